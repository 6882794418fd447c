"""One function that is given to control flow, traced to a graph of its own: what it captures, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.tracing.canonical import canonicalize
from tpshard.parallelism.tracing.functional import functionalize
from tpshard.parallelism.tracing.recorder import Recorder

if TYPE_CHECKING:
    from tpshard.parallelism.tracing.bodies import ControlFlow

Function = Callable[..., Any]


class _Body(Recorder):
    """The recorder of a body; what it reads from outside becomes an input, and is listed in `captured`."""

    def __init__(self, outer: Recorder, phase: str) -> None:
        super().__init__((lambda: outer.place()._replace(phase=phase)) if phase else outer.place)
        self.names = outer.names  # a name occurs once in a graph and its bodies
        self.captured: list[Tensor] = []
        self.outer = outer

    def value(self, tensor: Tensor) -> Value:
        if id(tensor) not in self.value_of:
            self.outer.value(tensor)
            self.input("", tensor)
            self.captured.append(tensor)
        return self.value_of[id(tensor)][0]

    def _draw(self, size: Any, dtype: torch.dtype) -> Tensor:
        raise ValueError("random numbers are drawn inside of control flow: draw them before, and pass them in")


class Traced:
    """A function given to control flow, traced on stand-ins for `inputs` and on `operands` from outside."""

    def __init__(
        self, flow: ControlFlow, fn: Function, inputs: Sequence[Tensor], operands: Sequence[Any], phase: str = ""
    ) -> None:
        self.flow, self.fn, self.operands = flow, fn, operands
        self.inputs = [flow.fresh(tuple(x.shape), x.dtype, x.requires_grad and not phase) for x in inputs]
        self.recorder = _Body(flow.recorder, phase)
        for x in self.inputs:
            self.recorder.input("", x)
        with flow.tracing(self.recorder):
            flat, self.tree = pytree.tree_flatten(fn(*self.inputs, *operands))
        for one in flat:
            if not isinstance(one, Tensor):
                raise ValueError(f"a function of control flow returns {one!r}, which is no tensor")
        self.results: list[Tensor] = flat
        self.plain = functionalize(self.recorder.graph(list(flat)))
        canonicalize(self.plain)

    def graph(self, whole: Sequence[Tensor]) -> Graph:
        """Its graph, with its inputs and then one for each of `whole`, of which it may have captured some."""
        graph, own = self.plain, self.plain.inputs
        place = {id(x): i for i, x in enumerate(self.recorder.captured, len(self.inputs))}
        graph.inputs = own[: len(self.inputs)] + [
            own[place[id(x)]] if id(x) in place else Value("", tuple(x.shape), x.dtype) for x in whole
        ]
        graph.number_inputs()
        return graph

    def gradient(self, whole: Sequence[Tensor], leaves: Sequence[int], summed: Sequence[int]) -> Function:
        """A function of its inputs, `whole` and the gradients of its results `summed` to those of its `leaves`."""
        n = len(self.inputs)

        def backward(*tensors: Tensor) -> list[Tensor]:
            own, grads = tensors[: n + len(whole)], tensors[n + len(whole) :]
            for i, x in enumerate(own):
                x.requires_grad_(i in leaves)
            inside = {id(outside): x for outside, x in zip(whole, own[n:])}
            operands = pytree.tree_map(lambda x: inside.get(id(x), x), self.operands)
            with torch.enable_grad(), self.flow.replacing(inside):
                results = [inside.get(id(x), x) for x in pytree.tree_leaves(self.fn(*own[:n], *operands))]
            ends = [(results[i], grad) for i, grad in zip(summed, grads) if results[i].requires_grad]
            inputs, found = [own[i] for i in leaves], tuple[Any, ...]([None] * len(leaves))
            if ends:
                outputs, end_grads = zip(*ends)
                beyond = [x for x in whole if x.requires_grad]
                found = torch.autograd.grad(outputs, [*inputs, *beyond], end_grads, allow_unused=True)
                if any(grad is not None for grad in found[len(inputs) :]):
                    raise ValueError(
                        "a function of control flow passes a tensor from outside to an `autograd.Function`, so that "
                        "its gradient cannot be told from others: make it an operand, or pass `tensor.clone()`"
                    )
            return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found)]

        return backward


class Replaced(TorchFunctionMode):
    """A mode in which functions get other tensors in the place of some, given by identity."""

    def __init__(self, by: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: self.by.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


def joined(traced: Sequence[Traced]) -> list[Tensor]:
    """What functions take from outside, each once."""
    return list({id(x): x for each in traced for x in each.recorder.captured}.values())
