"""The layers of a model that repeat: which lists hold them, and which of them differ in their weights alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from tpshard.models.module_state import OF_TORCH

T = TypeVar("T")


@dataclass(frozen=True)
class LayerStack:
    """A list of layers that repeat: stages of a pipeline share them, a few of them are planned for all, a vectorized
    pipeline stacks their parameters, GPTQ quantizes them one by one, and Muon moves their matrices."""

    path: str
    kinds: tuple[int, ...]
    """The kind of each layer. Layers of one kind differ only in their parameters' values, and share none."""
    differs: str = ""
    """Why one module cannot compute all layers; "" if it can."""

    def __len__(self) -> int:
        return len(self.kinds)


def refined(stack: LayerStack, marks: Iterable[tuple[str, object]], what: str) -> LayerStack:
    """A stack whose layers of one kind also have the same marks: (name of a parameter or module, what it has)."""
    own: list[list[object]] = [[kind] for kind in stack.kinds]
    for name, mark in marks:
        if layer := re.match(rf"{re.escape(stack.path)}\.(\d+)\.(.*)", name):
            own[int(layer[1])].append((layer[2], mark))
    forms = list(dict.fromkeys(map(repr, own)))
    kinds = tuple(forms.index(repr(one)) for one in own)
    unlike = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None)
    return replace(stack, kinds=kinds, differs=stack.differs or ("" if unlike is None else f"{what} in layer {unlike}"))


def layer_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """The lists of a module all of whose parts repeat; a list of one layer only where no list has several."""
    found = [
        LayerStack(path, _kinds(model, path), _difference(model, path)) for path, layers in repeated_layers(model)
        if len(layers) == len(list((own := model.get_submodule(path)).children()))
        and (isinstance(own, nn.ModuleList) or len({type(layer) for layer in own.children()}) == 1)
    ]  # fmt: skip
    several = tuple(stack for stack in found if len(stack) > 1)
    return several or tuple(found)


def repeated_layers(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yields (path, its parts that are layers) for the outermost lists of modules that have some.

    Layers are the parts of an `nn.ModuleList` that have parts of their own, and those of which a list has several of
    one form. An `nn.Sequential` may be a head, so only the latter count there.
    """
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{p}.") for p in lists):
            continue
        lists.append(path)
        forms = [_form(child) for child in module.children()]
        layers = [
            f"{path}.{name}" if path else name for (name, child), form in zip(module.named_children(), forms)
            if forms.count(form) > 1 or (isinstance(module, nn.ModuleList) and any(True for _ in child.children()))
        ]  # fmt: skip
        if layers:
            yield path, layers


def keep_layers(model: nn.Module, path: str, numbers: Sequence[int]) -> None:
    """Removes from the list of layers at `path` of a model those whose `numbers` are not given."""
    parent, _, leaf = path.rpartition(".")
    layers = list(model.get_submodule(path).children())
    setattr(model.get_submodule(parent), leaf, nn.ModuleList(layers[number] for number in numbers))


def names_after(values: Mapping[str, T], path: str, numbers: Sequence[int]) -> dict[str, T]:
    """Values by parameter, by the names that these have after `keep_layers`."""
    place = {f"{path}.{number}": f"{path}.{new}" for new, number in enumerate(numbers)}
    renamed = {}
    for name, value in values.items():
        layer = re.match(rf"{re.escape(path)}\.\d+(?=\.)", name)
        if layer is None or layer[0] in place:
            renamed[name if layer is None else place[layer[0]] + name[layer.end() :]] = value
    return renamed


def layer_numbers(layers: Sequence[nn.Module]) -> list[str]:
    """The names of the attributes that hold each layer's number, such as `layer_idx` of transformers' modules. A layer
    need not have all of them."""
    return _numbers([_description(layer) for layer in layers])


def _form(module: nn.Module) -> tuple[object, ...]:
    """What layers have in common: the class, and the names of its parts' parameters; of an operation their shapes."""
    named = list(module.named_parameters())
    parts = any(True for _ in module.children())
    return (type(module), *((name, None if parts else tuple(p.shape)) for name, p in named))


def _kinds(model: nn.Module, path: str) -> tuple[int, ...]:
    """The kind of each layer of a list; each is its own where layers share a parameter."""
    layers = list(model.get_submodule(path).children())
    if _shared(model, path):
        return tuple(range(len(layers)))
    described = [_description(layer) for layer in layers]
    numbers = _numbers(described)
    kinds: list[dict[str, object]] = []
    kind_of = []
    for one in described:
        one = {key: value.func if isinstance(value, partial) else value for key, value in one.items()}
        one = {key: value for key, value in one.items() if key not in numbers}
        kind = next((i for i, kind in enumerate(kinds) if _are_same(kind, one)), len(kinds))
        kinds += [one] * (kind == len(kinds))
        kind_of.append(kind)
    return tuple(kind_of)


def _difference(model: nn.Module, path: str) -> str:
    """Why the layers of a list cannot stand for each other: they differ in a class, an attribute, a buffer or the shape
    of a parameter, or share a parameter. "" if they can."""
    described = [_description(layer) for layer in model.get_submodule(path).children()]
    numbers = _numbers(described)
    for number, other in enumerate(described):
        for key in (key for key in {**described[0], **other} if key not in numbers):
            first, second = described[0].get(key, "unset"), other.get(key, "unset")
            if not _same(first, second):
                return f"`{key}` is {_shown(first)} in layer 0 and {_shown(second)} in layer {number}"
    if shared := _shared(model, path):
        return f"`{shared}` is shared with another part of the model"
    return ""


def _shared(model: nn.Module, path: str) -> str:
    """The first parameter of a list that also stands elsewhere in the model; "" without one."""
    named = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in named)
    return next((name for name, p in named if name.startswith(f"{path}.") and uses[id(p)] > 1), "")


def _numbers(described: Sequence[dict[str, object]]) -> list[str]:
    return [
        key for key in dict.fromkeys(key for one in described for key in one)
        if all(type(one[key]) is int and one[key] == number for number, one in enumerate(described) if key in one)
    ]  # fmt: skip


def _description(layer: nn.Module) -> dict[str, object]:
    """The classes, parameters' shapes, attributes and buffers of a layer's modules, by path."""
    described: dict[str, object] = dict(layer.named_buffers())
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        own = list(module.named_parameters(recurse=False))
        described |= {prefix + name: list(p.shape) for name, p in own}
        described |= {f"{prefix}{name}.requires_grad": p.requires_grad for name, p in own}
        described |= {prefix + name: value for name, value in vars(module).items() if name not in OF_TORCH}
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
