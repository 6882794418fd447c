"""Rewrites the captured graph of any model's forward pass into a server's step.

A step's rows are tokens of many sequences. They interact only in attention, which becomes attention to a paged cache
that belongs to the operation: the model knows nothing of it. All other operations must treat rows independently, which
is checked by the factors of their sharding rules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tpshard.kernels.attention import ATTENTION
from tpshard.kernels.paged_attention import PAGED, PAGED_LSE
from tpshard.parallelism.graph import Graph, Op, Place, Ref, Value
from tpshard.parallelism.rules.rule import Kind
from tpshard.parallelism.rules.table import rule_for

aten = torch.ops.aten
ROWS = ("slots", "sequences", "tables")
"""Inputs that attention to the cache needs besides the rows' positions."""
PAGING = (PAGED, PAGED_LSE)
"""The operations that attend to the cache; the second also returns the log-sum-exp of the scores."""
PARTS = (aten.slice.Tensor, aten.select.int, aten.view_as_real.default)
"""Operations whose result is a part of a tensor or another view of it."""


def page_attention(graph: Graph, positions: Value, block_size: int) -> list[Value]:
    """Replaces every attention by one that stores keys and values [1, rows, kv_heads, head_dim] in its own cache, and
    attends to that; returns the caches.

    New inputs: ROWS, and `layers.N.cache.k` and `.v` per attention N, with one block; the executor chooses the number
    of blocks. ValueError where attention is not causal over the whole sequence.
    """
    rows = positions.shape[1]
    shapes = {"slots": (1, rows), "sequences": (1, rows), "tables": (rows + 1, 1)}
    shared = [Value(name, shapes[name], torch.int64) for name in ROWS]
    pools: list[Value] = []
    for op in graph.ops:
        if op.target is not ATTENTION:
            continue
        if len(op.operands) != 3:
            raise ValueError(f"`{op.module}` attends within documents, which served sequences do not have")
        _, k, v = op.operands
        layer = len(pools) // 2
        own = [
            Value(f"layers.{layer}.cache.{name}", (1, block_size, *x.shape[2:]), x.dtype)
            for name, x in (("k", k), ("v", v))
        ]
        how = op.args[4:]  # scale, window and softcap
        reads_lse = bool(op.results[1].users)
        op.target, op.operands = PAGED_LSE if reads_lse else PAGED, [*op.operands, *own, positions, *shared]
        op.args = (*(Ref(i) for i in range(len(op.operands))), *how)
        op.results = op.results if reads_lse else op.results[:1]
        pools += own
    graph.inputs += [*shared, *pools]
    number_inputs(graph)
    graph.refresh_users()
    return pools


def rows_of(graph: Graph, inputs: Mapping[Value, int]) -> dict[Value, int]:
    """The dim of each value that holds the step's rows; `inputs` gives it for the inputs.

    ValueError where rows interact in another operation than attention to the cache, or a result depends on a row's
    place in the step.
    """
    row_dims = dict(inputs)
    for op in graph.ops:
        if op.target in PAGING:
            row_dims |= dict(zip(op.results, (1, 2)))
            continue
        operand_dims = [row_dims.get(value) for value in op.operands]
        if all(dim is None for dim in operand_dims):
            continue
        rule = rule_for(op)
        factors = {dims[dim] for dims, dim in zip(rule.operands, operand_dims) if dim is not None}
        (factor, *more), *others = factors
        read = [
            one for one in zip(op.operands, rule.operands, operand_dims) if one[2] is not None or not _unset(one[0])
        ]
        elsewhere = [dim for _, dims, own in read for i, dim in enumerate(dims) if i != own]
        after = [[i for i, dim in enumerate(dims) if dim == (factor,)] for dims in rule.results]
        apart = not more and not others and rule.has_rule and rule.kinds[factor] is Kind.PASS
        if not apart or any(factor in dim for dim in elsewhere) or any(len(places) != 1 for places in after):
            target = op.target if isinstance(op.target, torch._ops.OpOverload) else op.target.__name__
            raise ValueError(
                f"`{op.name}` ({target}) in `{op.module or 'the model'}` lets tokens of a step see each other, or "
                "depends on their places in it; a server's tokens are of many sequences, which meet in "
                "`tpshard.kernels.attention` alone"
            )
        row_dims.update({result: places[0] for result, places in zip(op.results, after)})
    return row_dims


def _unset(value: Value) -> bool:
    """Whether a value is allocated memory that nothing wrote, or a part of it, so that all its rows are alike."""
    op = value.producer
    if op is None or op.target is aten.empty.memory_format:
        return op is not None
    return op.target in PARTS and _unset(op.operands[0])


def take_logit_rows(graph: Graph, where: Mapping[Value, int], count: int) -> None:
    """Computes logits only for the `count` rows in the new input `logit_rows`; drops others after the last attention.

    `where` is the result of `rows_of`; the graph's one output has rows.
    """
    (output,) = graph.outputs
    logit_rows = Value("logit_rows", (count,), torch.int64)
    fewer = _with_logit_rows_alone(graph, where, output)
    selected: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if not any(result in fewer for result in op.results):
            ops.append(op)
            continue
        for value in op.operands:
            if value in where and value not in fewer and value not in selected:
                ops.append(_select(value, where[value], logit_rows))
                selected[value] = ops[-1].results[0]
        op.operands = [selected.get(value, value) for value in op.operands]
        for result in op.results:
            _shorten(op, result, where[result], count)
        ops.append(op)
    if output not in fewer:
        ops.append(_select(output, where[output], logit_rows))
        graph.outputs = [ops[-1].results[0]]
    graph.ops = ops
    graph.inputs.append(logit_rows)
    number_inputs(graph)
    graph.refresh_users()


def _with_logit_rows_alone(graph: Graph, where: Mapping[Value, int], output: Value) -> set[Value]:
    """The values that need to be computed only for the rows with logits."""
    shortened: set[Value] = set()

    def onward(value: Value) -> bool:
        """Whether all readers of a value need only the rows with logits."""
        return all(user.target not in PAGING and shortened.issuperset(user.results) for user in value.users)

    for op in reversed(graph.ops):
        read = [value for value in op.results if value.users or value is output]
        if op.target not in PAGING and read and all(value in where and onward(value) for value in op.results):
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


def number_inputs(graph: Graph) -> None:
    for i, value in enumerate(graph.inputs):
        value.index = i
