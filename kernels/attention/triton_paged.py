"""Attention over a paged KV cache in Triton: rows of one sequence share their keys, programs share a long context.

Neighbouring rows of one sequence (a chunk of a prompt) are one tile of queries. Keys are computed in parts of `_PART`
positions, counted from the sequence's start, each with an online softmax of its own (Milakov and Gimelshein 2018).
`_UNIT` parts are added up in order, and these units in order. Where programs share a tile's keys, a second kernel adds
what they leave: of few rows each part, of many each unit, so that it is little beside the products. So a row's bits
depend on its position alone, whichever rows and programs share its work (flash-decoding, Dao et al. 2023, splits by the
number of programs). A value that is not finite reaches all rows of its tile, also those before it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from tpshard.kernels.attention.triton_scores import graded_scores, powers, scales
from tpshard.kernels.triton_device import capability_of, shared_kib

_PART = 512
"""Keys per part."""
_UNIT = 4
"""Parts that are added up before others are."""
_MANY = 256
"""Rows of a step from which on prompts are most of its work."""
_PROGRAMS = 1056
"""Programs that are enough to fill a device: eight for each multiprocessor of an H100."""
_LEFT = 256 << 20
"""Bytes that programs which share prompts' keys may leave to be added up."""
_STAGES = {True: 5, False: 3}
"""Of the loop over keys, where programs share parts and where not, if they fit. A decode step waits for its keys, which
more stages load earlier; a prompt's tiles find theirs in the cache, and want the registers."""
_ALL = 2**30
"""The window that stands for none."""


@triton.jit
def _weight(score, largest):
    """2 ** (score - largest), 0 where there is no score yet."""
    return tl.exp2(score - tl.where(largest == -float("inf"), 0.0, largest))


@triton.jit
def _add(largest, total, weighted, largest_b, total_b, weighted_b):
    """The softmax over two sets of keys from those over each: largest scores, sums of weights, weighted values."""
    now = tl.maximum(largest, largest_b)
    a, b = _weight(largest, now), _weight(largest_b, now)
    # stated as fused, since a compiler may fuse either product, and another one in another kernel
    return (
        now,
        tl.fma(total, a, total_b * b),
        tl.fma(weighted, tl.broadcast_to(a[:, None], weighted.shape), weighted_b * b[:, None]),
    )


