"""Control flow: every dim of what crosses a body's border passes, but for the one along which a scan runs."""

from __future__ import annotations

from collections.abc import Iterator

from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, Joint, cond, joints, scan, while_loop
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, Rule


def _crossing(op: Op) -> Rule:
    factors = Factors()
    operands = [factors.dims(value.shape, Kind.WHOLE) for value in op.operands]
    results: list[tuple[Dim, ...]] = [() for _ in op.results]
    for joint in joints(op):
        inner = factors.dims(joint.inner[0].shape)
        if joint.operand is not None:
            operands[joint.operand] = (operands[joint.operand][0], *inner) if joint.sliced else inner
        if joint.result is not None:
            whole = factors.dims(op.results[joint.result].shape[:1], Kind.WHOLE) if joint.sliced else ()
            results[joint.result] = (*whole, *inner)
    return factors.rule(operands, results, work=())


def parts_of(op: Op, rule: Rule) -> Iterator[tuple[Op, Rule, list[Value]]]:
    """Yields the tensors between which propagation moves axes, with the rule by which it does: an op's operands and
    results, or of control flow each value that crosses the border of a body, with its forms inside."""
    if op.target not in CONTROL_FLOW:
        yield op, rule, [*op.operands, *op.results]
        return
    for joint in joints(op):
        yield op, *_part(op, joint)


def _part(op: Op, joint: Joint) -> tuple[Rule, list[Value]]:
    factors = Factors()
    inner = factors.dims(joint.inner[0].shape)
    outer = [op.operands[joint.operand]] if joint.operand is not None else []
    outer += [op.results[joint.result]] if joint.result is not None else []
    rows = [(*(factors.dims(value.shape[:1], Kind.WHOLE) if joint.sliced else ()), *inner) for value in outer]
    return factors.rule([], [*rows, *(inner for _ in joint.inner)], priority=0), [*outer, *joint.inner]


OPS: Table = {op: Entry(rule=_crossing) for op in (cond, scan, while_loop)}
