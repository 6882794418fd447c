"""Capturing a traceable function of tensors as a global `Graph` of ATen ops with global shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils import _pytree as pytree
from tpshard.kernels.fake_mode import fake_mode, uncompiled
from tpshard.parallelism.draws import SEED
from tpshard.parallelism.graph import Graph, Layer, Place, mark
from tpshard.parallelism.rules.strides import contiguous
from tpshard.parallelism.tracing.bodies import ControlFlow
from tpshard.parallelism.tracing.canonical import canonicalize
from tpshard.parallelism.tracing.functional import functionalize
from tpshard.parallelism.tracing.recorder import Recorder
from tpshard.parallelism.tracing.remember import Like, fake
from tpshard.parallelism.tracing.substitutes import Substitutes


class Trail:
    """The tracker of the model's module and the step's phase to which each traced op belongs.

    Forward ops get it from module hooks. Backward ops get it from the sequence number of the running autograd node,
    which is between those at the module's entry and exit.
    """

    def __init__(self) -> None:
        self.stack = [Place()]
        self.spans: list[tuple[int, int, Place]] = []
        """The autograd sequence numbers [start, end) of the ops of each place, inner places first."""

    @property
    def place(self) -> Place:
        """The place, in the model and in the step, of the op that is traced now."""
        return self.stack[-1]

    @contextlib.contextmanager
    def inside(self, place: Place) -> Iterator[None]:
        """A context whose traced ops belong to the given place."""
        start = self._enter(place)
        try:
            yield
        finally:
            self._leave(start)

    def _enter(self, place: Place) -> int:
        self.stack.append(place)
        return torch.autograd._get_sequence_nr()

    def _leave(self, start: int) -> None:
        self.spans.append((start, torch.autograd._get_sequence_nr(), self.stack.pop()))

    @contextlib.contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """A context that records the module of every op traced while `module` runs."""
        starts: list[int] = []
        handles = []
        for name, layer, child in _with_layers(module):

            def before(_m: nn.Module, _a: Any, place: Place = Place(name, layer)) -> None:  # noqa: B008
                starts.append(self._enter(place))

            def after(_m: nn.Module, _a: Any, _o: Any) -> None:
                self._leave(starts.pop())

            handles += [child.register_forward_pre_hook(before), child.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """A context that records the module of every op of `torch.autograd.grad(loss, ...)`."""
        handles = []
        visited: set[Any] = set()
        queue = [loss.grad_fn]
        places: dict[int, Place] = {}
        for start, end, place in self.spans:  # inner modules end first, so the first span of a number is the innermost
            for number in range(start, end):
                places.setdefault(number, place)
        while queue:
            node = queue.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            place = places.get(node._sequence_nr(), Place())._replace(phase="backward")

            def before(_grads: Any, place: Place = place) -> None:
                self.stack[-1] = place

            handles.append(node.register_prehook(before))
            queue.extend(parent for parent, _ in node.next_functions)
        self.stack.append(Place(phase="backward"))
        try:
            yield
        finally:
            self.stack[-1] = Place(phase="backward")  # later ops are computed from gradients
            for handle in handles:
                handle.remove()


def _with_layers(module: nn.Module) -> Iterator[tuple[str, Layer | None, nn.Module]]:
    """Yields the path, the outermost layer that contains it (None if none does) and the module, for every submodule."""
    stacks = (nn.ModuleList, nn.Sequential)
    layers: dict[str, Layer] = {}
    for path, child in module.named_modules():
        above, _, own = path.rpartition(".")
        if above in layers:
            layers[path] = layers[above]
        elif above and isinstance(module.get_submodule(above), stacks):
            layers[path] = Layer(above, int(own))
        yield path, layers.get(path), child


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    names: Sequence[str] | None = None,
    trail: Trail | None = None,
    rows: int = 0,
) -> Graph:
    """Traces `fn(*args)`, with real or meta tensors, into a canonical global graph.

    names: names of the flattened tensor arguments (default `arg0`, `arg1`, ...). If the function draws random numbers,
    the graph has one more input, `seed`; for the `rows` of a batch they depend on the row's place in a step (see
    `draws`). Raises ValueError for control flow that depends on data, which a static graph cannot hold.
    """
    leaves, in_tree = pytree.tree_flatten(tuple(args))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    names = list(names) if names is not None else [f"arg{i}" for i in range(len(where))]
    if len(names) != len(where):
        raise ValueError(f"{len(names)} names were given for {len(where)} tensor arguments")
    mode, own_trail = fake_mode(), trail or Trail()
    recorder = Recorder(lambda: own_trail.place, rows)
    full = list(leaves)
    for i, name in zip(where, names):
        full[i] = _fake(leaves[i], mode)
        recorder.input(name, full[i])
    try:
        with mode, recorder, disable_autocast_cache(), Substitutes(), uncompiled(), ControlFlow(recorder, mode):
            results, out_tree = pytree.tree_flatten(fn(*pytree.tree_unflatten(full, in_tree)))
    except DataDependentOutputException as error:
        raise ValueError(f"Python reads an element's value, which a static graph does not have: {error}") from error
    except DynamicOutputShapeException as error:
        raise ValueError(f"a result's shape depends on data, but a static graph's shapes are fixed: {error}") from error
    graph = recorder.graph(results)
    parts = [name for i, name in zip(where, names) if leaves[i].storage_offset() or not leaves[i].is_contiguous()]
    if parts and any(op.target is torch.ops.aten.as_strided.default for op in graph.ops):
        raise ValueError(
            f"`as_strided` reads memory by position, and the argument `{parts[0]}` is a view of another tensor: pass a "
            "contiguous copy"
        )
    graph.in_tree, graph.out_tree = in_tree, out_tree
    graph = functionalize(graph)
    if graph.seed is not None:
        mark([graph.seed], SEED)
    canonicalize(graph)
    return graph


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor without storage, on the CPU device."""
    like = Like(tuple(tensor.shape), contiguous(tuple(tensor.shape)), tensor.dtype, torch.device("cpu"))
    return fake(mode, like).requires_grad_(tensor.requires_grad)
