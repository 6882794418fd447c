"""capture: any traceable function of tensors -> the global `Graph`, in ATen ops with global shapes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree
from tpshard.parallelism.canonical import canonicalize
from tpshard.parallelism.graph import Graph, Op, Ref, Value

MARK = "tpshard_mark"
aten = torch.ops.aten

DECOMPOSED: list[Any] = [
    aten._log_softmax, aten._log_softmax_backward_data, aten._softmax, aten._softmax_backward_data, aten.t, aten.detach,
    aten._unsafe_view, aten.baddbmm, aten.native_layer_norm,
    aten.native_layer_norm_backward, aten.nll_loss_forward, aten.nll_loss_backward, aten.addcmul, aten.addcdiv,
    aten.embedding_dense_backward.out,
    aten.mse_loss, aten.mse_loss_backward, aten.logsumexp, aten.std, aten.var_mean, aten.linalg_vector_norm, aten.stack,
    aten.select_backward, aten.slice_backward, aten.unsafe_split, aten.hardtanh_backward, aten.elu_backward,
    aten.leaky_relu_backward, aten.softplus_backward, aten.norm, aten.aminmax, aten.native_dropout_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.huber_loss, aten.logit_backward, aten.mv, aten.dot,
    aten.addmv, aten.addbmm, aten.addr, aten.masked_fill_, aten.unfold_backward, aten.index_add, aten.glu_backward,
    aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.hardswish_backward, aten.mish_backward,
]  # fmt: skip
"""Only what splits into ops that shard better than the whole (vocabulary-parallel softmax, for one)."""


@functools.cache
def decompositions() -> dict[Any, Any]:
    known = []
    for packet in DECOMPOSED:
        with contextlib.suppress(RuntimeError):
            get_decompositions([packet])
            known.append(packet)
    return get_decompositions(known)


class Trail:
    """Remembers, while tracing, which module and which phase each node comes from.

    `make_fx` records no module paths. Forward nodes are told by module hooks; backward nodes by the sequence number
    of the autograd node that runs, which lies between those at the module's entry and exit.
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.path = ""
        self.phase = "forward"
        self.spans: list[tuple[int, int, str]] = []
        self.last: fx.Node | None = None

    def flush(self) -> None:
        mode = get_proxy_mode()
        if mode is None:
            return
        node = mode.tracer.graph._root.prev
        newest = node
        while node is not self.last and node.op != "root":
            node.meta.setdefault(MARK, (self.path, self.phase))
            node = node.prev
        self.last = newest

    def enter(self, path: str) -> None:
        self.flush()
        self.stack.append(path)
        self.path = path

    def leave(self) -> None:
        self.flush()
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
            self.flush()
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Notes the module path of what `torch.autograd.grad(loss, ...)` traces."""
        self.flush()
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
                self.flush()
                self.path = path

            handles.append(node.register_prehook(before))
            queue.extend(parent for parent, _ in node.next_functions)
        try:
            yield
        finally:
            self.flush()
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
    out_tree: list[Any] = []

    def flat(*tensors: torch.Tensor) -> list[Any]:
        full = list(leaves)
        for i, tensor in zip(where, tensors):
            full[i] = tensor
        out = fn(*pytree.tree_unflatten(full, in_tree))
        flat_out, spec = pytree.tree_flatten(out)
        out_tree[:] = [spec]
        if trail is not None:
            trail.flush()
        return flat_out

    fakes = _fake([leaves[i] for i in where])
    try:
        traced = make_fx(flat, decomposition_table=decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)(
            *fakes
        )
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode as error:
        raise ValueError(f"the function branches on data, which a static graph cannot hold: {error}") from error
    graph = from_fx(traced, names)
    graph.in_tree, graph.out_tree = in_tree, out_tree[0]
    canonicalize(graph)
    return graph


def _fake(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Meta stand-ins on the CPU device: fake tensors of no storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return [
            torch.empty_strided(t.shape, _dense_strides(t), dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
            for t in tensors
        ]


def _dense_strides(tensor: torch.Tensor) -> list[int]:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


RANDOM = {"rand", "randn", "randint", "bernoulli", "native_dropout", "uniform", "normal_functional", "multinomial",
          "rand_like", "randn_like", "randint_like", "randperm", "normal", "exponential", "dropout"}  # fmt: skip


def from_fx(traced: fx.GraphModule, names: Sequence[str]) -> Graph:
    """The traced FX graph as our values and ops; multi-result ops lose their getitem nodes."""
    env: dict[fx.Node, Any] = {}
    inputs: list[Value] = []
    ops: list[Op] = []
    outputs: list[Any] = []
    constants: dict[str, tuple[Value, torch.Tensor]] = {}

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            value = Value(names[len(inputs)], tuple(fake.shape), fake.dtype, None, len(inputs))
            inputs.append(value)
            env[node] = value
        elif node.op == "get_attr":
            tensor = getattr(traced, node.target)
            value = Value(node.target, tuple(tensor.shape), tensor.dtype)
            constants[node.target] = (value, tensor)
            env[node] = value
        elif node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            outputs = [env[o] if isinstance(o, fx.Node) else o for o in flat]
        elif getattr(node.target, "__name__", "") == "getitem":
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = _op(node, env, ops)
    graph = Graph(inputs, ops, outputs, constants)
    graph.refresh_users()
    return graph


def _op(node: fx.Node, env: dict[fx.Node, Any], ops: list[Op]) -> Any:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"`{node.target}` is not an ATen op: it cannot be partitioned")
    if node.target.overloadpacket.__name__ in RANDOM:
        raise ValueError(
            f"`{node.target}` is a random op, whose result would depend on the mesh: pass random numbers in as an input"
        )
    operands: list[Value] = []

    def ref(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            operands.append(env[arg])
            return Ref(len(operands) - 1)
        if isinstance(arg, (list, tuple)):
            return tuple(ref(a) for a in arg)
        return arg

    args = tuple(ref(a) for a in node.args)
    kwargs = {key: ref(a) for key, a in node.kwargs.items()}
    module, phase = node.meta.get(MARK, ("", "forward"))
    op = Op(node.name, node.target, args, kwargs, operands, [], module, phase)
    fake = node.meta["val"]
    several = isinstance(fake, (list, tuple))
    for i, one in enumerate(fake if several else [fake]):
        name = f"{node.name}.{i}" if several else node.name
        if isinstance(one, torch.Tensor):
            op.results.append(Value(name, tuple(one.shape), one.dtype, op, i))
        else:
            op.results.append(Value(name, (), torch.int64, op, i))
    ops.append(op)
    return op.results if several else op.results[0]
