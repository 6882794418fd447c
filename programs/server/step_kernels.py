"""Passes that choose the kernels of a server's step. They keep all values, except for the order of sums.

They rewrite one device's program before ranks compare its fingerprint and run it. A weight that a kernel reads in a
special layout becomes an input in that layout (`program.Held`); the executor converts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import fx
from tpshard.kernels.experts.expert_linear import fixed_rows_expert_linear
from tpshard.kernels.experts.experts import fixed_rows_experts
from tpshard.kernels.experts.quantized_experts import quantized_experts
from tpshard.kernels.linear import fixed_rows_linear, linear, packed_dtype
from tpshard.kernels.norm import NORM
from tpshard.kernels.quantized.int4 import int4_linear, parts_linear
from tpshard.kernels.quantized.quantized_linear import quantized_gate, quantized_linear
from tpshard.kernels.quantized.reorder import REORDER
from tpshard.parallelism.node_info import shape_of
from tpshard.parallelism.passes.copy import copy_program
from tpshard.parallelism.program import INFO, Held, Info, Port, Program, Spec, info
from tpshard.programs.server.captured_steps import APART
from tpshard.programs.server.served import Coded

aten = torch.ops.aten
EXPERTS = torch.ops.tpshard.experts.default
FIXED_ROWS: dict[Any, Any] = {
    EXPERTS: fixed_rows_experts, torch.ops.tpshard.expert_linear.default: fixed_rows_expert_linear
}  # fmt: skip
"""For each operation of experts, the one whose rows do not depend on each other."""
Settings = ParamSpec("Settings")


class Edited:
    """A copy of a program whose nodes and inputs a pass edits."""

    def __init__(self, program: Program) -> None:
        self.program, _ = copy_program(program)
        self.graph = self.program.graph
        feeds = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.ports = dict(zip(feeds, program.inputs))
        self.further: dict[tuple[fx.Node, str], fx.Node] = {}
        """(weight, layout) -> the additional input that holds the weight in it, where the plain one is read too."""

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def put(self, before: fx.Node, target: Any, args: Sequence[Any], like: Info) -> fx.Node:
        """Inserts a node before another, with the same information as `like`."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, tuple(args))
        node.meta[INFO] = like
        return node

    def hold(self, weight: fx.Node, held: Held) -> fx.Node:
        """The input that holds a weight in another layout: the weight's own, or a new one if other nodes read it
        plain."""
        earlier = self.further.get((weight, held.form))
        if earlier is not None:
            return earlier
        if len(weight.users) > 1:
            source, port = weight, self.ports[weight]
            with self.graph.inserting_after(source):
                weight = self.further[source, held.form] = self.graph.placeholder(f"{source.name}_{held.form}")
            weight.meta[INFO] = info(source)
            self.ports[weight] = replace(port, name=f"{port.name} ({held.form})")
        self.ports[weight] = replace(self.ports[weight], held=held)
        weight.meta[INFO] = replace(info(weight), specs=(Spec((held.bytes,), torch.uint8),))
        return weight

    def join(self, products: Sequence[fx.Node]) -> fx.Node:
        """The input that holds the weights of several products, each read by one only, along their outputs."""
        weights: list[Any] = [product.args[1] for product in products]
        ports = [self.ports[weight] for weight in weights]
        first, size = ports[0], sum(port.local_bytes for port in ports)
        names = tuple(name for port in ports for name in (port.held.of if port.held else (port.name,)))
        layouts = tuple(port.layout for port in ports)
        own = layouts if len(set(layouts)) > 1 else ()
        for weight in weights[1:]:
            self.drop(weight)
        return self.hold(weights[0], Held(first.held.form if first.held else "dense", size, names, own))

    def drop(self, feed: fx.Node) -> None:
        """Removes an input that nothing reads."""
        del self.ports[feed]

    def finish(self) -> Program:
        """The edited program without unused nodes."""
        for source, _ in self.further:
            if not source.users:
                self.ports.pop(source, None)
        for node in reversed(list(self.graph.nodes)):
            unread = node.op == "call_function" and info(node).comm is None
            if not node.users and (unread or (node.op == "placeholder" and node not in self.ports)):
                self.graph.erase_node(node)
        self.graph.lint()
        feeds = [node for node in self.graph.nodes if node.op == "placeholder"]
        return replace(self.program, inputs=tuple(self.ports[node] for node in feeds))


