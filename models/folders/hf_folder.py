"""Reading models from Hugging Face folders, and writing them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.files.atomic import write_aside
from tpshard.files.tensor_file import write_tensors
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders import hf_config, hf_headers, hf_json
from tpshard.models.folders.folder_files import copy_small_files, tokenizer_paths
from tpshard.models.folders.folder_tokenizer import special_tokens
from tpshard.models.folders.hf_names import fuse, hf_modules, hf_tensors
from tpshard.models.folders.hf_quantized import DequantizedTensors, tensors_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = {"F64", "F32", "BF16", "F16"}
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|transformer\.(h\.\d+\.attn\.)?(bias|masked_bias)")
"""Constants that older versions of transformers saved beside the parameters."""


class HFFolder:
    """A model in a Hugging Face folder, readable by blocks of parameters, so that a rank reads only what it needs.

    The weights of a GPTQ folder are dequantized when read. Opening checks everything from headers alone: ValueError
    names what is unsupported, missing, superfluous or of the wrong shape.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.raw = hf_config.read_raw(self.folder)
        self.tensors = tensors_of(self.folder)
        self.quantized = isinstance(self.tensors, DequantizedTensors)
        described = hf_config.read_config(self.raw, quantized=True)
        if described.layers > len(self.tensors.names()):
            raise ValueError(f"{self.folder}: {described.layers} layers and {len(self.tensors.names())} tensors")
        self.config: ModelConfig = self._with_biases(described) if self.quantized else described
        self.shapes = self.config.shapes
        self._modules = hf_modules(self.config)
        self._check()

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Elements [starts, starts + sizes) of parameter `name`; dtype defaults to that of the file."""
        module, _, leaf = name.rpartition(".")
        home, read = self._modules[module], self.tensors.block
        tensor, *others = home.tensors(leaf)
        if home.stack:
            expert_tensors = (tensor, *others)[starts[0] : starts[0] + sizes[0]]
            blocks = [read(name, starts[1:], sizes[1:]) for name in expert_tensors]
            value = torch.stack(blocks) if blocks else torch.empty(*sizes)
        elif home.part is None:
            value = read(tensor, starts, sizes)
        elif home.part[0] == 1:
            value = read(tensor, (home.part[2] + starts[0], *starts[1:]), sizes)
        else:
            value = home.take(read(tensor))[tuple(slice(a, a + n) for a, n in zip(starts, sizes))].clone()
        return value if dtype is None else value.to(dtype)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole parameter `name`."""
        shape = self.shapes[name]
        return self.block(name, (0,) * len(shape), shape, dtype)

    def _check(self) -> None:
        expected = hf_tensors(self.config, self.shapes)
        wrong = [f"`{name}` is missing" for name in expected if name not in self.tensors]
        for name in self.tensors.names():
            if name in expected:
                (first, home), *_ = expected[name]
                rows = sum(self.shapes[parameter][0] for parameter, _ in expected[name])
                shape = self.shapes[first][1:] if home.stack else (rows, *self.shapes[first][1:])
                if self.tensors.shape(name) != shape:
                    wrong.append(f"`{name}` is {list(self.tensors.shape(name))}, config.json makes it {list(shape)}")
                elif self.tensors.dtype(name) not in FLOATS:
                    wrong.append(f"`{name}` is of dtype {self.tensors.dtype(name)}, which is not supported")
            elif not _BUFFERS.fullmatch(name) and not self._is_tied(name) and not self.tensors.zero_bias(name):
                wrong.append(f"`{name}` is no parameter of a {self.raw['model_type']} model")
        self.tensors.refuse(wrong)

    def _with_biases(self, described: ModelConfig) -> ModelConfig:
        """The configuration with the biases that a GPTQ folder has beyond config.json, unless they are zero: AutoGPTQ
        gave a bias to each linear."""
        for flag in {"attention_bias", "mlp_bias"} & described.family_entry.numbers:
            wider = replace(described, **dict[str, Any]({flag: True}))
            more = set(hf_tensors(wider, wider.shapes)) - set(hf_tensors(described, described.shapes))
            present = all(name in self.tensors for name in more)
            if more and present and not all(self.tensors.zero_bias(name) for name in more):
                described = wider
        return described

    def _is_tied(self, name: str) -> bool:
        """Whether a tensor duplicates the embedding table and is therefore allowed to be missing."""
        if name != "lm_head.weight" or not self.config.tie_embeddings:
            return False
        table = f"{self._modules['tok_embed'].module}.weight"
        if table in self.tensors and not torch.equal(self.tensors.block(name), self.tensors.block(table)):
            raise ValueError(f"{self.folder}: `tie_word_embeddings` is set, but `lm_head.weight` is not `{table}`")
        return True


