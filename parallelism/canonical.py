"""Rewriting a captured graph so that shardings propagate through it: contractions over any dims, few kinds of views.

`F.linear` on [batch, seq, embed] is recorded as view + mm + view, and a sharding of seq cannot pass a view that merges
[batch, seq]. Folding the views into one contraction `bsk,nk->bsn` keeps every dim visible, for any module's code.
"""

from __future__ import annotations

import math
import string
from typing import Any, NamedTuple

import torch
from tpshard.parallelism.anchors import is_boundary, is_named, is_role
from tpshard.parallelism.graph import Graph, Op, Ref, Value
from tpshard.parallelism.rules.contraction import contract
from tpshard.parallelism.rules.pieces import bounds
from tpshard.parallelism.rules.strides import of_slice, of_view
from tpshard.parallelism.rules.table import entry_of

aten = torch.ops.aten


def canonicalize(graph: Graph) -> None:
    """Rewrites a captured graph into canonical form, in place, with the same results."""
    take_roles(graph)
    remove_identities(graph)
    unify(graph)
    join_pieces(graph)
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
    """Gives every value the role of its views."""
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


class Unmerged(NamedTuple):
    """A value seen through views: each of its dims is a group of dims of `base`."""

    base: Value
    groups: list[tuple[int, ...]]


def unmerge(value: Value) -> Unmerged:
    """Follows permutes, views that merge dims, and new dims of size 1 back to the value that has every dim."""
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
        have = 1
        while i < len(source) and (have < size or (have == size and source[i] == 1 and size != 1)):
            have *= source[i]
            group.append(i)
            i += 1
        if size == 1 and i < len(source) and source[i] == 1:
            group, i = [i], i + 1
        if have != size:
            return None
        out.append(tuple(group))
    return out if i == len(source) else None


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
            _fold_sum(graph, op, ops)
        else:
            ops.append(op)
    graph.ops = ops
    graph.refresh_users()


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
    _add_before_view(graph, op, ops)


def _result(ops: list[Op]) -> Value:
    return ops[-1].results[0]


def _add_before_view(graph: Graph, op: Op, ops: list[Op]) -> None:
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
    """Appends a view of a value, as a part of `op`, and returns its result. Several get numbers after the name."""
    alike = sum(other.name == name or other.name.startswith(f"{name}_") for other in ops[-8:])
    name = f"{name}_{alike}" if alike else name
    view = Op(name, aten.view.default, (Ref(0), shape), {}, [value], [], op.place)
    view.results = [Value(name, shape, value.dtype, view)]
    ops.append(view)
    return view.results[0]


def _fold_sum(graph: Graph, op: Op, ops: list[Op]) -> None:
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
            a, b = _merge_group(a, of_a, op, ops), _merge_group(b, of_b, op, ops)
        if a is None or b is None:
            a, b = _as_is(op.operands[0]), _as_is(op.operands[1])
            break
    letters = iter(string.ascii_lowercase)
    names: dict[str, str] = {}
    for roles, side in ((roles_a, a), (roles_b, b)):
        for role, group in zip(roles, side.groups):
            names.setdefault(role, "".join(next(letters) for _ in group))
    out_letters = "".join(names[r] for r in out_roles)
    spelled = f"{_letters(a, roles_a, names)},{_letters(b, roles_b, names)}->{out_letters}"
    sizes = {
        letter: side.base.shape[d]
        for roles, side in ((roles_a, a), (roles_b, b))
        for role, group in zip(roles, side.groups)
        for letter, d in zip(names[role], group)
    }
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


def _as_is(value: Value) -> Unmerged:
    return Unmerged(value, [(d,) for d in range(value.rank)])


def _letters(side: Unmerged, roles: str, names: dict[str, str]) -> str:
    """The letters of an operand's dims in the contraction's equation."""
    letters = [""] * side.base.rank
    for role, group in zip(roles, side.groups):
        for letter, d in zip(names[role], group):
            letters[d] = letter
    return "".join(letters)


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
            op.target, op.args = aten.view.default, (Ref(0), op.results[0].shape)
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
    """Gives every reader of a value without inputs (a filled tensor, positions, views of these) a copy of its own.

    Readers that share zeros should not affect each other's sharding.
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
    """Gives values named by the model that name, prefixed by the module's path; their gradients end in `.grad`.

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
