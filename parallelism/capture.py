"""capture: any traceable function of tensors -> the global `Graph`, in ATen ops with global shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils import _pytree as pytree
from tpshard.parallelism.canonical import canonicalize
from tpshard.parallelism.functional import functionalize
from tpshard.parallelism.graph import Graph
from tpshard.parallelism.record import Recorder
from tpshard.parallelism.remember import Like, fake
from tpshard.parallelism.rules.strides import contiguous


class Trail:
    """Knows, while tracing, which module and which phase the ops that run come from.

    Forward ops are told by module hooks; backward ops by the sequence number of the autograd node that runs, which
    lies between those at the module's entry and exit.
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.path = ""
        self.phase = "forward"
        self.spans: list[tuple[int, int, str]] = []

    def enter(self, path: str) -> None:
        self.stack.append(path)
        self.path = path

    def leave(self) -> None:
        self.stack.pop()
        self.path = self.stack[-1] if self.stack else ""

    @contextlib.contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Notes the module path of what is traced while `module` runs."""
        starts: list[int] = []
        handles = []
        for name, child in module.named_modules():

            def before(_m: nn.Module, _a: Any, name: str = name) -> None:
                self.enter(name)
                starts.append(torch.autograd._get_sequence_nr())

            def after(_m: nn.Module, _a: Any, _o: Any, name: str = name) -> None:
                self.spans.append((starts.pop(), torch.autograd._get_sequence_nr(), name))
                self.leave()

            handles += [child.register_forward_pre_hook(before), child.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Notes the module path of what `torch.autograd.grad(loss, ...)` traces."""
        self.phase = "backward"
        handles = []
        seen: set[Any] = set()
        queue = [loss.grad_fn]
        path_of: dict[int, str] = {}
        for start, end, name in self.spans:  # inner modules end first, so the first to claim a number is innermost
            for number in range(start, end):
                path_of.setdefault(number, name)
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)

            def before(_grads: Any, path: str = path_of.get(node._sequence_nr(), "")) -> None:
                self.path = path

            handles.append(node.register_prehook(before))
            queue.extend(parent for parent, _ in node.next_functions)
        try:
            yield
        finally:
            self.path = ""
            for handle in handles:
                handle.remove()


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    names: Sequence[str] | None = None,
    trail: Trail | None = None,
) -> Graph:
    """Traces `fn(*args)`, tensors real or meta, into a canonical global graph.

    `names` names the flattened tensor arguments (default `arg0`, `arg1`, ...). Raises ValueError where the function
    does what a static graph cannot hold: data-dependent control flow, random ops.
    """
    leaves, in_tree = pytree.tree_flatten(tuple(args))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    names = list(names) if names is not None else [f"arg{i}" for i in range(len(where))]
    if len(names) != len(where):
        raise ValueError(f"{len(names)} names were given for {len(where)} tensor arguments")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(trail)
    full = list(leaves)
    for i, name in zip(where, names):
        full[i] = _fake(leaves[i], mode)
        recorder.input(name, full[i])
    try:
        with mode, recorder, disable_autocast_cache():
            results, out_tree = pytree.tree_flatten(fn(*pytree.tree_unflatten(full, in_tree)))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(f"the function branches on data, which a static graph cannot hold: {error}") from error
    graph = recorder.graph(results)
    graph.in_tree, graph.out_tree = in_tree, out_tree
    graph = functionalize(graph)
    canonicalize(graph)
    return graph


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A stand-in without storage, on the CPU device."""
    like = Like(tuple(tensor.shape), contiguous(tuple(tensor.shape)), tensor.dtype, torch.device("cpu"))
    return fake(mode, like).requires_grad_(tensor.requires_grad)

