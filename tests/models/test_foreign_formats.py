"""A folder in another format is refused by the format's name, with what can be done; nothing is allocated for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.files.folder_json import FolderError
from tpshard.models.folders.foreign_formats import METHODS
from tpshard.models.folders.hf_config import read_raw
from tpshard.models.open_model import DOORS, open_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def folder(place: Path, config: dict[str, Any] | None, *files: str) -> Path:
    place.mkdir()
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    for name in files:
        (place / name).write_text("{}")
    return place


QUANTIZED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"quantization_config": {"quant_method": method}}, name)
        for method, (name, _) in METHODS.items()
        if method not in ("fp8", "fbgemm_fp8")
    ),  # which are read
    ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
    ({"quantization_config": {"quant_method": "bitsandbytes_8bit"}}, "bitsandbytes"),
    ({"quantization_config": {"quant_method": "AWQ"}}, "AWQ"),
    ({"quantization_config": {"quant_method": "of tomorrow"}}, "the method 'of tomorrow'"),
    ({"compression_config": {"format": "int-quantized"}}, "compressed-tensors"),
    ({"quantization": {"bits": 4, "group_size": 64}}, "MLX"),
]


@pytest.mark.parametrize(("more", "name"), QUANTIZED)
def test_other_quantizations_are_named(more: dict[str, Any], name: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "in", LLAMA | more, "model.safetensors")
    for key in ("hf", "transformers"):
        with pytest.raises(FolderError, match=f"quantized by {name}") as caught:
            DOORS[key](SimpleNamespace(overrides=dict), str(place), True)
        assert "dense model" in caught.value.fix


FILES = [
    (None, ["model-Q4_K_M.gguf", "README.md"], "GGUF", "gguf_file="),
    (None, ["adapter_config.json", "adapter_model.safetensors"], "adapter", ""),  # some commands read adapters
    (None, ["consolidated.00.pth", "params.json"], "authors' own format", "Hugging Face's format"),
    (None, ["consolidated.safetensors", "params.json"], "authors' own format", "Hugging Face's format"),
    (None, ["model.nemo"], "NeMo", "export"),
    (LLAMA, ["tf_model.h5"], "TensorFlow", "safetensors"),
    (LLAMA, ["flax_model.msgpack"], "Flax", "safetensors"),
    (None, ["model_index.json"], "diffusers", "language model"),
    (LLAMA, ["quant_config.json", "model.safetensors"], "AWQ", "dense model"),
    (LLAMA, ["pytorch_model.bin"], "is a pickle", "save_pretrained"),
]


@pytest.mark.parametrize(("config", "names", "what", "fix"), FILES)
def test_every_command_names_the_format(
    config: Any, names: list[str], what: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(tmp_path / "in", config, *names)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{hf: {place}}}\n")
    commands = [
        (["convert", str(place), "out"], Exit.CHECKPOINT),
        (["quantize", str(place), "out"], None),
        (["serve", "tiny", f"serve.checkpoint={place}"], Exit.CHECKPOINT),
        (["validate", str(recipe)], Exit.RECIPE),
    ]
    for arguments, code in commands:
        assert run(arguments) in ([code] if code else [Exit.CHECKPOINT, Exit.FIT])
        said = capsys.readouterr().err
        assert what in said and fix in said and "copy it again" not in said, arguments


def test_the_adapters_base_is_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "in", None)
    (place / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(FolderError, match="of 'org/base'"):
        read_raw(place)
    (place / "adapter_config.json").write_text("[")
    with pytest.raises(FolderError, match="is an adapter"):
        read_raw(place)
    (place / "config.json").write_text(json.dumps(LLAMA))
    assert read_raw(place) == LLAMA
    (place / "adapter_model.safetensors").touch()
    with pytest.raises(FolderError, match="beside a model"):
        read_raw(place)


def test_names_are_compared_before_anything_is_allocated(tmp_path: Path) -> None:
    """A folder whose names only transformers can map, for a model of 5.8 GiB."""
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 6, "vocab_size": 32000}
    place = folder(tmp_path / "in", {**LLAMA, **sizes, "model_type": "phi", "architectures": ["PhiForCausalLM"]})
    save_file({"somewhere.else": torch.zeros(4096)}, place / "model.safetensors")
    before = _resident()
    with pytest.raises(ValueError, match=r"missing keys|unexpected keys"):
        open_model(str(place))
    assert _resident() - before < 500 << 20


def _resident() -> int:
    """The largest memory of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
