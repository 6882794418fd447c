"""Rewrites a captured program for act-ordered weights: GPTQ weights whose rows are sorted by quantization group.

Such a weight needs its inputs in the same order, which the operation `tpshard::reorder` produces. For a linear whose
inputs are sharded, the layout decides the order, and so where the partitioner must gather:

    naive        one order over all rows: the permutation crosses shards, which requires a gather
    local_sort   each device's rows sorted by themselves: a permutation in blocks, without a gather
    tp_aware     the naive order, moved back into the columns of the linears that compute the inputs
                 (`parallelism.partitioning.absorb`), so that no operation is left; where that is impossible, local_sort

A device that holds all inputs of a linear permutes them locally in every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from tpshard.kernels.quantized import reorder
from tpshard.kernels.quantized.gptq_solver import Order
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.hf_quantized import quantizable
from tpshard.parallelism.graph import Graph, Op, Ref, Value
from tpshard.parallelism.partitioning.absorb import Stopped, absorb
from tpshard.parallelism.rules.contraction import contract
from tpshard.programs.server.parameter_parts import ParameterPart

Layout = Literal["naive", "local_sort", "tp_aware"]
LAYOUTS: tuple[Layout, ...] = ("naive", "local_sort", "tp_aware")
Groups = Callable[[str], Tensor | None]
"""A function from a weight's name to its `g_idx`, int32 [inputs]; None for a dense weight."""


@dataclass(frozen=True)
class ActOrder:
    """The permutation of a weight's rows that makes its groups adjacent."""

    key: str
    """Weights with one key have one order, and share the operation where they share the input."""
    blocks: int = 1
    """The order stays within each of this many equal parts, such as heads."""
    alike: int = 1
    """This many neighbouring blocks have one order, such as the query heads of a KV head."""


@dataclass(frozen=True)
class RowOrder:
    """The order in which a program has the rows of `weight`, sorted within each of `blocks` equal parts."""

    weight: str
    blocks: int


@dataclass(frozen=True)
class ColumnOrder:
    """A parameter whose outputs are permuted to the order of the rows of `weight`.

    `blocks`: blocks of the weight's rows, of which `distinct_blocks` have different orders.
    """

    weight: str
    blocks: int
    distinct_blocks: int


@dataclass
class Arrangement:
    """The permutations that a program expects of its parameters."""

    rows: dict[str, RowOrder] = field(default_factory=dict)
    """The order of the rows of each act-ordered weight."""
    columns: dict[str, ColumnOrder] = field(default_factory=dict)
    """The order of the outputs of each parameter (weight or bias) of a preceding linear."""
    inputs: dict[str, RowOrder] = field(default_factory=dict)
    """The order that each additional input of the program holds, int64 [inputs]; these follow all parameters."""
    of: dict[str, str] = field(default_factory=dict)
    """Weight -> the additional input that permutes its inputs; a weight whose order was moved has no entry."""
    between: dict[str, str] = field(default_factory=dict)
    """Weight -> what stands between it and the linears that could produce its inputs in its order, in the layout
    `tp_aware`; "" if nothing does, so that its order was moved."""
    parts: dict[str, ParameterPart] = field(default_factory=dict)
    """Input of the program -> the part of a parameter that it holds (`parameter_parts`)."""

    def order(self, row_order: RowOrder, group: Groups) -> Tensor:
        """The permutation, int64 [inputs], that sorts a weight's inputs by their groups within each block."""
        index = group(row_order.weight)
        assert index is not None, "only quantized weights are act-ordered"
        return reorder.sorting(index, row_order.blocks)

    def rows_of(self, name: str, group: Groups) -> Tensor | None:
        """The row order of a weight, int64 [inputs]; None if unchanged."""
        row_order = self.rows.get(name)
        return None if row_order is None else reorder.positions(self.order(row_order, group), row_order.blocks)

    def columns_of(self, name: str, group: Groups) -> Tensor | None:
        """The output order of a parameter, int64 [outputs]; None if unchanged."""
        turned = self.columns.get(name)
        if turned is None:
            return None
        order = self.order(RowOrder(turned.weight, turned.blocks), group)
        return reorder.positions(
            reorder.merge_blocks(order, turned.blocks, turned.distinct_blocks), turned.distinct_blocks
        )


def arrange(
    graph: Graph, orders: Mapping[str, ActOrder], layout: Layout, shards: Mapping[str, int], parameters: Collection[str]
) -> Arrangement:
    """Inserts the permutations that act-ordered weights [outputs, inputs] of a captured graph need; returns them.

    orders: the order of each such weight, by the name of its input. shards: the number of devices over which the inputs
    of a row-parallel weight are sharded; weights not in it are column-parallel. parameters: the inputs whose columns
    may be permuted.
    """
    arrangement = Arrangement()
    may_turn = {value for value in graph.inputs if value.name in parameters}
    read = {value.name: len(value.users) for value in graph.inputs}
    positions: dict[Op, float] = {op: i for i, op in enumerate(graph.ops)}
    for (x, _), products in _products(graph, orders).items():
        names = [name for name, _ in products]
        order, spread = orders[names[0]], shards.get(names[0], 1)
        turns = layout == "tp_aware" and all(read[name] == 1 for name in names)
        blocks = order.blocks if turns else 1 if layout == "naive" else spread
        op = _insert(graph, x, products, blocks)
        positions[op] = positions[products[0][1]] - 0.5
        several = Stopped(products[0][1].operands[1], "is read by several products")
        moved = absorb(graph, op, may_turn, positions, order.alike) if turns else several
        if layout == "tp_aware":
            arrangement.between |= dict.fromkeys(names, str(moved) if isinstance(moved, Stopped) else "")
        if turns and isinstance(moved, Stopped):
            blocks = spread
            op.args = (*op.args[:2], spread)
        for name in names:
            arrangement.rows[name] = RowOrder(name, blocks)
        if isinstance(moved, Stopped):
            order_input = op.operands[1]
            graph.inputs.append(order_input)
            arrangement.inputs[order_input.name] = RowOrder(names[0], blocks)
            arrangement.of.update(dict.fromkeys(names, order_input.name))
        else:
            arrangement.columns.update(
                {value.name: ColumnOrder(names[0], blocks, p.blocks) for value, p in moved.items()}
            )
    graph.number_inputs()
    if layout == "tp_aware":
        joined = {name: "no product reads its inputs as one dim" for name in orders if name not in arrangement.between}
        arrangement.between |= joined
    return arrangement


