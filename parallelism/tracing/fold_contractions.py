"""Rewriting matrix products and the views around them to contractions over all dims, so that shardings pass them.

`F.linear` on [batch, seq, embed] is recorded as view + mm + view, and a sharding of seq cannot pass a view that merges
[batch, seq]. Folding the views into one contraction `bsk,nk->bsn` keeps every dim visible, for any module's code.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from tpshard.parallelism.graph import Graph, Op, Ref, Value
from tpshard.parallelism.rules.contraction import contract
from tpshard.parallelism.rules.table import entry_of

aten = torch.ops.aten


def fold_contractions(graph: Graph) -> None:
    """Turns mm and bmm with their surrounding views into `contract`, with an equation over all dims."""
    ops: list[Op] = []
    for op in graph.ops:
        equation = entry_of(op.target).equation
        if equation and len(op.operands) == 2:
            _fold(graph, op, equation, ops)
        elif equation:
            _fold_added(graph, op, equation, ops)
        elif op.target is aten.sum.dim_IntList:
            _fold_sum(op, ops)
        else:
            ops.append(op)
    graph.ops = ops
    graph.refresh_users()


class Unmerged(NamedTuple):
    """A value seen through views: each of its dims is a group of dims of `base`."""

    base: Value
    groups: list[tuple[int, ...]]


def unmerge(value: Value) -> Unmerged:
    """Traces a value back through permutes, views that merge dims and new dims of size 1 to the value before them."""
    groups: list[tuple[int, ...]] = [(d,) for d in range(value.rank)]
    while value.producer is not None and len(value.producer.operands) == 1:
        op = value.producer
        source = op.operands[0]
        if op.target is aten.permute.default:
            order = [d % source.rank for d in op.args[1]]
            groups = [tuple(order[d] for d in group) for group in groups]
        elif op.target is aten.view.default:
            merged = merge_map(source.shape, value.shape)
            if merged is None:
                break
            groups = [tuple(s for d in group for s in merged[d]) for group in groups]
        elif op.target is aten.unsqueeze.default:
            new = op.args[1] % value.rank
            groups = [tuple(d - (d > new) for d in group if d != new) for group in groups]
        elif (op.target is aten.expand.default and source.shape == value.shape) or (op.target is aten.clone.default):
            pass
        else:
            break
        value = source
    return Unmerged(value, groups)


def merge_map(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The source dims of each target dim, if a view only merges neighbouring dims or adds dims of size 1; else None."""
    out: list[tuple[int, ...]] = []
    i = 0
    for size in target:
        group: list[int] = []
        merged_size = 1
        while i < len(source) and (merged_size < size or (merged_size == size and source[i] == 1 and size != 1)):
            merged_size *= source[i]
            group.append(i)
            i += 1
        if size == 1 and i < len(source) and source[i] == 1:
            group, i = [i], i + 1
        if merged_size != size:
            return None
        out.append(tuple(group))
    return out if i == len(source) else None


def _fold_added(graph: Graph, op: Op, equation: str, ops: list[Op]) -> None:
    """Rewrites beta a + alpha (b @ c), such as `addmm`, to a contraction, a scaling and a sum."""
    added, result, alpha, beta = op.operands[0], op.results[0], op.kwargs.get("alpha", 1), op.kwargs.get("beta", 1)

    def step(name: str, target: Any, operands: list[Value], args: tuple[Any, ...], **kwargs: Any) -> Op:
        new = Op(f"{op.name}_{name}", target, args, kwargs, operands, [], op.place)
        new.results = [Value(new.name, result.shape, result.dtype, new)]
        return new

    _fold(graph, step("mm", contract, op.operands[1:], (Ref(0), Ref(1))), equation, ops)
    if alpha != 1:
        ops.append(step("scaled", aten.mul.Tensor, [_result(ops)], (Ref(0), alpha)))
    if beta == 0:
        graph.replace(result, _result(ops))
        return
    op.target, op.args, op.kwargs = aten.add.Tensor, (Ref(0), Ref(1)), {} if beta == 1 else {"alpha": beta}
    op.operands = [_result(ops), added]
    _add_before_view(op, ops)


def _result(ops: list[Op]) -> Value:
    return ops[-1].results[0]


def _add_before_view(op: Op, ops: list[Op]) -> None:
    """Rewrites view(x) + bias to view(x + bias), so that the bias is added to the dims that the product kept apart."""
    view = ops[-1]
    if view.target is aten.view.default and op.operands[1].rank == 1:
        base, old = view.operands[0], op.results[0]
        if base.shape[-1:] == old.shape[-1:]:
            ops.pop()
            op.operands = [base, op.operands[1]]
            op.results = [Value(op.name, base.shape, old.dtype, op)]
            ops.append(op)
            _view_as(op.results[0], old, op, ops)
            return
    ops.append(op)


