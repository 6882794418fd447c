"""Rewrites the captured graph of any model's forward pass into a server's step.

A step's rows are tokens of many sequences. They interact only in attention, which becomes attention to a paged cache
that belongs to the operation: the model knows nothing of it. All other operations must treat rows independently, which
is checked by the factors of their sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from tpshard.kernels.attention.attention import ATTENTION
from tpshard.kernels.attention.paged_attention import PAGED, PAGED_LSE
from tpshard.kernels.attention.paged_selection import PAGED_SELECT, PAGED_SELECTED, SELECT, SELECTED
from tpshard.kernels.recurrences.state_pool import READ_STATE, WRITE_STATE
from tpshard.parallelism.graph import Graph, Op, Place, Ref, Value
from tpshard.parallelism.rules.rule import Kind
from tpshard.parallelism.rules.table import rule_for

aten = torch.ops.aten
ROWS = ("slots", "sequences", "tables")
"""Inputs that attention to the cache needs besides the rows' positions."""
SELECTING = {SELECT: PAGED_SELECT, SELECTED: PAGED_SELECTED}
"""The operations of indexers and of attention to their selected keys, with their paged ones."""
PAGING = (PAGED, PAGED_LSE, PAGED_SELECT, PAGED_SELECTED)
"""The operations that read the cache: attention, also with the log-sum-exp of its scores, and to selected keys."""
POOLED = (READ_STATE, WRITE_STATE)
"""The operations that read and write the states of recurrent layers."""
FILLED = (aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default)
"""Operations that make a tensor of equal numbers, or of none that is read."""
PARTS = (aten.slice.Tensor, aten.select.int, aten.view_as_real.default)
"""Operations whose result is a part of a tensor or another view of it."""


def page_attention(graph: Graph, positions: Value, block_size: int) -> list[Value]:
    """Replaces every attention by one that stores keys and values [1, rows, kv_heads, head_dim] in its own cache, and
    attends to that; returns the caches. Where the model computes the rows as a batch [rows, 1], they are turned.

    New inputs: ROWS, and `layers.N.cache.k` and `.v` per attention N (and `.index` where an indexer selects its keys),
    with one block; the executor chooses the number of blocks. ValueError where attention is not causal over the whole
    sequence.
    """
    rows = positions.shape[1]
    shapes = {"slots": (1, rows), "sequences": (1, rows), "tables": (rows + 1, 1)}
    shared = [Value(name, shapes[name], torch.int64) for name in ROWS]
    pools: list[Value] = []
    for op in list(graph.ops):
        if op.target in SELECTING:
            op.target, how = SELECTING[op.target], op.args[len(op.operands) :]
        elif op.target is ATTENTION:
            if len(op.operands) != 3:
                raise ValueError(f"`{op.module}` attends within documents, which served sequences do not have")
            reads_lse = bool(op.results[1].users)
            op.results = op.results if reads_lse else op.results[:1]
            if rows > 1 and op.operands[0].shape[:2] == (rows, 1):
                _turn_rows(graph, op)
            op.target, how = PAGED_LSE if reads_lse else PAGED, op.args[4:]  # scale, window and softcap
        else:
            continue
        q, k, third, *indices = op.operands
        stored = {"index": k} if op.target is PAGED_SELECT else {"k": k, "v": third}
        layer = sum(pool.name.endswith(".k") for pool in pools)
        own = [
            Value(f"layers.{layer}.cache.{name}", (1, block_size, *x.shape[2:]), x.dtype) for name, x in stored.items()
        ]
        op.operands = [q, k, third, *own, positions, *shared, *indices]
        op.args = (*(Ref(i) for i in range(len(op.operands))), *how)
        pools += own
    graph.inputs += [*shared, *pools]
    graph.number_inputs()
    graph.refresh_users()
    return pools


def _turn_rows(graph: Graph, op: Op) -> None:
    """Moves the rows of an attention's operands and results from dim 0 to dim 1, or to the last dim of its second."""
    place = graph.ops.index(op)
    turned = [_permuted(value, (1, 0, 2, 3), op) for value in op.operands]
    back = []
    for i, (result, order) in enumerate(zip(op.results, ((1, 0, 2, 3), (2, 1, 0)))):
        inside = Value(f"{result.name}_rows", tuple(result.shape[d] for d in order), result.dtype, op, i)
        back.append(_permuted(inside, order, op, result))
        op.results[i] = inside
    op.operands = [one.results[0] for one in turned]
    graph.ops[place : place + 1] = [*turned, op, *back]


