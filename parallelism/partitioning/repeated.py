"""Warnings about replicated computation: ops that several devices compute identically, why, and how to shard them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpshard.parallelism.depth import Depth
from tpshard.parallelism.graph import Graph, Op
from tpshard.parallelism.mesh import Axes, Axis, Mesh, difference, size_of
from tpshard.parallelism.partitioning.choose import Choice
from tpshard.parallelism.rules.control_flow import every_graph
from tpshard.parallelism.rules.rule import Kind, Rule
from tpshard.parallelism.rules.table import name_of

SHARE = 0.01
"""The share of a device's FLOPs above which replicated computation is reported."""


@dataclass
class Repeated:
    """Ops of one kind, in equal layers, that several devices compute identically."""

    op: Op
    idle: Axes
    count: int = 0
    flops: float = 0.0
    """The FLOPs of a device on these ops beyond its share."""


@dataclass(frozen=True, eq=False)
class Work:
    """The ops of a partitioned graph, each with the cuts of its factors and its FLOPs on one device."""

    graph: Graph
    mesh: Mesh
    rules: Mapping[Op, Rule]
    choices: Mapping[Op, Choice]
    flops: Mapping[str, int]
    """The FLOPs of one device for each op that has some, by the op's name."""
    apart: Sequence[str] = ()
    """Axes along which devices run different parts of the program."""

    def warnings(self, depth: Depth | None = None) -> list[str]:
        """A warning for every op (one for equal layers) whose replicated work exceeds 1% of what a device computes.

        Work on parameters after a step is not counted. depth: that of the model for which this graph stands.
        """
        sizes = self.mesh.axes.items()
        every = tuple(Axis(name, 1, size) for name, size in sizes if size > 1 and name not in self.apart)
        times = {name: depth.count(name) if depth is not None else 1 for name in self.flops}
        total = sum(flops * times[name] for name, flops in self.flops.items())
        kinds: dict[tuple[str, ...], Repeated] = {}
        for op in (op for graph in every_graph(self.graph) for op in graph.ops):
            if op.name not in self.flops or op not in self.choices or op.phase == "update":
                continue
            rule, choice = self.rules[op], self.choices[op]
            idle = difference(every, [a for f in rule.work if f in choice for a in choice[f].axes])
            if size_of(idle) == 1:
                continue
            key = (str(op.target), re.sub(r"\d+", "#", op.place.module), str(idle))
            kind = kinds.setdefault(key, Repeated(op, idle))
            kind.count += times[op.name]
            kind.flops += self.flops[op.name] * (1 - 1 / size_of(idle)) * times[op.name]
        worst = sorted(kinds.values(), key=lambda kind: -kind.flops)
        texts = [
            _warning(kind, self.rules[kind.op], self.choices[kind.op], kind.flops / total)
            for kind in worst if kind.flops > SHARE * total
        ]  # fmt: skip
        return texts if depth is None else [depth.in_text(text) for text in texts]


def _warning(one: Repeated, rule: Rule, choice: Choice, share: float) -> str:
    op, axes = one.op, ", ".join(sorted({axis.name for axis in one.idle}))
    alike = f" and {one.count - 1} like it" if one.count > 1 else ""
    cause, edit = _cause(one, rule, choice, axes)
    return (
        f"`{op.name}` ({name_of(op.target)}){alike}: {size_of(one.idle)} devices along {axes} compute the same, "
        f"{share:.1%} of a step's FLOPs: {cause}; {edit}"
    )


def _cause(one: Repeated, rule: Rule, choice: Choice, axes: str) -> tuple[str, str]:
    """Why an op is not sharded over the axes, and how to change that."""
    op, members = one.op, size_of(one.idle)
    values = [*op.results, *op.operands]
    needy = small = ""
    for value, dims in zip(values, (*rule.results, *rule.operands)):
        for d, factors in enumerate(dims):
            for f in factors:
                if f in choice or (rule.kinds[f] is Kind.PERMUTE and f not in {g for g, _ in rule.windows}):
                    continue
                dim_text = f"dim {d} of `{value.name}` {list(value.shape)}"
                if rule.kinds[f] is Kind.WHOLE:
                    needy = needy or dim_text
                elif rule.sizes[f] < members:
                    small = small or dim_text
                elif value in op.results:
                    edit = f"shard it over {axes} (`mesh_split`, or `sharding.rules` of a recipe)"
                    return f"nothing shards {dim_text}", edit
                else:
                    return f"nothing shards {dim_text}", f"shard it over {axes}: the sum over it is one all-reduce"
    if needy:
        return f"the op needs {needy} whole", f"shard another of its dims, such as the batch, over {axes}"
    if small:
        return f"{small} has fewer than {members} parts", f"make {axes} smaller, or that dim larger"
    return "its dims are sharded over other axes already", f"give {axes}'s devices to an axis that shards it"
