"""Quantized linears in a step: one rank's part of each in its layout, and the graph that multiplies with them.

With act-order the rows of a group lie apart; sorted, they need their inputs gathered alike. What `layout` does for a
row-parallel product (see kernels/layouts.py): `tp_aware` lets the products before it write the sorted order, which is
possible in the MLP; `local_sort` gathers a rank's own activations; `naive` gathers those of all ranks first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from tpshard.kernels import quantized_ops
from tpshard.kernels.packed import Packed
from tpshard.kernels.quantized import Quantized

Block = tuple[tuple[int, int], tuple[int, int]]
"""(start, size) of a rank's outputs and inputs in a whole weight [outputs, inputs]."""
ReadQuantized = Callable[[str], Quantized | None]
"""A parameter's quantized form, whole; None for one that is dense."""


@dataclass(frozen=True)
class Linear:
    """One rank's part of one quantized weight."""

    packed: Packed | None
    """None where no kernel of this device multiplies it quantized; then it is `dense` [outputs, inputs]."""
    dense: Tensor | None
    order: Tensor | None
    """Of the inputs, before the product; None: as they come."""
    collect: bool = False
    """Whether `order` is of all ranks' inputs."""


@dataclass(frozen=True)
class Linears:
    """All quantized weights of a rank by parameter name, and how the biases of the MLP go along."""

    of: Mapping[str, Linear]
    turned: Mapping[str, Tensor]
    """Bias name -> its elements, in the order in which the rank's weights make them."""


def cached(read: ReadQuantized) -> ReadQuantized:
    """`read` that keeps the last few: the weights of one MLP are asked for together."""
    return lru_cache(maxsize=3)(read)


def prepare(
    parts: Mapping[str, Block], read: ReadQuantized, layout: str, device: torch.device | str, dtype: torch.dtype,
    dense: bool | None = None,
) -> Linears:  # fmt: skip
    """A rank's parts of the weights in `parts`, by parameter name; those that `read` has no quantized form of are
    left out. `dense` keeps them as the dense weights that they stand for; None: where that is faster."""
    if dense is None:
        dense = torch.device(device).type == "cpu" and dense_is_faster(parts, dtype)
    found: dict[str, Linear] = {}
    turned: dict[str, Tensor] = {}
    for name, ((first_out, outputs), (first_in, inputs)) in parts.items():
        whole = read(name)
        if whole is None:
            continue
        columns, rows = torch.arange(first_out, first_out + outputs), torch.arange(first_in, first_in + inputs)
        order, collect = None, False
        turn = _turn(name, read, layout)
        if turn is not None and name.endswith(".down.weight"):
            rows = turn[rows]  # the products before it write this order
        elif turn is not None:
            columns = turn[columns]
            turned[name.removesuffix("weight") + "bias"] = columns
        elif layout == "naive" and inputs < whole.inputs and not whole.sorted:
            rows = whole.order()[rows]
            order, collect = rows, True
        own = whole.take_columns(columns).take_rows(rows)
        if not own.sorted:
            order = own.order()
            own = own.take_rows(order)
        found[name] = _linear(replace(own, bias=None), order, collect, device, dtype, dense)
    return Linears(found, turned)


def dense_is_faster(parts: Mapping[str, Block], dtype: torch.dtype) -> bool:
    """Whether a CPU multiplies 8 rows faster by the dense weights: those with matrix units do, in bf16, as long as the
    weights need not come from memory. (2816 x 1024, one core with AMX: 0.46 ms, int4 0.63.)

    Decided by the machine and the sizes alone, so that a model gives the same bits whenever it is started.
    """
    size = sum(outputs * inputs for (_, outputs), (_, inputs) in parts.values()) * dtype.itemsize
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() and size <= last_level_cache()


def last_level_cache() -> int:
    """Bytes of the CPU's last cache as Linux tells it; 32 MiB where it does not."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)
    return 32 << 20


def _turn(name: str, read: ReadQuantized, layout: str) -> Tensor | None:
    """The order in which the MLP's hidden values are made, where the layout turns them and all of it is quantized."""
    module, _, leaf = name.removesuffix(".weight").rpartition(".")
    if layout != "tp_aware" or leaf not in ("gate", "up", "down"):
        return None
    down, up = read(f"{module}.down.weight"), read(f"{module}.up.weight")
    return None if down is None or up is None or down.sorted else down.order()


def _linear(
    own: Quantized, order: Tensor | None, collect: bool, device: torch.device | str, dtype: torch.dtype, dense: bool
) -> Linear:
    """A sorted part, in the form of the device."""
    order = None if order is None else order.to(device)
    if dense:
        return Linear(None, own.dequantize(dtype).T.contiguous(), order, collect)
    packed = quantized_ops.prepare(own, device, dtype)
    if torch.device(device).type == "cpu":
        if packed.int4 is None:  # to dequantize it in every step would be slower than to keep it dense
            return Linear(None, own.dequantize(dtype).T.contiguous(), order, collect)
        packed = replace(packed, words=packed.words.new_zeros(1).expand(packed.words.shape))  # int4 replaces it
    return Linear(packed, None, order, collect)


def rewrite(
    graph: fx.Graph, nodes: list[fx.Node], names: Mapping[fx.Node, str], linears: Mapping[str, Linear],
    all_gather: Callable[[Tensor], Tensor], invariant: bool,
) -> list[Tensor]:  # fmt: skip
    """Lets products (nodes of `rows_linear`) whose weight input is quantized use the quantized form.

    `names` says which parameter an input node is. Returns the tensors that the graph's new inputs, after all others,
    take. `all_gather` joins all ranks' activations [rows, inputs] along the last dim. With `invariant` a row's bits do
    not depend on the others; a CPU's int4 product never lets them.
    """
    new: list[Tensor] = []
    inputs: dict[int, fx.Node] = {}
    ordered: dict[tuple[fx.Node, int], fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def given(tensor: Tensor | None) -> fx.Node | None:
        nonlocal last
        if tensor is None:
            return None
        same = next((t for t in new if t is tensor or _same_order(t, tensor)), tensor)
        if id(same) not in inputs:
            with graph.inserting_after(last):
                inputs[id(same)] = last = graph.placeholder(f"quantized_{len(new)}")
            new.append(same)
        return inputs[id(same)]

    for node in nodes:
        x, source, bias = node.args
        linear = linears.get(names.get(source, ""))  # type: ignore[arg-type]
        if linear is None or not isinstance(x, fx.Node):
            continue
        order = given(linear.order)
        with graph.inserting_before(node):
            if order is not None:
                if (x, id(order)) not in ordered:
                    whole = graph.call_function(_calls(all_gather), (x,)) if linear.collect else x
                    ordered[x, id(order)] = graph.call_function(torch.index_select, (whole, 1, order))
                x = ordered[x, id(order)]
            if linear.packed is None:
                node.args = (x, source, bias)
                continue
            *tensors, form = quantized_ops._arguments(linear.packed)
            fixed = invariant or linear.packed.int4 is not None
            y = graph.call_function(
                torch.ops.tpshard.quantized_matmul.default, (x, *(given(t) for t in tensors), form, fixed)
            )
            if bias is not None:
                y = graph.call_function(torch.add, (y, bias))
        node.replace_all_uses_with(y)
        graph.erase_node(node)
    return new


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Orders that several weights share (q, k and v; gate and up) are one input, and gathered once."""
    return a.dtype == b.dtype == torch.int64 and a.shape == b.shape and torch.equal(a, b)


def _calls(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def all_gather(x: Tensor) -> Tensor:
        return function(x)

    return all_gather
