"""What crosses the border of control flow's bodies on one device: its layout in, outside and between runs of them."""

from __future__ import annotations

from collections.abc import Mapping

from tpshard.parallelism import factors
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.node_info import Info
from tpshard.parallelism.partitioning.choose import Choice, computable, layout_of
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules.control_flow import Joint, cond, joints, rounds
from tpshard.parallelism.rules.rule import Dim, Rule
from tpshard.parallelism.sharding import Layout


def crossing_choice(op: Op, rule: Rule, propagated: Mapping[Value, Layout]) -> Choice:
    """The cuts of what crosses the border of an op's bodies, as propagation found them inside."""
    choice: Choice = {}
    for joint in joints(op):
        cuts = factors.cuts(propagated[joint.inner[0]], _inner_dims(rule, joint), rule.sizes)
        choice |= {f: cut for f, cut in cuts.items() if cut.axes}
    return computable(op, rule, choice)


def border_layouts(op: Op, rule: Rule, choice: Choice) -> dict[Value, Layout]:
    """The layouts of the inputs and results of an op's bodies."""
    return {
        value: layout_of(rule, _inner_dims(rule, joint), choice, False) for joint in joints(op) for value in joint.inner
    }


def _inner_dims(rule: Rule, joint: Joint) -> tuple[Dim, ...]:
    dims = rule.operands[joint.operand] if joint.operand is not None else rule.results[joint.result or 0]
    return dims[1:] if joint.sliced else dims


def work_of(op: Op, programs: list[Program]) -> tuple[int, int]:
    """The FLOPs of one device, and of the whole operation: of a condition those of the dearer branch."""
    each = [[info(node) for node in program.graph.nodes] for program in programs]
    sums = [(_flops(infos), sum(one.global_flops for one in infos if one.phase != "recompute")) for infos in each]
    times = rounds(op.target, op.args, [value.shape for value in op.operands])
    local, whole = max(sums) if op.target is cond else map(sum, zip(*sums))
    return times * local, times * whole


def _flops(infos: list[Info]) -> int:
    return sum(one.flops for one in infos if one.phase != "recompute")
