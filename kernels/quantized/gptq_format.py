"""Reading and writing GPTQ folders, bit for bit as Hugging Face's tools write them.

Per quantized linear P: `P.qweight`, `P.qzeros`, `P.scales`, `P.g_idx`, optionally `P.bias`. Inputs run along the first
dim. Only safetensors is read; nothing in a folder is executed or unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tpshard.files.folder_json import damaged, file_inside, read_json
from tpshard.files.tensor_file import write_tensors
from tpshard.kernels.quantized.gptq_config import GPTQConfig, read_config
from tpshard.kernels.quantized.packing import pack_stream, unpack_stream
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_STORED: dict[str, tuple[tuple[torch.dtype, ...], int]] = {
    "qweight": ((torch.int32,), 2), "qzeros": ((torch.int32,), 2), "scales": (_FLOATS, 2),
    "g_idx": ((torch.int32, torch.int64), 1), "bias": (_FLOATS, 1),
}  # fmt: skip
"""The dtypes and the number of dims that each tensor of a linear may have."""
_DTYPES = {"I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""safetensors' names of these."""
INDEX = "model.safetensors.index.json"
_ORDER_LOST = "act-order (desc_act) without g_idx: the order of the inputs is lost."


def encode(weight: Quantized, checkpoint_format: str = "gptq") -> dict[str, Tensor]:
    """The stored tensors of one linear, by name without the module's prefix.

    Raises ValueError where the format cannot hold it: sizes that are no multiples of 32, or in version 1 a zero of 0,
    which readers interpret differently.
    """
    weight.check()
    if weight.inputs % 32 or weight.outputs % 32:
        raise ValueError(f"GPTQ files hold multiples of 32 inputs and outputs, not {list(weight.codes.shape)}.")
    zeros = weight.zeros.T
    if checkpoint_format == "gptq":
        if bool((zeros == 0).any()):
            raise ValueError("A zero of 0 cannot be written as checkpoint_format gptq; clamp it to 1 or write gptq_v2.")
        zeros = zeros - 1
    tensors = {
        "qweight": pack_stream(weight.codes, weight.bits),
        "qzeros": pack_stream(zeros, weight.bits).T.contiguous(),
        "scales": weight.scales.to(torch.float16).contiguous(),
        "g_idx": weight.group.to(torch.int32).contiguous(),
    }
    return tensors if weight.bias is None else tensors | {"bias": weight.bias.to(torch.float16).contiguous()}


def decode(tensors: Mapping[str, Tensor], config: GPTQConfig, name: str = "quantized linear") -> Quantized:
    """Reads the quantized linear layer in `tensors` (qweight, qzeros, scales, ...). Raises ValueError naming `name`."""
    missing = {"qweight", "qzeros", "scales"} - tensors.keys()
    if missing:
        raise ValueError(f"{name}: {', '.join(sorted(missing))} is missing.")
    qweight, qzeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    bits = config.bits
    for suffix, tensor in tensors.items():
        _check_stored(f"{name}: {suffix}", suffix, list(tensor.shape), tensor.dtype)
    inputs, outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    groups = scales.shape[0]
    if inputs % 32 or tuple(qzeros.shape) != (groups, outputs * bits // 32) or scales.shape[1] != outputs:
        raise ValueError(
            f"{name}: qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} do "
            f"not fit {bits} bits."
        )
    expected = group_count(inputs, config.group_size)
    if groups != expected:
        raise ValueError(f"{name}: {groups} groups; {inputs} inputs in groups of {config.group_size} need {expected}.")
    group = _groups(tensors.get("g_idx"), inputs, groups, config, name)
    zeros = _zeros(qzeros, bits, config.checkpoint_format, name)
    scales = scales.to(torch.float16)
    for suffix, values in (("scales", scales), ("bias", tensors.get("bias"))):
        if values is not None and not bool(values.isfinite().all()):
            raise damaged(f"{name}: {suffix} has values that are not finite in fp16.")
    return Quantized(unpack_stream(qweight, bits), scales, zeros, group, bits, tensors.get("bias")).check(name)


def _check_stored(what: str, suffix: str, shape: Sequence[int], dtype: torch.dtype | None) -> None:
    """Raises ValueError where a tensor of a linear has a shape or dtype that it cannot have."""
    dtypes, dims = _STORED[suffix]
    if dtype not in dtypes or len(shape) != dims:
        kind, form = "int32" if torch.int32 in dtypes else "floats", "a vector" if dims == 1 else "a matrix"
        raise ValueError(f"{what} is {list(shape)} of {dtype or 'another dtype'}, not {form} of {kind}.")


def _groups(g_idx: Tensor | None, inputs: int, groups: int, config: GPTQConfig, name: str) -> Tensor:
    if g_idx is None:
        if config.desc_act:
            raise ValueError(f"{name}: {_ORDER_LOST}")
        return group_index(inputs, config.group_size)
    if tuple(g_idx.shape) != (inputs,):
        raise ValueError(f"{name}: g_idx {list(g_idx.shape)} for {inputs} inputs.")
    if groups > 1 and not bool(g_idx.any()):  # some tools leave it at zero
        if config.desc_act:
            raise ValueError(f"{name}: act-order (desc_act) with a g_idx of zeros: the order of the inputs is lost.")
        return group_index(inputs, config.group_size)
    if bool((g_idx < -groups).any()) or bool((g_idx >= groups).any()):
        raise ValueError(f"{name}: g_idx names groups outside of the {groups} of its scales.")
    group = torch.where(g_idx < 0, g_idx + groups, g_idx).to(torch.int32)
    members = torch.bincount(group, minlength=groups)
    wrong = members != torch.bincount(group_index(inputs, config.group_size), minlength=groups)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}: g_idx puts {int(members[first])} inputs into group {first}; groups have {config.group_size}, and "
            "only the last may have fewer."
        )
    return group


