"""Rules of mixture-of-experts ops: products of tokens with experts' matrices, and copies of tokens to slots."""

from __future__ import annotations

from typing import Any

import torch
from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, product

aten = torch.ops.aten


def experts(op: Op) -> Rule:
    """The rule of an MLP of routed experts: experts e and hidden columns h may be sharded, and are summed over.

    `x[... m], ids[... k], weights[... k], gate, up[e h m], down[e m h] -> [... m]`. A device with some of the experts
    computes them for the tokens of all devices along these axes, and returns a partial sum.
    """
    return _rule(op, forward=True)


def experts_backward(op: Op) -> Rule:
    """The rule of the experts' gradients: those of the matrices are summed over tokens.

    `dout, x, ids, weights, gate, up, down -> dx, dweights, dgate, dup, ddown`.
    """
    return _rule(op, forward=False)


def _rule(op: Op, forward: bool) -> Rule:
    where = 1 if forward else 2
    x, ids, _, gate = op.operands[where - 1 : where + 3]
    factors = Factors()
    tokens: tuple[Dim, ...] = factors.dims(x.shape[:-1], Kind.PASS if forward else Kind.REDUCE)
    k = factors.new(ids.shape[-1], Kind.WHOLE)
    e, h = (factors.new(size, Kind.REDUCE) for size in gate.shape[:2])
    m = factors.new(gate.shape[2], Kind.WHOLE)
    row, choice = (*tokens, (m,)), (*tokens, (k,))
    inward, outward = ((e,), (h,), (m,)), ((e,), (m,), (h,))

    def local(at: LocalOp) -> Any:
        """Subtracts this device's first expert from the ids, so that ids of other devices' experts are out of range."""
        if not at.axes(e):
            return at.same()
        local_experts = _local_ids(at, where, e)
        return at.with_args(*(local_experts if i == where else Ref(i) for i in range(len(op.operands))))

    operands = [row, choice, choice, inward, inward, outward]
    results = [row] if forward else [row, choice, inward, inward, outward]
    products = 3 if forward else 8  # the backward pass recomputes the hidden values
    flops = 2 * products * product(ids.shape) * gate.shape[1] * gate.shape[2]
    work = (*(f for dim in tokens for f in dim), e, h)
    return factors.rule(
        operands if forward else [row, *operands], results, flops=flops, work=work, local=local, guarded=(e,)
    )


def _local_ids(at: LocalOp, ids: int, e: int) -> Any:
    """The ids of experts less this device's first one. ids: the operand that holds them."""
    shape = at.operand_shape(ids)
    return at.emit(aten.sub.Tensor, at.inputs[ids], at.offset(e), shape=shape, dtype=torch.int64)


def expert_linear(op: Op) -> Rule:
    """The rule of products with experts' matrices: experts e and inputs i are summed, outputs o may be sharded.

    `x[... c i], ids[... k], weight[e o i] -> [... k o]`. A device with some of the experts has 0 for the others'.
    """
    x, ids, weight = op.operands
    factors = Factors()
    tokens, k = factors.dims(ids.shape[:-1]), factors.dims(ids.shape[-1:])
    e, o, i = factors.new(weight.shape[0], Kind.REDUCE), factors.new(weight.shape[1]), factors.new(x.shape[-1])
    factors.kinds[i] = Kind.REDUCE

    def local(at: LocalOp) -> Any:
        return at.with_args(Ref(0), _local_ids(at, 1, e), Ref(2)) if at.axes(e) else at.same()

    own = k if x.shape[-2] == ids.shape[-1] else ((),)
    return factors.rule(
        [(*tokens, *own, (i,)), (*tokens, *k), ((e,), (o,), (i,))], [(*tokens, *k, (o,))], local=local, additive=(0,),
        flops=2 * product(ids.shape) * weight.shape[1] * x.shape[-1], guarded=(e,),
    )  # fmt: skip


def expert_outer(op: Op) -> Rule:
    """The rule of the matrices' gradients, summed over tokens: experts e, outputs o and inputs i may be sharded.

    `dout[... k o], x[... c i], ids[... k] -> [e o i]`.
    """
    grad, x, ids = op.operands
    factors = Factors()
    tokens = factors.dims(ids.shape[:-1], Kind.REDUCE)
    k = factors.dims(ids.shape[-1:], Kind.REDUCE)
    e, o, i = factors.new(op.results[0].shape[0]), factors.new(grad.shape[-1]), factors.new(x.shape[-1])

    def local(at: LocalOp) -> Any:
        ids_here = _local_ids(at, 2, e) if at.axes(e) else Ref(2)
        return at.with_args(Ref(0), Ref(1), ids_here, at.size(e))

    own = k if x.shape[-2] == ids.shape[-1] else ((),)
    return factors.rule(
        [(*tokens, *k, (o,)), (*tokens, *own, (i,)), (*tokens, *k)], [((e,), (o,), (i,))], local=local,
        flops=2 * product(ids.shape) * grad.shape[-1] * x.shape[-1],
    )  # fmt: skip


def _slots(op: Op, tensors: str) -> Rule:
    """The rule of copies between tokens `s` and slots `n`: sequences `b` and columns `m` may be sharded.

    Any token may go to any slot of its sequence. tensors: the dims of the operands and of the result.
    """
    inputs, result = tensors.split("->")
    operands = inputs.split(",")[: len(op.operands)]
    values = zip([*operands, result], [*op.operands, *op.results])
    sizes = {c: n for dims, value in values for c, n in zip(dims, value.shape)}
    kinds = dict.fromkeys("skn", Kind.WHOLE) | {"b": Kind.PASS, "m": Kind.PASS if "m" in result else Kind.REDUCE}
    factors = Factors()
    factor = {c: factors.new(n, kinds[c]) for c, n in sizes.items()}
    return factors.rule(
        [tuple((factor[c],) for c in dims) for dims in operands], [tuple((factor[c],) for c in result)],
        additive=(0,) if "m" in result else (), flops=2 * product(op.results[0].shape), work=(factor["b"], factor["m"]),
        fills=((operands.index("bsk"), 0),),
    )  # fmt: skip


OPS: Table = {
    "tpshard.experts": Entry(experts, work="matmul", saved=True, routed=3),
    "tpshard.experts_backward": Entry(experts_backward, work="matmul", saved=True, routed=3),
    "tpshard.expert_linear": Entry(expert_linear, work="matmul", saved=True, routed=1),
    "tpshard.expert_outer": Entry(expert_outer, work="matmul", saved=True),
    "tpshard.to_slots": Entry(lambda op: _slots(op, "bsm,bsk,bsk->bnm")),
    "tpshard.from_slots": Entry(lambda op: _slots(op, "bnm,bsk,bsk->bsm")),
    "tpshard.slot_products": Entry(lambda op: _slots(op, "bsm,bnm,bsk->bsk")),
}
