"""Attention on a device equals plain softmax in fp64: flash kernels, plain blocks, and the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attention_cases import documents_of, expected, inputs
from tpshard.kernels.attention import attention, flash
from tpshard.kernels.attention.attention_mask import last_of
from tpshard.kernels.attention.dense_attention import BACKWARD as BACKWARD_OF_TORCH
from tpshard.kernels.attention.dense_attention import FORWARD
from tpshard.kernels.attention.paged_attention import paged_attention_reference

assert attention.__name__  # importing it registers the operations
OP, BACKWARD = torch.ops.tpshard.attention, torch.ops.tpshard.attention_backward
PART, PART_BACKWARD = torch.ops.tpshard.attention_part, torch.ops.tpshard.attention_part_backward
BOUND = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of results of size 1. Half precision rounds the probabilities too: an ulp or two of the largest."""
SHAPES = [(2, 150, 150, 8, 2, 64), (1, 1, 77, 8, 2, 128), (2, 40, 131, 6, 6, 96), (1, 65, 65, 4, 1, 40),
          (1, 256, 256, 4, 2, 256)]  # fmt: skip
"""Batch, queries, keys, heads, KV heads, head size."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("packed", ["none", "runs", "scattered"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (7, 2.0), (None, 2.0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward(
    shape: tuple[int, ...], window: int | None, softcap: float | None, packed: str, dtype: torch.dtype, device: str
) -> None:
    q, k, v, dout = (x.to(device) for x in inputs(shape, 0, dtype))
    documents = None if packed == "none" else documents_of(shape[0], shape[2], 1).to(device)
    if packed == "scattered":
        assert documents is not None
        documents = documents % 3
    runs = []
    for _ in range(2):
        out, lse = OP(q, k, v, documents, 0.125, window, softcap)
        runs.append([out, lse, *BACKWARD(dout, q, k, v, out, lse, documents, 0.125, window, softcap)])
    host = [x.cpu() for x in (q, k, v, dout)]
    reference = expected(*host, None if documents is None else documents.cpu(), 0.125, window, softcap)
    for first, second, value in zip(*runs, reference, strict=True):
        assert torch.equal(first, second), "the same inputs give the same bits"
        torch.testing.assert_close(first.cpu().double(), value, atol=BOUND[dtype], rtol=BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("way", ["ring", "gathered"])
def test_the_parts_of_a_sharded_sequence(
    way: str, window: int | None, packed: bool, dtype: torch.dtype, device: str
) -> None:
    """Three devices with 50 queries each; a ring's keys come in parts, gathered ones as a whole."""
    q, k, v, dout = (x.to(device) for x in inputs((2, 150, 150, 8, 2, 64), 0, dtype))
    documents = documents_of(2, 150, 1).to(device) if packed else None
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = OP(q, k, v, documents, 0.125, window)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for first in (0, 50, 100):
        rows, outs, logs = slice(first, first + 50), [], []
        own = None if documents is None else documents[:, rows]
        for at, t in [(0, 50), (50, 50), (100, 50)] if way == "ring" else [(0, 150)]:
            keys = slice(at, at + t)
            theirs = None if documents is None else documents[:, keys]
            pair, where = (k[:, keys], v[:, keys]), (own, theirs, 0.125, window, first, at)
            part, part_lse = PART(q[:, rows], *pair, *where)
            outs.append(part.to(wide))
            logs.append(part_lse)
            shares = PART_BACKWARD(dout[:, rows], q[:, rows], *pair, out[:, rows], lse[..., rows], *where)
            dq[:, rows] += shares[0]
            dk[:, keys] += shares[1]
            dv[:, keys] += shares[2]
        total = torch.stack(logs).logsumexp(0)
        torch.testing.assert_close(total, lse[..., rows], atol=BOUND[dtype], rtol=BOUND[dtype])
        joined = sum(x * (y - total).exp().transpose(1, 2).unsqueeze(-1) for x, y in zip(outs, logs))
        torch.testing.assert_close(joined, out[:, rows].to(wide), atol=BOUND[dtype], rtol=BOUND[dtype])
    host = [x.cpu() for x in (q, k, v, dout)]
    reference = expected(*host, None if documents is None else documents.cpu(), 0.125, window)[2:]
    for gradient, value in zip((dq, dk, dv), reference):
        torch.testing.assert_close(gradient.cpu().double(), value, atol=2 * BOUND[dtype], rtol=2 * BOUND[dtype])


@pytest.mark.gpu
def test_which_kernel_is_asked() -> None:
    q, k, *_ = (x.cuda() for x in inputs(SHAPES[0], 0, torch.bfloat16))
    runs = documents_of(2, 150, 1).cuda()
    for queries, keys, documents in ((q, k, None), (q, k, runs), (q[:, :5], k, None), (q[:, :5], k, runs)):
        assert flash.call_of(queries, last_of(queries.shape[1], keys.shape[1], documents, None))
    for queries, documents in ((q, runs % 3), (q[:, :5], runs % 3), (q.float(), None), (q[..., :60], None)):
        assert flash.call_of(queries, last_of(queries.shape[1], 150, documents, None)) is None