def _view_as(value: Value, old: Value, op: Op, ops: list[Op]) -> None:
    """Appends the view that computes `old`, the former result of `op`, from `value`."""
    view = Op(f"{op.name}_view", aten.view.default, (Ref(0), old.shape), {}, [value], [old], op.place)
    old.producer, old.name = view, view.name
    ops.append(view)


def _new_view(value: Value, shape: tuple[int, ...], name: str, op: Op, ops: list[Op]) -> Value:
    """Appends a view of a value at the place of `op`, and returns its result; a repeated name gets a number."""
    alike = sum(other.name == name or other.name.startswith(f"{name}_") for other in ops[-8:])
    name = f"{name}_{alike}" if alike else name
    view = Op(name, aten.view.default, (Ref(0), shape), {}, [value], [], op.place)
    view.results = [Value(name, shape, value.dtype, view)]
    ops.append(view)
    return view.results[0]


def _fold_sum(op: Op, ops: list[Op]) -> None:
    """Rewrites a sum over merged dims (the gradient of a bias) to a sum over the dims themselves."""
    ops.append(op)
    source = op.operands[0]
    unmerged = unmerge(source)
    dims = [d % source.rank for d in op.args[1]] if len(op.args) > 1 and op.args[1] else list(range(source.rank))
    if unmerged.base is source or any(len(unmerged.groups[d]) != 1 for d in range(source.rank) if d not in dims):
        return
    remaining = [unmerged.groups[d][0] for d in range(source.rank) if d not in dims]
    if remaining != sorted(remaining) or len(unmerged.base.shape) != sum(len(g) for g in unmerged.groups):
        return
    old = op.results[0]
    summed = tuple(sorted(b for d in dims for b in unmerged.groups[d]))
    shape = tuple(unmerged.base.shape[b] for b in remaining)
    if not summed:
        return
    op.operands, op.args = [unmerged.base], (Ref(0), summed)
    if shape != old.shape:
        op.results = [Value(op.name, shape, old.dtype, op)]
        _view_as(op.results[0], old, op, ops)


def _fold(graph: Graph, op: Op, equation: str, ops: list[Op]) -> None:
    """Appends a product to `ops` as a contraction of its unmerged operands, with a view to the original shape."""
    a: Unmerged | None
    b: Unmerged | None
    a, b = (unmerge(v) for v in op.operands)
    inputs, out_roles = equation.split("->")
    roles_a, roles_b = inputs.split(",")
    shared = sorted(set(roles_a) & set(roles_b))
    if not all(_agree(a, a.groups[roles_a.index(role)], b, b.groups[roles_b.index(role)]) for role in shared):
        a, b = _squeeze(a, op, ops), _squeeze(b, op, ops)
    for role in shared:
        of_a, of_b = a.groups[roles_a.index(role)], b.groups[roles_b.index(role)]
        if not _agree(a, of_a, b, of_b):
            merged = _merge_group(a, of_a, op, ops), _merge_group(b, of_b, op, ops)
            if None in merged:
                apart = _split_both(a, of_a, b, of_b, op, ops)
                merged = apart or (
                    merged[0] or _merge_apart(a, of_a, op, ops),
                    merged[1] or _merge_apart(b, of_b, op, ops),
                )
            a, b = merged
        if a is None or b is None:
            a, b = _as_is(op.operands[0]), _as_is(op.operands[1])
            break
    letters = iter(string.ascii_lowercase)
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for roles, side in ((roles_a, a), (roles_b, b)):
        for role, group in zip(roles, side.groups):
            names.setdefault(role, "".join(next(letters) for _ in group))
            sizes |= {letter: side.base.shape[d] for letter, d in zip(names[role], group)}
    out_letters = "".join(names[r] for r in out_roles)
    spelled = f"{_letters(a, roles_a, names)},{_letters(b, roles_b, names)}->{out_letters}"
    shape = tuple(sizes[letter] for letter in out_letters)
    old = op.results[0]
    product = Op(op.name, contract, (Ref(0), Ref(1), spelled), {}, [a.base, b.base], [], op.place)
    result = Value(old.name, shape, old.dtype, product)
    product.results = [result]
    ops.append(product)
    if shape == old.shape:
        graph.replace(old, result)
    else:
        _view_as(result, old, op, ops)


