"""Triton's paged attention equals the plain operation; `test_triton_kernels.py` runs this file."""

import pytest
import torch
from paged_cases import fill
from tpshard.kernels.attention import paged_attention, triton_paged  # noqa: F401  (registers the operation)
from triton_interpreter import prepare

prepare()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1, 17, 64, 65, 130]
ROWS = [(i, n - 1) for i, n in enumerate(LENGTHS)] + [(4, 3), (4, 63)]
CASES = [
    (4, 2, 16, torch.float32, 2e-6, None, None),
    (3, 1, 24, torch.float32, 2e-6, 33, 1.5),
    (2, 2, 32, torch.float16, 3e-3, None, None),
]


@pytest.mark.parametrize(("heads", "kv", "dim", "dtype", "close", "window", "softcap"), CASES)
def test_rows_are_those_of_the_operation_and_know_nothing_of_one_another(
    heads, kv, dim, dtype, close, window, softcap, monkeypatch
):
    monkeypatch.setattr(triton_paged, "_PART", 64)
    monkeypatch.setattr(triton_paged, "_UNIT", 2)
    monkeypatch.setattr(triton_paged, "_PROGRAMS", 1)
    tables, pools, past = fill(LENGTHS, kv, dim)
    sequences, positions = (torch.tensor([x]) for x in zip(*ROWS))
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    q, new = torch.randn(1, len(ROWS), heads, dim).to(dtype), past[:, sequences[0], positions[0]].unsqueeze(1).to(dtype)
    pools = pools.to(dtype)
    expected, lse = torch.ops.tpshard.paged_attention_lse(
        q, *new, *pools.clone(), positions, slots, sequences, tables, dim**-0.5, window, softcap
    )

    def run(which, with_lse=False):
        arrays = (q[0, which], *pools, positions[0, which], sequences[0, which], tables)
        return triton_paged.paged_attention(*(a.to(DEVICE) for a in arrays), dim**-0.5, window, softcap, with_lse)

    every = list(range(len(ROWS)))
    whole, own_lse = (x.cpu() for x in run(every, True))
    torch.testing.assert_close(own_lse, lse[0].T.contiguous(), rtol=0, atol=close)
    torch.testing.assert_close(whole, expected[0], rtol=0, atol=close)
    written = pools.clone()
    pools[:] = float("nan")  # what nobody wrote, or another sequence left
    for i, n in enumerate(LENGTHS):
        for p in range(n):
            pools[:, tables[i, p // 16], p % 16] = written[:, tables[i, p // 16], p % 16]
    for rows in (every, *([row] for row in every)):
        assert torch.equal(run(rows)[0].cpu(), whole[rows])
    monkeypatch.setattr(triton_paged, "_PROGRAMS", 64)  # several programs share a row's parts
    assert torch.equal(run(every)[0].cpu(), whole) and torch.equal(run([2, 4, 6])[0].cpu(), whole[[2, 4, 6]])
    monkeypatch.setattr(triton_paged, "_MANY", 1)  # the tiles of prompts, whose units they share
    assert torch.equal(run(every)[0].cpu(), whole) and torch.equal(run([4, 5, 6], True)[1].cpu(), own_lse[4:])
    monkeypatch.setattr(triton_paged, "_PROGRAMS", 1)  # of 128 queries in half precision
    assert torch.equal(run(every)[0].cpu(), whole)
