"""Checks whether the layers of a model differ only in their parameters' values, so that one module can run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from tpshard.parallelism.depth import Depth

_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as `training` and its hooks."""


def difference(model: nn.Module, path: str) -> str:
    """Why the layers in the list `path` of a model cannot stand for each other; "" if they can.

    They cannot if they differ in a class, an attribute or the shape of a parameter, if they share a parameter, or if
    they have buffers, whose values are unknown.
    """
    layers = list(model.get_submodule(path).children())
    described = [_description(layer) for layer in layers]
    numbers = layer_numbers(layers)
    for number, other in enumerate(described):
        for key in (key for key in {**described[0], **other} if key not in numbers):
            first, second = described[0].get(key, "unset"), other.get(key, "unset")
            if not _same(first, second):
                return f"`{key}` is {_shown(first)} in layer 0 and {_shown(second)} in layer {number}"
    named = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in named)
    shared = [name for name, parameter in named if name.startswith(f"{path}.") and uses[id(parameter)] > 1]
    if shared:
        return f"`{shared[0]}` is shared with another part of the model"
    buffers = [name for name, _ in model.get_submodule(path).named_buffers()]
    return f"`{path}.{buffers[0]}` is a buffer, which may have another value in each layer" if buffers else ""


def likeness(model: nn.Module, path: str) -> Depth | None:
    """The depth of a model whose layers in the list `path` repeat in blocks, such as five with a sliding window and
    one without; None if they do not, or share a parameter.

    The length of a block is chosen so that the shallow model leaves out most layers.
    """
    layers = list(model.get_submodule(path).children())
    numbers = layer_numbers(layers)
    described = [
        {key: value.func if isinstance(value, partial) else value for key, value in _description(layer).items()}
        | dict(layer.named_buffers())
        for layer in layers
    ]
    kinds: list[dict[str, object]] = []
    kind_of: list[int] = []
    for one in described:
        one = {key: value for key, value in one.items() if key not in numbers}
        kind = next((i for i, kind in enumerate(kinds) if _are_same(kind, one)), len(kinds))
        kinds += [one] * (kind == len(kinds))
        kind_of.append(kind)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if any(uses[id(parameter)] > 1 for layer in layers for parameter in layer.parameters()):
        return None
    count, best = len(layers), None
    for period in range(1, count // 4 + 1):
        unlike = [i for i in range(count - period) if kind_of[i] != kind_of[i + period]]
        depth = Depth(path, count, period, head=unlike[-1] + 1 if unlike else 0)
        if depth.copies > 1 and (best is None or depth.skipped > best.skipped):
            best = depth
    return best


def keep_layers(model: nn.Module, path: str, kept: Sequence[int]) -> None:
    """Removes from the list of layers at `path` of a model those that are not `kept`."""
    parent, _, leaf = path.rpartition(".")
    layers = list(model.get_submodule(path).children())
    setattr(model.get_submodule(parent), leaf, nn.ModuleList(layers[number] for number in kept))


def layer_numbers(layers: Sequence[nn.Module]) -> list[str]:
    """The names of the attributes that hold each layer's number, such as `layer_idx` of transformers' modules. A layer
    need not have all of them."""
    described = [_description(layer) for layer in layers]
    return [
        key for key in dict.fromkeys(key for one in described for key in one)
        if all(type(one[key]) is int and one[key] == number for number, one in enumerate(described) if key in one)
    ]  # fmt: skip


class LayerNumber:
    """A placeholder for the number of a stacked layer: it can be passed on; computing with it raises ValueError."""

    def __init__(self, attribute: str):
        self.attribute = attribute

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(f"`{self.attribute}` differs between the layers that a vectorized pipeline stacks")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _refuse
    __mod__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = _refuse  # type: ignore[assignment]


def _description(layer: nn.Module) -> dict[str, object]:
    """The classes, parameters' shapes and attributes of a layer's modules, by path."""
    described: dict[str, object] = {}
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        own = list(module.named_parameters(recurse=False))
        described |= {prefix + name: list(p.shape) for name, p in own}
        described |= {f"{prefix}{name}.requires_grad": p.requires_grad for name, p in own}
        described |= {prefix + name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        described[prefix + "class"] = type(module).__name__
    return described


def _same(first: Any, second: Any) -> bool:
    """Whether two attributes are one object, or equal."""
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and not first.is_meta and torch.equal(first, second)
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):
        return False


def _are_same(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
