"""What torch's FlashAttention is called with for a mask, by stand-ins that compute what it documents, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import documents_of, inputs
from torch import Tensor
from tpshard.kernels.attention import attention_blocks, cuda_attention, dense_attention, flash
from tpshard.kernels.attention.attention_mask import CausalMask, last_of


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, left: int | None) -> Tensor:
    """The scores [h, s, t] of one sequence's q [s,h,d] and k [t,kv,d], queries and keys ending together."""
    s, t = len(q), len(k)
    scores = torch.einsum("shd,thd->hst", q.float(), k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()) * scale
    behind = torch.arange(t - s, t)[:, None] - torch.arange(t)
    hidden = (behind < 0) & causal
    if left is not None:
        hidden |= behind > left
    return scores.masked_fill(hidden, -torch.inf)


def _sequences(starts: Tensor | None, rows: int) -> list[slice]:
    borders = [0, rows] if starts is None else starts.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, key_starts: Tensor | None, s: int, t: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if starts is None:
        each = [_forward(*(x[i] for x in (q, k, v)), torch.tensor([0, s]), torch.tensor([0, t]), s, t, 0.0, causal,
                         False, scale=scale, window_size_left=window_size_left) for i in range(len(q))]  # fmt: skip
        return torch.stack([one[0] for one in each]), torch.stack([one[1] for one in each]), *each[0][2:]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for rows, keys in zip(_sequences(starts, s), _sequences(key_starts, t), strict=True):
        scores = _scores(q[rows], k[keys], causal, scale, window_size_left)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1).float()
        out[rows] = torch.einsum("hst,thd->shd", scores.softmax(-1), values).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1) if keys.stop > keys.start else torch.inf
    return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor | None,
    key_starts: Tensor | None, s: int, t: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *,
    scale: float, window_size_left: int | None = None, **rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if starts is None:
        each = [_backward(*(x[i] for x in (dout, q, k, v, out, lse)), torch.tensor([0, s]), torch.tensor([0, t]), s, t,
                          0.0, causal, seed, offset, scale=scale, window_size_left=window_size_left)
                for i in range(len(q))]  # fmt: skip
        return tuple(torch.stack(parts) for parts in zip(*each))
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in zip(_sequences(starts, s), _sequences(key_starts, t), strict=True):
        shares = (_scores(q[rows], k[keys], causal, scale, window_size_left) - lse[:, rows, None]).exp()
        grad, wide_k, wide_v = dout[rows].float(), *(x[keys].repeat_interleave(group, 1).float() for x in (k, v))
        mean = (grad * out[rows]).sum(-1).T.unsqueeze(-1)
        dscores = shares * (torch.einsum("shd,thd->hst", grad, wide_v) - mean) * scale
        dq[rows] = torch.einsum("hst,thd->shd", dscores, wide_k).to(q.dtype)
        dk[keys] = torch.einsum("hst,shd->thd", dscores, q[rows].float()).unflatten(1, (-1, group)).sum(2).to(k.dtype)
        dv[keys] = torch.einsum("hst,shd->thd", shares, grad).unflatten(1, (-1, group)).sum(2).to(v.dtype)
    return dq, dk, dv


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    yield
    library._destroy()


OWN, EARLIER = (range(40, 60), range(40, 60)), (range(40, 60), range(20))
GATHERED, ENCLOSED = (range(40, 60), range(60)), (range(1), range(1))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("positions", "window", "causal"),
    [(OWN, None, True), (OWN, 6, True), (EARLIER, None, False), (EARLIER, 60, False), (GATHERED, None, True),
     (GATHERED, 7, True), (ENCLOSED, None, False)],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_is_told_as_it_is(
    positions: tuple[range, range], window: int | None, causal: bool, packed: bool
) -> None:
    """The results are those of matrix products, of queries without keys and of keys without queries as well."""
    queries, keys = positions
    seeds = (2, 5) if packed else (0,)
    for seed in seeds:
        ids = documents_of(2, 60, seed) - 3
        pair = (ids[:, queries.start : queries.stop], ids[:, keys.start : keys.stop]) if packed else None
        mask = CausalMask(queries, keys, pair, window)
        q, k, v, dout = inputs((2, len(queries), len(keys), 4, 2, 8), seed, torch.bfloat16)
        call = flash.call_of(q, mask)
        assert call is not None and call.causal == causal and (call.starts is not None) == packed
        out, lse = cuda_attention.forward(q, k, v, mask, 0.3, None)
        expected, logs = attention_blocks.forward(*(x.double() for x in (q, k, v)), mask, 0.3, None)
        torch.testing.assert_close(lse.double(), logs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
        over_all = torch.where(logs.isinf(), 0.5, logs + 0.1)  # of further keys
        gradients = cuda_attention.backward(dout, q, k, v, out, over_all.float(), mask, 0.3, None)
        wide = (x.double() for x in (dout, q, k, v, out))
        for mine, theirs in zip(gradients, attention_blocks.backward(*wide, over_all, mask, 0.3, None)):
            torch.testing.assert_close(mine.double(), theirs, atol=3e-2, rtol=3e-2)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("s", "t", "causal"), [(20, 20, True), (20, 33, False), (1, 9, False)])