def _permuted(value: Value, order: tuple[int, ...], beside: Op, result: Value | None = None) -> Op:
    """The op that permutes a value's dims, in the place of another op; `result` is its result if it exists already."""
    name = f"{value.name}_turned_for_{beside.name}"
    op = Op(name, aten.permute.default, (Ref(0), order), {}, [value], [], beside.place)
    result = result or Value(name, tuple(value.shape[d] for d in order), value.dtype)
    result.producer, result.index = op, 0
    op.results = [result]
    return op


class RowDim(NamedTuple):
    """The dim of a value that holds a step's rows, and how many of its entries each row has: more than one where rows
    and, say, heads are merged."""

    dim: int
    each: int = 1


def rows_of(graph: Graph, inputs: Mapping[Value, int], recurrent: Collection[str] = ()) -> dict[Value, RowDim]:
    """Where each value holds the step's rows; `inputs` gives the dim for the inputs.

    recurrent: the paths of modules in which the rows, of one sequence, may meet; what leaves them is [1, rows, ...].
    ValueError where rows interact in another operation than attention to the cache, or a result depends on a row's
    place in the step.
    """
    found = {value: RowDim(dim) for value, dim in inputs.items()}
    (count,) = {value.shape[dim] for value, dim in inputs.items()}
    for op in graph.ops:
        if op.target in PAGING:
            found |= {result: RowDim(dim) for result, dim in zip(op.results, (1, 2))}
        elif op.target is READ_STATE and op.operands[1].shape[0] == count:
            found[op.results[0]] = RowDim(0)
        elif is_inside(op, recurrent):
            for result in op.results:
                if any(user.target not in POOLED and not is_inside(user, recurrent) for user in result.users):
                    if result.shape[:2] != (1, count):
                        raise ValueError(f"`{op.module}` returns {result}, not [1, rows, ...]")
                    found[result] = RowDim(1)
        elif op.target not in POOLED and any(value in found for value in op.operands):
            found.update(zip(op.results, _rows_after(op, [found.get(value) for value in op.operands], count)))
    return found


def shrink(graph: Graph, where: Mapping[Value, RowDim]) -> None:
    """Makes a step of one row of a step of more, after `page_attention`; `where` is the result of `rows_of`.

    (Captured with one row a step has other operations, since a dim of one entry can be left out.)
    """
    for value in graph.inputs:
        if value in where or value.name in ROWS:
            value.shape = (2, 1) if value.name == "tables" else (1, 1)
    for op in graph.ops:
        for result in op.results:
            if result in where:
                _shorten(op, result, where[result].dim, where[result].each)


