"""Wrong gradients planted into a training program, to show that a comparison of two runs can fail."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from tpshard.parallelism.passes.copy import copy_program
from tpshard.parallelism.program import INFO, Info, Program, Spec, info, offset


@dataclass(frozen=True)
class Fault:
    """A fault: one parameter's gradient is multiplied by `factor`, on one rank or on all."""

    parameter: str
    factor: float
    rank: int | None = None


FAULTS = {
    "a norm's gradient halved": Fault("layers.1.mlp_norm.weight", 0.5),
    "a shard's gradient lost": Fault("layers.0.mlp.gate.weight", 0.0, rank=1),
    "a gradient scaled by 1.001": Fault("layers.1.attention.wo.weight", 1.001),
}
"""Each is small enough that twenty losses under AdamW and clipping look right."""


def plant(program: Program, fault: Fault) -> Program:
    """The micro-batch's program, with the fault in the gradient that it adds to the sum."""
    faulty, nodes = copy_program(program)
    names = [port.name for port in program.inputs if port.kind == "parameter"]
    place = names.index(fault.parameter)
    feeds = [node for node in program.graph.nodes if node.op == "placeholder"]
    before = nodes[feeds[len(names) + place]]
    (output,) = (node for node in faulty.graph.nodes if node.op == "output")
    results = list(output.args[0])
    after = results[2 + place]
    with faulty.graph.inserting_before(output):
        mesh = program.mesh
        strides = tuple(mesh.stride[name] for name in mesh.axes)
        rank = faulty.graph.call_function(offset, (tuple(map(mesh.axis, mesh.axes)), strides))
        rank.meta[INFO] = Info((Spec((), before.meta[INFO].specs[0].dtype),))
        results[2 + place] = faulty.graph.call_function(alter, (before, after, rank, fault.factor, fault.rank))
        results[2 + place].meta[INFO] = info(after)
    output.args = (type(output.args[0])(results),)
    return faulty


def alter(before: Tensor, after: Tensor, rank: int, factor: float, where: int | None) -> Tensor:
    """`after`, with its difference from `before` scaled if this rank has the fault."""
    return before + (after - before) * factor if where is None or where == rank else after.clone()
