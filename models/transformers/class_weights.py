"""The weights of a transformers model: read block by block from safetensors, and written to a folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from tpshard.kernels.dtypes import dtype_name
from tpshard.kernels.fake_mode import fake_mode
from tpshard.models.folders import hf_folder
from tpshard.models.folders.expert_tensors import Stack
from tpshard.models.folders.hf_quantized import DequantizedTensors, ScaledTensors, tensors_of
from tpshard.models.transformers.architecture import Architecture

_CONSTANTS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)")
"""Constants that older versions of transformers saved beside the parameters."""
_MIXTRAL_MLP = ".block_sparse_moe."
"""What Mixtral's folders call the module `.mlp.`."""


class FolderWeights:
    """A folder's weights, by the names of the module's parameters. Only headers are read until a block is asked for.

    ValueError for pickles and for tensors that are missing, superfluous or of another shape. Experts may be stored one
    by one. Where the folder's names differ otherwise from the parameters', transformers loads all weights at once. The
    weights of a GPTQ folder are dequantized. Without `values` only headers are read, and checked in the same way.
    """

    def __init__(
        self, folder: str | os.PathLike[str], architecture: Architecture, model: nn.Module, *, values: bool = True
    ) -> None:
        self.folder, self.architecture = Path(folder), architecture
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.tensors = tensors_of(self.folder)
        self.quantized = isinstance(self.tensors, DequantizedTensors)
        self._turned = _transposed_names(model)
        spellings = self._spellings(model)
        stacks = {name: Stack.find(spellings[name], shape[0], self.tensors) for name, shape in self.shapes.items()}
        self._stacks = {name: stack for name, stack in stacks.items() if stack is not None}
        self._home = self._homes(spellings, type(model).__name__)
        if self._home is None and self.quantized:
            reason = f"its tensors are not named as {type(model).__name__} names them"
            raise ValueError(f"{folder} is quantized, and {reason}: not supported")
        if self._home is not None:
            self._check(model, self._home)
        else:
            self._loaded = self._load(values=False)  # compares all names and shapes before anything is allocated
            self._loaded = self._load(values=True) if values else self._loaded

    def block(self, name: str, starts: Sequence[int], sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Elements [starts, starts + sizes) of parameter `name`; dtype defaults to that of the file."""
        if self._home is None:
            cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
            value = self._loaded[name][cut].clone()
        elif name in self._stacks:
            shape = self.shapes[name]
            value = self._stacks[name].block(self.tensors, starts or (0,) * len(shape), sizes or shape)
        else:
            value = self._read(name, self._home[name], starts, sizes)
        return value if dtype is None else value.to(dtype)

    def _read(self, name: str, tensor: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if not self._is_transposed(name, tensor):
            return self.tensors.block(tensor, starts, sizes)
        return self.tensors.block(tensor, starts[::-1], sizes[::-1]).T.contiguous()

    def _is_transposed(self, name: str, tensor: str) -> bool:
        """Whether a quantized tensor [outputs, inputs] is a parameter [inputs, outputs]."""
        return tensor in self.tensors.coded_weights and name in self._turned

    def module_of(self, name: str) -> str | None:
        """The folder's name for a parameter's quantized linear [outputs, inputs]; None for a parameter that is dense,
        or [inputs, outputs] in the model."""
        if self._home is None or name in self._turned:
            return None
        return self.tensors.coded_weights.get(self._home.get(name, ""))

    def stack_of(self, name: str) -> list[list[str]] | None:
        """For each expert of a stacked parameter, the folder's names for its quantized linears in the order of their
        outputs; None for other parameters, or if an expert is dense."""
        coded, stack = self.tensors.coded_weights, self._stacks.get(name)
        if stack is None or not all(tensor in coded for tensor in stack.tensors):
            return None
        return [[coded[tensor] for tensor in matrices] for matrices in stack.experts]

    def _spellings(self, model: nn.Module) -> dict[str, list[str]]:
        """The names under which a folder may store each parameter: as the model or its base calls it, as Mixtral's
        folders do, or what is tied to it.
        """
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        ties = {name: others for others in _tied_names(model) for name in others}
        return {
            name: [
                other.replace(".mlp.", part)
                for tied in ties.get(name, (name,))
                for other in (tied, tied.removeprefix(prefix))
                for part in (".mlp.", _MIXTRAL_MLP)
            ]
            for name in self.shapes
        }

    def _homes(self, spellings: Mapping[str, Sequence[str]], cls: str) -> dict[str, str] | None:
        """The stored tensor of each parameter that is not stacked; None if the folder spells some names otherwise.

        `spellings`: the names that a parameter's tensor may have. ValueError where tensors are missing, and the folder
        has no tensor of an unknown name that could be one of them.
        """
        single = {name: others for name, others in spellings.items() if name not in self._stacks}
        homes = {n: next((o for o in others if o in self.tensors), None) for n, others in single.items()}
        absent = [name for name, tensor in homes.items() if tensor is None]
        stacked = {tensor for stack in self._stacks.values() for tensor in stack.tensors}
        absent += sorted(tensor for tensor in stacked if tensor not in self.tensors)
        spelled = {other for others in spellings.values() for other in others} | stacked
        foreign = [t for t in self.tensors.names() if t not in spelled and not _CONSTANTS.fullmatch(t)]
        foreign = [tensor for tensor in foreign if not self.tensors.zero_bias(tensor)]
        if absent and not foreign:
            raise ValueError(f"{self.folder}: missing keys for {cls}: {', '.join(absent[:5])}")
        return None if absent else {name: tensor for name, tensor in homes.items() if tensor is not None}

    def _check(self, model: nn.Module, homes: Mapping[str, str]) -> None:
        wrong = []
        for name, stack in self._stacks.items():
            shape = list(self.shapes[name])
            for tensor in stack.misfits(shape, self.tensors.shape):
                wrong.append(f"`{tensor}` is {list(self.tensors.shape(tensor))}, config.json makes `{name}` {shape}")
        for name, tensor in homes.items():
            turned = self._is_transposed(name, tensor)
            stored = self.tensors.shape(tensor)
            if (stored[::-1] if turned else stored) != self.shapes[name]:
                expected = list(self.shapes[name])
                wrong.append(f"`{tensor}` is {list(stored)}, config.json makes it {expected}")
        stacked = {tensor for stack in self._stacks.values() for tensor in stack.tensors}
        for tensor in (*homes.values(), *sorted(stacked)):
            if self.tensors.dtype(tensor) not in hf_folder.FLOATS:
                wrong.append(f"`{tensor}` is of dtype {self.tensors.dtype(tensor)}, which is not supported")
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        placed = set(homes.values()) | stacked | {name for others in _tied_names(model) for name in others}
        placed |= {name for name, _ in model.named_buffers()}
        for tensor in self.tensors.names():
            accepted = tensor in placed or _CONSTANTS.fullmatch(tensor) or any(p.search(tensor) for p in ignored)
            if not accepted and not self.tensors.zero_bias(tensor):
                wrong.append(f"`{tensor}` is no parameter of {type(model).__name__}")
        self.tensors.refuse(wrong)

    def _load(self, values: bool) -> dict[str, Tensor]:
        """The parameters by transformers' own loading; without `values`, fake tensors of the shapes in the headers."""
        from transformers.utils import logging

        cls = self.architecture.cls
        logging.disable_progress_bar()
        options: dict[str, Any] = {
            "config": self.architecture.config, "output_loading_info": True, "ignore_mismatched_sizes": True,
        }  # fmt: skip
        if values and isinstance(self.tensors, ScaledTensors):
            own_dtype = self.architecture.config.dtype
            dense = {name: self.tensors.block(name).to(own_dtype) for name in self.tensors.names()}
            model, loading = cls.from_pretrained(None, state_dict=dense, **options)
        elif values:
            model, loading = cls.from_pretrained(self.folder, use_safetensors=True, local_files_only=True, **options)
        else:
            in_this_thread = mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1")  # where the mode is active
            # a module's `.to` swaps fake parameters, which cannot be where something refers to them; shapes stay
            unswapped = mock.patch("torch.utils.swap_tensors", lambda *_: None)
            with fake_mode(), in_this_thread, unswapped:
                shapes = {name: torch.empty(self.tensors.shape(name)) for name in self.tensors.names()}
                model, loading = cls.from_pretrained(None, state_dict=shapes, **options)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in loading.get(problem, ()))
            if names:
                raise ValueError(
                    f"{self.folder}: {problem.replace('_', ' ')} for {cls.__name__}: {', '.join(names[:5])}"
                )
        own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        return {name: own[name].detach() for name in self.shapes}


def _transposed_names(model: nn.Module) -> frozenset[str]:
    """The names of the weights that a module stores as [inputs, outputs]."""
    from transformers.pytorch_utils import Conv1D

    return frozenset(f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D))


def _tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]


def write_folder(
    architecture: Architecture,
    read: Callable[[str], Tensor],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    tokenizer: str | os.PathLike[str] | None = None,
    base: Path | None = None,
    overwrite: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that transformers loads, one shard of `shard_bytes` at a time.

    read: returns a parameter by name. base: the folder that the model came from, whose other small files go along.
    FileExistsError if the folder is not empty.
    """
    shapes = architecture.shapes
    own = architecture.own_dtypes(dtype)  # as transformers saves them
    dtypes = {name: own.get(name, dtype) for name in shapes}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    values = dict(architecture.raw) | {"dtype": dtype_name(dtype)}
    values.pop("torch_dtype", None)
    hf_folder.write_model(
        folder, sizes, lambda name: read(name).to("cpu", dtypes[name]), values, tokenizer, overwrite, shard_bytes, base
    )