def _zeros(qzeros: Tensor, bits: int, checkpoint_format: str, name: str) -> Tensor:
    stored = unpack_stream(qzeros.T.contiguous(), bits).T.contiguous()
    if checkpoint_format == "gptq_v2":
        return stored
    # Version 1 stores zero - 1. Some tools subtract 1 from the packed words, so that a zero of 0 borrows from the next
    # field; others subtract it field by field. The two readings differ where a field overflows into another.
    full = (1 << bits) - 1
    overflow = stored == full
    ends_word = (torch.arange(stored.shape[1], device=stored.device) + 1) * bits % 32 == 0
    if bool((overflow & ~ends_word).any()):
        raise ValueError(
            f"{name}: a zero of 0 in checkpoint_format gptq, which tools read differently; rewrite the folder as "
            "gptq_v2."
        )
    return (stored + 1) & full


class GPTQFolder:
    """A quantized HF folder, read one tensor at a time.

    `config`: its GPTQConfig. `modules`: names of the quantized linears, sorted. `dense`: names of all other tensors,
    sorted. Raises ValueError naming the file or module where config and files contradict each other.
    """

    def __init__(self, folder: str | Path, file_of: Mapping[str, str] | None = None):
        """file_of: the file of each tensor, where the folder's reader knows them."""
        self.folder = Path(folder)
        config = read_config(self.folder)
        if config is None:
            raise ValueError(f"{self.folder} is not quantized: no quantization_config.")
        self.config = config
        self._file_of, self._headers = _tensor_files(self.folder)
        self.modules = sorted(n.removesuffix(".qweight") for n in self._file_of if n.endswith(".qweight"))
        owned = {f"{module}.{suffix}" for module in self.modules for suffix in SUFFIXES}
        self.dense = sorted(set(self._file_of) - owned)
        for module in self.modules:
            self._check_names(module)
        for module in self.modules:
            if config.of(module) is None:
                raise ValueError(f"{module} is quantized although `dynamic` leaves it dense.")

    def linear(self, module: str) -> Quantized:
        """One quantized linear by its name in the file, such as `model.layers.0.mlp.down_proj`."""
        config = self.config.of(module)
        if config is None or f"{module}.qweight" not in self._file_of:
            raise ValueError(f"{module} is not quantized in {self.folder}.")
        names = {s: f"{module}.{s}" for s in SUFFIXES if f"{module}.{s}" in self._file_of}
        return decode({suffix: self.tensor(name) for suffix, name in names.items()}, config, module)

    def outputs(self, module: str) -> int:
        """The number of outputs of a quantized linear, from the header of its file."""
        return self._shape(f"{module}.scales")[1]

    def group(self, module: str) -> Tensor:
        """The group [in] of each input of a quantized linear, without reading its codes."""
        config = self.config.of(module)
        if config is None or f"{module}.qweight" not in self._file_of:
            raise ValueError(f"{module} is not quantized in {self.folder}.")
        (words, _), (groups, _) = (self._shape(f"{module}.{suffix}") for suffix in ("qweight", "scales"))
        stored = f"{module}.g_idx"
        g_idx = self.tensor(stored) if stored in self._file_of else None
        return _groups(g_idx, words * 32 // config.bits, groups, config, module)

    def _shape(self, name: str) -> list[int]:
        return self._headers[name][0]

    def _check_names(self, module: str) -> None:
        """Raises ValueError where a tensor of a linear is missing, or of another form, before any of a large folder is
        read."""
        missing = [name for name in ("qzeros", "scales") if f"{module}.{name}" not in self._file_of]
        if missing:
            raise ValueError(f"{module}: {', '.join(missing)} is missing.")
        own = self.config.of(module)
        if own is not None and own.desc_act and f"{module}.g_idx" not in self._file_of:
            raise ValueError(f"{module}: {_ORDER_LOST}")
        for suffix in SUFFIXES:
            if (name := f"{module}.{suffix}") in self._headers:
                _check_stored(name, suffix, *self._headers[name])

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        if name not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}.")
        with _open(self.folder / self._file_of[name]) as file:
            return file.get_tensor(name)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}.") from None