def test_torch_attention_without_a_mask(s: int, t: int, causal: bool) -> None:
    q, k, v, dout = (x.transpose(1, 2) for x in inputs((2, s, t, 4, 2, 8), 1, torch.bfloat16))
    out, lse = dense_attention.forward(q, k, v, 0.0, causal, scale=0.3)
    wide = [x.double() for x in (q, k, v)]
    expected, logs = dense_attention.forward(*wide, 0.0, causal, scale=0.3)
    torch.testing.assert_close(lse.double(), logs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    gradients = dense_attention.backward(dout, q, k, v, out, lse, 0.0, causal, scale=0.3)
    reference = dense_attention.backward(dout.double(), *wide, expected, logs, 0.0, causal, scale=0.3)
    for mine, theirs in zip(gradients, reference):
        torch.testing.assert_close(mine.double(), theirs, atol=3e-2, rtol=3e-2)


@pytest.mark.usefixtures("stand_ins")
def test_what_the_kernels_cannot_compute_is_left_to_products() -> None:
    q = torch.zeros(1, 20, 2, 8, dtype=torch.bfloat16)
    ids = torch.zeros(1, 60, dtype=torch.int64)
    assert flash.call_of(q, CausalMask(*EARLIER, None, 55)) is None, "the last query sees a part of the keys"
    assert flash.call_of(q, CausalMask(range(10, 30), range(20))) is None, "so does the first"
    assert flash.call_of(q, last_of(20, 60, ids.index_fill(1, torch.tensor(3), 1), None)) is None, "ids decrease"
    assert flash.call_of(q.float(), last_of(20, 20, None, None)) is None
    assert flash.call_of(q[..., :4], last_of(20, 20, None, None)) is None


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "own"),
    [(torch.bfloat16, None, 30.0, True), (torch.bfloat16, 55, None, True), (torch.bfloat16, None, None, False),
     (torch.float32, None, 30.0, False)],
)  # fmt: skip
def test_a_kernel_of_our_own_computes_what_torch_does_not(
    dtype: torch.dtype, window: int | None, softcap: float | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from tpshard.kernels.attention import triton_flash

    calls = list[str]()

    def forward(q: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        calls.append("forward")
        return q, q

    def backward(*how: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append("backward")
        return how[1:4]

    monkeypatch.setattr(triton_flash, "forward", forward)
    monkeypatch.setattr(triton_flash, "backward", backward)
    mask = CausalMask(*(EARLIER if window else GATHERED), None, window)
    q, k, v, dout = inputs((2, len(mask.queries), len(mask.keys), 4, 2, 8), 1, dtype)
    out, lse = cuda_attention.forward(q, k, v, mask, 0.3, softcap)
    cuda_attention.backward(dout, q, k, v, out, lse, mask, 0.3, softcap)
    assert calls == (["forward", "backward"] if own else [])


@pytest.mark.parametrize("packed", ["no", "same", "pair"])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernels_take_what_they_are_given(packed: str, window: int | None) -> None:
    """Their schemas and shapes in this torch, on `meta`; tests/gpu runs them."""
    t = 15 if packed == "pair" else 9
    q, k, v, dout = (x.to("meta", torch.bfloat16) for x in inputs((2, 9, t, 4, 2, 16), 0, torch.float32))
    first, second = (torch.empty(4, dtype=torch.int32, device="meta") for _ in range(2))
    starts = {"no": None, "same": (first, first), "pair": (first, second)}[packed]
    call = flash.FlashCall(True, window, starts)
    out, lse = flash.forward(q, k, v, call, 0.25)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 9), torch.float32)
    actual = flash.backward(dout, q, k, v, out, lse, call, 0.25)
    assert [x.shape for x in actual] == [q.shape, k.shape, v.shape]
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
