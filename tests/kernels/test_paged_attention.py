"""Paged attention equals attention over the whole sequence, with bits independent of the other rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_cases import fill
from tpshard.kernels.attention.paged_attention import paged_attention_reference, span


def paged_attention(q: torch.Tensor, *arrays: torch.Tensor, **how: float | None) -> torch.Tensor:
    return torch.ops.tpshard.paged_attention(q, *arrays, q.shape[-1] ** -0.5, **how)


@pytest.mark.parametrize("h,kv,d", [(4, 2, 16), (3, 1, 64), (8, 8, 8)])
@pytest.mark.parametrize("window,softcap", [(None, None), (1, None), (40, 1.5), (120, None)])
def test_equals_attention_over_the_whole(h: int, kv: int, d: int, window: int | None, softcap: float | None) -> None:
    lengths = [1, 17, 64, 65, 130, 200]
    tables, pools, past = fill(lengths, kv, d)
    rows = [(i, n - 1) for i, n in enumerate(lengths)] + [(5, p) for p in (3, 63, 64, 150)]
    sequences, positions = (torch.tensor([x]) for x in zip(*rows))
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    q = torch.randn(1, len(rows), h, d)
    new = past[:, sequences[0], positions[0]].unsqueeze(1)
    k_pool, v_pool = pools.clone()
    k_pool.view(-1, kv, d)[slots[0]] = 0  # the operation stores what is new
    placing = (positions, slots, sequences, tables)
    out = paged_attention(q, new[0], new[1], k_pool, v_pool, *placing, window=window, softcap=softcap)
    assert torch.equal(k_pool, pools[0]) and torch.equal(v_pool, pools[1])
    again, lse = torch.ops.tpshard.paged_attention_lse(
        q, new[0], new[1], k_pool, v_pool, *placing, d**-0.5, window, softcap
    )
    assert torch.equal(again, out)
    for row, (i, p) in enumerate(rows):
        keys, values = past[:, i, max(0, p + 1 - (window or p + 1)) : p + 1].repeat_interleave(h // kv, dim=2)
        scores = torch.einsum("hd,phd->hp", q[0, row], keys) / math.sqrt(d)
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        torch.testing.assert_close(lse[0, :, row], scores.logsumexp(-1))
        weights = torch.softmax(scores, -1)
        torch.testing.assert_close(out[0, row], torch.einsum("hp,phd->hd", weights, values), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_in_every_batch(window: int | None) -> None:
    lengths = [5, 40, 90, 90, 170, 300]
    tables, pools, past = fill(lengths, 2, 32)
    rows = [(i, p) for i, n in enumerate(lengths) for p in {0, n // 2, n - 1}]
    sequences, positions = (torch.tensor([x]) for x in zip(*rows))
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    q, new = torch.randn(1, len(rows), 6, 32), past[:, sequences[0], positions[0]].unsqueeze(1)

    def run(which: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            q[:, which], new[0][:, which], new[1][:, which], *pools.clone(), positions[:, which], slots[:, which],
            sequences[:, which], tables, window=window,
        )[0]  # fmt: skip

    whole = run(torch.arange(len(rows)))
    for row in range(len(rows)):
        assert torch.equal(run(torch.tensor([row]))[0], whole[row])
    shuffled = torch.randperm(len(rows))
    assert torch.equal(run(shuffled), whole[shuffled])


def test_what_lies_beyond_a_rows_position_does_not_reach_it() -> None:
    """NaN in a freed block never reaches its next owner, who reads only what it has written. Block 0 has no owner."""
    lengths = [1, 17, 40, 90]
    tables, pools, past = fill(lengths, 2, 16)
    dirty = torch.full_like(pools, float("nan"))
    for i, n in enumerate(lengths):
        at = torch.arange(n)
        dirty[:, tables[i, at // 16], at % 16] = past[:, i, :n]
    rows = [(0, 0), (1, 16), (2, 39), *((3, p) for p in (64, 65, 70, 89))]
    sequences, positions = (torch.tensor([x]) for x in zip(*rows))
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    q, new = torch.randn(1, len(rows), 4, 16), past[:, sequences[0], positions[0]].unsqueeze(1)
    clean = paged_attention(q, *new, *pools, positions, slots, sequences, tables)
    assert torch.equal(paged_attention(q, *new, *dirty, positions, slots, sequences, tables), clean)
    new[:, :, 5] = float("nan")  # of position 70: the rows of the same call at 64 and 65 do not see it, that at 89 does
    out = paged_attention(q, *new, *dirty, positions, slots, sequences, tables)
    assert torch.equal(out[:, :5], clean[:, :5]) and out[0, 5:].isnan().all()


@pytest.mark.parametrize("plain", [False, True])
def test_what_lies_before_a_rows_window_does_not_reach_it(plain: bool) -> None:
    attend = paged_attention_reference if plain else torch.ops.tpshard.paged_attention
    tables, pools, past = fill([90], 2, 16)
    positions = torch.tensor([[60, 75, 89]])
    sequences, slots = positions * 0, tables[0, positions // 16] * 16 + positions % 16
    q, new = torch.randn(1, 3, 4, 16), past[:, 0, positions[0]].unsqueeze(1)
    rest = (positions, slots, sequences, tables, 0.25, 30)
    clean = attend(q, *new, *pools.clone(), *rest)
    pools[:, tables[0, :2]] = float("nan")  # positions 0 to 31: the window of 60 begins with the last of them
    out = attend(q, *new, *pools, *rest)
    assert out[0, 0].isnan().all() and torch.equal(out[0, 1:], clean[0, 1:])
    out = attend(q[:, 1:2], *new[:, :, 1:2], *pools, *(x[:, 1:2] for x in rest[:3]), *rest[3:])
    assert torch.equal(out[0, 0], clean[0, 1])


def test_heads_do_not_mix() -> None:
    tables, pools, past = fill([50], 4, 16)
    sequences, positions = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[49]])
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    q, new = torch.randn(1, 1, 8, 16), past[:, 0, 49].reshape(2, 1, 1, 4, 16)
    whole = paged_attention(q, *new, *pools.clone(), positions, slots, sequences, tables)
    for part in range(2):
        heads, kv = slice(4 * part, 4 * part + 4), slice(2 * part, 2 * part + 2)
        local = pools[:, :, :, kv].clone()
        out = paged_attention(q[:, :, heads], *new[..., kv, :], *local, positions, slots, sequences, tables)
        torch.testing.assert_close(out, whole[:, :, heads], rtol=0, atol=1e-6)


def test_spans_cover_the_position_without_doubling_it() -> None:
    for position in (0, 63, 64, 95, 96, 127, 128, 191, 192, 1000, 5000):
        assert position < span(position) <= max(64, position * 3 // 2 + 1)
        assert span(position) % 32 == 0


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, pool = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 2, 8), torch.zeros(4, 16, 2, 8)
    row = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not match"):
        paged_attention(q, k, k, pool, pool.clone(), row, row, row, row)


@pytest.mark.parametrize(
    ("capability", "group", "head", "rows"),
    [(80, 4, 128, 1), (90, 4, 128, 1), (90, 4, 128, 512), (90, 8, 256, 512), (100, 8, 256, 1)],
)
def test_the_triton_kernel_spills_nothing_in_its_loop(capability: int, group: int, head: int, rows: int) -> None:
    compiled = compiled_paged(capability, group, head, torch.bfloat16, rows == 1, rows)
    spilled = sum(name in ("LDL", "STL") for name in compiled.main_loop)
    # where a step has many rows what waits for a part's end is spilled: two programs share the registers of Hopper's
    assert spilled == 0 if rows == 1 else 16 * spilled < len(compiled.main_loop)
    assert rows == 1 or head > 128 or compiled.registers <= 128
    assert compiled.shared <= {80: 163}.get(capability, 227) << 10


@pytest.mark.parametrize("head", [64, 96, 128, 256])
@pytest.mark.parametrize("device", [(8, 0), (9, 0), (12, 0)])
def test_many_rows_are_computed_by_the_same_steps_as_one(head: int, device: tuple[int, int]) -> None:
    one, _ = launch_sizes(1, 4, 8, head, 8192, torch.bfloat16, device)
    many, _ = launch_sizes(2048, 4, 8, head, 8192, torch.bfloat16, device)
    assert (one["KEYS"], one["PART"], one["M"]) == (many["KEYS"], many["PART"], 64)
    assert many["M"] == (128 if device == (9, 0) else 64) and many["TILE"] == many["M"] // 4


@pytest.mark.parametrize(
    ("rows", "kv", "keys", "queries", "unit", "programs"),
    [
        (1, 8, 32768, 64, 1, 64),  # a program for each part
        (64, 8, 8192, 64, 1, 2),
        (128, 8, 8192, 64, 4, 1),  # enough without sharing
        (512, 8, 8192, 128, 4, 2),  # a chunk of a prompt, two programs a multiprocessor
        (2048, 8, 8192, 128, 4, 1),
        (2048, 1, 8192, 128, 4, 4),  # of one tensor-parallel rank of eight
        (2048, 1, 2048, 64, 4, 1),  # too short to be shared
        (2048, 2, 2**20, 128, 4, 1),  # too much would be left to be added up
    ],
)
def test_programs_share_long_contexts(rows: int, kv: int, keys: int, queries: int, unit: int, programs: int) -> None:
    sizes, sharing = launch_sizes(rows, 4, kv, 128, keys, torch.bfloat16, (9, 0))
    assert (sizes["M"], sharing.unit, sharing.programs) == (queries, unit, programs)


def launch_sizes(*shape: Any) -> tuple[dict[str, int], Any]:
    pytest.importorskip("triton")
    from tpshard.kernels.attention import triton_paged

    return triton_paged.launch_sizes(*shape)


@pytest.mark.parametrize(("capability", "head", "dtype"), [
    (80, 256, torch.bfloat16), (86, 256, torch.bfloat16), (86, 128, torch.float32), (89, 256, torch.float32),
    (90, 192, torch.bfloat16), (90, 256, torch.bfloat16), (90, 256, torch.float32), (100, 256, torch.float32),
    (120, 256, torch.bfloat16),
])  # fmt: skip
def test_the_triton_kernel_fits_the_shared_memory_of_a_device(capability: int, head: int, dtype: torch.dtype) -> None:
    for shared in (True, False):
        compiled = compiled_paged(capability, 4, head, dtype, shared)
        assert compiled.shared <= {80: 163, 90: 227, 100: 227}.get(capability, 99) << 10


def compiled_paged(capability: int, group: int, head: int, dtype: torch.dtype, shared: bool, rows: int = 1) -> Any:
    """The kernel, with the sizes of its launcher, where programs share keys and where not."""
    pytest.importorskip("triton")
    from tpshard.kernels.attention import triton_paged

    from compiled_kernel import compile_kernel

    device, name = divmod(capability, 10), {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    sizes, _ = launch_sizes(rows, group, 8, head, 8192, dtype, device)
    sharing = triton_paged.Sharing(1, 2) if shared else triton_paged.Sharing(4, 1)
    constants = sizes | {"BLOCK": 16, "WITH_LSE": True, "SPLIT": shared, "UNIT": sharing.unit}
    constants |= {"CAPPED": group == 8, "FAST": True, "WINDOWED": group == 8}
    types = {"q": f"*{name}"} | dict.fromkeys(("scale", "slope", "zero"), "fp32")
    return compile_kernel(
        triton_paged.paged_attention_kernel, constants, name, capability, triton_paged.warps(sizes),
        triton_paged.stages(sizes, dtype, sharing, device), types, triton_paged.registers(sizes),
    )  # fmt: skip
