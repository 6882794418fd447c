"""Captures the arguments of a model's layers, and the inputs of the linears inside them, for quantizing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tpshard.kernels.quantized.gptq_solver import Heads


class LayerCaught(Exception):
    """Raised to end a forward pass early, once the needed values are captured."""


Form = Callable[[Tensor], Any]
"""A function from a residual stream to a layer's result: the stream itself, or a tuple with it as first element."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer: the residual stream, and others passed unchanged."""

    x: Tensor
    rest: tuple[Any, ...]
    named: Mapping[str, Any]

    def returned_by(self, layer: nn.Module) -> Any:
        return layer(self.x, *self.rest, **self.named)

    def into(self, layer: nn.Module) -> Tensor:
        """The residual stream that a layer returns when it is called with these arguments."""
        returned = self.returned_by(layer)
        return returned[0] if isinstance(returned, tuple) else returned  # type: ignore[no-any-return]


class _InPlace(nn.Module):
    """A stand-in for a layer, with the layer's attributes, which its model may read."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class CallCatcher(_InPlace):
    """A stand-in for a layer that keeps the arguments of its call.

    It returns NaNs in the given form; without a form it raises LayerCaught, which ends the forward pass.
    """

    def __init__(self, layer: nn.Module, form: Form | None = None) -> None:
        super().__init__(layer)
        self.__dict__["form"], self.__dict__["call"] = form, None

    def forward(self, *rest: Any, **named: Any) -> Any:
        x, rest = (rest[0], rest[1:]) if rest else (named.pop("hidden_states"), ())
        self.__dict__["call"] = LayerCall(x, rest, named)
        if self.form is None:
            raise LayerCaught
        return self.form(torch.full_like(x, math.nan))


class OutputReplay(_InPlace):
    """A stand-in for a layer that returns a fixed residual stream, whatever it is called with; ValueError if it is
    called again."""

    def __init__(self, layer: nn.Module, x: Tensor, form: Form) -> None:
        super().__init__(layer)
        self.__dict__["x"], self.__dict__["form"], self.__dict__["called"] = x, form, False

    def forward(self, *rest: Any, **named: Any) -> Any:
        if self.called:
            raise ValueError("the layers run several times in one forward pass, which quantizing layer by layer cannot")
        self.__dict__["called"] = True
        return self.form(self.x)


@dataclass(frozen=True)
class StackResult:
    """What a list of layers returns: the last residual stream, and the form of its layers' results."""

    x: Tensor
    form: Form


@contextlib.contextmanager
def replaying(model: nn.Module, results: Mapping[str, StackResult]) -> Iterator[None]:
    """A context in which the model's lists of layers at these paths return their results without computing them."""
    with contextlib.ExitStack() as replaced:
        for path, result in results.items():
            layers = [OutputReplay(one, result.x, result.form) for one in model.get_submodule(path).children()]
            replaced.enter_context(in_place_of(model, path, layers))
        yield


def first_call(model: nn.Module, path: str, run: Callable[[], Any]) -> LayerCall | None:
    """The call of the first layer of the list at `path`, at which the run ends; None if it is not called."""
    layers = list(model.get_submodule(path).children())
    catcher = CallCatcher(layers[0])
    with in_place_of(model, path, [catcher, *layers[1:]]), contextlib.suppress(LayerCaught):
        run()
    return catcher.call  # type: ignore[no-any-return]


def first_to_run(model: nn.Module, paths: Sequence[str], run: Callable[[], Any]) -> str | None:
    """Which of the model's lists of layers runs first; None if none does."""
    catchers = {path: CallCatcher(next(model.get_submodule(path).children())) for path in paths}
    with contextlib.ExitStack() as replaced, contextlib.suppress(LayerCaught):
        for path, catcher in catchers.items():
            others = list(model.get_submodule(path).children())[1:]
            replaced.enter_context(in_place_of(model, path, [catcher, *others]))
        run()
    return next((path for path, catcher in catchers.items() if catcher.call is not None), None)


