"""A CPU computes some kernels by several operations of the library, and the plan prices as many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.devices.read import device
from tpshard.kernels.attention import attention, cpu_attention
from tpshard.kernels.attention.attention_mask import last_of
from tpshard.kernels.attention.paged_attention import PAGED, paged_attention_reference
from tpshard.kernels.attention.paged_selection import (
    PAGED_SELECT,
    PAGED_SELECTED,
    select_keys_reference,
    selected_attention_reference,
)
from tpshard.kernels.norm import NORM, rms_norm
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.pricing.cost import EVICTING_BYTES, Overhead
from tpshard.parallelism.pricing.fusion import CacheReads, kernels, seconds
from tpshard.parallelism.rules.table import entry_of


class Counting(TorchDispatchMode):
    """Counts the operations that are no views."""

    calls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls += not op.is_view and "_unsafe_view" not in str(op)
        return op(*args, **(kwargs or {}))


def test_the_kernels_issue_as_many_operations_as_their_entries_say() -> None:
    x, weight = torch.ones(1, 8, 16), torch.ones(16)
    with Counting() as norm:
        rms_norm(x, weight, None, 1e-5)
    assert norm.calls == entry_of(NORM).calls
    rows = torch.arange(8)[None]
    q, k, pool = torch.ones(1, 8, 4, 16), torch.ones(1, 8, 2, 16), torch.zeros(20, 16, 2, 16)
    tables, positions = torch.arange(16).view(8, 2) + 1, torch.full((1, 8), 20)
    other, slots = pool.clone(), rows * 16 + 16
    with Counting() as paged:
        paged_attention_reference(q, k, k, pool, other, positions, slots, rows, tables, 0.25)
    assert paged.calls == entry_of(PAGED).calls
    keys, index_pool, weights = k[:, :, :1].contiguous(), pool[:, :, :1].contiguous(), torch.ones(1, 8, 4)
    with Counting() as select:
        chosen = select_keys_reference(q, keys, weights, index_pool, positions, slots, rows, tables, 0.25, 8)
    with Counting() as selected:
        selected_attention_reference(q, k, k, pool, other, positions, slots, rows, tables, chosen, 0.25)
    assert select.calls == entry_of(PAGED_SELECT).calls and selected.calls == entry_of(PAGED_SELECTED).calls
    heads = torch.ones(1, 8, 2, 16)
    with Counting() as forward:
        mask = last_of(8, 8, rows, None)
        out, lse = cpu_attention.forward(heads, heads, heads, mask, 0.25, None)
    with Counting() as backward:
        cpu_attention.backward(out, heads, heads, heads, out, lse, mask, 0.25, None)
    assert forward.calls == entry_of(attention.ATTENTION).calls
    assert backward.calls == entry_of(attention.ATTENTION_BACKWARD).calls


def test_a_cpu_pays_for_each_of_them_and_for_copies_of_the_cache() -> None:
    def step(q, k, keys, values, positions, tables):
        return PAGED(q, k, k, keys, values, positions, positions, positions, tables, 0.25, None, None)

    rows = torch.arange(8)[None]
    pools = [torch.zeros(20, 16, 2, 16) for _ in range(2)]
    inputs = [torch.ones(1, 8, 4, 16), torch.ones(1, 8, 2, 16), *pools, rows, rows.view(8, 1)]
    program = partition(step, inputs, Mesh({"x": 1}))
    base = replace(device("cpu"), overhead=Overhead(op_s=0.0, eager_op_s=0.0))
    slow = replace(base, overhead=Overhead(op_s=0.0, eager_op_s=1.0))
    gpu = device("h100-sxm-80g")
    (kernel,) = (k for k in kernels(program, compiled="none") if k.node.target is PAGED)
    assert seconds(kernel, slow) - seconds(kernel, base) == pytest.approx(entry_of(PAGED).calls)
    doubled = replace(kernel, moved=2 * kernel.moved)
    assert seconds(doubled, base) - seconds(kernel, base) == pytest.approx(3 * kernel.moved / base.stream_rate)
    assert seconds(kernel, gpu) <= max(gpu.overhead.eager_op_s, kernel.moved / gpu.stream_rate)


def test_attention_to_selected_keys_is_priced_by_these_and_the_indexer_by_all() -> None:
    def step(q, k, weights, index_pool, keys, values, positions, tables):
        rows = (positions, positions, positions, tables)
        chosen = PAGED_SELECT(q, k, weights, index_pool, *rows, 0.25, 64)
        return PAGED_SELECTED(q, k, k + 1, keys, values, *rows, chosen, 0.25)

    rows, pools = torch.arange(8)[None], [torch.zeros(1, 16, 1, 32) for _ in range(3)]
    inputs = [torch.ones(1, 8, 4, 32), torch.ones(1, 8, 1, 32), torch.ones(1, 8, 4), *pools, rows, rows.view(8, 1)]
    program = partition(step, inputs, Mesh({"x": 1}))
    block, by_length = 16 * 32 * 4, []
    for blocks in (1.0, 4.0, 100.0, 1000.0):
        every = kernels(program, compiled="none", cached=CacheReads(8 * blocks, blocks))
        by_length.append([one for one in every if one.node.target in (PAGED_SELECT, PAGED_SELECTED)])
    (first, attended), *longer = by_length
    assert first.flops == 2 * 8 * (4 * 32 + 4) * 16 and attended.flops == 4 * 8 * 4 * 32 * 16
    for blocks, (scored, few) in zip((4, 100, 1000), longer):
        assert scored.flops == blocks * first.flops and scored.moved - first.moved == 8 * (blocks - 1) * block
        assert few.flops == 4 * attended.flops and few.moved - attended.moved == 8 * 3 * 2 * block


def test_a_cpu_reads_inputs_from_memory_and_dispatches_slowly_what_has_left_the_caches() -> None:
    def step(x, weight):
        y = x @ weight
        return y + 1, x * 2

    def program(n):
        return partition(step, [torch.ones(4, n), torch.ones(n, n)], Mesh({"x": 1}))

    base = replace(device("cpu"), overhead=Overhead(op_s=0.0, eager_op_s=1e-3))
    cold = replace(base, cpu=replace(base.cpu, cold_bandwidth=base.stream_rate / 4))
    evicted = replace(base, cpu=replace(base.cpu, cold_overhead=3.0))
    product, plus, double = (k for k in kernels(program(2048), compiled="none") if k.work != "free")
    assert product.cold == 4 * (4 * 2048 + 2048**2) and plus.cold == 0 and double.cold == 4 * 4 * 2048
    assert seconds(double, cold) - seconds(double, base) == pytest.approx(3 * double.cold / base.stream_rate)
    assert seconds(plus, cold) == seconds(plus, base)
    assert plus.since == product.moved + double.moved  # the step before counts too
    assert seconds(plus, evicted) - seconds(plus, base) == pytest.approx(2e-3 * plus.since / EVICTING_BYTES)
    far = [k for k in kernels(program(4096), compiled="none") if k.work != "free"][1]
    assert seconds(far, evicted) - seconds(far, base) == pytest.approx(4e-3)  # behind 64 MiB of weights


def test_an_operation_finds_its_code_in_the_caches_where_one_of_its_kind_came_shortly_before() -> None:
    def step(x, weight):
        return ((x + 1) @ weight + 1) + 2

    program = partition(step, [torch.ones(4, 2048), torch.ones(2048, 2048)], Mesh({"x": 1}))
    first, product, second, third = (k for k in kernels(program, compiled="none") if k.work != "free")
    assert (first.since, second.since, third.since) == (0, product.moved, 0)
    assert product.since == first.moved + second.moved + third.moved
