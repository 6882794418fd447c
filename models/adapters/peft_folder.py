"""Folders with adapters alone in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tpshard.files.atomic import write_aside
from tpshard.files.tensor_file import write_tensors
from tpshard.models.adapters import peft_config
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import MAGNITUDE, A, Adapter, B
from tpshard.models.folders.folder_files import copy_small_files
from tpshard.models.folders.hf_headers import entries
from tpshard.models.folders.hf_names import Home, fuse
from tpshard.models.model_spec import ModelSpec

PREFIX = "base_model.model."
FLOATING = ("F64", "F32", "BF16", "F16")
"""The dtypes of adapters, as safetensors names them."""
PICKLE = "adapter_model.bin"
VECTOR = "lora_magnitude_vector"
"""DoRA's magnitudes in PEFT's files."""


def is_peft(folder: Path) -> bool:
    """Whether a folder holds adapters."""
    return (folder / peft_config.CONFIG).is_file()


@dataclass(frozen=True)
class PeftFolder:
    """The adapters in a folder, for a model that they fit. ValueError names what is unsupported or does not fit."""

    folder: Path
    spec: AdaptedModel

    @staticmethod
    def of(folder: Path, base: ModelSpec) -> PeftFolder:
        """The adapters of a folder for a base."""
        raw = peft_config.read_config(folder)
        if not (folder / peft_config.WEIGHTS).exists() and (folder / PICKLE).exists():
            raise ValueError(
                f"{folder / PICKLE} is a pickle, which may run code; PEFT also writes {peft_config.WEIGHTS}"
            )
        try:
            spec = AdaptedModel(base, peft_config.lora_of(raw))
            spec.check()
            if raw.get("ensure_weight_tying") and (tied := [n for n, one in spec.adapters.items() if one.layer.shares]):
                raise ValueError(
                    f"`ensure_weight_tying` with an adapter of `{tied[0]}`, whose weight another layer has: PEFT gives"
                    " both one memory, which it updates twice a step, and cannot read again what it writes"
                )
        except ValueError as error:
            raise ValueError(f"{folder / peft_config.CONFIG}: {error}") from error
        adapters = PeftFolder(folder, spec)
        adapters._check()
        return adapters

    @cached_property
    def stored(self) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
        """For each tensor, by its name without PEFT's prefixes and the names of versions: its name in the file, and
        what the file's header says of it."""
        return {_ours(name): (name, entry) for name, entry in entries(self.folder, peft_config.WEIGHTS).items()}

    @cached_property
    def places(self) -> Mapping[str, tuple[list[str], tuple[int, ...]]]:
        """For each parameter that the folder has: its tensors there, and the shape of each."""
        return dict(places(self.spec))

    def _check(self) -> None:
        expected = {name: shape for names, shape in self.places.values() for name in names}
        copy = f"{self.spec.saved_head}.weight"
        tied = next((names for names, _ in self.places.values() if copy in names), None)
        if tied and not (all(one in self.stored for one in tied) and torch.equal(*map(self._tensor, tied))):
            raise ValueError(
                f"{self.folder}: `modules_to_save` without `ensure_weight_tying`: PEFT trained `{tied[0]}` and"
                f" `{copy}` apart from each other, which are one weight of the base"
            )
        wrong = [f"`{name}` is missing" for name in expected if name not in self.stored]
        for name, (_, entry) in self.stored.items():
            if self._is_of_base(name):
                continue
            if name not in expected and ".base_layer." in name:
                wrong.append(f"`{name}` is not the base's own")
            elif name not in expected:
                wrong.append(f"`{name}` belongs to no adapter that adapter_config.json names")
            elif entry["shape"] != list(expected[name]):
                wrong.append(f"`{name}` is {entry['shape']}, the model makes it {list(expected[name])}")
            elif entry["dtype"] not in FLOATING:
                wrong.append(f"`{name}` is of dtype {entry['dtype']}")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if wrong[3:] else ""
            raise ValueError(f"{self.folder} holds adapters of another model: {'; '.join(wrong[:3])}{more}")

    def _is_of_base(self, name: str) -> bool:
        """Whether a tensor is the weight below an adapter of the head or of embeddings, which PEFT saves too, as the
        base has it, perhaps rounded."""
        module, of_base, leaf = name.partition(".base_layer.")
        path = next((p for p, one in self.spec.adapters.items() if module in one.layer.names), None)
        parameter = f"{path}.{leaf}"
        if path is not None and (head := self.spec.adapters[path].layer).head and head.shares:
            parameter = (self.spec.base.tied or "")[1]
        shape = self.spec.base.shapes.get(parameter)
        if not of_base or shape is None or self.stored[name][1]["shape"] != list(shape):
            return False
        stored = self._tensor(name)
        weights, place = self.spec.base.weights, (parameter, [0] * len(shape), shape)
        own = self.spec.base.initial_block(*place, 0) if weights is None else weights.block(*place)
        return torch.equal(stored, own.to(stored.dtype)) or torch.equal(stored.to(own.dtype), own)  # either is rounded

    def _tensor(self, name: str) -> Tensor:
        """A tensor of the file, by its name in `stored`."""
        from safetensors import SafetensorError, safe_open

        file = self.folder / peft_config.WEIGHTS
        try:
            with safe_open(file, "pt") as opened:
                return opened.get_tensor(self.stored[name][0])
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        """A whole parameter of the adapters, or one that was trained beside them."""
        names = self.places[name][0]
        path, _, leaf = name.rpartition(".")
        adapter = self.spec.adapters.get(path)
        if adapter is not None and adapter.wrapper:
            return _own_part(adapter, leaf, self._tensor(names[0]))
        return torch.stack([*map(self._tensor, names)]) if _stacked(self.spec, name) else self._tensor(names[0])

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Elements [starts, starts + sizes) of a parameter of the adapters."""
        value = self.read(name)[tuple(slice(a, a + n) for a, n in zip(starts, sizes))]
        return value if dtype is None else value.to(dtype)


def places(spec: AdaptedModel) -> Iterator[tuple[str, tuple[list[str], tuple[int, ...]]]]:
    """For each parameter that an adapters' folder has: its tensors there without prefix, and the shape of each."""
    for path, adapter in spec.adapters.items():
        module = adapter.layer.theirs or path
        for leaf, shape in adapter.shapes.items():
            module = adapter.wrapper or module
            name = f"{module}.{VECTOR}" if leaf == MAGNITUDE else f"{module}.{leaf}.weight"
            if adapter.wrapper:
                groups, rows, *_ = adapter.layer.part or (1, adapter.layer.outputs)
                rank = adapter.rank * (adapter.layer.experts or 1)
                whole = {A: (rank, shape[-1]), B: (groups * rows, rank), MAGNITUDE: (groups * rows,)}
                yield f"{path}.{leaf}", ([name], whole[leaf])
                continue
            if adapter.layer.table:
                name = f"{module}.{leaf.replace('lora_', 'lora_embedding_')}"
            if experts := adapter.layer.experts:
                yield f"{path}.{leaf}", ([name.format(i) for i in range(experts)], shape[1:])
            else:
                yield f"{path}.{leaf}", ([name], shape)
    theirs = spec.base.folder_names()
    for name in spec.saved:
        module, _, leaf = name.rpartition(".")
        head = [spec.saved_head] if spec.saved_head is not None and name == (spec.base.tied or "")[1] else []
        yield name, ([f"{path}.{leaf}" for path in (theirs.get(module, module), *head)], spec.base.shapes[name])


