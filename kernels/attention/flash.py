"""The attention operation by torch's FlashAttention kernels (CUDA, half precision); documents become ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from tpshard.kernels.attention.attention_mask import CausalMask

WIDEST = 256
"""The largest head that FlashAttention takes."""


@dataclass(frozen=True)
class FlashCall:
    """What the kernels are told of a mask."""

    causal: bool
    """Whether each query sees the keys up to its own, the last query's being the last; else all keys."""
    window: int | None
    """Of a causal call: how many positions a query attends to, its own included."""
    starts: tuple[Tensor, Tensor] | None
    """Where the documents begin among the flattened queries and keys, and how many these are: two of [documents + 1]
    int32. A document may have no query or no key here. None without documents."""


def call_of(q: Tensor, mask: CausalMask) -> FlashCall | None:
    """How the kernels compute attention under a mask; None where they do not.

    They take fp16 or bf16 on compute capability 8.0 or later, queries that end where the keys end or that see all
    positions, and document ids that never decrease.
    """
    if not in_half(q) or q.shape[3] % 8:
        return None
    if not mask.ends_together and not mask.hides_no_position:
        return None
    causal = mask.ends_together and not mask.hides_no_position
    window = mask.window if causal else None
    if mask.documents is None:
        return FlashCall(causal, window, None)
    queries, keys = mask.documents
    if mask.queries == mask.keys:
        starts = starts_of(keys)
        return None if starts is None else FlashCall(causal, window, (starts, starts))
    pair = _shared_starts(queries, keys)
    return None if pair is None else FlashCall(causal, window, pair)


def in_half(q: Tensor) -> bool:
    """Whether queries are in half precision, of heads that kernels take, on a GPU of sm_80 or later."""
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] <= WIDEST and q.numel() > 0
    return half and torch.version.hip is None and torch.cuda.get_device_capability(q.device) >= (8, 0)


@contextmanager
def _deterministic() -> Iterator[None]:
    """A context with torch's deterministic mode on, in which the backward kernel sums dq in a fixed order."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module whose attributes are created at import
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # the kernel writes everything it allocates
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensor of document ids -> its version and its `starts_of`."""


def starts_of(documents: Tensor) -> Tensor | None:
    """The first flattened row of each run of equal document ids, then the number of rows: [runs + 1] int32; None where
    the ids of a row decrease.

    It is computed, for which the host waits for the device, once for all layers that read the same tensor, in the
    forward and the backward pass.
    """
    version, starts = _known.get(documents, (-1, None))
    if version != documents._version:
        starts = _starts(documents) if bool(_never_decrease(documents)) else None
        _known[documents] = documents._version, starts
    return starts


def _starts(documents: Tensor) -> Tensor:
    b, s = documents.shape
    first = torch.ones((b, s), dtype=torch.bool, device=documents.device)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = first.flatten().nonzero().squeeze(1)
    return torch.cat([begins, begins.new_full((1,), b * s)]).to(torch.int32)


def _never_decrease(documents: Tensor) -> Tensor:
    """Whether no row's ids decrease: [] bool."""
    return (documents[:, 1:] >= documents[:, :-1]).all()


def _shared_starts(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where each document of queries [b, s] or keys [b, t] begins among either, by `FlashCall.starts`; None where the
    ids of a row decrease.

    Keys stand at or before the queries, so that the documents have the same order in both. The host waits for the
    device.
    """
    if not bool(_never_decrease(queries) & _never_decrease(keys)):
        return None
    least = torch.minimum(queries.min(), keys.min())
    span = torch.maximum(queries.max(), keys.max()) - least + 1
    row = torch.arange(queries.shape[0], device=queries.device).unsqueeze(1) * span
    flat = [(ids - least + row).flatten() for ids in (queries, keys)]
    documents = torch.cat(flat).unique()
    starts = [torch.searchsorted(ids, documents, right=True, out_int32=True) for ids in flat]
    first, second = (torch.cat([ends.new_zeros(1), ends]) for ends in starts)
    return first, second


def _flat(x: Tensor) -> Tensor:
    """x [b, s, ...] as contiguous rows [b * s, ...]."""
    return x.flatten(0, 1).contiguous()


def _rows(x: Tensor) -> Tensor:
    """The tensor itself, or a copy where its last dim is not contiguous, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sides(call: FlashCall) -> dict[str, int]:
    """The kernels' arguments for a window: how many positions before and after its own a row attends to."""
    return {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}


def forward(q: Tensor, k: Tensor, v: Tensor, call: FlashCall, scale: float) -> tuple[Tensor, Tensor]:
    """The output [b,s,h,d] and logsumexps [b,h,s] of attention from q [b,s,h,d] to k and v [b,t,kv,d]."""
    (b, s), t = q.shape[:2], k.shape[1]
    if call.starts is None:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _rows(q), _rows(k), _rows(v), None, None, s, t, 0.0, call.causal, False, scale=scale, **_sides(call)
        )
        return out.contiguous(), lse
    of_queries, of_keys = call.starts
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _flat(q), _flat(k), _flat(v), of_queries, of_keys, s, t, 0.0, call.causal, False, scale=scale, **_sides(call)
    )
    if of_queries is not of_keys:  # the kernel says inf for queries without keys
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return out.unflatten(0, (b, s)), lse.unflatten(1, (b, s)).transpose(0, 1).contiguous()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: FlashCall, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the output and logsumexps over all keys."""
    b, s, t = q.shape[0], q.shape[1], k.shape[1]
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is off
    with _deterministic():
        if call.starts is None:
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout.contiguous(), _rows(q), _rows(k), _rows(v), out, lse, None, None, s, t, 0.0, call.causal,
                unused, unused, scale=scale, **_sides(call),
            )  # fmt: skip
            return dq.contiguous(), dk.contiguous(), dv.contiguous()
        log_sums = lse.transpose(0, 1).flatten(1, 2).contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _flat(dout), _flat(q), _flat(k), _flat(v), _flat(out), log_sums, *call.starts, s, t, 0.0, call.causal,
            unused, unused, scale=scale, **_sides(call),
        )  # fmt: skip
    return dq.unflatten(0, (b, s)), dk.unflatten(0, (b, t)), dv.unflatten(0, (b, t))