def _squeeze(side: Unmerged, op: Op, ops: list[Op]) -> Unmerged:
    """The operand without dims of size 1."""
    shape = side.base.shape
    if 1 not in shape:
        return side
    remaining = [d for d, n in enumerate(shape) if n != 1]
    base = _new_view(side.base, tuple(shape[d] for d in remaining), f"{op.name}_squeeze", op, ops)
    return Unmerged(base, [tuple(remaining.index(d) for d in group if d in remaining) for group in side.groups])


def _agree(a: Unmerged, of_a: tuple[int, ...], b: Unmerged, of_b: tuple[int, ...]) -> bool:
    """Whether a group of dims of one operand has the sizes of a group of the other."""
    return [a.base.shape[d] for d in of_a] == [b.base.shape[d] for d in of_b]


def _merge_group(side: Unmerged | None, group: tuple[int, ...], op: Op, ops: list[Op]) -> Unmerged | None:
    """The operand with one group of neighbouring dims merged by a view; None if they are not neighbours."""
    if side is None or len(group) == 1:
        return side
    if not group:
        return None
    first, count = group[0], len(group)
    if group != tuple(range(first, first + count)):
        return None
    shape = list(side.base.shape)
    shape[first : first + count] = [math.prod(shape[first : first + count])]
    base = _new_view(side.base, tuple(shape), f"{op.name}_merge", op, ops)

    def after(d: int) -> int:
        return d if d <= first else max(first, d - count + 1)

    return Unmerged(base, [(first,) if g == group else tuple(after(d) for d in g) for g in side.groups])


def _split_both(
    a: Unmerged, of_a: tuple[int, ...], b: Unmerged, of_b: tuple[int, ...], op: Op, ops: list[Op]
) -> tuple[Unmerged, Unmerged] | None:
    """Both operands with the dims of a group split alike, so that any of them may be sharded.

    None where no sizes divide both, or for an argument, such as a weight, which keeps its dims.
    """
    sizes = [[side.base.shape[d] for d in of] for side, of in ((a, of_a), (b, of_b))]
    common = _common_sizes(*sizes)
    if common is None or any(side.base.producer is None and own != common for side, own in zip((a, b), sizes)):
        return None
    return _split_group(a, of_a, common, op, ops), _split_group(b, of_b, common, op, ops)


def _merge_apart(side: Unmerged, group: tuple[int, ...], op: Op, ops: list[Op]) -> Unmerged | None:
    """The operand with a group of dims, which need not be neighbours, merged behind all others."""
    if len(group) < 2:
        return side if group else None
    order = [d for d in range(side.base.rank) if d not in group] + list(group)
    turned = Op(f"{op.name}_turned", aten.permute.default, (Ref(0), tuple(order)), {}, [side.base], [], op.place)
    turned.results = [Value(turned.name, tuple(side.base.shape[d] for d in order), side.base.dtype, turned)]
    ops.append(turned)
    moved = Unmerged(turned.results[0], [tuple(order.index(d) for d in g) for g in side.groups])
    return _merge_group(moved, tuple(order.index(d) for d in group), op, ops)


def _common_sizes(first: Sequence[int], second: Sequence[int]) -> list[int] | None:
    """The sizes into which the dims of two groups can both be split, from major to minor; None if there are none."""
    ends = sorted({end for sizes in (first, second) for end in accumulate(reversed(sizes), operator.mul, initial=1)})
    if any(after % before for before, after in pairwise(ends)):
        return None
    return [after // before for before, after in pairwise(ends)][::-1]


def _split_group(side: Unmerged, group: tuple[int, ...], sizes: Sequence[int], op: Op, ops: list[Op]) -> Unmerged:
    """The operand with the dims of a group split by a view into these sizes."""
    shape, left, parts = side.base.shape, iter(sizes), {}
    for d in group:
        parts[d] = [next(left)] if shape[d] > 1 else [1]
        while math.prod(parts[d]) < shape[d]:
            parts[d].append(next(left))
    pieces = [parts.get(d, [n]) for d, n in enumerate(shape)]
    if all(len(piece) == 1 for piece in pieces):
        return side
    base = _new_view(side.base, tuple(n for piece in pieces for n in piece), f"{op.name}_split", op, ops)
    starts = [0, *accumulate(map(len, pieces))]
    return Unmerged(base, [tuple(m for d in g for m in range(starts[d], starts[d + 1])) for g in side.groups])


def _as_is(value: Value) -> Unmerged:
    return Unmerged(value, [(d,) for d in range(value.rank)])


def _letters(side: Unmerged, roles: str, names: dict[str, str]) -> str:
    """The letters of an operand's dims in the contraction's equation."""
    letters = [""] * side.base.rank
    for role, group in zip(roles, side.groups):
        for letter, d in zip(names[role], group):
            letters[d] = letter
    return "".join(letters)
