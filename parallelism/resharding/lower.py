"""Lowers resharding steps to `_c10d_functional` nodes of one device's graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from tpshard.parallelism.graph import Place
from tpshard.parallelism.mesh import Axes, Axis, Mesh, atoms, size_of, split
from tpshard.parallelism.node_info import INFO, Info, Spec, group_name, info, make_collective, offset, resized, shape_of
from tpshard.parallelism.resharding.new_nodes import call, identifier
from tpshard.parallelism.resharding.reshard import ReshardStep
from tpshard.parallelism.resharding.reshard_moves import moved_places
from tpshard.parallelism.resharding.runs import RunPlan
from tpshard.parallelism.sharding import Layout, even, lengths, local_shape, local_size

aten = torch.ops.aten
funcol = torch.ops._c10d_functional
COLLECTIVES = {
    "gather": ("all_gather", funcol.all_gather_into_tensor.default),
    "scatter": ("reduce_scatter", funcol.reduce_scatter_tensor.default),
    "reduce": ("all_reduce", funcol.all_reduce.default),
    "exchange": ("all_to_all", funcol.all_to_all_single.default),
    "permute": ("permute", funcol.all_to_all_single.default),
}
"""For each kind of step that sends, the kind of its collective and the op."""


def transfers(axes: Axes, table: tuple[int, ...], length: int, receive: bool) -> list[int]:
    """The split sizes of an all-to-all in which each device sends its whole shard of `length` elements to one member.

    `table[i]` is the target of member i (in mesh order). Evaluated where the rank is known, like `offset`.
    """
    raise RuntimeError("a program's split sizes are evaluated by the executor or the simulation, which know the rank")


def valid(axes: Axes, size: int, grain: int) -> int:
    """The number of elements of this device's shard of a dim that are not padding; evaluated like `offset`."""
    raise RuntimeError("a program's valid sizes are evaluated by the executor or the simulation, which know the rank")


def pick(axes: Axes, table: tuple[int, ...]) -> int:
    """Returns the table's entry for this device's position on `axes`, outer to inner; evaluated like `offset`."""
    raise RuntimeError("a program's tables are read by the executor or the simulation, which know the rank")


def is_first(position: int) -> int:
    """Returns 1 at position 0, else 0; a replicated value times this number is a partial sum of it."""
    return int(position == 0)


