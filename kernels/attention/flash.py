"""The attention operation by torch's FlashAttention kernels (CUDA, half precision); documents become ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


def applies(q: Tensor, k: Tensor, documents: Tensor | None) -> bool:
    """Whether the kernels apply: fp16 or bf16, compute capability 8.0 or later, and document ids that never
    decrease."""
    d = q.shape[3]
    if q.dtype not in (torch.float16, torch.bfloat16) or d % 8 or d > 256 or q.numel() == 0:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    if documents is None:
        return True
    return q.shape[1] == k.shape[1] and starts_of(documents) is not None


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
        never_decrease = bool((documents[:, 1:] >= documents[:, :-1]).all())
        starts = _starts(documents) if never_decrease else None
        _known[documents] = documents._version, starts
    return starts


def _starts(documents: Tensor) -> Tensor:
    b, s = documents.shape
    first = torch.ones((b, s), dtype=torch.bool, device=documents.device)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = first.flatten().nonzero().squeeze(1)
    return torch.cat([begins, begins.new_full((1,), b * s)]).to(torch.int32)


def _flat(x: Tensor) -> Tensor:
    """x [b, s, ...] as contiguous rows [b * s, ...]."""
    return x.flatten(0, 1).contiguous()


def _rows(x: Tensor) -> Tensor:
    """The tensor itself, or a copy where its last dim is not contiguous, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sides(window: int | None) -> dict[str, int]:
    """The kernels' arguments for a window: how many positions before and after its own a row attends to."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """`tpshard::attention` by torch's FlashAttention: the output [b,s,h,d] and logsumexps [b,h,s]."""
    b, s = q.shape[:2]
    if documents is None:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _rows(q), _rows(k), _rows(v), None, None, s, k.shape[1], 0.0, True, False, scale=scale, **_sides(window)
        )
        return out.contiguous(), lse
    starts = starts_of(documents)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _flat(q), _flat(k), _flat(v), starts, starts, s, s, 0.0, True, False, scale=scale, **_sides(window)
    )
    return out.unflatten(0, (b, s)), lse.unflatten(1, (b, s)).transpose(0, 1).contiguous()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`tpshard::attention_backward` by torch's FlashAttention: the gradients of q, k and v."""
    b, s, t = q.shape[0], q.shape[1], k.shape[1]
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is off
    with _deterministic():
        if documents is None:
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout.contiguous(), _rows(q), _rows(k), _rows(v), out, lse, None, None, s, t, 0.0, True, unused, unused,
                scale=scale, **_sides(window),
            )  # fmt: skip
            return dq.contiguous(), dk.contiguous(), dv.contiguous()
        starts = starts_of(documents)
        log_sums = lse.transpose(0, 1).flatten(1, 2).contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _flat(dout), _flat(q), _flat(k), _flat(v), _flat(out), log_sums, starts, starts, s, s, 0.0, True,
            unused, unused, scale=scale, **_sides(window),
        )  # fmt: skip
    return dq.unflatten(0, (b, s)), dk.unflatten(0, (b, s)), dv.unflatten(0, (b, s))