@contextlib.contextmanager
def in_place_of(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which the model has other layers in its list of layers at `path`."""
    own = model.get_submodule(path)
    model.set_submodule(path, nn.ModuleList(layers))
    try:
        yield
    finally:
        model.set_submodule(path, own)


def form_of(layer: nn.Module, call: LayerCall) -> Form:
    """A function that puts a residual stream into the form of a layer's result. Its other tensors are kept if they are
    the same for another stream, as T5's relative positions are, which its first layer returns for all."""
    returned = call.returned_by(layer)
    if not isinstance(returned, tuple):
        return lambda x: x
    of_another = replace(call, x=call.x.flip(-1)).returned_by(layer)
    others = tuple(
        one if not isinstance(one, Tensor) or torch.equal(one, another) else _unknown(one)
        for one, another in zip(returned[1:], of_another[1:])
    )
    return lambda x: (x, *others)


def _unknown(x: Tensor) -> Tensor:
    """A tensor like x of values that no layer returns: NaN, or the largest integer; x if it is of truths."""
    if x.dtype == torch.bool:
        return x
    return torch.full_like(x, math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


def _has_unknown(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype != torch.bool and bool((x.isnan() | (x == _unknown(x))).any())


def calls_of_layers(model: nn.Module, path: str, form: Form, run: Callable[[], Any]) -> list[LayerCall]:
    """Runs the model once and returns the call of each layer. Residual streams are NaNs in all calls but the first.

    Raises ValueError for a layer whose other arguments depend on the layers before it.
    """
    layers = list(model.get_submodule(path).children())
    catchers = [CallCatcher(layer, form) for layer in layers[:-1]] + [CallCatcher(layers[-1])]
    with in_place_of(model, path, catchers), contextlib.suppress(LayerCaught):
        run()
    calls = [catcher.call for catcher in catchers]
    for i, call in enumerate(calls):
        others = [] if call is None else tree_leaves((call.rest, dict(call.named)))
        depends = any(_has_unknown(one) for one in others)
        kept = call is None or any(type(one) in (dict, list) and not one for one in (*call.rest, *call.named.values()))
        if depends or kept:
            raise ValueError(
                f"`{path}.{i}` is not called with values of earlier layers alone in its first argument, which "
                "quantizing layer by layer needs"
            )
    return calls


def input_of(layer: nn.Module, name: str, call: LayerCall) -> Tensor:
    """Calls the layer and returns the input of its linear `name`."""
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
    """Calls the layer until it raises `LayerCaught`, when the needed values are captured."""
    with contextlib.suppress(LayerCaught):
        call.into(layer)


def shared_inputs(layer: nn.Module, call: LayerCall) -> list[list[str]]:
    """Calls the layer and returns its linears' names in the order they run; those with the same input form a list."""
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


def joined_heads(layer: nn.Module, name: str, call: LayerCall) -> Heads | None:
    """The heads that the input of the linear `name` joins into one dim, as attention's result is; None where it joins
    none. Calls the layer."""
    seen = _Joins()
    inputs: list[Tensor] = []
    handle = layer.get_submodule(name).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        with seen:
            call.into(layer)
    finally:
        handle.remove()
    if not inputs or inputs[0].data_ptr() not in seen.joined:
        return None
    _, heads, size = seen.joined[inputs[0].data_ptr()]
    if heads * size != inputs[0].shape[-1]:  # the first part of a joined value
        return None
    return Heads(heads, seen.kv_heads if seen.kv_heads and heads % seen.kv_heads == 0 else heads, size)


class _Joins(TorchDispatchMode):
    """Keeps the views that join the last two dims of a value, and the number of KV heads of attention."""

    _VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[Tensor, int, int]] = {}
        self.kv_heads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._VIEWS and (x := args[0]).dim() > 3 and math.prod(x.shape[-2:]) == result.shape[-1]:
            self.joined[result.data_ptr()] = result, *x.shape[-2:]  # kept, so that its memory is not used again
        elif func.name() == "tpshard::attention":
            self.kv_heads = args[1].shape[2]
        elif func.name().startswith("aten::_scaled_dot_product"):  # its CPU's, or one of a GPU's
            self.kv_heads = args[1].shape[1]
        return result


def expert_inputs(layer: nn.Module, call: LayerCall) -> tuple[Tensor, Tensor]:
    """The tokens [rows, embed] that the layer's experts get when it is called, and the experts [rows, top_k] that each
    token chooses."""
    with _ExpertInputs() as caught:
        _until_caught(layer, call)
    x, ids = caught.inputs
    return x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1])


class _ExpertInputs(TorchDispatchMode):
    """Keeps the first arguments of `tpshard::experts`, and ends the forward pass there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.tpshard.experts.default:
            self.inputs: tuple[Tensor, Tensor] = args[:2]
            raise LayerCaught
        return func(*args, **(kwargs or {}))
