"""Records what a function runs: every ATen op on fake tensors, below autograd, as an `Op` of the global graph.

It does what `make_fx` does and makes our graph at once: no proxies, and no second graph to translate.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _Namespace
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from tpshard.parallelism.graph import Graph, Op, Ref, Value
from tpshard.parallelism.remember import Shapes

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
    return get_decompositions(known) | {torch.ops.prims.broadcast_in_dim.default: _broadcast}


def _broadcast(x: Tensor, shape: list[int], dims: list[int]) -> Tensor:
    """prims.broadcast_in_dim, whose dim i is dim dims[i] of the result, as torch's own ops."""
    grown = [1] * len(shape)
    for size, d in zip(x.shape, dims):
        grown[d] = size
    return x.view(grown).expand(shape) if tuple(grown) != tuple(x.shape) else x.expand(shape)


RANDOM = {"rand", "randn", "randint", "bernoulli", "native_dropout", "uniform", "normal_functional", "multinomial",
          "rand_like", "randn_like", "randint_like", "randperm", "normal", "exponential", "dropout"}  # fmt: skip
QUESTIONS = {
    torch.ops.prim.device.default, aten.size.default, aten.stride.default, aten.storage_offset.default,
}  # fmt: skip
"""What is asked of a tensor and answered at once."""


class Place(Protocol):
    """Where in the model the ops that run now come from."""

    path: str
    phase: str


class Recorder(TorchDispatchMode):
    """To be entered inside a `FakeTensorMode`. `place` is read whenever an op runs."""

    supports_higher_order_operators = True
    """So that they come here, to be refused."""

    def __init__(self, place: Place | None = None) -> None:
        super().__init__()
        self.place = place
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.constants: dict[str, tuple[Value, Tensor]] = {}
        self.decompositions = decompositions()
        self.names = _Namespace()
        self.known: dict[int, tuple[Value, Tensor]] = {}
        """By identity of the tensor, which is kept alive: its value, the newest where it was changed in place."""
        self.composite: dict[Any, bool] = {}
        self.shapes = Shapes()

    def input(self, name: str, fake: Tensor) -> None:
        """Takes the next argument of the function."""
        value = Value(name, tuple(fake.shape), fake.dtype, None, len(self.inputs))
        self.inputs.append(value)
        self.known[id(fake)] = (value, fake)

    def constant(self, name: str, tensor: Tensor, fake: Tensor) -> None:
        """Takes a constant of the function, for which `fake` stands."""
        value = Value(name, tuple(tensor.shape), tensor.dtype)
        self.constants[name] = (value, tensor)
        self.known[id(fake)] = (value, fake)

    def graph(self, outputs: list[Any]) -> Graph:
        """What has run, with these results of the function."""
        results = [self.value(o) if isinstance(o, Tensor) else o for o in outputs]
        graph = Graph(self.inputs, self.ops, results, self.constants)
        graph.refresh_users()
        return graph

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor; one that no op has made is a constant."""
        known = self.known.get(id(tensor))
        if known is None:
            name = f"_tensor_constant{len(self.constants)}"
            known = (Value(name, tuple(tensor.shape), tensor.dtype), tensor)
            self.constants[name] = self.known[id(tensor)] = known
        return known[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise ValueError(f"`{func}` is not an ATen op: it cannot be partitioned")
        if func in QUESTIONS:
            if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
                return args[0].fake_device  # what asking gives, without asking: autograd wants it of every tensor
            return func(*args, **kwargs)
        decomposition = self.decompositions.get(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        operands: list[Tensor] = []
        refs = _refs(args, operands)
        keywords = {key: _refs(arg, operands) for key, arg in kwargs.items()}
        if self._is_composite(func, operands):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:  # what is lifted may be changed in place later: the constant stays
            func = aten.lift_fresh_copy.default
        # before the op runs: it may change a tensor that it reads
        values = [self.value(tensor) for tensor in operands]
        made = self.shapes.run(func, args, kwargs, (refs, keywords), operands)
        if isinstance(made, (int, float, bool)):
            return made  # of a constant: known while tracing
        self._record(func, refs, keywords, values, made)
        return made

    def _is_composite(self, func: Any, operands: list[Tensor]) -> bool:
        """Whether eager mode would run other ops instead, had autograd seen the op."""
        known = self.composite.get(func)
        if known is None:
            implicit = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            known = implicit and autograd_would_have_decomposed(func, operands)
            self.composite[func] = known
        return known

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], operands: list[Value], made: Any) -> None:
        packet = func.overloadpacket.__name__
        if packet in RANDOM:
            raise ValueError(
                f"`{func}` is a random op, whose result would depend on the mesh: pass random numbers in as an input"
            )
        name = self.names.create_name(packet, None)
        place = self.place
        path, phase = (place.path, place.phase) if place is not None else ("", "forward")
        op = Op(name, func, args, kwargs, operands, [], path, phase)
        several = isinstance(made, (list, tuple))
        for i, one in enumerate(made if several else [made]):
            label = f"{name}.{i}" if several else name
            if isinstance(one, Tensor):
                op.results.append(Value(label, tuple(one.shape), one.dtype, op, i))
                self.known[id(one)] = (op.results[-1], one)
            else:
                op.results.append(Value(label, (), torch.int64, op, i))
        self.ops.append(op)


def _refs(arg: Any, operands: list[Tensor]) -> Any:
    """An argument with a `Ref` for every tensor, which is appended to `operands`."""
    if isinstance(arg, Tensor):
        operands.append(arg)
        return Ref(len(operands) - 1)
    if isinstance(arg, (list, tuple)):
        return tuple([_refs(a, operands) for a in arg])
    return arg
