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
    result: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def rotate_at_once(program: Program) -> Program:
    """Makes the rotary positions of a layer's queries and keys one kernel (`kernels.rotary`)."""
    edited = Edited(program)
    place = {node: i for i, node in enumerate(edited.graph.nodes)}
    found = [rotated for node in edited.calls if (rotated := _rotated(node)) is not None]
    while found:
        pair = [found.pop(0)]
        after = min(place[user] for user in pair[0].result.users)
        if found and found[0][2:] == pair[0][2:] and place[found[0].result] < after:
            pair.append(found.pop(0))
        last = pair[-1].result
        like = replace(info(last), specs=tuple(spec for one in pair for spec in info(one.result).specs))
        both = edited.put(last, ROTATE, ([one.x for one in pair], *pair[0][2:]), like)
        _replace(edited, last, both, [one.result for one in pair])
    return edited.finish()


def _rotated(node: fx.Node) -> _Rotated | None:
    """What a node rotates, x * cos + roll(x) * sin; None for any other node."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    straight, turned = (argument_by(node, i, aten.mul.Tensor) for i in (0, 1))
    roll = argument_by(turned, 0, aten.roll.default)
    if straight is None or roll is None or roll.args[0] is not straight.args[0]:
        return None
    x, cos, sin = straight.args[0], straight.args[1], turned.args[1]
    if not isinstance(cos, fx.Node) or not isinstance(sin, fx.Node):
        return None
    shape = shape_of(x)
    halves = [list(part) for part in roll.args[1:]] == [[shape[-1] // 2], [3]] and len(shape) == 4 and not shape[-1] % 2
    rows = (1, shape[1], 1, shape[-1]) if halves else ()
    once = all(len(inner.users) == 1 for inner in (straight, turned, roll))
    fits = shape[0] == 1 and tuple(shape_of(cos)) == tuple(shape_of(sin)) == rows
    one_dtype = len({info(value).specs[0].dtype for value in (x, cos, sin)}) == 1
    return _Rotated(node, x, cos, sin) if halves and once and fits and one_dtype else None


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
