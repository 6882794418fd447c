"""Lowers resharding steps to `_c10d_functional` nodes of one device's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tpshard.parallelism.graph import Place
from tpshard.parallelism.mesh import Axes, Axis, Mesh, atoms, merge, size_of, split
from tpshard.parallelism.node_info import INFO, Info, Spec, group_name, info, make_collective, offset, resized, shape_of
from tpshard.parallelism.reshard import ReshardStep
from tpshard.parallelism.reshard_moves import moved_places
from tpshard.parallelism.sharding import Layout, even, local_shape, local_size

aten = torch.ops.aten
funcol = torch.ops._c10d_functional
KINDS = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce", "exchange": "all_to_all",
         "permute": "permute"}  # fmt: skip


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
        self.prologue: fx.Node | None = None

    def at(self, origin: str, place: Place) -> None:
        """Sets the origin and the place of the nodes that are emitted next."""
        self.origin, self.place = origin, place

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(_identifier(name))
        node.meta[INFO] = Info((Spec(tuple(shape), dtype),), origin=name)
        self.prologue = node
        return node

    def call(
        self, target: Any, args: Sequence[Any], specs: Sequence[Spec], kwargs: dict[str, Any] | None = None, **rest: Any
    ) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), kwargs or {})
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

    def offset(self, axes: Axes, size: int, grain: int = 1) -> Any:
        """A node with the global index at which this device's shard of a dim of `size` over `axes` begins.

        Without axes it is the number 0.
        """
        strides = []
        for axis in axes:
            size = local_size(size, (axis,), grain)
            strides.append(size)
        return self.ranked_number(offset, axes, tuple(strides)) if axes else 0

    def position(self, axes: Axes) -> Any:
        """A node with this device's position in the row-major order of `axes`; without axes the number 0."""
        return self.offset(axes, size_of(axes))

    def valid(self, axes: Axes, size: int, grain: int = 1) -> Any:
        """A node with the number of elements of this device's shard that are not padding."""
        return self.ranked_number(valid, axes, size, grain)

    def ranked_number(self, target: Any, axes: Axes, *args: Any) -> fx.Node:
        """A node with a number that depends on the device's position on `axes`: `offset`, `valid` or `pick`."""
        key = (target, axes, *args)
        if key not in self.ranked:
            with self.graph.inserting_after(self.prologue) if self.prologue else self.graph.inserting_before(None):
                node = self.graph.call_function(target, (tuple(tuple(a) for a in axes), *args))
            node.meta[INFO] = Info((), target.__name__)
            if self.prologue is None:
                self.prologue = node
            self.ranked[key] = node
        return self.ranked[key]

    def padding(self, axes: Axes, size: int, grain: int, rank: int, dim: int) -> fx.Node:
        """A mask node, true where this device's shard of a dim is padding; it broadcasts along `dim` of `rank` dims."""
        local = local_size(size, axes, grain)
        places = self.call(aten.arange.default, (local,), [Spec((local,), torch.int64)])
        beyond = self.call(aten.ge.Scalar, (places, self.valid(axes, size, grain)), [Spec((local,), torch.bool)])
        return self.reshape(beyond, [local if d == dim else 1 for d in range(rank)])

    # ---- one resharding step ------------------------------------------------------------------------------
    def step(self, node: fx.Node, step: ReshardStep, shape: Sequence[int], **why: Any) -> fx.Node:
        """Emits the nodes of one resharding step, and returns the last.

        shape: the global one. why: fields of the `Collective` that it records.
        """
        run = {
            "gather": self._gather, "scatter": self._scatter, "reduce": self._reduce, "exchange": self._exchange,
            "slice": self._slice, "mask": self._mask, "spread": self._to_partial_sum, "permute": self._permute,
        }[step.kind]  # fmt: skip
        return run(node, step, tuple(shape), why)

    def _issue(self, op: Any, node: fx.Node, args: Sequence[Any], axes: Axes, spec: Spec, kind: str, nbytes: int,
               why: dict[str, Any]) -> fx.Node:  # fmt: skip
        comm = make_collective(self.mesh, KINDS[kind], axes, nbytes, spec.dtype, **why)
        started = self.call(op, (node, *args, group_name(axes)), [spec], comm=comm)
        return self.call(funcol.wait_tensor.default, (started,), [spec])

    def _gather(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        local = info(node).specs[0]
        n = size_of(axes)
        out = Spec((local.shape[0] * n, *local.shape[1:]), local.dtype)
        gathered = self._issue(funcol.all_gather_into_tensor.default, node, (n,), axes, out, "gather", out.bytes, why)
        return self._join(gathered, local.shape, step, shape)

    def _join(self, node: fx.Node, part: Sequence[int], step: ReshardStep, shape: tuple[int, ...]) -> fx.Node:
        """Joins the pieces [members of the group, *part] that a step received along their dims.

        Inner axes are joined before outer ones, and the padding of each is removed at once.
        """
        joined = {
            d: _by_layout([a for a, source, _ in step.parts if source == d], step.before.dims[d])
            for d in range(len(shape))
        }
        single = sorted((a for axes in joined.values() for a in axes), key=self.mesh.key)
        spread = self.reshape(node, (*(a.size for a in single), *part))
        order: list[int] = []
        for d in range(len(shape)):
            order.extend(single.index(a) for a in joined[d])
            order.append(len(single) + d)
        node = self.permute(spread, order)
        target = local_shape(shape, step.after)
        current_shape = list(shape_of(node))
        for at, axes in joined.items():  # dims before `at` are joined already
            lengths = [target[at]]  # the dim's size before each axis divided it, outer to inner
            for axis in axes:
                lengths.append(local_size(lengths[-1], (axis,), step.grain(at)))
            if all(long == axis.size * short for axis, long, short in zip(axes, lengths, lengths[1:])):
                current_shape[at : at + len(axes) + 1] = [target[at]]
            else:
                for i in range(len(axes) - 1, -1, -1):
                    current_shape[at + i : at + i + 2] = [axes[i].size * current_shape[at + i + 1]]
                    node = self.reshape(node, current_shape)
                    node = self._trim(node, at + i, lengths[i])
                    current_shape[at + i] = lengths[i]
        return self.reshape(node, current_shape)

    def _trim(self, node: fx.Node, d: int, size: int) -> fx.Node:
        if shape_of(node)[d] == size:
            return node
        return self.move(aten.slice.Tensor, node, resized(node, d, size), d, 0, size)

    def _grow(self, node: fx.Node, d: int, size: int) -> fx.Node:
        """Pads the end of a dim with zeros to `size`, so that it can be divided evenly."""
        shape = shape_of(node)
        if shape[d] == size:
            return node
        widths = [0, 0] * (len(shape) - 1 - d) + [0, size - shape[d]]
        return self.move(aten.constant_pad_nd.default, node, resized(node, d, size), widths, 0)

    def _cut(self, node: fx.Node, step: ReshardStep) -> tuple[fx.Node, tuple[int, ...]]:
        """Cuts a tensor into the pieces for the members of a group, as one leading dim in the order of the group.

        Returns the node [members * part[0], *part[1:]] and the shape of a part.
        """
        single: list[Axis] = []
        shape = list(shape_of(node))
        where: dict[Axis, int] = {}
        rest: list[int] = []
        at = 0
        for d in range(len(step.after.dims)):
            for axis in _by_layout([a for a, _, to in step.parts if to == d], step.after.dims[d]):
                part = local_size(shape[at], (axis,), step.grain(d))
                if part * axis.size != shape[at]:
                    node = self._grow(self.reshape(node, shape), at, part * axis.size)
                shape[at : at + 1] = [axis.size, part]
                where[axis] = at
                single.append(axis)
                at += 1
            rest.append(at)
            at += 1
        single.sort(key=self.mesh.key)
        result = tuple(shape[r] for r in rest)
        spread = self.permute(self.reshape(node, shape), [*(where[a] for a in single), *rest])
        return self.reshape(spread, (size_of(single) * result[0], *result[1:])), result

    def _scatter(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        whole, part = self._cut(node, step)
        held = info(whole).specs[0]
        return self._issue(
            funcol.reduce_scatter_tensor.default, whole, ("sum", size_of(axes)), axes, Spec(part, held.dtype),
            "scatter", held.bytes, why,
        )  # fmt: skip

    def _reduce(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        spec = info(node).specs[0]
        return self._issue(funcol.all_reduce.default, node, (step.before.kind,), axes, spec, "reduce", spec.bytes, why)

    def _exchange(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        n = size_of(axes)
        whole, part = self._cut(node, step)
        held = info(whole).specs[0]
        sizes = [held.shape[0] // n] * n
        received = self._issue(
            funcol.all_to_all_single.default, whole, (sizes, sizes), axes, held, "exchange", held.bytes, why
        )
        return self._join(received, part, step, shape)

    def _slice(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        for d in range(len(shape)):
            added = _by_layout([a for a, _, to in step.parts if to == d], step.after.dims[d])
            size, grain = shape_of(node)[d], step.grain(d)
            if added and even(size // grain, added):
                node = self._narrow(node, d, merge(added), size // size_of(added), grain)
                continue
            for axis in added:
                size = local_size(size, (axis,), grain)
                node = self._narrow(self._grow(node, d, size * axis.size), d, (axis,), size, grain)
        return node

    def _narrow(self, node: fx.Node, d: int, axes: Axes, size: int, grain: int) -> fx.Node:
        start = self.offset(axes, shape_of(node)[d], grain)
        return self.move(aten.narrow.default, node, resized(node, d, size), d, start, size)

    def _mask(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        keep = self.call(is_first, (self.position(axes),), [])
        return self.move(aten.mul.Scalar, node, shape_of(node), keep)

    def _to_partial_sum(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        """Turns shards into summands of a partial sum: each device pads its shard with zeros to the whole dim."""
        local = local_shape(shape, step.after)
        for d in range(len(shape)):
            axes = _by_layout([a for a, source, _ in step.parts if source == d], step.before.dims[d])
            lengths = [local[d]]  # the dim's size before each axis divided it, outer to inner
            for axis in axes:
                lengths.append(local_size(lengths[-1], (axis,), step.grain(d)))
            for axis, long, short in zip(reversed(axes), lengths[-2::-1], lengths[:0:-1]):
                total = axis.size * short
                before, behind = (
                    self.ranked_number(pick, (axis,), tuple(starts))
                    for starts in (range(0, total, short), range(total - short, -1, -short))
                )
                widths = [0, 0] * (len(shape) - 1 - d) + [before, behind]
                node = self.move(aten.constant_pad_nd.default, node, resized(node, d, total), widths, 0)
                node = self._trim(node, d, long)
        return node

    def _permute(self, node: fx.Node, step: ReshardStep, shape: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        axes = self.mesh.sorted(a for a, _, _ in step.parts)
        table = permutation_table(step.before, step.after, axes)
        return self._send(node, axes, table, why)

    def stack(self, node: fx.Node, axes: Axes, why: dict[str, Any]) -> fx.Node:
        """Gathers the shards of all devices over `axes`, outer to inner, along a new first dim."""
        local, members = info(node).specs[0], self.mesh.sorted(axes)
        n = size_of(axes)
        node = self.reshape(node, (1, *local.shape))
        out = Spec((n, *local.shape), local.dtype)
        node = self._issue(funcol.all_gather_into_tensor.default, node, (n,), members, out, "gather", out.bytes, why)
        cuts = atoms((axes, members))
        inner, group = split(axes, cuts), split(members, cuts)
        if inner == group:
            return node
        spread = self.reshape(node, (*(a.size for a in group), *local.shape))
        rest = range(len(group), len(group) + len(local.shape))
        return self.reshape(self.permute(spread, [*(group.index(a) for a in inner), *rest]), out.shape)

    def send(self, node: fx.Node, axes: Axes, to: Sequence[int], why: dict[str, Any]) -> fx.Node:
        """Sends the shard of each device of the group over `axes` (outer to inner) to another: device i to `to[i]`."""
        members = self.mesh.sorted(axes)
        cuts = atoms((axes, members))
        inner, group = split(axes, cuts), split(members, cuts)
        table = [0] * len(to)
        for i, target in enumerate(to):
            table[_place(i, inner, group)] = _place(target, inner, group)
        return self._send(node, members, tuple(table), why)

    def _send(self, node: fx.Node, axes: Axes, table: tuple[int, ...], why: dict[str, Any]) -> fx.Node:
        spec = info(node).specs[0]
        numel = math.prod(spec.shape)
        flat = self.reshape(node, (numel,))
        refs = tuple(tuple(a) for a in axes)
        out, into = (self.call(transfers, (refs, table, numel, r), []) for r in (True, False))
        received = self._issue(
            funcol.all_to_all_single.default, flat, (out, into), axes, Spec((numel,), spec.dtype), "permute",
            spec.bytes, why,
        )  # fmt: skip
        return self.reshape(received, spec.shape)


def _place(index: int, order: Axes, group: Axes) -> int:
    """Converts a position in the row-major order of the axes `order` to one in that of `group`, the same axes."""
    at = dict(zip(order, _unravel(index, [a.size for a in order])))
    return _ravel([(at[axis], axis.size) for axis in group])


def permutation_table(before: Layout, after: Layout, axes: Axes) -> tuple[int, ...]:
    """Returns the target of each member's shard in a permute between two layouts, for the group over `axes`.

    A member whose own piece is the one it needs keeps it. If several members hold a piece, each sends it to one other.
    """
    moved = moved_places(before.dims, after.dims)
    members = split(axes, atoms((axes, *(side for pair in moved for side in pair))))
    sizes = [a.size for a in members]
    holders: dict[tuple[int, ...], list[int]] = {}
    readers: dict[tuple[int, ...], list[int]] = {}
    for i in range(math.prod(sizes)):
        position = dict(zip(members, _unravel(i, sizes)))
        for by_piece, side in ((holders, 0), (readers, 1)):
            piece = tuple(_ravel([(position[a], a.size) for a in pair[side]]) for pair in moved)
            by_piece.setdefault(piece, []).append(i)
    table = [0] * math.prod(sizes)
    for piece, senders in holders.items():
        receivers = readers[piece]
        stay = set(senders) & set(receivers)
        for i in stay:
            table[i] = i
        for i, j in zip((i for i in senders if i not in stay), (j for j in receivers if j not in stay)):
            table[i] = j
    return tuple(table)


def _ravel(places: Sequence[tuple[int, int]]) -> int:
    """The row-major position of (place, size) pairs."""
    position = 0
    for place, size in places:
        position = position * size + place
    return position


def _unravel(index: int, sizes: Sequence[int]) -> list[int]:
    """The place in each dim of a row-major position; the inverse of `_ravel`."""
    out = []
    for n in reversed(sizes):
        out.append(index % n)
        index //= n
    return out[::-1]


def _by_layout(axes: Sequence[Axis], order: Axes) -> Axes:
    """The axes of one dim, outer to inner as in the dim's layout, with parts of one axis joined."""

    def key(axis: Axis) -> tuple[int, int]:
        for i, placed in enumerate(order):
            if placed.overlaps(axis):
                return (i, axis.pre)
        return (len(order), axis.pre)

    return merge(sorted(axes, key=key))


def _identifier(name: str) -> str:
    """The name with all characters but letters and digits replaced, as a graph's node requires."""
    return "".join(c if c.isalnum() else "_" for c in name)
