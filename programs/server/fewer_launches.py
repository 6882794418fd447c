"""Passes that make several small kernels of a GPU's step one, each of whose launches costs more than what it moves.

They keep all values, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx
from tpshard.kernels.norm import ADD_NORM, NORM
from tpshard.kernels.rotary import ROTATE
from tpshard.parallelism.node_info import shape_of
from tpshard.parallelism.program import Program, info
from tpshard.programs.server.step_kernels import Edited, argument_by

aten = torch.ops.aten


def add_before_norms(program: Program) -> Program:
    """Makes a norm of a sum compute the sum too, which the next residual reads."""
    edited = Edited(program)
    place = {node: i for i, node in enumerate(edited.graph.nodes)}
    for norm in edited.calls:
        total = argument_by(norm, 0, aten.add.Tensor) if norm.target is NORM else None
        if total is None or total.kwargs or not _alike(total, *total.args):
            continue
        if any(place[user] < place[norm] for user in total.users):
            continue
        _, weight, order, eps = norm.args
        like = replace(info(norm), specs=(*info(total).specs, *info(norm).specs))
        both = edited.put(norm, ADD_NORM, (*total.args, weight, order, eps), like)
        _replace(edited, norm, both, [total, norm])
    return edited.finish()


class _Rotated(NamedTuple):
    """A node that holds a rotated x [1, t, heads, d], and the angles that it is rotated by."""

    result: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def rotate_at_once(program: Program) -> Program:
    """Makes the rotary positions of a layer's queries and keys one kernel (`kernels.rotary`)."""
    edited = Edited(program)
    place = {node: i for i, node in enumerate(edited.graph.nodes)}
    found = [rotated for node in edited.calls if (rotated := _rotated(node)) is not None]
    angles: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]] = {}
    while found:
        pair = [found.pop(0)]
        after = min((place[user] for user in pair[0].result.users), default=0)
        if found and found[0][2:] == pair[0][2:] and place[found[0].result] < after:
            pair.append(found.pop(0))
        last, key = pair[-1].result, (pair[0].cos, pair[0].sin)
        if key not in angles:
            angles[key] = key if last.target is aten.add.Tensor else _by_rows(edited, last, *key)
        like = replace(info(last), specs=tuple(spec for one in pair for spec in info(one.result).specs))
        both = edited.put(last, ROTATE, ([one.x for one in pair], *angles[key]), like)
        _replace(edited, last, both, [one.result for one in pair])
    return edited.finish()


def _rotated(node: fx.Node) -> _Rotated | None:
    """What a node rotates; None for any other node.

    Either x * cos + roll(x) * sin of [1, t, heads, d], or, as in transformers, x * cos + cat(-second half, first half)
    * sin of [1, heads, t, d], between two permutations.
    """
    theirs = _heads_swapped(node)
    total: Any = argument_by(node, 0, aten.add.Tensor) if theirs else node
    if total is None or total.target is not aten.add.Tensor or total.kwargs:
        return None
    straight: Any = argument_by(total, 0, aten.mul.Tensor)
    crossed: Any = argument_by(total, 1, aten.mul.Tensor)
    if straight is None or crossed is None:
        return None
    (x, cos), (swapped, sin) = straight.args, crossed.args
    if not all(isinstance(value, fx.Node) for value in (x, cos, sin, swapped)):
        return None
    shape, rows = tuple(shape_of(x)), tuple(shape_of(cos))
    if len(shape) != 4 or shape[0] != 1 or shape[3] % 2 or (theirs and not _heads_swapped(x)):
        return None
    angles = (1, 1, *shape[2:]) if theirs else (1, shape[1], 1, shape[3])
    one_dtype = len({info(value).specs[0].dtype for value in (x, cos, sin)}) == 1
    once = all(len(inner.users) == 1 for inner in (straight, crossed, swapped, *([total] if theirs else [])))
    halves = (_negated_halves if theirs else _rolled)(swapped, x, shape[3] // 2)
    if rows != angles or tuple(shape_of(sin)) != angles or not (one_dtype and once and halves):
        return None
    return _Rotated(node, x.args[0] if theirs else x, cos, sin)


def _heads_swapped(node: Any) -> bool:
    """Whether a node swaps rows and heads of four dims."""
    return node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1, 3]


def _rolled(node: Any, x: fx.Node, half: int) -> bool:
    """Whether a node is x rolled by half of its last dim."""
    return node.target is aten.roll.default and node.args[0] is x and list(map(list, node.args[1:])) == [[half], [3]]


def _negated_halves(node: Any, x: fx.Node, half: int) -> bool:
    """Whether a node is cat(-second half, first half) of x along the last dim."""
    if node.target is not aten.cat.default or len(node.args[0]) != 2 or list(node.args[1:]) not in ([-1], [3]):
        return False
    first, second = node.args[0]
    negated = argument_by(first, 0, aten.slice.Tensor) if first.target is aten.neg.default else None
    return _is_part(negated, x, half, 2 * half) and _is_part(second, x, 0, half)


def _is_part(node: Any, x: fx.Node, start: int, end: int) -> bool:
    """Whether a node is x from start to end along the last of four dims."""
    if node is None or node.target is not aten.slice.Tensor or len(node.args) != 4:
        return False
    source, dim, begins, ends = node.args
    return source is x and dim in (-1, 3) and begins == start and min(ends, shape_of(x)[3]) == end


def _by_rows(edited: Edited, before: fx.Node, cos: fx.Node, sin: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The angles [1, 1, t, d] as [1, t, 1, d], the first half of the sines negated instead of x."""
    _, _, rows, head = shape_of(cos)

    def put(target: Any, args: Sequence[Any], width: int) -> fx.Node:
        spec = replace(info(sin).specs[0], shape=(1, rows, 1, width))
        return edited.put(before, target, args, replace(info(sin), specs=(spec,), flops=0, global_flops=0))

    cos, sin = (put(aten.reshape.default, (angle, [1, rows, 1, head]), head) for angle in (cos, sin))
    first, second = (put(aten.slice.Tensor, (sin, 3, i * head // 2, (i + 1) * head // 2), head // 2) for i in (0, 1))
    return cos, put(aten.cat.default, ([put(aten.neg.default, (first,), head // 2), second], -1), head)


def _alike(result: fx.Node, *operands: Any) -> bool:
    """Whether all operands have the result's shape and dtype."""
    return all(isinstance(one, fx.Node) and info(one).specs == info(result).specs for one in operands)


def _replace(edited: Edited, before: fx.Node, joined: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Makes the results of a node that computes several stand for those of the nodes that it replaces."""
    for i, node in enumerate(nodes):
        part = edited.put(before, getitem, (joined, i), replace(info(node), flops=0, global_flops=0, saved=False))
        node.replace_all_uses_with(part)


FEWER = (add_before_norms, rotate_at_once)
"""The passes, in order."""