@triton.jit
def _part(
    part, queries, k_pool, v_pool, table, d, first, position, low, high, lowest, kv, kv_heads, scale, slope, zero,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, CAPPED: tl.constexpr,
    FAST: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """The largest score, the sum of weights and the weighted values of the keys of a part, by query."""
    M: tl.constexpr = queries.shape[0]
    D: tl.constexpr = queries.shape[1]
    key = tl.arange(0, KEYS)
    top = tl.full([M], -float("inf"), tl.float32)
    sums = tl.zeros([M], tl.float32)
    values_sum = tl.zeros([M, D], tl.float32)
    begin = tl.maximum(part * PART, low) // KEYS * KEYS
    for start in range(begin, tl.minimum((part + 1) * PART, high + 1), KEYS):
        at = start + key
        # a key that none may see is read as another: blocks outside may be another sequence's by now
        stored = tl.minimum(tl.maximum(at, low), high).to(tl.uint32)  # whose division is a shift
        block = tl.load(table + stored // BLOCK).to(tl.int32)
        slot = ((block * BLOCK + (stored % BLOCK).to(tl.int32)) * kv_heads + kv).to(tl.int64)
        if D == HEAD:
            keys = tl.load(k_pool + slot[:, None] * HEAD + d[None, :])
            values = tl.load(v_pool + slot[:, None] * HEAD + d[None, :])
        else:
            keys = tl.load(k_pool + slot[:, None] * HEAD + d[None, :], mask=d[None, :] < HEAD, other=0.0)
            values = tl.load(v_pool + slot[:, None] * HEAD + d[None, :], mask=d[None, :] < HEAD, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = graded_scores(scores, scale, CAPPED, FAST)
        if WINDOWED:
            scores = tl.where(at[None, :] >= first[:, None], scores, -float("inf"))
        if start + KEYS > lowest:  # some row does not see all of these keys
            scores = tl.where(at[None, :] <= position[:, None], scores, -float("inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now) * slope
        weights, shrunk = powers(scores, slope, base[:, None]), powers(top, slope, base)
        sums = sums * shrunk + tl.sum(weights, 1)
        values_sum *= shrunk[:, None]
        values_sum += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = now
    return top * slope + zero, sums, values_sum


@triton.jit
def paged_attention_kernel(
    q, k_pool, v_pool, positions, sequences, tables, out, lse, partial, peaks, rows, scale, slope, zero, width,
    kv_heads, window, GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr,
    FAST: tl.constexpr, WINDOWED: tl.constexpr, WITH_LSE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of a run of rows and one KV head. Grid: (rows, kv_heads, programs that share the units of a run).

    q, out: [rows, kv_heads * GROUP, HEAD]; pools: [blocks, BLOCK, kv_heads, HEAD]; tables: [sequences, width]; lse:
    [rows, kv_heads * GROUP], written with WITH_LSE. A run is at most TILE neighbouring rows of one sequence; the
    program of its first row computes it. With SPLIT it leaves the results of its units, each of UNIT parts, for
    `add_parts_kernel`: sums of weighted values in partial [units, rows, kv_heads * GROUP, HEAD], the largest score and
    the sum of weights in peaks [units, rows, kv_heads * GROUP, 2].
    """
    row, kv, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + row)
    before = tl.load(sequences + tl.maximum(row - 1, 0))
    if (row % TILE == 0) | (before != sequence):
        member, d = tl.arange(0, M), tl.arange(0, D)
        end = tl.minimum((row // TILE + 1) * TILE, rows)
        own = row + member // GROUP
        same = tl.load(sequences + own, mask=own < end, other=-1) == sequence
        mine = own < tl.min(tl.where(same, end, own), 0)  # rows up to the first of another sequence
        position = tl.load(positions + own, mask=mine, other=-1).to(tl.int32)
        first = tl.maximum(position - window + 1, 0)
        low, high = tl.min(tl.where(mine, first, 1 << 30), 0), tl.max(position, 0)
        lowest = tl.min(tl.where(mine, position, high), 0)

        table = tables + sequence * width
        head = (own * kv_heads + kv) * GROUP + member % GROUP
        in_head = mine[:, None] & (d[None, :] < HEAD)
        place = head[:, None].to(tl.int64) * HEAD + d[None, :]
        queries = tl.load(q + place, mask=in_head, other=0.0)
        of_all = tl.full([M], -float("inf"), tl.float32)
        total_of_all = tl.zeros([M], tl.float32)
        weighted_of_all = tl.zeros([M, D], tl.float32)
        first_part, last_part = low // PART, high // PART
        for unit in range(first_part // UNIT + program, last_part // UNIT + 1, tl.num_programs(2)):
            if UNIT == 1:
                largest, total, weighted = _part(
                    unit, queries, k_pool, v_pool, table, d, first, position, low, high, lowest, kv, kv_heads, scale,
                    slope, zero, HEAD, BLOCK, KEYS, PART, CAPPED, FAST, WINDOWED,
                )  # fmt: skip
            else:
                largest = tl.full([M], -float("inf"), tl.float32)
                total = tl.zeros([M], tl.float32)
                weighted = tl.zeros([M, D], tl.float32)
                for part in range(tl.maximum(unit * UNIT, first_part), tl.minimum((unit + 1) * UNIT, last_part + 1)):
                    top, sums, values_sum = _part(
                        part, queries, k_pool, v_pool, table, d, first, position, low, high, lowest, kv, kv_heads,
                        scale, slope, zero, HEAD, BLOCK, KEYS, PART, CAPPED, FAST, WINDOWED,
                    )  # fmt: skip
                    largest, total, weighted = _add(largest, total, weighted, top, sums, values_sum)
            if SPLIT:
                at_unit = (unit * rows).to(tl.int64) * kv_heads * GROUP
                tl.store(partial + at_unit * HEAD + place, weighted, mask=in_head)
                tl.store(peaks + 2 * (at_unit + head), largest, mask=mine)
                tl.store(peaks + 2 * (at_unit + head) + 1, total, mask=mine)
            else:
                of_all, total_of_all, weighted_of_all = _add(
                    of_all, total_of_all, weighted_of_all, largest, total, weighted
                )
        if not SPLIT:
            result = weighted_of_all * (1 / total_of_all)[:, None]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=in_head)
            if WITH_LSE:
                tl.store(lse + head, (of_all + tl.log2(total_of_all)) * 0.6931471805599453, mask=mine)


@triton.jit
def add_parts_kernel(
    partial, peaks, positions, out, lse, heads, window, HEAD: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    COUNT: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Adds up what programs left of a row and head, in order: of KEYS keys each, COUNT of them a unit. Grid: (rows,
    heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    d, low, high = tl.arange(0, D), tl.maximum(position - window + 1, 0) // KEYS, position // KEYS
    state = tl.num_programs(0).to(tl.int64) * heads
    place = row * heads + head
    of_all = tl.full([1], -float("inf"), tl.float32)
    total_of_all = tl.zeros([1], tl.float32)
    weighted_of_all = tl.zeros([1, D], tl.float32)
    for unit in range(low // COUNT, high // COUNT + 1):
        largest = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        weighted = tl.zeros([1, D], tl.float32)
        for part in range(tl.maximum(unit * COUNT, low), tl.minimum((unit + 1) * COUNT, high + 1)):
            at = part * state + place
            top = tl.load(peaks + 2 * at + tl.arange(0, 1))
            sums = tl.load(peaks + 2 * at + 1 + tl.arange(0, 1))
            values_sum = tl.load(partial + at * HEAD + d[None, :], mask=d[None, :] < HEAD, other=0.0)
            largest, total, weighted = _add(largest, total, weighted, top, sums, values_sum)
        of_all, total_of_all, weighted_of_all = _add(of_all, total_of_all, weighted_of_all, largest, total, weighted)
    result = weighted_of_all * (1 / total_of_all)[:, None]
    tl.store(out + place * HEAD + d[None, :], result.to(out.dtype.element_ty), mask=d[None, :] < HEAD)
    if WITH_LSE:
        tl.store(lse + place + tl.arange(0, 1), (of_all + tl.log2(total_of_all)) * 0.6931471805599453)


@dataclass(frozen=True)
class Sharing:
    """How programs share the keys of a run of rows."""

    unit: int
    """Parts whose sums a program leaves to be added up, where several share them."""
    programs: int

    @staticmethod
    def of(sizes: Mapping[str, int], rows: int, kv_heads: int, keys: int) -> Sharing:
        """Of so many rows whose sequences have up to so many keys. Neighbours among many rows are a prompt's."""
        if rows < _MANY:
            programs = min(_PROGRAMS // (rows * kv_heads), -(-keys // _PART))
            return Sharing(1, programs) if programs > 1 else Sharing(_UNIT, 1)
        units = -(-keys // (_PART * _UNIT))
        runs = -(-rows // sizes["TILE"]) * kv_heads
        # a program of large heads has a multiprocessor for itself, of others two share one
        programs = min(_PROGRAMS // (8 if sizes["HEAD"] > 128 else 4) // runs, units)
        left = 4 * units * rows * kv_heads * sizes["GROUP"] * sizes["HEAD"]
        return Sharing(_UNIT, max(1, programs if left <= _LEFT else 1))


def launch_sizes(
    rows: int, group: int, kv_heads: int, head: int, keys: int, dtype: torch.dtype, capability: tuple[int, int]
) -> tuple[dict[str, int], Sharing]:
    """The compile-time sizes for so many rows of `group` query heads of size `head` for each KV head, and how programs
    share up to `keys` keys of a sequence."""
    sizes = tile(group, head, dtype, capability)
    sharing = Sharing.of(sizes, rows, kv_heads, keys)
    # Tiles of many queries read keys from the cache half as often, if there are enough of them for all multiprocessors.
    wide = sizes | {"TILE": max(1, 128 // group), "M": 128}
    if (
        rows >= _MANY
        and sizes["M"] == 64
        and shared_kib(capability) > 163
        and _fits(wide, dtype, _STAGES[False], capability)
    ):
        of_wide = Sharing.of(wide, rows, kv_heads, keys)
        if -(-rows // wide["TILE"]) * kv_heads * of_wide.programs >= _PROGRAMS // 11:
            return wide, of_wide
    return sizes, sharing


def tile(group: int, head: int, dtype: torch.dtype, capability: tuple[int, int] = (9, 0)) -> dict[str, int]:
    """The compile-time sizes for `group` query heads of size `head` a KV head, where rows are few.

    64 queries are a product of Hopper's. KEYS, of a step of the loop, are as many as fit the shared memory of a device,
    however many rows there are and programs share them, so that a row's bits do not depend on that.
    """
    queries = max(16 if dtype == torch.float32 else 64, triton.next_power_of_2(group))
    sizes = {"GROUP": group, "HEAD": head, "PART": _PART, "TILE": max(1, queries // group),
             "M": queries, "D": max(16, triton.next_power_of_2(head))}  # fmt: skip
    fitting = [keys for keys in (64, 32) if _fits(sizes | {"KEYS": keys}, dtype, _STAGES[False], capability)]
    return sizes | {"KEYS": fitting[0] if fitting else 16}


def stages(sizes: Mapping[str, int], dtype: torch.dtype, sharing: Sharing, capability: tuple[int, int] = (9, 0)) -> int:
    """Stages of the loop over keys with these sizes: as many as fit a device."""
    return next(
        (count for count in range(_STAGES[sharing.unit == 1], 2, -1) if _fits(sizes, dtype, count, capability)), 2
    )


def _fits(sizes: Mapping[str, int], dtype: torch.dtype, stages: int, capability: tuple[int, int]) -> bool:
    """Whether a program's queries and the keys and values in flight fit a device's shared memory; products of Hopper's
    and later keep those that they read there."""
    in_flight = stages // 2 + (capability >= (9, 0) and dtype != torch.float32)
    numbers = (sizes["M"] + 2 * in_flight * sizes["KEYS"]) * sizes["D"]
    return numbers * dtype.itemsize + (10 << 10) <= shared_kib(capability) << 10


def warps(sizes: Mapping[str, int]) -> int:
    """Warps of a program, whose registers hold its rows of a head twice."""
    return 8 if sizes["HEAD"] > 128 or sizes["M"] > 64 else 4


def registers(sizes: Mapping[str, int]) -> int | None:
    """The most registers of a thread: with many queries as few as let two programs share a multiprocessor, so that one
    computes products while the other has exponentials. What waits for a part's end lies in memory meanwhile."""
    return 128 if sizes["M"] > 64 and sizes["HEAD"] <= 128 else None


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, scale: float,
    window: int | None = None, softcap: float | None = None, with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output of q [rows, heads, head_dim], in its shape, and the logsumexps [rows, heads] in fp32 if asked for.

    The pools must hold the new keys. Does not synchronize with the host.
    """
    rows, heads, head_dim = q.shape
    block, kv_heads = k_pool.shape[1:3]
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((rows, heads), dtype=torch.float32) if with_lse else None
    capability, positions, window = capability_of(q), positions.contiguous(), window or _ALL
    keys = tables.shape[1] * block
    sizes, sharing = launch_sizes(rows, heads // kv_heads, kv_heads, head_dim, keys, q.dtype, capability)
    partial, peaks, shared = out, out, sharing.programs > 1
    if shared:
        units = -(-keys // (_PART * sharing.unit))
        partial = q.new_empty((units, rows, heads, head_dim), dtype=torch.float32)
        peaks = q.new_empty((units, rows, heads, 2), dtype=torch.float32)
    paged_attention_kernel[rows, kv_heads, sharing.programs](
        q, k_pool, v_pool, positions, sequences.contiguous(), tables.contiguous(), out, out if lse is None else lse,
        partial, peaks, rows, *scales(scale, softcap), tables.shape[1], kv_heads, window,
        BLOCK=block, **sizes, UNIT=sharing.unit, CAPPED=softcap is not None, FAST=q.is_cuda, WINDOWED=window != _ALL,
        WITH_LSE=with_lse, SPLIT=shared, maxnreg=registers(sizes), num_warps=warps(sizes),
        num_stages=stages(sizes, q.dtype, sharing, capability),
    )  # fmt: skip
    if shared:
        add_parts_kernel[rows, heads](
            partial, peaks, positions, out, out if lse is None else lse, heads, window, HEAD=head_dim, D=sizes["D"],
            KEYS=_PART * sharing.unit, COUNT=_UNIT // sharing.unit, WITH_LSE=with_lse, num_warps=1,
        )  # fmt: skip
    return out, lse