def to_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model of tpshard as a folder that transformers reads.

    tokenizer: a folder whose tokenizer files are copied. ValueError if transformers has no equivalent model,
    FileExistsError if the folder is not empty.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{type(model).__name__} is not a model of tpshard; others cannot be written as folders")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError("the model is on the meta device: it has no values to write")
    dtype = next(iter(parameters.values())).dtype
    write_hf(
        config, parameters.__getitem__, folder, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite,
        shard_bytes=shard_bytes,
    )  # fmt: skip


def write_hf(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    tokenizer: str | os.PathLike[str] | None = None,
    base: Path | None = None,
    overwrite: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """`to_hf` with a function that returns a parameter by name; holds one shard of `shard_bytes` at a time.

    base: the folder that the model came from. What its config.json says beyond the computation, and its other small
    files, are written too.
    """
    names = {value: key for key, value in DTYPES.items()}
    if dtype not in names:
        raise ValueError(f"{dtype} is not a dtype of such folders; {', '.join(map(str, names))} are")
    others = other_settings(tokenizer, base)
    values = hf_config.write_config(replace(config, dtype=names[dtype]), names[dtype], others)
    tensors = hf_tensors(config, config.shapes)
    sizes = {
        tensor: sum(math.prod(config.shapes[p]) // max(1, home.stack) for p, home in parts) * dtype.itemsize
        for tensor, parts in tensors.items()
    }
    stored = lru_cache(maxsize=1)(lambda parameter: read(parameter).to("cpu", dtype))  # experts are read one by one

    def tensor_of(tensor: str) -> Tensor:
        return fuse([(stored(parameter), home) for parameter, home in tensors[tensor]])

    write_model(folder, sizes, tensor_of, values, tokenizer, overwrite, shard_bytes, base)


def other_settings(tokenizer: str | os.PathLike[str] | None, base: Path | None) -> dict[str, Any]:
    """The ids of a tokenizer's special tokens, and the config.json of the folder that a model came from."""
    ids = _token_ids(Path(tokenizer)) if tokenizer is not None else {}
    raw = hf_config.read_raw(base) if base is not None and (base / "config.json").exists() else {}
    return ids | {key: value for key, value in raw.items() if value is not None or key not in ids}


def write_model(
    folder: str | os.PathLike[str], sizes: Mapping[str, int], tensor_of: Callable[[str], Tensor],
    config: Mapping[str, Any], tokenizer: str | os.PathLike[str] | None, overwrite: bool, shard_bytes: int,
    base: Path | None = None,
) -> None:  # fmt: skip
    """Writes tensors (name -> bytes) as safetensors files of at most `shard_bytes`, with an index if several, and
    beside them config.json, and the files of a tokenizer and of the folder that the model came from, if any."""
    shards = _shards(sizes, shard_bytes)
    with write_aside(folder, overwrite=overwrite) as aside:
        for file, members in shards.items():
            write_tensors(aside / file, {tensor: tensor_of(tensor).contiguous() for tensor in members})
        if len(shards) > 1:
            places = {tensor: file for file, members in shards.items() for tensor in members}
            _write_json(
                aside / hf_headers.INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            )
        _write_json(aside / "config.json", config)
        copy_small_files(aside, Path(tokenizer) if tokenizer is not None else None, base)


def _shards(sizes: Mapping[str, int], largest: int) -> dict[str, list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {hf_headers.SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def check_tokenizer(tokenizer: Path) -> None:
    """Raises ValueError or OSError for a tokenizer that cannot be copied and described, before anything is written."""
    tokenizer_paths(tokenizer)
    _token_ids(tokenizer)


def _token_ids(tokenizer: Path) -> dict[str, int]:
    """The ids of the special tokens named in a tokenizer's files."""
    if not (tokenizer / "tokenizer.json").exists():
        return {}
    added = hf_json.read_json(tokenizer, "tokenizer.json").get("added_tokens")
    ids = {
        entry["content"]: entry["id"]
        for entry in (added if isinstance(added, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str)
    }
    name = "tokenizer_config.json"
    special = special_tokens(tokenizer, hf_json.read_json(tokenizer, name) if (tokenizer / name).exists() else {})
    return {
        f"{key}_id": ids[special[key]] for key in ("bos_token", "eos_token", "pad_token") if special.get(key) in ids
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object in the style of Hugging Face folders."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
