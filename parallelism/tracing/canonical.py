"""Rewriting a captured graph into a canonical form with fewer kinds of ops, through which shardings propagate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tpshard.parallelism.anchors import is_boundary, is_named, is_role
from tpshard.parallelism.graph import Graph, Op, Ref, Value
from tpshard.parallelism.rules.pieces import bounds
from tpshard.parallelism.rules.pooling import APART, sum_of_windows, window_counts, windows_of
from tpshard.parallelism.rules.selection import SCANS, scan_to_end
from tpshard.parallelism.rules.strides import of_slice, of_view
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.tracing.fold_contractions import fold_contractions

aten = torch.ops.aten


def canonicalize(graph: Graph) -> None:
    """Rewrites a captured graph into canonical form, in place, with the same results."""
    take_roles(graph)
    remove_identities(graph)
    unify(graph)
    join_pieces(graph)
    scan_from_behind(graph)
    narrow_splits(graph)
    spread_windows(graph)
    fold_contractions(graph)
    merge_views(graph)
    graph.drop_dead()
    split_constants(graph)
    rename(graph)
    spread_roles(graph)


def take_roles(graph: Graph) -> None:
    """Marks the result of every `role` op with its role, so that the op itself can be removed."""
    for op in graph.ops:
        if is_role(op):
            op.results[0].marked = op.args[1]


def spread_roles(graph: Graph) -> None:
    """Gives a value without a role the role of a view of it."""
    for op in reversed(graph.ops):
        if op.results and op.results[0].marked and entry_of(op.target).view is not None:
            op.operands[0].marked = op.operands[0].marked or op.results[0].marked


def remove_identities(graph: Graph) -> None:
    """Removes ops that return their operand unchanged: views of its own shape, and copies.

    Nothing is written into a captured graph's values, so that a copy equals its source forever. A copy that the
    function returns stays, so that its result shares no memory with an argument.
    """
    returned = _returned_values(graph)
    for op in graph.ops:
        entry = entry_of(op.target)
        same_view = entry.view in (of_view, of_slice) and op.operands[0].shape == op.results[0].shape
        copy = op.target is aten.clone.default and op.results[0] not in returned
        if entry.recorded == "operand" or same_view or copy:
            graph.replace(op.results[0], op.operands[0])
    graph.drop_dead()


def _returned_values(graph: Graph) -> set[Value]:
    """The results of a graph, and the values that they are views of."""
    returned: set[Value] = set()
    for value in graph.outputs:
        while isinstance(value, Value) and value not in returned:
            returned.add(value)
            op = value.producer
            if op is None or len(op.operands) != 1 or entry_of(op.target).view is None:
                break
            value = op.operands[0]
    return returned


def unify(graph: Graph) -> None:
    """Replaces synonyms by one op: transpose and t become permute, reshape becomes view."""
    for op in graph.ops:
        canonical = entry_of(op.target).canonical
        if canonical is not None:
            canonical(op)


def join_pieces(graph: Graph) -> None:
    """Rewrites cat([x[k:], x[:k]]) to a roll, which moves less than two slices put together."""
    for op in graph.ops:
        pieces = [v.producer for v in op.operands]
        if op.target is not aten.cat.default or len(pieces) != 2:
            continue
        last, first = pieces
        if last is None or first is None or {last.target, first.target} != {aten.slice.Tensor}:
            continue
        (dim, k, end, step), (other, start, stop, by) = bounds(last, 1), bounds(first, 1)
        source, result = last.operands[0], op.results[0]
        along = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % result.rank
        whole = (start, stop, end, step, by) == (0, k, source.shape[dim], 1, 1)
        if source is first.operands[0] and dim == other == along and whole and 0 < k < end:
            op.target, op.args, op.kwargs, op.operands = aten.roll.default, (Ref(0), [-k], [dim]), {}, [source]
            graph.refresh_users()
    graph.drop_dead()


def scan_from_behind(graph: Graph) -> None:
    """Rewrites a flipped cumsum of a flipped tensor, the gradient of cumsum, and other such scans to `scan_to_end`."""
    for op in graph.ops:
        scan = op.operands[0].producer if op.target is aten.flip.default else None
        if scan is None or scan.target not in SCANS or len(scan.results) > 1:
            continue
        first, rank = scan.operands[0].producer, op.results[0].rank
        if first is None or first.target is not aten.flip.default:
            continue
        if {scan.args[1] % rank} == {d % rank for d in op.args[1]} == {d % rank for d in first.args[1]}:
            op.target, op.args, op.kwargs = scan_to_end, (*scan.args, scan.target), scan.kwargs
            op.operands = [first.operands[0]]
            graph.refresh_users()
    graph.drop_dead()


def spread_windows(graph: Graph) -> None:
    """Rewrites im2col and col2im, of `F.unfold` and `F.fold`, to ops whose windows keep all their dims apart."""
    ops: list[Op] = []

    def step(op: Op, name: str, target: Any, value: Value, args: tuple[Any, ...], shape: Sequence[int]) -> Value:
        ops.append(Op(f"{op.name}_{name}", target, (Ref(0), *args), {}, [value], [], op.place))
        ops[-1].results = [Value(ops[-1].name, tuple(shape), value.dtype, ops[-1])]
        return ops[-1].results[0]

    for op in graph.ops:
        spread = (
            op.target in (aten.im2col.default, aten.col2im.default) and op.operands[0].rank + op.results[0].rank == 7
        )
        if spread and op.target is aten.im2col.default:
            (x,), geometry = op.operands, op.args[1:]
            counts = window_counts(x.shape[2:], *geometry)
            windows = step(op, "windows", windows_of, x, geometry, (*x.shape[:2], *counts, *geometry[0]))
            apart = step(op, "apart", aten.permute.default, windows, (APART,), [windows.shape[d] for d in APART])
            op.target, op.args, op.operands = aten.view.default, (Ref(0), op.results[0].shape), [apart]
        elif spread:
            (columns,), counts = op.operands, window_counts(*op.args[1:])
            shape = (*op.results[0].shape[:2], *op.args[2], *counts)
            parts = step(op, "parts", aten.view.default, columns, (shape,), shape)
            windows = step(op, "windows", aten.permute.default, parts, (APART,), [shape[d] for d in APART])
            op.target, op.operands = sum_of_windows, [windows]
        ops.append(op)
    graph.ops = ops
    graph.refresh_users()


PARTS = {aten.split.Tensor: 2, aten.split_with_sizes.default: 2, aten.unbind.int: 1}
"""Ops that return all parts of a dim, with the place of the dim in their arguments."""


def narrow_splits(graph: Graph) -> None:
    """Rewrites a split of which one result is read to a slice, and such an unbind to a select."""
    returned = {value for value in graph.outputs if isinstance(value, Value)}
    for op in graph.ops:
        read = [value for value in op.results if value.users or value in returned]
        if op.target not in PARTS or len(op.results) < 2 or len(read) != 1:
            continue
        (part,), at = read, PARTS[op.target]
        dim = (op.args[at] if len(op.args) > at else op.kwargs.get("dim", 0)) % op.operands[0].rank
        if op.target is aten.unbind.int:
            op.target, op.args = aten.select.int, (Ref(0), dim, part.index)
        else:
            start = sum(value.shape[dim] for value in op.results[: part.index])
            op.target, op.args = aten.slice.Tensor, (Ref(0), dim, start, start + part.shape[dim])
        op.kwargs, op.results, part.index = {}, [part], 0


def merge_views(graph: Graph) -> None:
    """Merges views of views; removes views that change nothing, and permutes that cancel."""
    for op in graph.ops:
        if op.target is aten.view.default:
            source = op.operands[0]
            while source.producer is not None and source.producer.target is aten.view.default:
                source = source.producer.operands[0]
            if source is not op.operands[0]:
                op.operands[0].users.remove(op)
                op.operands = [source]
                source.users.append(op)
            op.args = (Ref(0), op.results[0].shape)
            if source.shape == op.results[0].shape:
                graph.replace(op.results[0], source)
        elif op.target is aten.permute.default:
            source, order = op.operands[0], [d % op.operands[0].rank for d in op.args[1]]
            inner = source.producer
            if inner is not None and inner.target is aten.permute.default:
                first = [d % source.rank for d in inner.args[1]]
                order = [first[d] for d in order]
                op.operands[0].users.remove(op)
                op.operands = [inner.operands[0]]
                inner.operands[0].users.append(op)
                op.args = (Ref(0), tuple(order))
            if order == sorted(order):
                graph.replace(op.results[0], op.operands[0])


def split_constants(graph: Graph) -> None:
    """Gives every reader of a constant (a filled tensor, positions, or a view of one) a copy of the ops that make it.

    Propagation passes shardings between the readers of one value; readers of separate copies do not affect each other.
    """
    constant: set[Value] = set()
    for op in graph.ops:
        entry = entry_of(op.target)
        from_constants = entry.view is not None and all(v in constant for v in op.operands)
        if len(op.results) == 1 and (from_constants if op.operands else entry.inlined):
            constant.add(op.results[0])
    copies: dict[Op, list[Op]] = {}
    for op in reversed(graph.ops):
        if op.results[0] not in constant:
            continue
        for i, reader in enumerate(dict.fromkeys(op.results[0].users)):
            if i == 0:
                continue
            place = reader.place._replace(phase=op.phase)
            copy = Op(f"{op.name}_{i}", op.target, op.args, op.kwargs, list(op.operands), [], place)
            copy.results = [Value(copy.name, op.results[0].shape, op.results[0].dtype, copy)]
            copies.setdefault(op, []).append(copy)
            for operand in op.operands:
                operand.users.append(copy)
            reader.operands = [copy.results[0] if v is op.results[0] else v for v in reader.operands]
            copy.results[0].users = [reader] * reader.operands.count(copy.results[0])
    if copies:
        graph.ops = [each for op in graph.ops for each in (op, *copies.get(op, ()))]
        graph.refresh_users()


def rename(graph: Graph) -> None:
    """Renames values that the model names to `MODULE.NAME`, and their gradients to `MODULE.NAME.grad`.

    At a boundary the used parameter is `NAME.used`, its gradient `NAME.grad`, and the stored one `NAME.grad.stored`.
    """
    uses: dict[str, int] = {}
    for op in graph.ops:
        if is_named(op):
            label = f"{op.module}.{op.args[1]}" if op.module else str(op.args[1])
            name = label + (".grad" if op.phase == "backward" else "")
            uses[name] = uses.get(name, 0) + 1
            op.results[0].name = name if uses[name] == 1 else f"{name}.{uses[name]}"
            op.results[0].label = label
            op.results[0].dims = tuple(op.args[2])
        elif is_boundary(op):
            kind, name = op.args[1], op.args[2]
            op.results[0].marked = kind
            if kind == "parameter":
                op.results[0].name = f"{name}.used"
            else:
                op.operands[0].marked = kind
                op.results[0].name = f"{name}.grad.stored"
                if op.operands[0].producer is not None:
                    op.operands[0].name = f"{name}.grad"