def _products(graph: Graph, orders: Mapping[str, ActOrder]) -> dict[tuple[Value, str], list[tuple[str, Op]]]:
    """Linears with act-ordered weights, grouped by their input and its order."""
    products: dict[tuple[Value, str], list[tuple[str, Op]]] = {}
    for op in graph.ops:
        if op.target is not contract:
            continue
        x, weight = op.operands
        sides, _ = op.args[2].split("->")
        left, right = sides.split(",")
        if weight.producer is not None and weight.producer.target is torch.ops.aten.permute.default:
            turned = weight.producer  # of a linear with a bias whose input is no contiguous tensor
            weight, right = turned.operands[0], "".join(right[turned.args[1].index(dim)] for dim in range(len(right)))
        if weight.producer is None and weight.name in orders and left[-1] == right[-1]:
            products.setdefault((x, orders[weight.name].key), []).append((weight.name, op))
    return products


def _insert(graph: Graph, x: Value, products: Sequence[tuple[str, Op]], blocks: int) -> Op:
    """Makes the linears read x permuted by an order, which becomes an input of the graph."""
    name, first = products[0]
    module = name.removesuffix(".weight")
    order = Value(f"{module}.order", x.shape[-1:], torch.int64)
    op = Op(
        f"reorder_{module.replace('.', '_')}", torch.ops.tpshard.reorder.default, (Ref(0), Ref(1), blocks), {},
        [x, order], [], first.place,
    )  # fmt: skip
    op.results = [Value(op.name, x.shape, x.dtype, op)]
    graph.ops.insert(graph.ops.index(first), op)
    readers = [product for _, product in products]
    for reader in readers:
        reader.operands = [op.results[0], *reader.operands[1:]]
    x.users = [*(user for user in x.users if user not in readers), op]
    order.users, op.results[0].users = [op], readers
    return op


# ---- which weights are act-ordered ------------------------------------------------------------------------------


def order_key(group: Tensor) -> str:
    """A key that is equal for weights whose inputs have the same groups; empty for groups in sequence."""
    in_sequence = bool((group[1:] >= group[:-1]).all())
    return "" if in_sequence else hashlib.sha256(group.contiguous().numpy().tobytes()).hexdigest()


def act_orders(
    dims: Mapping[str, tuple[str, ...]], heads: tuple[int, int, int] | None, group: Groups
) -> dict[str, ActOrder]:
    """Finds the act-ordered weights among parameters with these dims, and the order of each.

    `heads`: query heads, KV heads, head size. `group`: the groups of a weight's inputs, by the weight's name.
    """
    orders = {}
    for name, named in dims.items():
        own = group(name) if len(named) == 2 else None
        key = "" if own is None else order_key(own)
        if own is None or not key:
            continue
        if heads is None or not named[1]:
            orders[name] = ActOrder(key, *_blocks_of(own))
            continue
        local = named[1] == "heads" and reorder.head_local_order(own, *heads) is not None
        orders[name] = ActOrder(key, heads[0], heads[0] // heads[1]) if local else ActOrder(key)
    return orders


def _blocks_of(group: Tensor) -> tuple[int, int]:
    """(blocks, alike) of the order of inputs with these groups: the most equal parts within which it stays, and how
    many neighbouring ones have one order. (1, 1) where it crosses all parts."""
    inputs, place = len(group), torch.arange(len(group))
    ends = [torch.zeros(int(group.max()) + 1, dtype=place.dtype).scatter_reduce(
        0, group.long(), place, how, include_self=False) for how in ("amin", "amax")]  # fmt: skip
    for blocks in (n for n in range(inputs // 2, 1, -1) if inputs % n == 0):
        if not torch.equal(*(end // (inputs // blocks) for end in ends)):  # a group spans several blocks
            continue
        for distinct in (n for n in range(1, blocks + 1) if blocks % n == 0):
            if reorder.head_local_order(group, blocks, distinct, inputs // blocks) is not None:
                return blocks, blocks // distinct
    return 1, 1


def planned_orders(config: ModelConfig, order: Order, group_size: int) -> dict[str, ActOrder]:
    """The act-ordered weights that `tpshard quantize` would write with these settings.

    Weights that share an input share its order (see `gptq_solver.ordering`).
    """
    orders = {}
    held = quantizable(config)
    for name in config.parameters:
        inputs = config.shapes[name][-1]
        size = inputs if group_size == -1 else group_size
        if order == "none" or size >= inputs or name not in held or len(config.shapes[name]) != 2:
            continue
        into = config.parameters[name][1]
        key = f"{name.removesuffix('.weight').rpartition('.')[0]} {into}"
        if into != "heads" or order == "global":
            orders[name] = ActOrder(key)
        elif size < config.head_dim:
            orders[name] = ActOrder(key, config.heads, config.heads // config.kv_heads)
    return orders
