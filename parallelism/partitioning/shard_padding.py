"""Tracking where the padding of unevenly sharded dims is 0, and overwriting it where an op needs another value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.partitioning.choose import Choice
from tpshard.parallelism.program import Spec
from tpshard.parallelism.resharding.lower import Emitter
from tpshard.parallelism.rules.indexing import finite
from tpshard.parallelism.rules.rule import Kind, Rule
from tpshard.parallelism.sharding import Layout, even, local_shape

aten = torch.ops.aten


class ShardPadding:
    """Fills the padding of sharded dims where an op needs it, and tracks which padding is 0."""

    def __init__(self, emitter: Emitter):
        self.emitter = emitter
        self.zeros: dict[fx.Node, frozenset[int]] = {}
        """The dims of each node whose padding is known to be 0."""

    def fill(self, node: fx.Node, op: Op, rule: Rule, choice: Choice, operand: int, layout: Layout) -> fx.Node:
        """Fills an operand's padding with a value that does not change the op's results (see `Rule.fill`)."""
        value = op.operands[operand]
        for d in padded_dims(value.shape, layout):
            members = [f for f in rule.operands[operand][d] if f in choice]
            # the minor-most sharded factor is the one whose last shard is padded
            fill = rule.fill(operand, members[-1])
            zeros = self.zeros.get(node, frozenset())
            if fill is None or (fill == 0 and d in zeros):
                continue
            node = self._masked(node, value, layout, d, finite(fill, value.dtype))
            self.zeros[node] = zeros | {d} if fill == 0 else zeros - {d}
        return node

    def clear(self, node: fx.Node, value: Value, layout: Layout) -> fx.Node:
        """The value with zeros in its padding, as a program expects it of its inputs."""
        zeros = self.zeros.get(node, frozenset())
        for d in padded_dims(value.shape, layout):
            if d not in zeros:
                node = self._masked(node, value, layout, d, 0)
        self.zeros[node] = frozenset(range(value.rank))
        return node

    def _masked(self, node: fx.Node, value: Value, layout: Layout, d: int, fill: float) -> fx.Node:
        """A value with `fill` in the padding of dim `d`."""
        mask = self.emitter.padding(layout.dims[d], value.shape[d], layout.grain(d), value.rank, d)
        spec = Spec(local_shape(value.shape, layout), value.dtype)
        return self.emitter.call(aten.masked_fill.Scalar, (node, mask, fill), [spec])

    def note_result(
        self, node: fx.Node, op: Op, rule: Rule, inputs: Sequence[fx.Node], result: int, layout: Layout
    ) -> None:
        """Notes the dims of a result `node` whose padding is 0, because the padding of its linear operands is 0."""
        unclean = {f for f, kind in enumerate(rule.kinds) if kind is Kind.PERMUTE}
        held: set[int] = set()
        for i, (source, dims) in enumerate(zip(inputs, rule.operands)):
            zeros = self.zeros.get(source, frozenset())
            for d, members in enumerate(dims):
                held.update(members)
                if i not in rule.additive or d not in zeros:
                    unclean.update(members)
        padded = padded_dims(op.results[result].shape, layout)
        self.zeros[node] = frozenset(
            d for d, members in enumerate(rule.results[result])
            if d not in padded or (held.issuperset(members) and not unclean.intersection(members))
        )  # fmt: skip


def padded_dims(shape: Sequence[int], layout: Layout) -> list[int]:
    """The dims whose last shards are padded."""
    return [d for d, n in enumerate(shape) if not even(n // layout.grain(d), layout.dims[d])]
