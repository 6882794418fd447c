"""Triton's attention under a mask equals matrix products; `test_triton_kernels.py` runs this file."""

import pytest
import torch
from attention_cases import documents_of, inputs
from tpshard.kernels.attention import attention_blocks, triton_flash
from tpshard.kernels.attention.attention_mask import CausalMask
from triton_interpreter import prepare

prepare()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OWN, EARLIER = (range(40, 67), range(40, 67)), (range(40, 67), range(35))
EVEN = (range(32), range(32))
GATHERED, LATER = (range(40, 67), range(70)), (range(40, 67), range(50, 80))


@pytest.mark.parametrize(
    ("positions", "window", "softcap", "packed", "d"),
    [(OWN, None, 1.5, False, 16), (OWN, 9, 0.7, False, 24), (EARLIER, 20, None, False, 16),
     (GATHERED, 13, 2.0, True, 16), (GATHERED, None, None, True, 16), (LATER, None, 1.5, True, 16),
     (LATER, 5, None, False, 8), (EVEN, 12, 1.5, False, 16)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_and_softcaps(positions, window, softcap, packed, d, dtype, monkeypatch):
    """Queries without keys, keys without queries, and documents out of order."""
    small = triton_flash.FlashTile(16, 16, 4, 1)
    monkeypatch.setattr(triton_flash.FlashTile, "of", staticmethod(lambda *how: small))
    if dtype == torch.float16:  # as heads above 128
        monkeypatch.setattr(triton_flash, "PARTS_OF_KEYS", {False: triton_flash.PARTS_OF_KEYS[True]})
    queries, keys = positions
    q, k, v, dout = inputs((2, len(queries), len(keys), 4, 2, d), 1, dtype)
    ids = documents_of(2, 80, 3).flip(0)[:, torch.randperm(80, generator=torch.Generator().manual_seed(5))]
    pair = (ids[:, queries.start : queries.stop], ids[:, keys.start : keys.stop]) if packed else None
    mask = CausalMask(queries, keys, pair, window)
    own = CausalMask(queries, keys, None if pair is None else tuple(x.to(DEVICE) for x in pair), window)
    wide = [x.double() for x in (q, k, v)]
    expected, logs = attention_blocks.forward(*wide, mask, 0.3, softcap)
    there = [x.to(DEVICE) for x in (q, k, v)]
    out, lse = triton_flash.forward(*there, own, 0.3, softcap)
    close = {"atol": 2e-6, "rtol": 2e-6} if dtype == torch.float32 else {"atol": 3e-3, "rtol": 3e-3}
    torch.testing.assert_close(lse.cpu().double(), logs, **close)
    torch.testing.assert_close(out.cpu().double(), expected, **close)
    total = torch.logaddexp(logs, torch.ones_like(logs))  # over more keys than these
    gradients = attention_blocks.backward(dout.double(), *wide, expected, total, mask, 0.3, softcap)
    results = triton_flash.backward(
        dout.to(DEVICE), *there, expected.to(dtype).to(DEVICE), total.float().to(DEVICE), own, 0.3, softcap
    )
    for result, gradient in zip(results, gradients, strict=True):
        torch.testing.assert_close(result.cpu().double(), gradient, **close)


def test_blocks_without_a_key_of_the_rows_documents_are_not_read(monkeypatch):
    small = triton_flash.FlashTile(16, 16, 4, 1)
    monkeypatch.setattr(triton_flash.FlashTile, "of", staticmethod(lambda *how: small))
    q, k, v, dout = (x.to(DEVICE) for x in inputs((1, 64, 64, 2, 1, 16), 1, torch.float32))
    ids = torch.arange(4, device=DEVICE).repeat_interleave(16)[None]
    mask = CausalMask(range(64), range(64), (ids, ids))
    out, lse = triton_flash.forward(q, k, v, mask, 0.3, 1.5)
    poisoned = [x.clone() for x in (dout, q, k, v)]
    for x in poisoned:
        x[:, 16:32] = float("nan")
    others = torch.arange(64) // 16 != 1
    spoilt, of_spoilt = triton_flash.forward(*poisoned[1:], mask, 0.3, 1.5)
    torch.testing.assert_close(spoilt[:, others], out[:, others], rtol=0, atol=0)
    assert spoilt[:, ~others].isnan().all()
    clean = triton_flash.backward(dout, q, k, v, out, lse, mask, 0.3, 1.5)
    for result, expected in zip(triton_flash.backward(*poisoned, spoilt, of_spoilt, mask, 0.3, 1.5), clean):
        torch.testing.assert_close(result[:, others], expected[:, others], rtol=0, atol=0)
        assert result[:, ~others].isnan().all()
