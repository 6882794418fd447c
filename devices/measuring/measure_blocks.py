"""The graphs that `doctor --measure` times: blocks of a transformer layer without matrix products and attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
EXPONENTIALS = (aten.exp.default, aten.silu.default)
HEAD_DIM = 32


class Tape:
    """Builds a graph that runs like a program, and counts its operations, the bytes they move, and exponentials."""

    def __init__(self) -> None:
        self.graph, self.inputs = fx.Graph(), list[Tensor]()
        self.ops = self.moved = self.exponentials = 0
        self.root: dict[fx.Node, fx.Node] = {}
        """For each view, the node whose memory it shares."""

    def feed(self, *shape: int) -> fx.Node:
        """Adds an input of this shape, with random values."""
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["value"] = torch.rand(shape) + 0.5
        self.inputs.append(node.meta["value"])
        return node

    def view(self, target: Any, source: fx.Node, *args: Any) -> fx.Node:
        """Adds a view of `source`, which moves no bytes."""
        node = self._call(target, source, *args)
        self.root[node] = self.root.get(source, source)
        return node

    def op(self, target: Any, *args: Any) -> fx.Node:
        """Adds an operation, and counts it."""
        node = self._call(target, *args)
        self.ops += 1
        self.moved += sum(_bytes(n) for n in (*node.all_input_nodes, node))
        self.exponentials += node.meta["value"].numel() if target in EXPONENTIALS else 0
        return node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["value"] = target(*fx.map_arg(args, lambda n: n.meta["value"].to("meta")))
        return node

    def module(self, *results: fx.Node) -> fx.GraphModule:
        """Ends the graph with these results, and returns it."""
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def _bytes(node: fx.Node) -> int:
    return 4 * int(node.meta["value"].numel())


def forward(tape: Tape, x: fx.Node, weight: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Adds a block: a norm, a rotation of each head, a copy in another order, a gate, and much scaling and adding.

    Returns the result and the tensors that its gradient needs.
    """
    op, mul, add = tape.op, partial(tape.op, aten.mul.Tensor), partial(tape.op, aten.add.Tensor)
    inverse = op(aten.rsqrt.default, op(aten.mean.dim, mul(x, x), [-1], True))
    scaled = mul(x, inverse)
    normed = mul(scaled, weight)
    heads, angle = _heads(tape, normed), tape.view(aten.slice.Tensor, weight, 0, 0, HEAD_DIM)
    turned = add(mul(heads, angle), mul(op(aten.roll.default, heads, [1], [-1]), angle))
    gate = op(aten.silu.default, _reorder(tape, turned, x))
    out = add(x, mul(mul(gate, normed), weight))
    return out, (inverse, scaled, normed, gate, out)


def backward(tape: Tape, x: fx.Node, saved: tuple[fx.Node, ...], weight: fx.Node) -> fx.Node:
    """Adds the gradient of a block: sums over rows, a copy in another order, and an exponential."""
    op, mul, add = tape.op, partial(tape.op, aten.mul.Tensor), partial(tape.op, aten.add.Tensor)
    inverse, scaled, normed, gate, out = saved
    grad = op(aten.exp.default, op(aten.div.Tensor, normed, out))
    back = add(mul(grad, gate), mul(mul(grad, normed), weight))
    op(aten.sum.dim_IntList, mul(back, scaled), [0])
    back = _reorder(tape, _heads(tape, back), x)
    row = op(aten.sum.dim_IntList, mul(back, gate), [-1], True)
    down = add(mul(back, inverse), mul(mul(scaled, row), weight))
    return add(mul(down, weight), add(x, mul(down, inverse)))


def _heads(tape: Tape, x: fx.Node) -> fx.Node:
    """Views rows [rows, width] as 8 sequences of heads: [8, rows / 8, heads, head size]."""
    rows, width = x.meta["value"].shape
    return tape.view(aten.reshape.default, x, [8, rows // 8, width // HEAD_DIM, HEAD_DIM])


def _reorder(tape: Tape, heads: fx.Node, like: fx.Node) -> fx.Node:
    """Copies the heads into the order [sequence, head, row, size], in the shape of `like`."""
    turned = tape.view(aten.permute.default, heads, [0, 2, 1, 3])
    return tape.op(aten.reshape.default, turned, list(like.meta["value"].shape))


def blocks(elements: int, count: int) -> tuple[Tape, fx.Node]:
    """A graph of `count` blocks in a row on this many elements, then of their gradients in reverse; and its result."""
    tape = Tape()
    width = 128 if elements <= 1 << 18 else 512
    x, weight = tape.feed(elements // width, width), tape.feed(width)
    saved_of = []
    for _ in range(count):
        x, saved = forward(tape, x, weight)
        saved_of.append(saved)
    for saved in reversed(saved_of):
        x = backward(tape, x, saved, weight)
    return tape, x
