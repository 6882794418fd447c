"""Calls of a model's layers, kept while it is quantized, and the inputs that modules inside a layer get from them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class LayerCaught(Exception):
    """Ends a forward pass early, once the needed values are captured."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer: the residual stream, and others passed unchanged."""

    x: Tensor
    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def into(self, layer: nn.Module) -> Tensor:
        return layer(self.x, *self.rest, **self.named)  # type: ignore[no-any-return]


class CallCatcher(nn.Module):
    """Stands in a layer's place: keeps the arguments of each call and ends the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.calls.append(LayerCall(x, rest, named))
        raise LayerCaught


class OutputReplay(nn.Module):
    """Stands in the layers' place: returns a given residual stream, whatever it is called with."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, *rest: Any, **named: Any) -> Tensor:
        return self.x


def input_of(layer: nn.Module, name: str, call: LayerCall) -> Tensor:
    """The input of the linear `name` when the layer is called."""
    inputs: list[Tensor] = []

    def see(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])
        raise LayerCaught  # the rest of the layer is not needed

    handle = layer.get_submodule(name).register_forward_pre_hook(see)
    try:
        _until_caught(layer, call)
    finally:
        handle.remove()
    return inputs[0]


def _until_caught(layer: nn.Module, call: LayerCall) -> None:
    """Calls the layer up to the place where the needed values are known."""
    with contextlib.suppress(LayerCaught):
        call.into(layer)


def through(layer: nn.Module, call: LayerCall) -> LayerCall:
    """The call of the next layer: the same one, with this layer's result as residual stream."""
    return replace(call, x=call.into(layer))


def shared_inputs(layer: nn.Module, call: LayerCall) -> list[list[str]]:
    """The layer's linears in the order they run, grouped by their input."""
    order: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda _, arguments, name=name: order.append((name, arguments[0])))
        for name, module in layer.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2
    ]
    try:
        call.into(layer)
    finally:
        for handle in handles:
            handle.remove()
    together: list[list[str]] = []
    last: Tensor | None = None
    for name, x in order:
        if x is last:
            together[-1].append(name)
        else:
            together.append([name])
        last = x
    return together


def expert_inputs(layer: nn.Module, call: LayerCall) -> tuple[Tensor, Tensor]:
    """The tokens [rows, embed] that the layer's experts get when it is called, and the experts [rows, top_k] that each
    token chooses."""
    with _ExpertInputs() as seen:
        _until_caught(layer, call)
    x, ids = seen.inputs
    return x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1])


class _ExpertInputs(TorchDispatchMode):
    """Keeps the first arguments of `tpshard::experts`, and ends the forward pass there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.tpshard.experts.default:
            self.inputs: tuple[Tensor, Tensor] = args[:2]
            raise LayerCaught
        return func(*args, **(kwargs or {}))
