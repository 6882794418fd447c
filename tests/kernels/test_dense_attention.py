"""The products that compute torch's attention on a GPU equal its CPU operation, in values and in memory layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tpshard.kernels.attention import dense_attention, flash
from tpshard.kernels.attention.dense_attention import BACKWARD, FORWARD

BOUND = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(40, 600), (600, 600), (1, 7)])
def test_equals_the_operation_on_the_cpu(
    queries: int, keys: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of rows, shared KV heads, masks of any shape, and queries that see no key."""
    monkeypatch.setattr(flash, "call_of", lambda q, mask: None)
    generator = torch.Generator().manual_seed(keys)
    bound = {"rtol": BOUND[dtype], "atol": BOUND[dtype]}
    for kv, causal, leading in itertools.product((6, 2), (False, True), (None, (1, 1), (2, 6))):
        if causal and leading:
            continue  # torch allows no mask beside is_causal
        q, dout = (torch.randn(2, 6, queries, 8, generator=generator).to(dtype) for _ in range(2))
        k, v = (torch.randn(2, kv, keys, 8, generator=generator).to(dtype) for _ in range(2))
        mask = None
        if leading:
            hidden = torch.rand(*leading, queries, keys, generator=generator) > 0.5
            hidden[..., 0, :] = True
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
        theirs = FORWARD(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
        ours = dense_attention.forward(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
        if kv == 6:  # torch repeats shared KV heads before its gradient
            theirs += BACKWARD(dout, q, k, v, *theirs, 0.0, causal, attn_mask=mask, scale=0.3)
            ours += dense_attention.backward(dout, q, k, v, *ours, 0.0, causal, attn_mask=mask, scale=0.3)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, **bound)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=str)
def test_a_gpu_has_the_operation(op: torch._ops.OpOverload) -> None:
    assert op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA)