Headers = dict[str, tuple[list[int], torch.dtype | None]]
"""The shape and dtype of each tensor; None for a dtype that no tensor of a quantized linear has."""


def _tensor_files(folder: Path) -> tuple[dict[str, str], Headers]:
    """The file name of every tensor, and what the headers say. Files that an index names must lie in the folder."""
    index = folder / INDEX
    named: Any = {}
    if index.is_file():
        named = read_json(folder, INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ValueError(f"{INDEX} holds no weight_map of tensors to files.")
        files = set(named.values())
        for file in files:
            if not file.endswith(".safetensors"):
                raise ValueError(f"{INDEX} names {file!r}, which is not a safetensors file of this folder.")
    else:
        files = {path.name for path in folder.glob("*.safetensors")}
        if not files:
            pickled = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
            hint = f"; {pickled[0]} is a pickle, which is never loaded" if pickled else ""
            raise ValueError(f"{folder} holds no safetensors file{hint}.")
    file_of: dict[str, str] = {}
    headers: Headers = {}
    for name in sorted(files):
        with _open(file_inside(folder, name)) as opened:
            names = list(opened.keys())
            file_of |= dict.fromkeys(names, name)
            for tensor in names:
                header = opened.get_slice(tensor)
                headers[tensor] = list(header.get_shape()), _DTYPES.get(header.get_dtype())
    if index.is_file() and (absent := sorted(set(named) - set(file_of))):
        raise ValueError(f"{INDEX} names {absent[0]}, which no file holds.")
    return file_of, headers


def write_into(
    folder: Path,
    model_config: Mapping[str, Any],
    quantized: Iterable[tuple[str, Quantized]],
    dense: Iterable[tuple[str, Tensor]],
    config: GPTQConfig,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors (with an index where there are several) into an existing, empty folder.

    `quantized` and `dense` may be generators: at most `shard_bytes` are in memory.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for module, weight in quantized:
            for suffix, tensor in encode(weight, config.checkpoint_format).items():
                yield f"{module}.{suffix}", tensor
        for name, tensor in dense:
            yield name, tensor.contiguous()

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        write_tensors(folder / _part(len(shards)), {n: t.cpu().clone() for n, t in held.items()})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors():
        if held and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        os.rename(folder / _part(0), folder / "model.safetensors")
    else:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        for i, name in enumerate(names):
            os.rename(folder / _part(i), folder / name)
        weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", {**model_config, "quantization_config": config.to_json()})


def _part(i: int) -> str:
    return f"part-{i:05}.safetensors"


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
