"""What crosses the border of control flow's bodies on one device: its layout in, outside and between runs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from tpshard.parallelism import factors
from tpshard.parallelism.graph import Graph, Op, Value
from tpshard.parallelism.mesh import Axes, overlap, without
from tpshard.parallelism.node_info import Info
from tpshard.parallelism.partitioning.choose import Choice, computable, layout_of
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules.control_flow import Joint, bodies, cond, joints, priced, rounds, while_loop
from tpshard.parallelism.rules.rule import Dim, Rule
from tpshard.parallelism.sharding import Layout, replicated

aten = torch.ops.aten


def crossing_choice(op: Op, rule: Rule, propagated: Mapping[Value, Layout]) -> Choice:
    """The cuts of what crosses the border of an op's bodies, as propagation found them inside."""
    choice: Choice = {}
    for joint in joints(op):
        cuts = factors.cuts(propagated[joint.inner[0]], _inner_dims(rule, joint), rule.sizes)
        choice |= {f: cut for f, cut in cuts.items() if cut.axes}
    return computable(op, rule, choice)


class Border(NamedTuple):
    """The layouts in which a body's inputs and results cross its border, in order."""

    inputs: list[Layout]
    results: list[Layout]


def borders_of(op: Op, rule: Rule, choice: Choice, sums: Mapping[int, Axes]) -> list[Border]:
    """The border of each of an op's bodies. sums: the results that stay partial, with the axes, by index."""
    inputs: dict[Value, Layout] = {}
    results = [replicated(0)] * len(op.results)
    for joint in joints(op):
        layout = layout_of(rule, _inner_dims(rule, joint), choice, False)
        if joint.result is not None:
            layout = results[joint.result] = layout.as_sum(sums.get(joint.result, ()))
        if joint.operand is not None:
            inputs.update({value: layout for value in joint.inner if value.producer is None})
    tests = [replicated(0)]
    return [
        Border([inputs[value] for value in graph.inputs], tests if op.target is while_loop and k == 0 else results)
        for k, graph in enumerate(bodies(op.args, Graph))
    ]


class Inside(NamedTuple):
    """What bodies do with the layouts of a first choice."""

    computed: dict[Value, Layout]
    """The layout in which each value is computed."""
    partial: dict[Value, Axes]
    """The values that are partial sums, with the axes."""
    needed: dict[Value, set[Layout]]
    """The layouts in which the readers of each input need it."""


def needed_layouts(
    graph: Graph, rules: Mapping[Op, Rule], choices: Mapping[Op, Choice]
) -> dict[Value, set[Layout]]:  # fmt: skip
    """The layouts in which the readers of each input of a body need it, without annotations."""
    return {
        value: {
            layout_of(rules[op], dims, choices[op], False)
            for op in value.users if op in choices
            for operand, dims in zip(op.operands, rules[op].operands) if operand is value
        }
        for value in graph.inputs
    }  # fmt: skip


def settled(op: Op, rule: Rule, choice: Choice, inside: Inside) -> tuple[Choice, dict[int, Axes]]:
    """The choice by which a loop moves least in its runs, and the results that stay partial, with their axes, by index.

    What is the same in all runs crosses the border as the body's readers need it, so that it is gathered once in front.
    What a run only adds to a carried value, as a scan's gradient does for a weight, is added up unreduced, as is what a
    branch returns: it is reduced once behind; but not where a branch's unreduced result is larger, since the other
    branch may have nothing to reduce.
    """
    sums: dict[int, Axes] = {}
    for joint in joints(op):
        layout = held = layout_of(rule, _inner_dims(rule, joint), choice, False)
        if joint.result is None and not joint.sliced and op.target is not cond:
            layouts = {one for value in joint.inner for one in inside.needed[value]}
            layout = layouts.pop() if len(layouts) == 1 else held
        elif joint.result is not None and not joint.sliced:
            ends = joint.inner if op.target is cond else joint.inner[-1:]
            terms = ends if op.target is cond else _added(joint.inner[0], ends[0])
            term = next((term for term in terms if term in inside.partial), None)
            if term is not None and not any(end.users for end in ends):
                axes = inside.partial[term]
                grows = any(overlap(axis, held.axes) for axis in axes)
                if not (grows and op.target is cond):
                    sums[joint.result] = axes
                    if grows:  # whole over them while it is added up
                        layout = Layout(tuple(without(dim, axes) for dim in inside.computed[term].dims))
        if layout != held:
            dims = _inner_dims(rule, joint)
            choice = {f: cut for f, cut in choice.items() if not any(f in members for members in dims)}
            choice |= {f: cut for f, cut in factors.cuts(layout, dims, rule.sizes).items() if cut.axes}
    choice = computable(op, rule, choice)
    shown = {j.result: layout_of(rule, _inner_dims(rule, j), choice, False).axes for j in joints(op)}
    return choice, {i: axes for i, axes in sums.items() if not any(overlap(axis, shown[i]) for axis in axes)}


def _added(carried: Value, end: Value) -> tuple[Value, ...]:
    """What a run adds to a carried value, which it uses for nothing else; nothing if it does something else."""
    op = end.producer
    if op is None or op.target is not aten.add.Tensor or len(op.args) != 2 or op.kwargs or carried.users != [op]:
        return ()
    return tuple(v for v in op.operands if v is not carried and v.users == [op] and v.shape == carried.shape)


def _inner_dims(rule: Rule, joint: Joint) -> tuple[Dim, ...]:
    dims = rule.operands[joint.operand] if joint.operand is not None else rule.results[joint.result or 0]
    return dims[1:] if joint.sliced else dims


def work_of(op: Op, programs: list[Program]) -> tuple[int, int]:
    """The FLOPs of one device, and of the whole operation: of a condition those of the branch that is priced."""
    each = [[info(node) for node in program.graph.nodes] for program in programs]
    sums = [(_flops(infos), sum(one.global_flops for one in infos if one.phase != "recompute")) for infos in each]
    times = rounds(op.target, op.args, [value.shape for value in op.operands])
    local, whole = priced(op.args, sums, max) if op.target is cond else map(sum, zip(*sums))
    return times * local, times * whole


def _flops(infos: list[Info]) -> int:
    return sum(one.flops for one in infos if one.phase != "recompute")
