"""The names of each module's tensors in a Hugging Face folder.

One table serves dense and quantized folders: a module's `weight`, `bias`, `qweight` and `scales` share a prefix. Where
several modules share a fused matrix, `Home` also says which of its output rows belong to which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from tpshard.models.families.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Home:
    """The place of one module's parameters in a folder: `module` is the prefix of their names."""

    module: str
    part: tuple[int, int, int, int] | None = None
    """(groups, rows, start, stop): the fused matrix's outputs are viewed as [groups, rows], and rows start:stop of each
    group belong to this module."""
    stack: int = 0
    """The number of the folder's matrices that are stacked into one here; `{}` in `module` is the number of each."""
    index: int | None = None
    """Which matrix of the stack is meant."""
    bias: str = "bias"
    """What the folder calls the parameter `bias`."""

    def tensors(self, leaf: str) -> list[str]:
        """The names of the tensors that hold parameter `leaf`: one, or one per matrix of the stack."""
        name = f"{self.module}.{self.bias if leaf == 'bias' else leaf}"
        return [name.format(i) for i in range(self.stack)] if self.stack else [name]

    def take(self, fused: Tensor, dim: int = 0) -> Tensor:
        """This module's part of a tensor whose dim `dim` is the fused outputs."""
        if self.part is None:
            return fused
        groups, rows, start, stop = self.part
        return fused.unflatten(dim, (groups, rows)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)


def hf_modules(c: ModelConfig) -> dict[str, Home]:
    """The home of every module with parameters, by its path in the model.

    For example `layers.0.attention.wq` -> Home("model.layers.0.self_attn.q_proj"). Modules that share a fused matrix
    are ordered by KV head: its queries, its key, its value.
    """
    hf, sharing = c.family_entry.hf, dict[str, list[tuple[str, str]]]()
    for path in c.leaves:
        layer = re.search(r"\.(\d+)\.", path)
        pattern = path if layer is None else path.replace(layer[0], ".*.", 1)
        module = hf.names[pattern] if layer is None else hf.names[pattern].replace("*", layer[1])
        sharing.setdefault(module, []).append((path, pattern))
    homes = {}
    for module, sharers in sharing.items():
        leaves = [c.leaves[path] for path, _ in sharers]
        ends = list(accumulate(c.size(leaf.dims[0], leaf) // c.kv_heads for leaf in leaves))
        for (path, pattern), leaf, start, stop in zip(sharers, leaves, [0, *ends], ends):
            part = (c.kv_heads, ends[-1], start, stop) if len(sharers) > 1 else None
            stack = (c.experts or 0) if leaf.kind == "experts" else 0
            homes[path] = Home(module, part, stack, bias=hf.biases.get(pattern, "bias"))
    return homes


_PARTS = {"gate_proj": ("gate_up_proj", (0, 2)), "w1": ("gate_up_proj", (0, 2)), "up_proj": ("gate_up_proj", (1, 2)),
          "w3": ("gate_up_proj", (1, 2)), "down_proj": ("down_proj", (0, 1)), "w2": ("down_proj", (0, 1))}  # fmt: skip
"""For each matrix of an expert: the parameter of transformers' class in which all experts have it, and which of how
many matrices of an expert it is there."""


def parameter_of(home: Home, outputs: int) -> tuple[str, tuple[int, int, int, int] | None]:
    """The path of a weight with so many outputs in transformers' class, and its part of that parameter, as in `Home`;
    None: all of it."""
    module = home.module.replace(".block_sparse_moe.", ".mlp.")  # as folders of Mixtral are, and its class was, named
    if not home.stack:
        return f"{module}.weight", home.part
    experts, _, matrix = module.partition(".{}.")
    leaf, (number, count) = _PARTS[matrix]
    part = (1, count * outputs, number * outputs, (number + 1) * outputs)
    return f"{experts}.{leaf}", part if count > 1 else None


def hf_tensors(c: ModelConfig, parameters: Iterable[str]) -> dict[str, list[tuple[str, Home]]]:
    """The parameters that each tensor of the folder consists of, in the order of their rows."""
    modules = hf_modules(c)
    tensors: dict[str, list[tuple[str, Home]]] = {}
    for parameter in parameters:
        module, _, leaf = parameter.rpartition(".")
        home = modules[module]
        for i, tensor in enumerate(home.tensors(leaf)):
            tensors.setdefault(tensor, []).append((parameter, replace(home, index=i) if home.stack else home))
    for parts in tensors.values():
        parts.sort(key=lambda entry: entry[1].part[2] if entry[1].part else 0)
    return tensors


def fuse(parts: list[tuple[Tensor, Home]]) -> Tensor:
    """A tensor of the folder, fused from its parameters in the order of `hf_tensors`."""
    import torch

    first, home = parts[0]
    if home.part is None:
        return first if home.index is None else first[home.index]
    return torch.cat([value.unflatten(0, (home.part[0], -1)) for value, _ in parts], 1).flatten(0, 1)