def at_each_call(
    edit: Callable[Concatenate[Edited, fx.Node, Settings], None],
) -> Callable[Concatenate[Program, Settings], Program]:
    """A pass that makes an edit at every operation of a program."""

    @wraps(edit)
    def edit_program(program: Program, *args: Settings.args, **kwargs: Settings.kwargs) -> Program:
        edited = Edited(program)
        for node in edited.calls:
            edit(edited, node, *args, **kwargs)
        return edited.finish()

    return edit_program


def argument_by(node: Any, place: int, *targets: Any) -> Any:
    """The argument of a node at index `place` if one of the `targets` computed it, else None."""
    argument = node.args[place] if isinstance(node, fx.Node) and len(node.args) > place else None
    return argument if isinstance(argument, fx.Node) and argument.target in targets else None


# ---- products and views ---------------------------------------------------------------------------------------------
@at_each_call
def merge_views(edited: Edited, node: fx.Node) -> None:
    """Merges views of views, and removes views that change nothing."""
    if node.target is not aten.reshape.default:
        return
    while (inner := argument_by(node, 0, aten.reshape.default)) is not None:
        node.args = (inner.args[0], node.args[1])
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if shape_of(source) == shape_of(node):
        node.replace_all_uses_with(source)


@at_each_call
def fold_linears(edited: Edited, node: fx.Node) -> None:
    """Turns a product with a transposed matrix, and the views around it, into one `linear` over any number of dims."""
    turned = argument_by(node, 1, aten.permute.default) if node.target is aten.mm.default else None
    if turned is None or list(turned.args[1]) != [1, 0]:
        return
    rows, weight = node.args[0], turned.args[0]
    reshaped = argument_by(node, 0, aten.reshape.default)
    if reshaped is not None and shape_of(reshaped.args[0])[-1] == shape_of(rows)[-1]:
        rows = reshaped.args[0]
    spec = Spec((*shape_of(rows)[:-1], shape_of(node)[-1]), info(node).specs[0].dtype)
    product = edited.put(node, linear, (rows, weight), replace(info(node), specs=(spec,)))
    for user in list(node.users):
        if user.target is aten.reshape.default and shape_of(user) == spec.shape:
            user.replace_all_uses_with(product)
        elif user.target is aten.reshape.default:
            user.args = (product, user.args[1])
        else:
            moves = replace(info(node), flops=0, global_flops=0, saved=False)
            flat = edited.put(user, aten.reshape.default, (product, list(shape_of(node))), moves)
            user.replace_input_with(node, flat)


@at_each_call
def fix_rows(edited: Edited, node: fx.Node, kind: str) -> None:
    """Makes linears and experts multiply a fixed number of rows at a time, so that rows are independent.

    See `kernels.linear`. On a `cpu` the weights are held as its library packs them.
    """
    node.target = FIXED_ROWS.get(node.target, node.target)
    if node.target is not linear:
        return
    node.target, (rows, weight) = fixed_rows_linear, node.args
    assert isinstance(weight, fx.Node)
    port = edited.ports.get(weight)
    packed = None if port is None else packed_dtype(port.dtype)
    if kind != "cpu" or port is None or packed is None:
        return
    size = port.local_bytes * packed.itemsize // port.dtype.itemsize
    held = Held("onednn", size, (port.name,)) if port.held is None else replace(port.held, form="onednn", bytes=size)
    node.args = (rows, edited.hold(weight, held))


@at_each_call
def count_useful(edited: Edited, node: fx.Node, flops: Mapping[str, int]) -> None:
    """Sets the useful FLOPs of padded operations. flops: those of each operation without padding."""
    facts = info(node)
    if facts.global_flops:
        node.meta[INFO] = replace(facts, global_flops=flops.get(facts.origin, facts.global_flops))


# ---- norms ----------------------------------------------------------------------------------------------------------
@at_each_call
def fuse_norms(edited: Edited, node: fx.Node) -> None:
    """Fuses x * rsqrt(mean(x * x) + eps) * weight, fp32 up to the last product, into one kernel (`kernels.norm`)."""
    if (operands := _norm(node)) is not None:
        norm = edited.put(node, NORM, operands, info(node))
        node.replace_all_uses_with(norm)