def _ours(name: str) -> str:
    """A tensor's name without what PEFT's present format and the one before add to it."""
    name = name.removeprefix(PREFIX)
    name = re.sub(r"\.(lora_(?:embedding_)?[AB]|modules_to_save|lora_magnitude_vector)\.default(?=\.|$)", r".\1", name)
    name = name.replace(".modules_to_save.", ".").replace(".original_module.", ".")
    return re.sub(rf"\.{VECTOR}\.weight$", f".{VECTOR}", name)


def write_peft(spec: AdaptedModel, read: Callable[[str], Tensor], folder: Path, *, base: str,
               tokenizer: Path | None = None, overwrite: bool = False) -> None:  # fmt: skip
    """Writes the adapters of a model as a folder that PEFT reads. ValueError for what the format has no place for.

    read: returns a parameter by name. base: the folder of the model that they are for. tokenizer: a folder whose
    tokenizer goes along.
    """
    assert spec.lora is not None
    if spec.base.reads_code:
        raise ValueError("PEFT's folders are for classes of transformers; this is a module of your own")
    adapters = list(spec.adapters.values())
    theirs = spec.base.folder_names()
    saved = list(dict.fromkeys(theirs.get(n.rpartition(".")[0], n.rpartition(".")[0]) for n in spec.saved))
    config = peft_config.config_of(spec.lora, adapters, spec.adaptable(), saved, base)
    if spec.saved_head is not None:  # versions that do not know the field read both
        config |= {"ensure_weight_tying": True, "modules_to_save": [*saved, spec.saved_head]}
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[Adapter, Tensor]]] = {}
    for name, (names, _) in places(spec):
        value, adapter = read(name), spec.adapters.get(name.rpartition(".")[0])
        if adapter is not None and adapter.wrapper:
            parts.setdefault(names[0], []).append((adapter, value))
            continue
        each = list(value) if _stacked(spec, name) else [value] * len(names)
        tensors |= {PREFIX + one: part.contiguous().clone() for one, part in zip(names, each)}
    tensors |= {PREFIX + one: _joined(one, each).contiguous().clone() for one, each in parts.items()}
    with write_aside(folder, overwrite=overwrite) as aside:
        write_tensors(aside / peft_config.WEIGHTS, tensors)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (aside / peft_config.CONFIG).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            copy_small_files(aside, tokenizer, None)


def _own_part(adapter: Adapter, leaf: str, whole: Tensor) -> Tensor:
    """A layer's `leaf` from that of the parameter that its weight is a part of, as PEFT flattens it: A
    [expert * rank, inputs], B [outputs, rank * expert], and DoRA's [outputs]."""
    count = adapter.layer.experts
    if leaf == A:
        return whole.unflatten(0, (count, -1)) if count else whole
    own = Home("", adapter.layer.part).take(whole)
    return own.unflatten(1, (-1, count)).permute(2, 0, 1).contiguous() if count else own


def _joined(name: str, parts: Sequence[tuple[Adapter, Tensor]]) -> Tensor:
    """The tensor of which `_own_part` gives each layer its part. name: its own in the folder."""
    parts = sorted(parts, key=lambda one: (one[0].layer.part or (0, 0, 0))[2])
    if name.endswith(f".{A}.weight"):
        (adapter, value), *_ = parts
        return value.flatten(0, 1) if adapter.layer.experts else value
    return fuse([
        (value.permute(1, 2, 0).flatten(1) if one.layer.experts else value, Home("", one.layer.part))
        for one, value in parts
    ])  # fmt: skip


def _stacked(spec: AdaptedModel, name: str) -> bool:
    adapter = spec.adapters.get(name.rpartition(".")[0])
    return adapter is not None and name in spec.added and bool(adapter.layer.experts)
