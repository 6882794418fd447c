"""Where each module's tensors live in a Hugging Face folder.

The same table serves dense and quantized folders: a module's `weight`, `bias`, `qweight`, `scales` are all found under
its home. Where several modules share one fused matrix, `Home` also says which of its output rows are whose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from tpshard.models.config import ModelConfig


@dataclass(frozen=True)
class Home:
    """`module` is the prefix of the tensors' names. With `part`, (groups, rows, start, stop): the fused matrix's
    outputs are seen as [groups, rows], and start:stop of each group are this module's."""

    module: str
    part: tuple[int, int, int, int] | None = None

    def take(self, fused: Tensor, dim: int = 0) -> Tensor:
        """This module's share of a tensor whose dim `dim` is the fused outputs."""
        if self.part is None:
            return fused
        groups, rows, start, stop = self.part
        return fused.unflatten(dim, (groups, rows)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)


def hf_modules(c: ModelConfig) -> dict[str, Home]:
    """The home of every module with parameters, by its path in the model: `layers.0.attention.wq` -> Home("model.
    layers.0.self_attn.q_proj"). Modules that share a matrix lie there KV head by KV head: queries, key, value."""
    sharing: dict[str, list[str]] = {}
    for path in c.leaves:
        pattern, layer = re.sub(r"\.(\d+)\.", ".*.", path), re.search(r"\.(\d+)\.", path)
        module = c.described.hf.names[pattern].replace("*", layer[1] if layer else "*")
        sharing.setdefault(module, []).append(path)
    homes = {}
    for module, paths in sharing.items():
        ends = list(accumulate(c.size(c.leaves[path].dims[0]) // c.kv_heads for path in paths))
        for path, start, stop in zip(paths, [0, *ends], ends):
            homes[path] = Home(module, (c.kv_heads, ends[-1], start, stop) if len(paths) > 1 else None)
    return homes


def hf_tensors(c: ModelConfig, parameters: Iterable[str]) -> dict[str, list[tuple[str, Home]]]:
    """For every tensor of the folder the parameters that it is made of, in the order of their rows."""
    modules = hf_modules(c)
    tensors: dict[str, list[tuple[str, Home]]] = {}
    for parameter in parameters:
        module, _, leaf = parameter.rpartition(".")
        home = modules[module]
        tensors.setdefault(f"{home.module}.{leaf}", []).append((parameter, home))
    for parts in tensors.values():
        parts.sort(key=lambda entry: entry[1].part[2] if entry[1].part else 0)
    return tensors


def fuse(parts: list[tuple[Tensor, Home]]) -> Tensor:
    """The tensor of the folder from its parameters, in the order of `hf_tensors`."""
    first, home = parts[0]
    if home.part is None:
        return first
    return torch.cat([value.unflatten(0, (home.part[0], -1)) for value, _ in parts], 1).flatten(0, 1)
