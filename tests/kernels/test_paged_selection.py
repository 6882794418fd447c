"""Paged selection takes the keys with the best scores, and attention sees these alone, with bits of the row alone."""

from __future__ import annotations

import pytest
import torch
from paged_cases import fill
from torch import Tensor
from tpshard.kernels.attention.paged_selection import PAGED_SELECT, PAGED_SELECTED

LENGTHS = [1, 2, 17, 64, 65, 130, 200]
ROWS = [*((i, n - 1) for i, n in enumerate(LENGTHS)), *((6, p) for p in (3, 63, 64, 150))]
COUNT, HEADS, WIDTH = 5, 8, 16


def placed(rows: list[tuple[int, int]], tables: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, slots, sequences and tables of rows (sequence, position)."""
    sequences, positions = (torch.tensor([x]) for x in zip(*rows))
    return positions, tables[sequences, positions // 16] * 16 + positions % 16, sequences, tables


def select(rows: list[tuple[int, int]], count: int = COUNT, dirty: bool = False) -> tuple[Tensor, list[list[int]]]:
    """The selection of rows, and the positions that they should select, by the formula in double."""
    tables, pools, past = fill(LENGTHS, 1, WIDTH)
    if dirty:
        for i, n in enumerate(LENGTHS):  # behind every sequence's last position, in its own blocks
            pools[0, tables[i, (n - 1) // 16], (n - 1) % 16 + 1 :] = float("nan")
            pools[0, tables[i, (n - 1) // 16 + 1 :]] = float("nan")
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(len(LENGTHS), 200, HEADS, WIDTH, generator=generator)
    weights = torch.randn(len(LENGTHS), 200, HEADS, generator=generator)
    at = tuple(torch.tensor(x) for x in zip(*rows))
    placing = placed(rows, tables)
    pool = pools[0].clone()
    pool.view(-1, 1, WIDTH)[placing[1][0]] = 7.0  # the operation stores what is new
    new = past[0][at].unsqueeze(0)
    indices = PAGED_SELECT(q[at][None], new, weights[at][None], pool, *placing, 0.25, count)
    assert dirty or torch.equal(pool, pools[0])
    best = []
    for i, p in rows:
        products = torch.einsum("hd,nd->hn", q[i, p].double(), past[0, i, : p + 1, 0].double()) * 0.25
        scores = weights[i, p].double() @ products.relu()
        best.append(scores.topk(min(count, p + 1)).indices.tolist())
    return indices, best


@pytest.mark.parametrize("dirty", [False, True])
def test_the_best_positions_come_first_and_absent_ones_last(dirty: bool) -> None:
    indices, best = select(ROWS, dirty=dirty)
    assert indices.dtype == torch.int32
    assert indices[0].tolist() == [one + [-1] * (COUNT - len(one)) for one in best]


def test_a_selection_of_all_keys_is_all_positions() -> None:
    indices, _ = select(ROWS, 300)
    for row, (_, p) in zip(indices[0].tolist(), ROWS):
        assert sorted(row[: p + 1]) == list(range(p + 1)) and set(row[p + 1 :]) <= {-1}


def attend(
    rows: list[tuple[int, int]], indices: Tensor, kv: int = 2, foul: float = 0.0, heads: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Output and logsumexps of rows; keys that no row selects, and those behind it, are `foul` if that is not 0."""
    tables, pools, past = fill(LENGTHS, kv, WIDTH)
    if foul:
        chosen = {(i, int(x)) for (i, _), row in zip(rows, indices[0]) for x in row if x >= 0}
        for i in range(len(LENGTHS)):
            for p in range(tables.shape[1] * 16):
                if (i, p) not in chosen:
                    pools[:, tables[i, p // 16], p % 16] = foul
    q = torch.randn(len(LENGTHS), 200, 2 * kv, WIDTH, generator=torch.Generator().manual_seed(6))
    at = tuple(torch.tensor(x) for x in zip(*rows))
    own = slice(None) if heads == slice(None) else slice(heads.start // 2, heads.stop // 2)
    k, v = past[0][at].unsqueeze(0)[:, :, own], past[1][at].unsqueeze(0)[:, :, own, : WIDTH - 4]
    k_pool, v_pool = pools[0, :, :, own].clone(), pools[1, :, :, own, : WIDTH - 4].clone()
    out, lse = PAGED_SELECTED(q[at][None][:, :, heads], k, v, k_pool, v_pool, *placed(rows, tables), indices, 0.25)
    if not foul:
        slots = placed(rows, tables)[1][0]
        assert torch.equal(k_pool.view(-1, *k.shape[2:])[slots], k[0])
        assert torch.equal(v_pool.view(-1, *v.shape[2:])[slots], v[0])
    return out, lse


def test_attention_sees_the_selected_positions_alone() -> None:
    """Keys of 16 numbers, values of 12; what is not selected may be NaN."""
    indices, _ = select(ROWS)
    indices[0, :, 1:] = indices[0, :, 1:].flip(-1).sort(-1, descending=True).values  # the order says nothing
    out, lse = attend(ROWS, indices)
    _, _, past = fill(LENGTHS, 2, WIDTH)
    q = torch.randn(len(LENGTHS), 200, 4, WIDTH, generator=torch.Generator().manual_seed(6))
    for row, (i, p) in enumerate(ROWS):
        chosen = indices[0, row][indices[0, row] >= 0].long()
        keys, values = (x[i, chosen].repeat_interleave(2, 1).double() for x in past)
        scores = torch.einsum("hd,nhd->hn", q[i, p].double(), keys) * 0.25
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)[:, : WIDTH - 4]
        torch.testing.assert_close(out[0, row].double(), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(lse[0, :, row].double(), scores.logsumexp(-1), rtol=0, atol=2e-6)
    last = ROWS[: len(LENGTHS)]
    clean, _ = attend(last, indices[:, : len(last)])
    fouled, _ = attend(last, indices[:, : len(last)], foul=float("nan"))
    assert torch.equal(fouled, clean)


@pytest.mark.parametrize("count", [COUNT, 100])
def test_a_row_has_the_same_bits_in_every_batch_and_heads_do_not_mix(count: int) -> None:
    indices, _ = select(ROWS, count)
    out, lse = attend(ROWS, indices)
    for row, one in enumerate(ROWS):
        alone, _ = select([one], count)
        assert torch.equal(alone[0, 0], indices[0, row])
        own, own_lse = attend([one], alone)
        assert torch.equal(own[0, 0], out[0, row]) and torch.equal(own_lse[0, :, 0], lse[0, :, row])
    half, _ = attend(ROWS, indices, heads=slice(2, 4))
    torch.testing.assert_close(half, out[:, :, 2:], rtol=0, atol=1e-6)


def test_absent_positions_are_not_read_in_place_of_others() -> None:
    """One selected position of many, and NaN in all others."""
    few = torch.tensor([[[9, -1, -1]]], dtype=torch.int32)
    out, _ = attend([(2, 16)], few)
    fouled, _ = attend([(2, 16)], few, foul=float("nan"))
    assert torch.equal(fouled, out) and not out.isnan().any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, rows, table = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2).long(), torch.ones(1, 1)
    pool, weights = torch.zeros(3, 16, 1, 8), torch.zeros(1, 2, 4)
    for wrong in ((q, k, weights[..., :3], pool), (q, k[..., :4], weights, pool), (q, k, weights, pool[..., :4])):
        with pytest.raises(ValueError, match="the shapes of q"):
            PAGED_SELECT(*wrong, rows, rows, rows, table.long(), 1.0, 2)
    with pytest.raises(ValueError, match="count is 0"):
        PAGED_SELECT(q, k, weights, pool, rows, rows, rows, table.long(), 1.0, 0)
    with pytest.raises(ValueError, match="the shapes of q"):
        PAGED_SELECTED(q, k, k, pool, pool.clone(), rows, rows, rows, table.long(), rows[:, :1, None], 1.0)