def _rows_after(op: Op, before: Sequence[RowDim | None], count: int) -> list[RowDim]:
    """Where an op's results hold the `count` rows, which its operands hold as `before` says."""
    rule = rule_for(op)
    own = {_leading(dims[rows.dim], rule.sizes, count) for dims, rows in zip(rule.operands, before) if rows is not None}
    row_factors, *others = own
    elsewhere = [
        dim
        for value, dims, rows in zip(op.operands, rule.operands, before)
        for i, dim in enumerate(dims)
        if (not _is_uniform(value, i) if rows is None else i != rows.dim)
    ]
    after = [
        [i for i, dim in enumerate(dims) if row_factors and dim[: len(row_factors)] == row_factors]
        for dims in rule.results
    ]
    apart = not others and rule.has_rule and all(rule.kinds[factor] is Kind.PASS for factor in row_factors)
    if not apart or any(set(row_factors) & set(dim) for dim in elsewhere) or any(len(places) != 1 for places in after):
        target = op.target if isinstance(op.target, torch._ops.OpOverload) else op.target.__name__
        raise ValueError(
            f"`{op.name}` ({target}) in `{op.module or 'the model'}` lets tokens of a step see each other, or "
            "depends on their places in it; a server's tokens are of many sequences, which meet in "
            "`tpshard.kernels.attention.attention` alone"
        )
    return [RowDim(dim, result.shape[dim] // count) for result, (dim,) in zip(op.results, after)]


def _leading(factors: Sequence[int], sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """The leading factors of a dim that hold its `count` rows; none if its factors cut across rows."""
    for end in range(1, len(factors) + 1):
        if math.prod(sizes[factor] for factor in factors[:end]) % count == 0:
            return tuple(factors[:end])
    return ()


def is_inside(op: Op, modules: Collection[str]) -> bool:
    """Whether an op belongs to one of the modules at these paths."""
    return any(op.module == path or op.module.startswith(f"{path}.") for path in modules)


def _is_uniform(value: Value, dim: int) -> bool:
    """Whether a value is the same at every index of a dim: one number, memory that nothing wrote, or a repetition."""
    op = value.producer
    if op is None or op.target in FILLED:
        return op is not None
    if op.target is aten.expand.default:
        source = op.operands[0]
        before = dim - (value.rank - source.rank)
        return before < 0 or source.shape[before] != value.shape[dim] or _is_uniform(source, before)
    return op.target in PARTS and all(_is_uniform(op.operands[0], i) for i in range(op.operands[0].rank))


def take_logit_rows(graph: Graph, where: Mapping[Value, RowDim], count: int, recurrent: Collection[str] = ()) -> None:
    """Computes logits only for the `count` rows in the new input `logit_rows`; drops others after the last attention.

    `where` is the result of `rows_of` with these `recurrent` modules; the graph's first output has rows.
    """
    output, *others = graph.outputs
    logit_rows = Value("logit_rows", (count,), torch.int64)
    fewer = _with_logit_rows_alone(graph, where, output, recurrent)
    selected: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if not any(result in fewer for result in op.results):
            ops.append(op)
            continue
        for value in op.operands:
            if value in where and value not in fewer and value not in selected:
                ops.append(_select(value, where[value].dim, logit_rows))
                selected[value] = ops[-1].results[0]
        op.operands = [selected.get(value, value) for value in op.operands]
        for result in op.results:
            _shorten(op, result, where[result].dim, count)
        ops.append(op)
    if output not in fewer:
        ops.append(_select(output, where[output].dim, logit_rows))
        graph.outputs = [ops[-1].results[0], *others]
    graph.ops = ops
    graph.inputs.append(logit_rows)
    graph.number_inputs()
    graph.refresh_users()


def _with_logit_rows_alone(
    graph: Graph, where: Mapping[Value, RowDim], output: Value, recurrent: Collection[str]
) -> set[Value]:
    """The values that need to be computed only for the rows with logits."""
    shortened: set[Value] = set()
    merged = {value for value, rows in where.items() if rows.each > 1}
    every = {
        op
        for op in graph.ops
        if op.target in (*PAGING, *POOLED) or is_inside(op, recurrent) or merged & {*op.operands, *op.results}
    }

    def onward(value: Value) -> bool:
        """Whether all readers of a value need only the rows with logits."""
        return all(user not in every and shortened.issuperset(user.results) for user in value.users)

    for op in reversed(graph.ops):
        read = [value for value in op.results if value.users or value is output]
        if op not in every and read and all(value in where and onward(value) for value in op.results):
            shortened.update(op.results)
    return shortened


def _select(value: Value, dim: int, logit_rows: Value) -> Op:
    name = f"logit_rows_{value.name}"
    op = Op(name, aten.index_select.default, (Ref(0), dim, Ref(1)), {}, [value, logit_rows], [])
    if value.producer is not None:
        op.place = Place(value.producer.module)
    shape = (*value.shape[:dim], logit_rows.shape[0], *value.shape[dim + 1 :])
    op.results = [Value(name, shape, value.dtype, op)]
    return op


def _shorten(op: Op, result: Value, dim: int, count: int) -> None:
    """Gives a result `count` rows, also where the operation's arguments contain its shape."""
    before, after = result.shape, (*result.shape[:dim], count, *result.shape[dim + 1 :])

    def spelt(arg: object) -> object:
        if not isinstance(arg, (list, tuple)) or len(arg) != len(before) or not all(isinstance(n, int) for n in arg):
            return arg
        if any(n not in (-1, size) for n, size in zip(arg, before)):
            return arg
        return type(arg)(n if n == -1 else size for n, size in zip(arg, after))

    op.args = tuple(spelt(arg) for arg in op.args)
    result.shape = after
