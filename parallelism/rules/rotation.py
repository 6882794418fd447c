"""Ring attention for torch's non-causal attention op, in which a query sees all keys or those that a mask allows.

Keys and values rotate among the devices of a sharded sequence, and each device computes with those that it has (Liu et
al. 2023). Each part is torch's own attention to one device's keys, under those columns of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tpshard.kernels.dense_attention import BACKWARD, FORWARD
from tpshard.parallelism.rules.rule import LocalOp

aten = torch.ops.aten
HIDDEN = -1e30
"""The logsumexp of a query that sees no key of a part; finite, so that merging two such parts gives no NaN."""


def forward(at: LocalOp, s: int, t: int, scale: float | None) -> list[Any]:
    """The output and logsumexps of this device's queries, from the operands q, k, v and maybe a mask.

    s, t: the factor of the sequence and its length.
    """
    q, *moving = at.inputs[:3]
    mask = _whole_mask(at, s, t, at.inputs[3] if len(at.inputs) > 3 else None)
    members = at.members(s)
    like = [(at.shape(0), at.dtype(0)), (at.shape(1), at.dtype(1))]

    def part(behind: int) -> list[Any]:
        columns = _columns(at, s, mask, behind)
        out, lse = at.several(
            FORWARD, q, *moving, 0.0, False, like=like, work=1 / members, attn_mask=columns, scale=scale
        )
        return [out, lse if columns is None else _without_keys(at, columns, lse)]

    out, lse = part(0)
    for behind in range(1, members):
        moving = [at.shift(node, s) for node in moving]
        out, lse = merge(at, (out, lse), part(behind), heads_first=True)
    return [out, lse if mask is None else _as_torch(at, lse)]


def backward(at: LocalOp, s: int, t: int, scale: float | None) -> list[Any]:
    """The gradients of q, k and v, from the operands dout, q, k, v, out, lse and maybe a mask.

    s, t: the factor of the sequence and its length.
    """
    dout, q, keys, values, out, lse = at.inputs[:6]
    mask = _whole_mask(at, s, t, at.inputs[6] if len(at.inputs) > 6 else None)
    members, moving = at.members(s), [keys, values]
    like = [(at.shape_of(node), at.dtype(i)) for i, node in enumerate((q, keys, values))]
    wide = torch.promote_types(at.dtype(0), torch.float32)

    def part(behind: int) -> list[Any]:
        columns = _columns(at, s, mask, behind)
        shares = at.several(
            BACKWARD, dout, q, *moving, out, lse, 0.0, False, like=like, work=1 / members, attn_mask=columns,
            scale=scale,
        )  # fmt: skip
        return [cast(at, share, wide) for share in shares]

    totals = part(0)
    for behind in range(1, members):
        moving = [at.shift(node, s) for node in moving]
        totals[1:] = [at.shift(node, s) for node in totals[1:]]
        totals = [_plus(at, total, share) for total, share in zip(totals, part(behind))]
    totals[1:] = [at.shift(node, s) for node in totals[1:]]  # back to the device of their keys
    return [cast(at, total, at.dtype(i)) for i, total in enumerate(totals)]


def _whole_mask(at: LocalOp, s: int, t: int, mask: Any) -> Any:
    """Returns the mask of this device's queries for all keys, with padding keys hidden; None if neither exists."""
    padded = at.size(s) * at.members(s)
    if mask is None and padded == t:
        return None
    if mask is None:
        mask = at.emit(aten.new_zeros.default, at.inputs[0], [1, 1, 1, t], shape=(1, 1, 1, t), dtype=at.dtype(0))
    if padded == t:
        return mask
    shape = (*at.shape_of(mask)[:-1], padded)
    return at.emit(aten.constant_pad_nd.default, mask, [0, padded - t], -math.inf, shape=shape, dtype=at.dtype_of(mask))


def _columns(at: LocalOp, s: int, mask: Any, behind: int) -> Any:
    """The columns of the mask for the keys of the device that is `behind` positions before this one, cyclically."""
    if mask is None:
        return None
    size, members = at.size(s), at.members(s)
    begin = at.pick(s, [((position - behind) % members) * size for position in range(members)])
    shape, dtype = at.shape_of(mask), at.dtype_of(mask)
    return at.emit(aten.narrow.default, mask, len(shape) - 1, begin, size, shape=(*shape[:-1], size), dtype=dtype)


def _without_keys(at: LocalOp, columns: Any, lse: Any) -> Any:
    """Sets the logsumexps to `HIDDEN` for queries whose mask hides all keys; torch returns 0 for them."""
    shape, dtype = at.shape_of(columns)[:-1], at.dtype_of(columns)
    highest = at.emit(aten.amax.default, columns, [-1], shape=shape, dtype=dtype)
    empty = at.emit(aten.eq.Scalar, highest, -math.inf, shape=shape, dtype=torch.bool)
    return at.emit(aten.masked_fill.Scalar, lse, empty, HIDDEN, shape=at.shape_of(lse), dtype=at.dtype_of(lse))


def _as_torch(at: LocalOp, lse: Any) -> Any:
    """Sets the logsumexps of queries that see no key to 0, as torch's attention returns them."""
    empty = at.emit(aten.lt.Scalar, lse, HIDDEN / 2, shape=at.shape_of(lse), dtype=torch.bool)
    return at.emit(aten.masked_fill.Scalar, lse, empty, 0.0, shape=at.shape_of(lse), dtype=at.dtype_of(lse))


def merge(at: LocalOp, first: Sequence[Any], second: Sequence[Any], heads_first: bool) -> tuple[Any, Any]:
    """Merges the outputs and logsumexps of attention to two parts of the keys into those of attention to both.

    heads_first: whether the outputs have the logsumexps' order of dims, `[b h s d]` as `[b h s]`, else `[b s h d]`.
    """
    out, lse = first
    (b, h, s), dtype, wide = at.shape_of(lse), at.dtype_of(out), at.dtype_of(lse)
    total = at.emit(aten.logaddexp.default, lse, second[1], shape=(b, h, s), dtype=wide)

    def weigh(share: Any, logs: Any) -> Any:
        weight = at.emit(aten.sub.Tensor, logs, total, shape=(b, h, s), dtype=wide)
        weight = at.emit(aten.exp.default, weight, shape=(b, h, s), dtype=wide)
        if not heads_first:
            weight = at.emit(aten.permute.default, weight, [0, 2, 1], shape=(b, s, h), dtype=wide)
        weight = at.emit(aten.unsqueeze.default, weight, 3, shape=(*at.shape_of(weight), 1), dtype=wide)
        return at.emit(aten.mul.Tensor, share, weight, shape=at.shape_of(out), dtype=wide)

    combined = at.emit(aten.add.Tensor, weigh(out, lse), weigh(*second), shape=at.shape_of(out), dtype=wide)
    return cast(at, combined, dtype), total


def _plus(at: LocalOp, total: Any, share: Any) -> Any:
    return at.emit(aten.add.Tensor, total, share, shape=at.shape_of(total), dtype=at.dtype_of(total))


def cast(at: LocalOp, node: Any, dtype: torch.dtype) -> Any:
    """The node in another dtype; the node itself if it has it."""
    if at.dtype_of(node) == dtype:
        return node
    return at.emit(aten._to_copy.default, node, shape=at.shape_of(node), dtype=dtype)