@pytest.mark.gpu
def test_operands_may_lie_in_any_order_of_dims() -> None:
    q, k, v, dout = (x.cuda() for x in inputs(SHAPES[0], 0, torch.bfloat16))
    out, lse = OP(q, k, v, None, 0.125)
    turned = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v, dout)]
    same, same_lse = OP(*turned[:3], None, 0.125)
    assert torch.equal(out, same) and same.is_contiguous()
    expected = BACKWARD(dout, q, k, v, out, lse, None, 0.125)
    for a, b in zip(expected, BACKWARD(turned[3], *turned[:3], same, same_lse, None, 0.125)):
        assert torch.equal(a, b) and b.is_contiguous()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "plane"])
def test_torch_attention_in_a_captured_program(mask: str, dtype: torch.dtype, device: str) -> None:
    """Capture records torch's operation for the CPU, which a GPU computes by `kernels.dense_attention`."""
    q, k, v, dout = (torch.randn(2, 6, 70, 16, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4))
    plane = torch.zeros(70, 70, dtype=dtype).masked_fill_(torch.ones(70, 70).triu(9) > 0, -torch.inf)
    settings = {"attn_mask": plane if mask == "plane" else None, "scale": 0.3}
    on_device = {"attn_mask": plane.to(device) if mask == "plane" else None, "scale": 0.3}
    causal = mask == "causal"
    expected = FORWARD(q, k, v, 0.0, causal, **settings)
    expected += BACKWARD_OF_TORCH(dout, q, k, v, *expected, 0.0, causal, **settings)
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    results = FORWARD(q, k, v, 0.0, causal, **on_device)
    results += BACKWARD_OF_TORCH(dout, q, k, v, *results, 0.0, causal, **on_device)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), value, atol=BOUND[dtype], rtol=BOUND[dtype])
        assert result.stride() == value.stride()


# ---- over a paged cache ------------------------------------------------------------------------------------------
LENGTHS, EARLIER = [1, 17, 64, 65, 200], [(4, 3), (4, 64), (4, 150)]


def cache(
    kv: int, d: int, dtype: torch.dtype, lengths: Sequence[int] = LENGTHS, earlier: Sequence[tuple[int, int]] = EARLIER
) -> tuple[torch.Tensor, ...]:
    """Pools in which each sequence has its past, tables, and rows of the last and of some earlier positions."""
    generator = torch.Generator().manual_seed(kv + d)
    width = -(-max(lengths) // 16)
    tables = (torch.randperm(width * len(lengths), generator=generator) + 1).reshape(len(lengths), width)
    pools = torch.randn(2, width * len(lengths) + 1, 16, kv, d, generator=generator).to(dtype)
    rows = [*((i, n - 1) for i, n in enumerate(lengths)), *earlier]
    sequences, positions = (torch.tensor([part]) for part in zip(*rows))
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    new = pools.flatten(1, 2)[:, slots[0]].unsqueeze(1)
    return pools, new, positions, slots, sequences, tables


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("h", "kv", "d"), [(8, 2, 64), (8, 1, 128), (3, 1, 24), (4, 4, 32), (8, 8, 80)])
def test_paged(h: int, kv: int, d: int, dtype: torch.dtype, window: int | None, device: str) -> None:
    check_paged(cache(kv, d, dtype), h, dtype, window, device, every=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "head"), [(70, 64), (300, 64), (600, 128), (600, 256)])
def test_programs_share_a_long_context_and_a_chunk_is_read_as_tiles(
    count: int, head: int, dtype: torch.dtype, device: str
) -> None:
    """Nine parts of keys in three units, and rows of one prompt between those of others. Programs share parts of few
    rows and units of many, in tiles of 64 queries, and of 128 in half precision where these are enough."""
    chunk = [(0, position) for position in range(4400 - count, 4400)]
    check_paged(cache(2, head, dtype, [4500, 40, 700], [*chunk, (1, 5)]), 8, dtype, None, device, every=count // 8)


def check_paged(
    cached: Sequence[torch.Tensor], h: int, dtype: torch.dtype, window: int | None, device: str, every: int
) -> None:
    """Compares with plain attention in fp64, and one row in `every` with what it is alone, bit by bit."""
    pools, new, *rest = cached
    d = pools.shape[-1]
    q = torch.randn(1, rest[0].shape[1], h, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    reference = paged_attention_reference(q.double(), *new.double(), *pools.double(), *rest, d**-0.5, window)
    on_device = [x.to(device) for x in rest]
    k_pool, v_pool = (x.to(device).clone() for x in pools)
    k_pool.flatten(0, 1)[on_device[1][0]] = 0  # the operation stores what is new
    paged = torch.ops.tpshard.paged_attention
    out = paged(q.to(device), *new.to(device), k_pool, v_pool, *on_device, d**-0.5, window)
    assert torch.equal(k_pool.cpu(), pools[0])
    torch.testing.assert_close(out.cpu().double(), reference.double(), atol=BOUND[dtype], rtol=BOUND[dtype])
    for row in range(0, q.shape[1], every):  # whatever else is in the call
        one = [x[:, row : row + 1] for x in on_device[:3]]
        alone = paged(
            q[:, row : row + 1].to(device), *new[:, :, row : row + 1].to(device), k_pool, v_pool, *one, on_device[3],
            d**-0.5, window,
        )  # fmt: skip
        assert torch.equal(alone[0, 0], out[0, row])
