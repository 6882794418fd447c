"""Formats of models that tpshard does not read: how they are recognized, and what can be done with them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpshard.files.folder_json import FolderError, read_json
from tpshard.kernels.fp8.scaled_config import ScaledConfig, is_scaled, scaled_config

_DENSE = "name the dense model that it was made from; `tpshard quantize` makes a GPTQ folder of that"
_DEQUANTIZED = "; or write it dense with transformers: load it with {}, then save_pretrained"
_LOADED = "AutoModelForCausalLM.from_pretrained({}).save_pretrained(OUT)"

METHODS: Mapping[str, tuple[str, str]] = {
    "awq": ("AWQ", ""),
    "fp8": ("fp8", "FineGrainedFP8Config(dequantize=True)"),
    "fbgemm_fp8": ("fp8 of FBGEMM", ""),
    "compressed-tensors": ("compressed-tensors", "CompressedTensorsConfig(run_compressed=False)"),
    "bitsandbytes": ("bitsandbytes", "its own settings, call dequantize()"),
    "mxfp4": ("MXFP4", "Mxfp4Config(dequantize=True)"),
    "auto-round": ("AutoRound's own format", ""),
    "aqlm": ("AQLM", ""), "hqq": ("HQQ", ""), "quanto": ("Quanto", ""), "torchao": ("torchao", ""),
    "eetq": ("EETQ", ""), "higgs": ("HIGGS", ""), "spqr": ("SpQR", ""), "vptq": ("VPTQ", ""), "bitnet": ("BitNet", ""),
    "quark": ("Quark", ""), "modelopt": ("ModelOpt", ""), "exl2": ("EXL2", ""), "exl3": ("EXL3", ""),
}  # fmt: skip
"""The names of quantizations by `quant_method`, and how transformers dequantizes them, where it does."""

_FILES: tuple[tuple[str, str, str], ...] = (
    ("*.gguf", "a GGUF file of llama.cpp", f"turn it into safetensors: {_LOADED.format('FOLDER, gguf_file=NAME')}"),
    ("*.nemo", "an archive of NeMo", "export it to Hugging Face's format with NeMo"),
    ("*.onnx", "an ONNX model", "name the model that it was exported from"),
    ("tf_model.h5", "weights of TensorFlow", "name the model's safetensors"),
    ("flax_model.msgpack", "weights of Flax", "name the model's safetensors"),
    ("model_index.json", "a pipeline of diffusers", "name a language model"),
    ("consolidated*", "the authors' own format", "name the version in Hugging Face's format, with a config.json"),
)
"""Patterns of files by which a folder without weights in safetensors is recognized, and what can be done."""


def refuse_format(folder: Path) -> None:
    """Raises FolderError for a file or folder without weights in safetensors that is recognizably something else."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise FolderError(f"{folder} is {_FILES[0][1]}, which is not read", _FILES[0][2])
    if not folder.is_dir():
        return
    adapter = folder / "adapter_config.json"
    beside = (folder / "config.json").exists()
    if adapter.is_file() and (not beside or any(folder.glob("adapter_model.*"))):
        base = ""
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            base = str(json.loads(adapter.read_bytes()[:1_000_000]).get("base_model_name_or_path") or "")[:100]
        of = f" of {base!r}" if base else ""
        merge = "PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(OUT)"
        if beside:
            raise FolderError(
                f"{folder} holds an adapter (LoRA, PEFT){of} beside a model, which transformers would add to it",
                f"move adapter_config.json away, for the model alone; or merge the two with peft first: {merge}",
            )
        raise FolderError(
            f"{folder} is an adapter (LoRA, PEFT){of}, not a model",
            f"name the base model's folder, or merge the two with peft first: {merge}",
        )
    names = {path.name for path in folder.iterdir()}
    if (folder / "config.json").exists() and any(name.endswith(".safetensors") for name in names):
        return
    for pattern, what, fix in _FILES:
        match = next((name for name in sorted(names) if Path(name).match(pattern)), None)
        if match is not None:
            raise FolderError(f"{folder} holds {match}, {what}, which is not read", fix)


def refuse_quantization(raw: Mapping[str, Any], where: Path) -> None:
    """Raises FolderError for a config.json that describes quantized weights other than GPTQ's and numbers of few bits
    with scales."""
    settings = quantization_of(raw, where.parent)
    if settings is None and isinstance(raw.get("quantization"), Mapping):
        raise FolderError(f"{where} describes weights quantized by MLX, which are not read", _DENSE)
    if not isinstance(settings, Mapping):
        return
    method = settings.get("quant_method") or settings.get("method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    key = str(method).lower().removeprefix("intel/")
    if method is None or key in ("gptq", "gptq_v2"):
        return
    others = (f"the method {str(method)[:60]!r}", "")
    name, loading = next((entry for known, entry in METHODS.items() if key.startswith(known)), others)
    fix, read = _DENSE + (_DEQUANTIZED.format(loading) if loading else ""), "which are not read"
    if is_scaled(settings):
        try:
            scaled_config(settings)
        except ValueError as error:
            read = f"of which {error} is not read"
        else:
            return
    others_read = "GPTQ's are, and numbers of few bits with scales (fp8, compressed-tensors, FBGEMM, ModelOpt)"
    raise FolderError(f"{where} describes weights quantized by {name}, {read}: {others_read}", fix)


def quantization_of(raw: Mapping[str, Any], folder: Path) -> Any:
    """The `quantization_config` of a folder with this config.json, which may stand under another name or in a file of
    its tool; None where there is none."""
    if (settings := raw.get("quantization_config", raw.get("compression_config"))) is not None:
        older = {"quant_method": "compressed-tensors"} if "quantization_config" not in raw else {}
        return {**older, **settings} if isinstance(settings, Mapping) else settings
    if (folder / "quant_config.json").is_file():
        return {"quant_method": "awq"}  # AutoAWQ's file
    if (folder / MODELOPT).is_file():
        described = read_json(folder, MODELOPT).get("quantization")
        return {"quant_method": "modelopt", **(described if isinstance(described, Mapping) else {"quant_algo": "none"})}
    return None


def scaled_folder(folder: Path) -> ScaledConfig | None:
    """How a folder stores weights as numbers of few bits with scales; None for a folder of other weights."""
    there = (folder / "config.json").is_file()
    settings = quantization_of(read_json(folder, "config.json"), folder) if there else None
    return scaled_config(settings) if isinstance(settings, Mapping) and is_scaled(settings) else None


MODELOPT = "hf_quant_config.json"
"""ModelOpt's file, which describes a folder's weights."""


def pickled(folder: Path, names: str) -> FolderError:
    """The error for a folder whose weights are pickles. names: the files of safetensors that it lacks."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if not pickles:
        fix = "copy the missing files, or name another folder"
        return FolderError(f"{folder} holds no weights: neither {names}", fix)
    fix = f"if you trust its source, rewrite it as safetensors with transformers: {_LOADED.format('FOLDER')}"
    return FolderError(
        f"{folder} holds neither {names}; {pickles[0]} is a pickle, which could run code and is not read", fix
    )


PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Suffixes of files that are never read."""
