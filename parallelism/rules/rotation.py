"""Ring attention for torch's non-causal attention op, in which a query sees all keys or those that a mask allows.

Keys and values rotate among the devices of a sharded sequence, and each device computes with those that it has (Liu et
al. 2023). Each part is torch's own attention to one device's keys, under those columns of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tpshard.kernels.attention.dense_attention import BACKWARD, FORWARD
from tpshard.parallelism.rules.rule import LocalOp

aten = torch.ops.aten
HIDDEN = -1e30
"""The logsumexp of a query that sees no key of a part; finite, so that merging two such parts gives no NaN."""


def around(
    at: LocalOp, s: int, members: int, moving: list[Any], part: Callable[[int, list[Any]], list[Any]],
    join: Callable[[list[Any], list[Any]], list[Any]], staying: int,
) -> list[Any]:  # fmt: skip
    """Joins the results of part(behind, moving) for the shards of all members of a ring along factor `s`.

    moving: this device's shards, then those of the devices that are `behind` positions before it, cyclically. staying:
    the number of results that stay on the device; the others travel with the shards, and return with them.
    """
    totals: list[Any] = []
    onward = [(i + 1) % members for i in range(members)]
    for behind in range(members):  # the next part travels while this one is computed
        coming = [at.send(node, s, onward) for node in moving] if behind + 1 < members else []
        travelled = [at.send(node, s, onward) for node in totals[staying:]]
        share = part(behind, moving)
        totals = join([*totals[:staying], *travelled], share) if totals else share
        moving = coming
    return totals if members == 1 else [*totals[:staying], *(at.send(node, s, onward) for node in totals[staying:])]


def forward(at: LocalOp, s: int, t: int, scale: float | None) -> list[Any]:
    """The output and logsumexps of this device's queries, from the operands q, k, v and maybe a mask.

    s, t: the factor of the sequence and its length.
    """
    q, keys, values = at.inputs[:3]
    mask = _whole_mask(at, s, t, at.inputs[3] if len(at.inputs) > 3 else None)
    members = at.members(s)

    def part(behind: int, moving: list[Any]) -> list[Any]:
        columns = _columns(at, s, mask, behind)
        out, lse = at.several(FORWARD, q, *moving, 0.0, False, work=1 / members, attn_mask=columns, scale=scale)
        return [out, lse if columns is None else _without_keys(at, columns, lse)]

    out, lse = around(at, s, members, [keys, values], part, partial(merge, at, heads_first=True), staying=2)
    return [cast(at, out, at.dtype(0)), lse if mask is None else _as_torch(at, lse)]


def backward(at: LocalOp, s: int, t: int, scale: float | None) -> list[Any]:
    """The gradients of q, k and v, from the operands dout, q, k, v, out, lse and maybe a mask.

    s, t: the factor of the sequence and its length.
    """
    dout, q, keys, values, out, lse = at.inputs[:6]
    mask = _whole_mask(at, s, t, at.inputs[6] if len(at.inputs) > 6 else None)
    members, wide = at.members(s), torch.promote_types(at.dtype(0), torch.float32)

    def part(behind: int, moving: list[Any]) -> list[Any]:
        shares = at.several(
            BACKWARD, dout, q, *moving, out, lse, 0.0, False, work=1 / members,
            attn_mask=_columns(at, s, mask, behind), scale=scale,
        )  # fmt: skip
        return [cast(at, share, wide) for share in shares]

    totals = around(at, s, members, [keys, values], part, partial(plus, at), staying=1)
    return [cast(at, total, at.dtype(i)) for i, total in enumerate(totals)]


def _whole_mask(at: LocalOp, s: int, t: int, mask: Any) -> Any:
    """Returns the mask of this device's queries for all keys, with padding keys hidden; None if neither exists."""
    padded = at.size(s) * at.members(s)
    if mask is None and padded == t:
        return None
    if mask is None:
        mask = at.emit(aten.new_zeros.default, at.inputs[0], [1, 1, 1, t], dtype=at.dtype(0))
    return mask if padded == t else at.emit(aten.constant_pad_nd.default, mask, [0, padded - t], -math.inf)


def _columns(at: LocalOp, s: int, mask: Any, behind: int) -> Any:
    """The columns of the mask for the keys of the device that is `behind` positions before this one, cyclically."""
    if mask is None:
        return None
    return at.emit(aten.narrow.default, mask, len(at.shape_of(mask)) - 1, start_of(at, s, behind), at.size(s))


def start_of(at: LocalOp, s: int, behind: int) -> Any:
    """The first position of the device that is `behind` positions before this one, cyclically."""
    members = at.members(s)
    return at.pick(s, [((position - behind) % members) * at.size(s) for position in range(members)])


def _without_keys(at: LocalOp, columns: Any, lse: Any) -> Any:
    """Sets the logsumexps to `HIDDEN` for queries whose mask hides all keys; torch returns 0 for them."""
    empty = at.emit(aten.eq.Scalar, at.emit(aten.amax.default, columns, [-1]), -math.inf)
    return at.emit(aten.masked_fill.Scalar, lse, empty, HIDDEN)


def _as_torch(at: LocalOp, lse: Any) -> Any:
    """Sets the logsumexps of queries that see no key to 0, as torch's attention returns them."""
    empty = at.emit(aten.lt.Scalar, lse, HIDDEN / 2)
    return at.emit(aten.masked_fill.Scalar, lse, empty, 0.0)


def merge(at: LocalOp, first: Sequence[Any], second: Sequence[Any], heads_first: bool) -> list[Any]:
    """Merges the outputs and logsumexps of attention to two parts of the keys into those of attention to both, the
    output in the logsumexps' dtype.

    heads_first: whether the outputs have the logsumexps' order of dims, `[b h s d]` as `[b h s]`, else `[b s h d]`.
    """
    total = at.emit(aten.logaddexp.default, first[1], second[1])

    def weigh(share: Any, logs: Any) -> Any:
        weight = at.emit(aten.exp.default, at.emit(aten.sub.Tensor, logs, total))
        if not heads_first:
            weight = at.emit(aten.permute.default, weight, [0, 2, 1])
        return at.emit(aten.mul.Tensor, share, at.emit(aten.unsqueeze.default, weight, 3))

    return [at.emit(aten.add.Tensor, weigh(*first), weigh(*second)), total]


def plus(at: LocalOp, totals: Sequence[Any], shares: Sequence[Any]) -> list[Any]:
    """The sums of two lists of tensors."""
    return [at.emit(aten.add.Tensor, total, share) for total, share in zip(totals, shares)]


def cast(at: LocalOp, node: Any, dtype: torch.dtype) -> Any:
    """The node in another dtype; the node itself if it has it."""
    if at.dtype_of(node) == dtype:
        return node
    return at.emit(aten._to_copy.default, node, dtype=dtype)