class Emitter:
    """Appends nodes with their `Info` to one device's graph."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.graph = fx.Graph()
        self.origin = ""
        self.place = Place()
        self.ranked: dict[tuple[Any, ...], fx.Node] = {}
        """Nodes of numbers that depend on the rank, by function and arguments."""
        self.windows: dict[fx.Node, Hashable] = {}
        """What each window is one of: nodes with one key are equal."""
        self.received: dict[tuple[Hashable, int, Axes, int, int], fx.Node] = {}
        """What neighbours sent: by the node or the key of a window, the dim, the axes, the distance, and the number of
        elements."""
        self.prologue: fx.Node | None = None

    def at(self, origin: str, place: Place) -> None:
        """Sets the origin and the place of the nodes that are emitted next."""
        self.origin, self.place = origin, place

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(identifier(name))
        node.meta[INFO] = Info((Spec(tuple(shape), dtype),), origin=name)
        self.prologue = node
        return node

    def call(
        self, target: Any, args: Sequence[Any], specs: Sequence[Spec], kwargs: dict[str, Any] | None = None, **rest: Any
    ) -> fx.Node:
        node = call(self.graph, target, tuple(args), kwargs)
        node.meta[INFO] = Info(tuple(specs), self.origin, self.place, **rest)
        return node

    def move(self, target: Any, node: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """A node that calls `target(node, *args)`, with a result of this shape and of the node's dtype."""
        return self.call(target, (node, *args), [Spec(tuple(shape), info(node).specs[0].dtype)])

    def number(self, target: Any, shape: Sequence[int], dtype: torch.dtype, *args: Any) -> fx.Node:
        """A node that calls `target(*args)`, with a result of this shape and dtype."""
        return self.call(target, args, [Spec(tuple(shape), dtype)])

    def reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        shape = tuple(shape)
        return node if shape_of(node) == shape else self.move(aten.reshape.default, node, shape, list(shape))

    def permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return node
        shape = shape_of(node)
        return self.move(aten.permute.default, node, [shape[d] for d in order], list(order))

    def narrow(self, node: fx.Node, dim: int, start: Any, length: int) -> fx.Node:
        if start == 0 and shape_of(node)[dim] == length:
            return node
        return self.move(aten.narrow.default, node, resized(node, dim, length), dim, start, length)

    def pad(self, node: fx.Node, dim: int, before: Any, after: Any, total: int | None = None) -> fx.Node:
        """Pads a dim with zeros; `total` is the resulting length if the widths depend on the rank."""
        if before == after == 0:
            return node
        shape = shape_of(node)
        size = shape[dim] + before + after if total is None else total
        widths = [0, 0] * (len(shape) - 1 - dim) + [before, after]
        return self.move(aten.constant_pad_nd.default, node, resized(node, dim, size), widths, 0)

    def concatenate(self, nodes: Sequence[fx.Node], dim: int) -> fx.Node:
        if len(nodes) == 1:
            return nodes[0]
        shape = resized(nodes[0], dim, sum(shape_of(node)[dim] for node in nodes))
        return self.number(aten.cat.default, shape, info(nodes[0]).specs[0].dtype, list(nodes), dim)

    def offset(self, axes: Axes, size: int, grain: int = 1) -> Any:
        """A node with the global index at which this device's shard of a dim of `size` over `axes` begins.

        Without axes it is the number 0.
        """
        return self.ranked_number(offset, axes, tuple(lengths(size, axes, grain)[1:])) if axes else 0

    def position(self, axes: Axes) -> Any:
        """A node with this device's position in the row-major order of `axes`; without axes the number 0."""
        return self.offset(axes, size_of(axes))

    def valid(self, axes: Axes, size: int, grain: int = 1) -> Any:
        """A node with the number of elements of this device's shard that are not padding."""
        return self.ranked_number(valid, axes, size, grain)

    def pick(self, axes: Axes, table: Sequence[int]) -> Any:
        """A node with the table's entry for this device's position on `axes`; a number where all entries are equal."""
        return table[0] if len(set(table)) == 1 else self.ranked_number(pick, axes, tuple(table))

    def ranked_number(self, target: Any, axes: Axes, *args: Any) -> fx.Node:
        """A node with a number that depends on the device's position on `axes`: `offset`, `valid` or `pick`."""
        key = (target, axes, *args)
        if key not in self.ranked:
            with self.graph.inserting_after(self.prologue) if self.prologue else self.graph.inserting_before(None):
                node = call(self.graph, target, (tuple(tuple(a) for a in axes), *args))
            node.meta[INFO] = Info((), target.__name__)
            if self.prologue is None:
                self.prologue = node
            self.ranked[key] = node
        return self.ranked[key]

    def padding(self, axes: Axes, size: int, grain: int, rank: int, dim: int) -> fx.Node:
        """A mask node, true where this device's shard of a dim is padding; it broadcasts along `dim` of `rank` dims."""
        local = local_size(size, axes, grain)
        places = self.number(aten.arange.default, (local,), torch.int64, local)
        beyond = self.number(aten.ge.Scalar, (local,), torch.bool, places, self.valid(axes, size, grain))
        return self.reshape(beyond, [local if d == dim else 1 for d in range(rank)])

    # ---- one resharding step ------------------------------------------------------------------------------
    def step(self, node: fx.Node, step: ReshardStep, shape: Sequence[int], **why: Any) -> fx.Node:
        """Emits the nodes of one resharding step, and returns the last.

        shape: the global one. why: fields of the `Collective` that it records.
        """
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        spec = info(node).specs[0]
        match step.kind:
            case "gather":
                return self._join(self._gather(node, axes, why), spec.shape, step, shape)
            case "scatter":
                whole, part = self._cut(node, step)
                return self._issue("scatter", whole, ("sum", size_of(axes)), axes, Spec(part, spec.dtype), why)
            case "reduce":
                return self._issue("reduce", node, (step.before.kind,), axes, spec, why)
            case "exchange":
                whole, part = self._cut(node, step)
                sizes = [shape_of(whole)[0] // size_of(axes)] * size_of(axes)
                received = self._issue("exchange", whole, (sizes, sizes), axes, info(whole).specs[0], why)
                return self._join(received, part, step, shape)
            case "slice":
                return self._slice(node, step)
            case "mask":
                keep = self.call(is_first, (self.position(axes),), [])
                return self.move(aten.mul.Scalar, node, spec.shape, keep)
            case "spread":
                return self._to_partial_sum(node, step, shape)
            case "permute":
                return self._send(node, axes, permutation_table(step.before, step.after, axes), why)
            case "regrain":
                dim, plan = step.runs(shape)
                length = local_shape(shape, step.after)[dim]
                return self.move_runs([node], dim, step.before.dims[dim], plan, [length], why)[0]
        raise ValueError(f"no resharding step is a {step.kind}")

    def _issue(
        self, kind: str, node: fx.Node, args: Sequence[Any], axes: Axes, spec: Spec, why: dict[str, Any]
    ) -> fx.Node:
        name, op = COLLECTIVES[kind]
        comm = make_collective(self.mesh, name, axes, max(info(node).bytes, spec.bytes), spec.dtype, **why)
        started = self.call(op, (node, *args, group_name(axes)), [spec], comm=comm)
        return self.call(funcol.wait_tensor.default, (started,), [spec])

    def _gather(self, node: fx.Node, axes: Axes, why: dict[str, Any]) -> fx.Node:
        """Gathers the tensors of a group's members, one after the other along the first dim."""
        n, (first, *rest) = size_of(axes), shape_of(node)
        return self._issue("gather", node, (n,), axes, Spec((first * n, *rest), info(node).specs[0].dtype), why)

    def _join(self, node: fx.Node, part: Sequence[int], step: ReshardStep, shape: Sequence[int]) -> fx.Node:
        """Joins the pieces [members of the group, *part] that a step received along their dims.

        Inner axes are joined before outer ones, and the padding of each is removed at once.
        """
        joined = [step.axes_from(d) for d in range(len(shape))]
        single = sorted((a for axes in joined for a in axes), key=self.mesh.key)
        spread = self.reshape(node, (*(a.size for a in single), *part))
        order: list[int] = []
        for d in range(len(shape)):
            order.extend(single.index(a) for a in joined[d])
            order.append(len(single) + d)
        node = self.permute(spread, order)
        target = local_shape(shape, step.after)
        current_shape = list(shape_of(node))
        for at, axes in enumerate(joined):  # dims before `at` are joined already
            before = lengths(target[at], axes, step.grain(at))
            for i in reversed(range(len(axes))):
                current_shape[at + i : at + i + 2] = [axes[i].size * current_shape[at + i + 1]]
                if current_shape[at + i] != before[i]:
                    node = self.narrow(self.reshape(node, current_shape), at + i, 0, before[i])
                    current_shape[at + i] = before[i]
        return self.reshape(node, current_shape)

    def _cut(self, node: fx.Node, step: ReshardStep) -> tuple[fx.Node, tuple[int, ...]]:
        """Cuts a tensor into the pieces for the members of a group, as one leading dim in the order of the group.

        Returns the node [members * part[0], *part[1:]] and the shape of a part.
        """
        shape = list(shape_of(node))
        where: dict[Axis, int] = {}
        rest: list[int] = []
        at = 0
        for d in range(len(step.after.dims)):
            for axis in step.axes_to(d):
                part = local_size(shape[at], (axis,), step.grain(d))
                if part * axis.size != shape[at]:
                    node = self.pad(self.reshape(node, shape), at, 0, part * axis.size - shape[at])
                shape[at : at + 1] = [axis.size, part]
                where[axis] = at
                at += 1
            rest.append(at)
            at += 1
        single = sorted(where, key=self.mesh.key)
        result = tuple(shape[r] for r in rest)
        spread = self.permute(self.reshape(node, shape), [*(where[a] for a in single), *rest])
        return self.reshape(spread, (size_of(single) * result[0], *result[1:])), result

    def _slice(self, node: fx.Node, step: ReshardStep) -> fx.Node:
        for d in range(len(shape_of(node))):
            added, grain = step.axes_to(d), step.grain(d)
            at_once = even(shape_of(node)[d] // grain, added)
            for axes in [added] if at_once else [(axis,) for axis in added]:
                size = shape_of(node)[d]
                part = local_size(size, axes, grain)
                padded = part * size_of(axes)
                node = self.pad(node, d, 0, padded - size)
                node = self.narrow(node, d, self.offset(axes, padded, grain), part)
        return node

    def _to_partial_sum(self, node: fx.Node, step: ReshardStep, shape: Sequence[int]) -> fx.Node:
        """Turns shards into summands of a partial sum: each device pads its shard with zeros to the whole dim."""
        local = local_shape(shape, step.after)
        for d in range(len(shape)):
            axes = step.axes_from(d)
            before = lengths(local[d], axes, step.grain(d))
            for axis, long, short in reversed(list(zip(axes, before, before[1:]))):
                total = axis.size * short
                left, right = (
                    self.ranked_number(pick, (axis,), tuple(widths))
                    for widths in (range(0, total, short), range(total - short, -1, -short))
                )
                node = self.narrow(self.pad(node, d, left, right, total), d, 0, long)
        return node

    def stack(self, node: fx.Node, axes: Axes, why: dict[str, Any]) -> fx.Node:
        """Gathers the shards of all devices over `axes`, outer to inner, along a new first dim."""
        local, (inner, group) = shape_of(node), self._parts(axes)
        node = self._gather(self.reshape(node, (1, *local)), self.mesh.sorted(axes), why)
        if inner == group:
            return node
        spread = self.reshape(node, (*(a.size for a in group), *local))
        rest = range(len(group), len(group) + len(local))
        order = [*(group.index(a) for a in inner), *rest]
        return self.reshape(self.permute(spread, order), shape_of(node))

    def send(self, node: fx.Node, axes: Axes, to: Sequence[int], why: dict[str, Any]) -> fx.Node:
        """Sends the shard of each device of the group over `axes` (outer to inner) to another: device i to `to[i]`."""
        inner, group = self._parts(axes)
        member = [_place(position, group) for position in _positions(inner)]
        table = {member[i]: member[target] for i, target in enumerate(to)}
        return self._send(node, self.mesh.sorted(axes), tuple(table[i] for i in range(len(to))), why)

    def _parts(self, axes: Axes) -> tuple[Axes, Axes]:
        """The parts of axes that are parts of their group's too, in the order of `axes` and in that of the group."""
        members = self.mesh.sorted(axes)
        cuts = atoms((axes, members))
        return split(axes, cuts), split(members, cuts)

    def _send(self, node: fx.Node, axes: Axes, table: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        spec = info(node).specs[0]
        numel = math.prod(spec.shape)
        flat = self.reshape(node, (numel,))
        refs = tuple(tuple(a) for a in axes)
        out, into = (self.call(transfers, (refs, table, numel, r), []) for r in (True, False))
        received = self._issue("permute", flat, (out, into), axes, Spec((numel,), spec.dtype), why)
        return self.reshape(received, spec.shape)

    # ---- runs of elements ---------------------------------------------------------------------------------
    def move_runs(
        self, nodes: Sequence[fx.Node], dim: int, axes: Axes, plan: RunPlan, sizes: Sequence[int], why: dict[str, Any]
    ) -> list[fx.Node]:
        """Emits a plan on a device's shards of the sources, and returns its shards of the results.

        sizes: the lengths of the results' shards along `dim`.
        """
        held = self.concatenate(nodes, dim)
        strips = [
            self.send(self.narrow(held, dim, self.pick(axes, each.starts), each.width), axes, each.to, why)
            for each in plan.rounds
        ]
        held = self.concatenate([held, *strips], dim)
        return [self._shard_elements(held, dim, axes, places, size) for places, size in zip(plan.places, sizes)]

    def _shard_elements(
        self, node: fx.Node, dim: int, axes: Axes, places: Sequence[Sequence[tuple[int, int]]], length: int
    ) -> fx.Node:
        """The elements of a device's shard of a result, in order."""
        total = shape_of(node)[dim]
        parts = max(map(len, places), default=0)
        firsts = [own[0][1] if own else 0 for own in places]
        if parts < 2 and all(0 <= first <= total - length for first in firsts):
            return self.narrow(node, dim, self.pick(axes, firsts), length)
        spec = (length,)
        order = self.number(aten.arange.default, spec, torch.int64, length)
        index = self.number(aten.add.Tensor, spec, torch.int64, order, self.pick(axes, firsts))
        for k in range(1, parts):
            begins = [own[k][0] if k < len(own) else length for own in places]
            jumps = [own[k][1] - own[k - 1][1] if k < len(own) else 0 for own in places]
            behind = self.number(aten.ge.Scalar, spec, torch.bool, order, self.pick(axes, begins))
            jump = self.number(aten.mul.Scalar, spec, torch.int64, behind, self.pick(axes, jumps))
            index = self.number(aten.add.Tensor, spec, torch.int64, index, jump)
        index = self.number(aten.clamp.default, spec, torch.int64, index, 0, total - 1)  # padding reads anything
        return self.move(aten.index_select.default, node, resized(node, dim, length), dim, index)


def _positions(axes: Axes) -> Iterator[dict[Axis, int]]:
    """Yields the positions on axes in row-major order, each as the place along every axis."""
    return (dict(zip(axes, places)) for places in itertools.product(*(range(axis.size) for axis in axes)))


def _place(position: Mapping[Axis, int], axes: Axes) -> int:
    """The place of a position in the row-major order of `axes`."""
    place = 0
    for axis in axes:
        place = place * axis.size + position[axis]
    return place


def permutation_table(before: Layout, after: Layout, axes: Axes) -> tuple[int, ...]:
    """Returns the target of each member's shard in a permute between two layouts, for the group over `axes`.

    A member whose own piece is the one it needs keeps it. If several members hold a piece, each sends it to one other.
    """
    moved = moved_places(before.dims, after.dims)
    members = split(axes, atoms((axes, *(side for pair in moved for side in pair))))
    holders: dict[tuple[int, ...], list[int]] = {}
    readers: dict[tuple[int, ...], list[int]] = {}
    for i, position in enumerate(_positions(members)):
        for by_piece, side in ((holders, 0), (readers, 1)):
            by_piece.setdefault(tuple(_place(position, pair[side]) for pair in moved), []).append(i)
    table = [0] * size_of(members)
    for piece, senders in holders.items():
        receivers = readers[piece]
        stay = set(senders) & set(receivers)
        for i in stay:
            table[i] = i
        for i, j in zip((i for i in senders if i not in stay), (j for j in receivers if j not in stay)):
            table[i] = j
    return tuple(table)
