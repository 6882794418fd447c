"""Dispatch and combine for experts with a capacity: copies tokens into numbered slots, and sums slots into tokens.

    tpshard::to_slots(x [b, s, m], slots [b, s, k], weights [b, s, k] | None, n) -> [b, n, m]
    tpshard::from_slots(y [b, n, m], slots [b, s, k], weights [b, s, k] | None) -> [b, s, m]
    tpshard::slot_products(x [b, s, m], y [b, n, m], slots [b, s, k]) -> [b, s, k]

A sequence has n slots. Each of its tokens goes to up to k of them, never two tokens to one slot; a negative slot means
none. `to_slots` writes weight * token into the slots and 0 into empty ones. `from_slots` sums weight * slot for each
token in fp32. `slot_products` are the dot products of tokens with the contents of their slots. Each operation's
gradient uses the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.operation import operation


def to_slots(x: Tensor, slots: Tensor, n: int, weights: Tensor | None = None) -> Tensor:
    """Tokens x [b, s, m] copied into their slots, times `weights` [b, s, k] if any: [b, n, m]."""
    return torch.ops.tpshard.to_slots(x, slots, weights, n)


def from_slots(y: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """For each token the sum of its slots in y [b, n, m], times `weights` [b, s, k] if any: [b, s, m]."""
    return torch.ops.tpshard.from_slots(y, slots, weights)


def _flat_rows(slots: Tensor, n: int) -> Tensor:
    """Each slot's row [b, s, k] with all sequences' slots side by side; a negative slot is the row after the last."""
    first = torch.arange(slots.shape[0], device=slots.device).view(-1, 1, 1) * n
    return torch.where(slots >= 0, slots + first, slots.shape[0] * n)


def _to_slots(x: Tensor, slots: Tensor, weights: Tensor | None, n: int) -> Tensor:
    (b, _, m), out = x.shape, x.new_zeros(x.shape[0] * n + 1, x.shape[2])
    rows = _flat_rows(slots, n)
    for choice in range(slots.shape[2]):
        value = x if weights is None else (x * weights[..., choice, None]).to(x.dtype)
        out[rows[..., choice].reshape(-1)] = value.reshape(-1, m)
    return out[:-1].view(b, n, m)


def _contents(y: Tensor, slots: Tensor, choice: int) -> Tensor:
    """The contents [b, s, m] of the slot that is each token's choice number `choice`; 0 for a negative slot."""
    b, n, m = y.shape
    rows = _flat_rows(slots[..., choice : choice + 1], n).reshape(-1)
    values = y.reshape(-1, m).index_select(0, rows.clamp(max=b * n - 1))
    return values.masked_fill_((rows == b * n).unsqueeze(1), 0).view(b, -1, m)


def _from_slots(y: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    out = y.new_zeros(y.shape[0], slots.shape[1], y.shape[2], dtype=wide_dtype(y))
    for choice in range(slots.shape[2]):
        value = _contents(y, slots, choice).to(out.dtype)
        out += value if weights is None else value * weights[..., choice, None]
    return out.to(y.dtype)


def _slot_products(x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
    wide = x.to(wide_dtype(x))
    return torch.stack([(wide * _contents(y, slots, choice)).sum(-1) for choice in range(slots.shape[2])], -1)


def _slots_shape(x: Tensor, slots: Tensor, weights: Tensor | None, n: int) -> Tensor:
    return x.new_empty(x.shape[0], n, x.shape[2])


def _tokens_shape(y: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty(y.shape[0], slots.shape[1], y.shape[2])


def _products_shape(x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
    return x.new_empty(slots.shape, dtype=wide_dtype(x))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _to_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, slots, weights = ctx.saved_tensors
    dweights = None if weights is None else torch.ops.tpshard.slot_products(x, dout, slots).to(weights.dtype)
    return torch.ops.tpshard.from_slots(dout, slots, weights), None, dweights, None


def _from_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    y, slots, weights = ctx.saved_tensors
    dweights = None if weights is None else torch.ops.tpshard.slot_products(dout, y, slots).to(weights.dtype)
    return torch.ops.tpshard.to_slots(dout, slots, weights, y.shape[1]), None, dweights


operation(
    "to_slots(Tensor x, Tensor slots, Tensor? weights, int n) -> Tensor", _to_slots, _slots_shape,
    gradient=_to_gradient, keep=_keep,
)  # fmt: skip
operation(
    "from_slots(Tensor y, Tensor slots, Tensor? weights) -> Tensor", _from_slots, _tokens_shape, gradient=_from_gradient
)
operation("slot_products(Tensor x, Tensor y, Tensor slots) -> Tensor", _slot_products, _products_shape)
