"""The attention operation equals plain softmax in fp64; tests/gpu/test_attention.py does the same on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_cases import documents_of, expected, inputs, plain_scores
from tpshard.kernels.attention.attention import attention, blockwise, blockwise_backward

OP = torch.ops.tpshard.attention
BACKWARD = torch.ops.tpshard.attention_backward

SHAPES = [  # batch, queries, keys, heads, KV heads, head size
    (2, 7, 7, 4, 4, 8),
    (1, 33, 33, 6, 2, 16),
    (3, 16, 16, 5, 1, 5),
    (2, 1, 9, 4, 2, 8),
    (1, 5, 12, 3, 3, 24),
    (1, 1300, 1300, 2, 1, 8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("path", ["op", "blockwise"])
@pytest.mark.parametrize("window", [None, 1, 6, 600])
def test_equals_plain_softmax(shape: tuple[int, ...], packed: bool, path: str, window: int | None) -> None:
    q, k, v, dout = inputs(shape, 0, torch.float32)
    documents = documents_of(shape[0], shape[2], 1) if packed else None
    forward, backward = (OP, BACKWARD) if path == "op" else (blockwise, blockwise_backward)
    out, lse = forward(q, k, v, documents, 0.3, window)
    got = [out, lse, *backward(dout, q, k, v, out, lse, documents, 0.3, window)]
    for value, reference, operand in zip(got, expected(q, k, v, dout, documents, 0.3, window), (q, None, q, k, v)):
        torch.testing.assert_close(value.double(), reference, atol=2e-5, rtol=2e-5)
        assert operand is None or value.shape == operand.shape
        assert value.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    q, k, v, dout = inputs((2, 20, 20, 4, 2, 16), 3, dtype)
    documents = documents_of(2, 20, 4)
    out, lse = OP(q, k, v, documents, 0.25)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    got = [out, lse, *BACKWARD(dout, q, k, v, out, lse, documents, 0.25)]
    tolerance = 3e-2 if dtype != torch.float64 else 1e-12
    for value, reference in zip(got, expected(q, k, v, dout, documents, 0.25)):
        torch.testing.assert_close(value.double(), reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_scores_are_capped(shape: tuple[int, ...], window: int | None) -> None:
    q, k, v, dout = inputs(shape, 2, torch.float64)
    documents = documents_of(shape[0], shape[2], 1)
    out, lse = OP(q, k, v, documents, 1.5, window, 2.0)
    got = [out, lse, *BACKWARD(dout, q, k, v, out, lse, documents, 1.5, window, 2.0)]
    for value, reference in zip(got, expected(q, k, v, dout, documents, 1.5, window, 2.0)):
        torch.testing.assert_close(value, reference, atol=1e-10, rtol=1e-10)


def test_later_tokens_and_other_documents_do_not_matter() -> None:
    q, k, v, _ = inputs((1, 12, 12, 2, 1, 8), 5, torch.float32)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    before = attention(q, k, v, documents)
    k[:, 9:], v[:, :5] = 7.0, -3.0
    after = attention(q, k, v, documents)
    assert torch.equal(before[:, 5:9], after[:, 5:9])
    assert not torch.equal(before[:, 9:], after[:, 9:]) and not torch.equal(before[:, :5], after[:, :5])


def test_bits_do_not_depend_on_the_other_heads() -> None:
    q, k, v, dout = inputs((2, 40, 40, 8, 4, 16), 6, torch.float32)
    documents = documents_of(2, 40, 7)
    out, lse = OP(q, k, v, documents, 0.25)
    whole = [out, *BACKWARD(dout, q, k, v, out, lse, documents, 0.25)]
    for part in range(4):
        heads, kv = slice(2 * part, 2 * part + 2), slice(part, part + 1)
        own = (q[:, :, heads], k[:, :, kv], v[:, :, kv])
        own_out, own_lse = OP(*own, documents, 0.25)
        own_grads = BACKWARD(dout[:, :, heads], *own, own_out, own_lse, documents, 0.25)
        for whole_value, own_value, cut in zip(whole, [own_out, *own_grads], (heads, heads, kv, kv)):
            assert torch.equal(whole_value[:, :, cut], own_value)


def test_registration() -> None:
    """Schema, fake shapes and autograd agree with the kernels."""
    q, k, v, dout = inputs((2, 6, 6, 4, 2, 8), 8, torch.float32)
    documents = documents_of(2, 6, 9)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OP.default, (*leaves, documents, 0.5), test_utils=checks)
    out, lse = OP(*leaves, documents, 0.5)
    grads = torch.autograd.grad(out, leaves, dout)
    direct = BACKWARD(dout, *leaves, out, lse, documents, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(grads, direct))
    with torch.no_grad():
        torch.library.opcheck(BACKWARD.default, (dout, q, k, v, out, lse, documents, 0.5), test_utils=checks[:2])


@pytest.mark.parametrize("fault", ["heads", "batch", "documents", "keys"])
def test_refuses_operands_that_do_not_fit(fault: str) -> None:
    q, k, v, _ = inputs((2, 6, 6, 4, 2, 8), 8, torch.float32)
    documents = torch.zeros(2, 6, dtype=torch.int64)
    if fault == "heads":
        q = q[:, :, :3]
    elif fault == "batch":
        k = k[:1]
    elif fault == "documents":
        documents = documents[:, :5]
    else:
        k, v, documents = k[:, :5], v[:, :5], documents[:, :5]
    with pytest.raises(ValueError, match=r"do not match|documents"):
        OP(q, k, v, documents, 0.5)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
@pytest.mark.parametrize(("packed", "window", "softcap"), [(False, None, None), (True, 6, None), (True, None, 2.0)])
def test_a_sink_is_a_further_key_without_a_value(
    shape: tuple[int, ...], packed: bool, window: int | None, softcap: float | None
) -> None:
    q, k, v, dout = inputs(shape, 4, torch.float64)
    documents = documents_of(shape[0], shape[2], 1) if packed else None
    sinks = torch.linspace(-1.5, 2.0, shape[3], dtype=torch.float64)

    def by_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        scores, values = plain_scores(q, k, v, documents, 0.3, window, softcap)
        further = sinks[:, None, None].expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, further], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhst,bthd->bshd", shares, values)

    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    out, reference = attention(*leaves[:3], documents, 0.3, window, softcap, leaves[3]), by_softmax(*leaves)
    torch.testing.assert_close(out, reference, atol=1e-10, rtol=1e-10)
    for pair in zip(*(torch.autograd.grad(result, leaves, dout) for result in (out, reference))):
        torch.testing.assert_close(*pair, atol=1e-10, rtol=1e-10)
