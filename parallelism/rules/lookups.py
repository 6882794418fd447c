"""Rules of ops that look up positions of a dim which must be whole: searchsorted, embedding_bag."""

from __future__ import annotations

from typing import Any

import torch
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.letters import rule_of
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, whole

aten = torch.ops.aten


def search_sorted(op: Op) -> Rule:
    """The rule of searchsorted(sorted, values): values may be sharded, since each is searched separately."""
    alone = op.operands[0].rank == 1
    return rule_of(op, "N,...->..." if alone else "...N,...m->...m")


def bags(op: Op) -> Rule:
    """The rule of _embedding_bag(weight, indices, offsets, ...): the width may be sharded, and bags of one length.

    The results are the bags, the bag of every lookup, and the size and the maximum of every bag.
    """
    each = _lookups_each(op, 1)
    if each is None and op.results[1].shape == (0,):
        return whole(op)
    if each is None:
        largest = "Bd" if op.results[3].rank == 2 else "L"
        return rule_of(op, f"Vd,I,O,I->Bd,X,Y,{largest}", same="d")
    parts = _Bags(op.operands[2].numel, each, op.operands[0])

    def local(at: LocalOp) -> Any:
        if not at.axes(parts.bag):
            return at.same()
        at.inputs[2] = parts.offsets(at)
        out, bag, *sizes = at.same()
        if at.shape_of(bag) != (0,):  # the number of each lookup's bag, of which other devices have those before
            bag = at.emit(aten.add.Tensor, bag, at.offset(parts.bag))
        return [out, bag, *sizes]

    rest = op.operands[1:]
    operands = [((parts.row,), (parts.width,)), *map(parts.dims, rest)]
    return parts.factors.rule(operands, [*map(parts.dims, op.results)], local=local, fills=((1, 0), (3, 0)))


def bags_backward(op: Op) -> Rule:
    """The rule of _embedding_bag_backward, as that of `bags`: over sharded bags the table's gradient is a sum.

    The operands are the gradient, indices, offsets, the bag of every lookup, the bags' sizes and maxima, and weights.
    """
    each = _lookups_each(op, 1)
    if len(op.operands) < 6 or (each is None and op.operands[3].shape == (0,)):
        return whole(op)
    if each is None or op.args[7]:  # which scales by how often all devices look up a row
        largest = "Bd" if op.operands[5].rank == 2 else "L"
        return rule_of(op, f"Bd,I,O,X,Y,{largest},W->Vd")
    parts = _Bags(op.operands[2].numel, each, op.results[0], Kind.REDUCE)

    def local(at: LocalOp) -> Any:
        if at.axes(parts.bag):
            at.inputs[2:4] = [parts.offsets(at), parts.own(at, at.inputs[3])]
        return at.same()

    result = ((parts.row,), (parts.width,))
    fills = ((0, 0.0), (1, 0), (4, 1), (5, 0), (6, 0))
    return parts.factors.rule([*map(parts.dims, op.operands)], [result], additive=(0,), local=local, fills=fills)


def bag_weights_backward(op: Op) -> Rule:
    """The rule of _embedding_bag_per_sample_weights_backward, as that of `bags`.

    The operands are the gradient, the table, indices, offsets and the bag of every lookup.
    """
    each = _lookups_each(op, 2)
    if each is None and op.operands[4].shape == (0,):
        return whole(op)
    if each is None:
        return rule_of(op, "Bd,Vd,I,O,X->I")
    parts = _Bags(op.operands[3].numel, each, op.operands[1])
    parts.factors.kinds[parts.width] = Kind.REDUCE

    def local(at: LocalOp) -> Any:
        if at.axes(parts.bag):
            at.inputs[3:5] = [parts.offsets(at), parts.own(at, at.inputs[4])]
        return at.same()

    grad, _, *rest = op.operands
    operands = [parts.dims(grad), ((parts.row,), (parts.width,)), *map(parts.dims, rest)]
    return parts.factors.rule(operands, [parts.dims(op.results[0])], additive=(0,), local=local, fills=((2, 0),))


def _lookups_each(op: Op, indices: int) -> int | None:
    """The number of lookups of each bag, of which offsets that are counted up tell; None where bags differ."""
    lookups, offsets = op.operands[indices : indices + 2]
    counted = offsets.producer
    if counted is None or counted.target is not aten.arange.start_step or not offsets.numel:
        return None
    start, end, step = (*counted.args, 1)[:3]
    return step if (start, end) == (0, lookups.numel) and step * offsets.numel == end else None


class _Bags:
    """The factors of lookups `table[row width]` by `indices[bag each]`, in bags of `each` lookups."""

    def __init__(self, count: int, each: int, table: Value, kind: Kind = Kind.PASS):
        self.factors, self.count, self.each = Factors(), count, each
        self.bag, self.lookup = self.factors.new(count, kind), self.factors.new(each, Kind.WHOLE)
        self.row, self.width = self.factors.new(table.shape[0], Kind.WHOLE), self.factors.new(table.shape[1])

    def dims(self, value: Value) -> tuple[Dim, ...]:
        """The dims of an operand or a result other than the table."""
        if value.rank == 2:
            return (self.bag,), (self.width,)
        lookups = value.shape == (self.count * self.each,) and (value.shape != (self.count,) or self.each == 1)
        if lookups:
            return ((self.bag, self.lookup) if self.each > 1 else (self.bag,),)
        return ((self.bag,),) if value.shape == (self.count,) else ((),) * value.rank

    def offsets(self, at: LocalOp) -> Any:
        """Where a device's bags begin in its lookups."""
        return at.emit(aten.arange.start_step, 0, at.size(self.bag) * self.each, self.each, dtype=torch.int64)

    def own(self, at: LocalOp, bag: Any) -> Any:
        """The bag of each of a device's lookups, counted from its first; nothing where torch needs none."""
        if at.shape_of(bag) == (0,):
            return bag
        lookup = at.emit(aten.arange.default, at.size(self.bag) * self.each, dtype=torch.int64)
        return at.emit(aten.floor_divide.default, lookup, self.each)


OPS: Table = {
    aten.searchsorted: Entry(search_sorted, dense="all"),
    aten._embedding_bag: Entry(bags, empty=True, dense="all"),
    aten._embedding_bag_forward_only: Entry(bags, empty=True, dense="all"),
    aten._embedding_bag_backward: Entry(bags_backward, empty=True, dense="all"),
    aten._embedding_bag_per_sample_weights_backward: Entry(bag_weights_backward, empty=True, dense="all"),
}