def _norm(node: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of `NORM` for a node that computes the result of a norm; None for any other node."""
    if node.target is not aten.mul.Tensor:
        return None
    return _weighted(node, 0) or _weighted(node, 1)


def _weighted(node: fx.Node, place: int) -> tuple[Any, ...] | None:
    """The arguments of `NORM` where a product's operand at `place` is what its other one weighs."""
    narrowed, weight = argument_by(node, place, aten._to_copy.default), node.args[1 - place]
    unit = argument_by(node if narrowed is None else narrowed, place if narrowed is None else 0, aten.mul.Tensor)
    root = argument_by(unit, 1, aten.rsqrt.default)
    shifted = argument_by(root, 0, aten.add.Tensor)
    mean = argument_by(shifted, 0, aten.mean.dim)
    square = argument_by(mean, 0, aten.mul.Tensor, aten.pow.Tensor_Scalar)
    if square is None or shifted.kwargs:
        return None
    wide, eps = unit.args[0], shifted.args[1]
    widened = wide if narrowed is None else argument_by(unit, 0, aten._to_copy.default)
    if widened is None or not isinstance(weight, fx.Node) or not isinstance(eps, (int, float)):
        return None
    squared = square.args in ((wide, wide), (wide, 2))
    if not squared or [list(mean.args[1]), *mean.args[2:]] != [[-1], True] or len(shape_of(weight)) != 1:
        return None
    x = wide if narrowed is None else widened.args[0]
    assert isinstance(x, fx.Node)
    return (x, weight, None, eps) if info(x).specs[0].dtype == info(node).specs[0].dtype else None


@at_each_call
def store_norms_in_order(edited: Edited, node: fx.Node) -> None:
    """Makes a norm that is read in only one order store its result in that order."""
    norm = argument_by(node, 0, NORM) if node.target is REORDER else None
    if norm is None or len(norm.users) > 1 or norm.args[2] is not None or node.args[2] != 1:
        return
    x, weight, _, eps = norm.args
    node.replace_all_uses_with(edited.put(node, NORM, (x, weight, node.args[1], eps), info(norm)))


# ---- quantized weights ----------------------------------------------------------------------------------------------
@at_each_call
def quantize(
    edited: Edited, node: fx.Node, weights: Mapping[str, Coded], kind: str, invariant: bool, parts: str = ""
) -> None:
    """Makes linears with these weights multiply codes: by torch's int4 product on a `cpu`, by Triton on a
    `gpu`, with `invariant` in the same order of sums for any number of rows.

    parts: on a CPU, how the weights are held in parts (see `kernels.int4`), `int4` or `dense`; "" for whole ones.
    """
    port = edited.ports.get(node.args[1]) if node.target is linear else None  # type: ignore[arg-type]
    if port is None or port.name not in weights:
        return
    outputs, inputs = port.local
    held = outputs * (4 * inputs if parts == "dense" else weights[port.name].row_bytes(port.shape[1], inputs))
    form = "packed" if kind != "cpu" else f"{parts} parts" if parts else "int4"
    weight = edited.hold(node.args[1], Held(form, held, (port.name,)))  # type: ignore[arg-type]
    node.target = quantized_linear if kind != "cpu" else parts_linear if parts else int4_linear
    node.args = (node.args[0], weight) if kind == "cpu" else (node.args[0], weight, invariant)


@at_each_call
def quantize_experts(edited: Edited, node: fx.Node, weights: Mapping[str, Coded], invariant: bool) -> None:
    """Makes experts with these weights multiply codes; an input holds their three stacks of matrices."""
    if node.target is not EXPERTS:
        return
    stacks: Sequence[fx.Node] = node.args[3:]  # type: ignore[assignment]
    ports = [edited.ports[stack] for stack in stacks if stack in edited.ports and len(stack.users) == 1]
    if len(ports) < len(stacks) or not all(port.name in weights for port in ports):
        return
    gate, up = (weights[port.name].alike for port in ports[:2])
    held = Held("experts" if gate == up else APART, _expert_bytes(ports, weights), tuple(port.name for port in ports))
    packed = edited.hold(stacks[0], held)
    node.target, node.args = quantized_experts, (*node.args[:3], packed, invariant)
    for stack in stacks[1:]:
        edited.drop(stack)


def _expert_bytes(ports: Sequence[Port], weights: Mapping[str, Coded]) -> int:
    """Bytes of gate, up and down of a device's experts, with the orders of each expert's inputs if the folder has some:
    one where gate and up are multiplied as one matrix."""
    (count, _, width), gate, up = ports[0].local, weights[ports[0].name], weights[ports[1].name]
    read = [gate] if gate.alike == up.alike else [gate, up]
    held = 8 * count * width * sum(1 for one in read if one.order)
    for port in ports:
        _, outputs, inputs = port.local
        held += count * outputs * weights[port.name].row_bytes(port.shape[2], inputs)
    return held


# ---- weights side by side -------------------------------------------------------------------------------------------
@at_each_call
def join_gates(edited: Edited, node: fx.Node, weights: Mapping[str, Coded]) -> None:
    """Fuses silu(x @ gate) * (x @ up) of quantized weights on a GPU into one launch."""
    silu = argument_by(node, 0, aten.silu.default) or argument_by(node, 1, aten.silu.default)
    if node.target is not aten.mul.Tensor or silu is None:
        return
    gate = argument_by(silu, 0, quantized_linear)
    up = argument_by(node, 1 if node.args[0] is silu else 0, quantized_linear)
    if gate is None or up is None or gate.args[0] is not up.args[0]:
        return
    form = _joinable(edited, gate, weights)
    once = all(len(read.users) == 1 for read in (silu, gate, up))
    if not once or form is None or form != _joinable(edited, up, weights):
        return
    x, _, invariant = gate.args
    like = _of_all([node, gate, up, silu], saved=True)
    node.replace_all_uses_with(edited.put(node, quantized_gate, (x, edited.join([gate, up]), invariant), like))


def join_products(program: Program, weights: Mapping[str, Coded]) -> Program:
    """Makes products of one value by several weights one: q, k and v, or gate and up, unless `join_gates` did."""
    edited = Edited(program)
    alike: dict[Any, list[fx.Node]] = {}
    for node in edited.calls:
        if (form := _joinable(edited, node, weights)) is not None:
            alike.setdefault((node.target, node.args[0], *node.args[2:], form), []).append(node)
    for products in alike.values():
        if len(products) > 1:
            _join_products(edited, products)
    return edited.finish()


def _join_products(edited: Edited, products: Sequence[fx.Node]) -> None:
    first, shapes = products[0], [shape_of(product) for product in products]
    spec = Spec((*shapes[0][:-1], sum(shape[-1] for shape in shapes)), info(first).specs[0].dtype)
    like = _of_all(products, specs=(spec,))
    joined = edited.put(first, first.target, (first.args[0], edited.join(products), *first.args[2:]), like)
    if (sums := _biased(edited, products)) is not None:
        like = replace(info(sums[0]), specs=(spec,))
        joined, products = edited.put(first, aten.add.Tensor, (joined, edited.join(sums)), like), sums
    end = 0
    for product, shape in zip(products, shapes):
        start, end = end, end + shape[-1]
        own = replace(info(product), flops=0, global_flops=0, saved=False)
        part = edited.put(first, aten.slice.Tensor, (joined, len(shape) - 1, start, end), own)
        product.replace_all_uses_with(part)


def _biased(edited: Edited, products: Sequence[fx.Node]) -> list[fx.Node] | None:
    """The additions of a bias to each product; None where one has none, or a bias that others read too."""
    sums = []
    for product in products:
        reader = next(iter(product.users))
        bias = reader.args[1] if reader.target is aten.add.Tensor and len(reader.args) == 2 else None
        port = None if bias is product else edited.ports.get(bias)  # type: ignore[arg-type]
        alike = port is not None and (port.local, port.dtype) == (shape_of(product)[-1:], info(product).specs[0].dtype)
        if len(product.users) > 1 or reader.kwargs or not alike or len(bias.users) > 1:  # type: ignore[union-attr]
            return None
        sums.append(reader)
    return sums


def _joinable(edited: Edited, node: fx.Node, weights: Mapping[str, Coded]) -> Any:
    """A key that is equal for products whose weights can be one matrix; None for another node, or a weight that others
    read too."""
    if node.target not in (linear, quantized_linear, int4_linear, parts_linear):
        return None
    port = edited.ports.get(node.args[1])  # type: ignore[arg-type]
    if port is None or len(node.args[1].users) > 1:  # type: ignore[union-attr]
        return None
    return port.dtype if port.held is None else (port.held.form, weights[port.held.of[0]].alike)


def _of_all(nodes: Sequence[fx.Node], **changes: Any) -> Info:
    """The information on the first of several nodes, with the FLOPs of all."""
    flops, useful = (sum(getattr(info(node), of) for node in nodes) for of in ("flops", "global_flops"))
    return replace(info(nodes[0]), flops=flops, global_flops=useful, **changes)


JOINS = (join_gates, join_products)
"""Passes after which fewer operations multiply, in order; each costs more than a row's share of the product."""
