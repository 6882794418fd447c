"""Capturing control flow: the functions given to `torch.cond`, `scan` and `while_loop` become graphs of their own.

Tensors that such a function takes from outside become operands. A gradient is control flow too: of `cond` another
`cond`, of `scan` a `scan` from the last slice to the first, whose bodies compute the functions again and then their
gradients. `associative_scan` is recorded as the operations of torch's own implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from tpshard.parallelism.graph import Graph
from tpshard.parallelism.rules.control_flow import DEARER, cond, scan, while_loop
from tpshard.parallelism.rules.strides import contiguous
from tpshard.parallelism.tracing.recorder import Recorder
from tpshard.parallelism.tracing.remember import Like, fake
from tpshard.parallelism.tracing.substitutes import Substitutes
from tpshard.parallelism.tracing.traced import Function, Replaced, Traced, joined

RARE = "rare"
"""The attribute of a function that `torch.cond` is given and that hardly ever runs: the other one is priced."""


class ControlFlow(TorchFunctionMode):
    """A mode that records torch's operations of control flow with a recorder; the recorder refuses all others."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode) -> None:
        super().__init__()
        self.recorder, self.mode = recorder, mode
        self.stand_ins: dict[int, Tensor] = {}
        """While a gradient is traced, the tensor that stands for each one from outside, by the latter's identity."""
        self.by_name: dict[str, Function] = {
            "cond": self._cond, "scan": self._scan, "while_loop": self._while_loop,
            "associative_scan": self._associative_scan,
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.HigherOrderOperator) or func.name() not in self.by_name:
            return func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            raise ValueError(
                f"`{func.name()}` inside of a manual region or a transform of `torch.func` is not supported"
            )
        return self.by_name[func.name()](*args, **(kwargs or {}))

    # ---- the operations, as torch calls them --------------------------------------------------------------------
    def _cond(self, pred: Any, true_fn: Function, false_fn: Function, operands: Sequence[Any]) -> Any:
        if not isinstance(pred, Tensor):
            return (true_fn if pred else false_fn)(*operands)
        rare = [getattr(fn, RARE, False) for fn in (true_fn, false_fn)]
        often = (DEARER if rare[0] == rare[1] else rare.index(False),)
        one, other = traced = [Traced(self, fn, (), operands) for fn in (true_fn, false_fn)]
        if list(map(_like, one.results)) != list(map(_like, other.results)) or one.tree != other.tree:
            raise ValueError(f"`cond`: one branch returns {_said(one.results)}, the other {_said(other.results)}")
        whole = joined(traced)
        graphs = [each.graph(whole) for each in traced]

        def forward() -> list[Tensor]:
            return self.record(cond, graphs, often, [pred, *whole], one.results)

        if not _differentiated([*one.results, *other.results]):
            return pytree.tree_unflatten(forward(), one.tree)
        needed, summed = _needed(whole), [i for i, x in enumerate(one.results) if x.is_floating_point()]
        back = [
            Traced(
                self, each.gradient(whole, needed, summed), [*whole, *(one.results[i] for i in summed)], (), "backward"
            )
            for each in traced
        ]
        further = joined(back)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            operands = [pred, *whole, *(grads[i] for i in summed), *further]
            return self.record(cond, [each.graph(further) for each in back], often, operands, back[0].results)

        return pytree.tree_unflatten(_apply(forward, backward, whole, needed), one.tree)

    def _scan(
        self, combine_fn: Function, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]
    ) -> Any:
        carried = len(init)
        slices = [self.fresh(tuple(x.shape[1:]), x.dtype, x.requires_grad) for x in xs]
        traced = Traced(self, combine_fn, [*init, *slices], additional_inputs)
        _check_carried("scan", init, traced.results[:carried])
        whole, rounds = joined([traced]), xs[0].shape[0]
        operands, graph = [*init, *xs, *whole], traced.graph(whole)
        stacked = [self.fresh((rounds, *x.shape), x.dtype) for x in traced.results[carried:]]
        results, numbers = [*traced.results[:carried], *stacked], (carried, len(xs), 0)
        if not _differentiated(traced.results):
            return pytree.tree_unflatten(self.record(scan, [graph], numbers, operands, results), traced.tree)

        summed = [i for i, x in enumerate(traced.results) if x.is_floating_point()]
        needed = _needed(operands)
        # carried values pass on gradients, also those that begin without
        leaves = [i for i in range(len(operands)) if i in needed or (i < carried and i in summed)]
        back = _ScanGradient(self, traced, whole, leaves, summed, carried)
        kept = back.kept
        graph.outputs += [graph.inputs[i] for i in kept]
        held = [self.fresh((rounds, *init[i].shape), init[i].dtype) for i in kept]
        saved: list[Tensor] = []

        def forward() -> list[Tensor]:
            out = self.record(scan, [graph], numbers, operands, [*results, *held])
            saved.extend(out[len(results) :])
            return out[: len(results)]

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            grown = back.record(grads, [*saved, *xs], operands)
            return [grown[i] for i in needed]

        return pytree.tree_unflatten(_apply(forward, backward, operands, needed), traced.tree)

    def _while_loop(
        self,
        cond_fn: Function,
        body_fn: Function,
        carried_inputs: Sequence[Any],
        additional_inputs: Sequence[Any],
        *_: Any,
    ) -> Any:
        for one in carried_inputs:
            if not isinstance(one, Tensor):
                raise ValueError(f"`while_loop` carries {one!r}: pass a tensor, `torch.tensor({one!r})`")
        held = list(carried_inputs)
        test, body = traced = [Traced(self, fn, held, additional_inputs) for fn in (cond_fn, body_fn)]
        if list(map(_like, test.results)) != [((), torch.bool)]:
            raise ValueError(f"`while_loop`: the condition returns {_said(test.results)}, not one bool")
        _check_carried("while_loop", held, body.results)
        whole = joined(traced)
        if _differentiated(body.results):
            results = self._while_loop_with_gradient(cond_fn, body_fn, held, additional_inputs, body, whole)
            return pytree.tree_unflatten(results, body.tree)
        graphs = [each.graph(whole) for each in traced]
        results = self.record(while_loop, graphs, [len(held)], [*held, *whole], body.results)
        return pytree.tree_unflatten(results, body.tree)

    def _while_loop_with_gradient(
        self, cond_fn: Function, body_fn: Function, carried: Sequence[Tensor], more: Sequence[Any], body: Traced,
        whole: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """A loop that counts its runs. Its gradient runs as often, and computes what a run began with from the start:
        how much a loop would keep depends on data."""
        operands, zero = [*carried, *whole], torch.zeros((), dtype=torch.int64)
        summed = [i for i, x in enumerate(body.results) if x.is_floating_point()]
        needed = _needed(operands)
        leaves = [i for i in range(len(operands)) if i in needed or i in summed]
        gradient, n, runs = body.gradient(whole, leaves, summed), len(carried), [zero]
        stand_ins = dict(self.stand_ins)  # those of now, also where the gradient is traced later

        def again(running: Function, begin: Sequence[Tensor]) -> list[Tensor]:
            """The number of runs while `running(count, *carried)`, and what is carried then."""
            following = lambda count, *c: (count + 1, *pytree.tree_leaves(body_fn(*c, *more)))  # noqa: E731
            return list(self._while_loop(lambda count, *c: running(count, *c), following, [zero, *begin], ()))

        def forward() -> list[Tensor]:
            runs[0], *results = again(lambda _, *c: cond_fn(*c, *more), carried)
            return results

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            def step(left: Tensor, *grown: Tensor) -> list[Tensor]:
                by = dict(zip(leaves, grown))
                begin = again(lambda count, *_: count < left - 1, carried)[1:]
                apart = [x.detach() for x in whole]
                found = dict(zip(leaves, gradient(*begin, *apart, *(by[i] for i in summed))))
                return [left - 1, *(found[i] if i < n else by[i] + found[i] for i in leaves)]

            ends = [grads[i] if i in summed else torch.zeros_like(operands[i]) for i in leaves]
            with self.replacing(stand_ins):
                _, *grown = self._while_loop(lambda left, *_: left > 0, step, [runs[0], *ends], ())
            by = dict(zip(leaves, grown))
            return [by[i] for i in needed]

        return _apply(forward, backward, operands, needed)

    def _associative_scan(self, combine_fn: Function, xs: Sequence[Tensor], additional_inputs: Sequence[Any]) -> Any:
        from torch._higher_order_ops.associative_scan import generic_associative_scan

        with self:
            return generic_associative_scan(combine_fn, list(xs), additional_inputs=tuple(additional_inputs))

    # ---- recording ----------------------------------------------------------------------------------------------
    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype, differentiable: bool = False) -> Tensor:
        """A fake tensor that nothing has computed."""
        tensor = fake(self.mode, Like(shape, contiguous(shape), dtype, torch.device("cpu")))
        return tensor.requires_grad_(differentiable)

    @contextmanager
    def tracing(self, body: Recorder) -> Iterator[None]:
        """A context whose operations a body's recorder records, instead of the one around it."""
        outer, self.recorder.body = self.recorder, body
        self.recorder = body
        try:
            with self, Substitutes(), Replaced(self.stand_ins):
                yield
        finally:
            outer.body, self.recorder = None, outer

    @contextmanager
    def replacing(self, by: Mapping[int, Tensor]) -> Iterator[None]:
        """A context whose functions get other tensors in the place of some, also inside of further control flow."""
        outer = self.stand_ins
        self.stand_ins = {key: by.get(id(x), x) for key, x in outer.items()} | dict(by)
        try:
            with Replaced(self.stand_ins):
                yield
        finally:
            self.stand_ins = outer

    def record(
        self, target: Any, graphs: Sequence[Graph], numbers: Sequence[int], operands: Sequence[Tensor],
        like: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Records an operation; returns its results, with the shapes of `like`."""
        results = [self.fresh(tuple(x.shape), x.dtype) for x in like]
        values = [self.recorder.value(x) for x in operands]
        self.recorder.control_flow(target, (*graphs, *numbers), values, results)
        return results


class _ScanGradient:
    """The gradient of a scan: it carries the gradients of carried values, and sums those of whole operands."""

    def __init__(
        self, flow: ControlFlow, traced: Traced, whole: Sequence[Tensor], leaves: Sequence[int], summed: Sequence[int],
        carried: int,
    ) -> None:  # fmt: skip
        self.flow, self.carried, self.leaves, self.summed = flow, carried, leaves, summed
        own = len(traced.inputs)
        self.passed = [i for i in leaves if i < carried]
        self.sliced = [i for i in leaves if carried <= i < own]
        self.sums = [i for i in leaves if i >= own]
        gradient = traced.gradient(whole, leaves, summed)
        every = [*traced.inputs, *whole]

        def step(*tensors: Tensor) -> list[Tensor]:
            # gradients of carried results, sums; slices of results' gradients, of carried values, of xs; whole
            parts = iter(tensors)
            passed, sums = [next(parts) for _ in self.passed], [next(parts) for _ in self.sums]
            stacked = [next(parts) for i in summed if i >= carried]
            grads = gradient(*parts, *passed, *stacked)
            by = dict(zip(leaves, grads))
            return [
                *(by[i] for i in self.passed), *(a + by[i] for a, i in zip(sums, self.sums)),
                *(by[i] for i in self.sliced),
            ]  # fmt: skip

        results = [traced.results[i] for i in summed]
        inputs = [
            *(every[i] for i in self.passed),
            *(every[i] for i in self.sums),
            *results[len(self.passed) :],
            *every,
        ]
        self.traced = Traced(flow, step, inputs, (), "backward")
        self.whole = joined([self.traced])
        self.graph = self.traced.graph(self.whole)
        first = len(self.sums) + len(results)
        read = [
            bool(value.users) or value in self.graph.outputs for value in self.graph.inputs[first : first + carried]
        ]
        self.kept = [i for i, is_read in enumerate(read) if is_read]
        """The carried values of which the gradient needs each round's."""
        dropped = {first + i for i, is_read in enumerate(read) if not is_read}
        self.graph.inputs = [value for i, value in enumerate(self.graph.inputs) if i not in dropped]
        self.graph.number_inputs()

    def record(
        self, grads: Sequence[Tensor], slices: Sequence[Tensor], operands: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Records it; returns the gradients by operand. slices: the carried values of each round, and the xs."""
        ends = {i: grads[i] for i in self.summed}
        starts = [ends[i] for i in self.passed] + [torch.zeros_like(operands[i]) for i in self.sums]
        sliced = [*(grad for i, grad in ends.items() if i >= self.carried), *slices]
        whole = operands[self.carried + len(slices) - len(self.kept) :]
        like = [operands[i] for i in (*self.passed, *self.sums, *self.sliced)]
        numbers = (len(starts), len(sliced), 1)
        results = self.flow.record(scan, [self.graph], numbers, [*starts, *sliced, *whole, *self.whole], like)
        return dict(zip((*self.passed, *self.sums, *self.sliced), results))


class _Differentiable(torch.autograd.Function):
    """Recorded operations with a recorded gradient."""

    @staticmethod
    def forward(ctx: Any, forward: Function, backward: Function, needed: Sequence[int], *operands: Tensor) -> Any:
        ctx.backward_of, ctx.needed, ctx.count = backward, needed, len(operands)
        results = forward()
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        by = dict(zip(ctx.needed, ctx.backward_of(grads)))
        return (None, None, None, *(by.get(i) for i in range(ctx.count)))


def _apply(forward: Function, backward: Function, operands: Sequence[Tensor], needed: Sequence[int]) -> list[Tensor]:
    return list(_Differentiable.apply(forward, backward, needed, *operands))  # type: ignore[no-untyped-call]


def _needed(operands: Sequence[Tensor]) -> list[int]:
    return [i for i, x in enumerate(operands) if x.requires_grad]


def _differentiated(operands: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def _like(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.dtype


def _said(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors) or "nothing"


def _check_carried(of: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    if list(map(_like, before)) != list(map(_like, after)):
        raise ValueError(f"`{of}` carries {_said(before)} into its function, and {_said(after)} out of it")
