"""Runs of operations in a step's graph that our kernels do in one: the norm on every device, the others on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tpshard.kernels import rows
from tpshard.kernels.quantized_ops import NORM
from tpshard.kernels.reorder import REORDER

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default)

Match = Callable[[fx.Node], tuple[Any, tuple[Any, ...]] | None]
"""The last node of a run -> what is called instead, and with what; None where it ends no such run."""


def fuse(graph: fx.Graph, device: torch.device) -> dict[str, int]:
    """Puts each run that a kernel stands for in its place; returns how many there were of each."""
    kinds: dict[str, Match] = {"norm": _norm, "order": _order}
    if device.type == "cpu":
        kinds |= {"rotation": _rotation, "gate": _gate}
    found = dict.fromkeys(kinds, 0)
    for node in list(graph.nodes):
        for kind, match in kinds.items():
            if (instead := match(node)) is not None:
                with graph.inserting_before(node):
                    new = graph.call_function(*instead)
                new.meta.update(node.meta)
                node.replace_all_uses_with(new)
                found[kind] += 1
    graph.eliminate_dead_code()
    return found


def _norm(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """x * rsqrt(mean(x * x) + eps) * weight, all but the last product in fp32: models.layers.RMSNorm."""
    if node.target is not aten.mul.Tensor:
        return None
    narrowed = _made(node, 0, aten._to_copy.default)
    unit = _made(narrowed or node, 0, aten.mul.Tensor)
    root = _made(unit, 1, aten.rsqrt.default)
    shifted = _made(root, 0, aten.add.Tensor)
    mean = _made(shifted, 0, aten.mean.dim)
    square = _made(mean, 0, aten.mul.Tensor)
    if square is None or shifted.kwargs:
        return None
    wide, weight, eps = unit.args[0], node.args[1], shifted.args[1]
    widened = wide if narrowed is None else _made(unit, 0, aten._to_copy.default)
    if widened is None or not isinstance(weight, fx.Node) or not isinstance(eps, (int, float)):
        return None
    if square.args != (wide, wide) or [list(mean.args[1]), *mean.args[2:]] != [[-1], True]:
        return None
    return NORM, (wide if narrowed is None else widened.args[0], weight, None, eps)


def _order(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """A norm that is read in one order only: it stores its result so."""
    norm = _made(node, 0, NORM)
    if node.target is not REORDER or norm is None or len(norm.users) > 1 or norm.args[2] is not None:
        return None
    (x, weight, _, eps), (_, order, blocks) = norm.args, node.args
    return (NORM, (x, weight, order, eps)) if blocks == 1 else None


def _rotation(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """x * cos + roll(x, half) * sin, with x a view whose last dim is twice that half: models.rope.rotate."""
    kept, turned = (_made(node, place, aten.mul.Tensor) for place in (0, 1))
    rolled = _made(turned, 0, aten.roll.default)
    if node.target is not aten.add.Tensor or node.kwargs or kept is None or rolled is None:
        return None
    x, shifts, *dims = rolled.args
    if x is not kept.args[0] or x.target not in _VIEWS:
        return None
    if [[2 * shift for shift in shifts], *map(list, dims)] != [[x.args[1][-1]], [-1]]:
        return None
    cos, sin = kept.args[1], turned.args[1]
    return (rows.rotate, (x, cos, sin)) if isinstance(cos, fx.Node) and isinstance(sin, fx.Node) else None


def _gate(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """silu(x) * up: models.llama.MLP."""
    silu = _made(node, 0, aten.silu.default)
    if node.target is not aten.mul.Tensor or silu is None or not isinstance(node.args[1], fx.Node):
        return None
    return rows.gate, (silu.args[0], node.args[1])


def _made(node: Any, place: int, target: Any) -> Any:
    """The argument of a node (or None) at a place, where this operation made it; else None."""
    found = node.args[place] if node is not None and len(node.args) > place else None
    return found if isinstance(found, fx.Node) and found.target is target else None
