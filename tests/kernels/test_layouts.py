"""Layouts of act-ordered weights over ranks: permutations only, so every one computes the same."""

import pytest
import torch
import torch.nn.functional as F
from tpshard.kernels import layouts
from tpshard.kernels import quantized_ops as ops
from tpshard.kernels.layouts import LAYOUTS, cuts, head_local_order, shard, shard_attention, simulate
from tpshard.kernels.quantized import Quantized, group_count, group_index, reference_matmul

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def linear(inputs, outputs, group_size=32, group=None, bits=4, bias=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = group_count(inputs, group_size)
    if group is None:
        group = group_index(inputs, group_size)[torch.randperm(inputs, generator=g)]
    return Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs), generator=g).to(torch.uint8),
        (torch.rand(groups, outputs, generator=g) * 0.05 + 1e-3).half(),
        torch.randint(0, 1 << bits, (groups, outputs), generator=g).to(torch.uint8),
        group,
        bits,
        torch.randn(outputs, generator=g).half() if bias else None,
    )


def swiglu(gate, up):
    return F.silu(gate) * up


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [384, 352])
def test_every_layout_computes_the_mlp(layout, ranks, dtype, hidden):
    gate, up = linear(64, hidden, seed=1, bias=True), linear(64, hidden, seed=2)  # the two need not share an order
    down = linear(hidden, 96, seed=3, bias=True)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = reference_matmul(swiglu(*(reference_matmul(x.double(), w) for w in (gate, up))), down)
    parts = [shard(layout, (gate, up), down, rank, ranks) for rank in range(ranks)]
    y = simulate(parts, x, swiglu)
    assert y.dtype == dtype and (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    assert [p.start for p in parts] + [hidden] == cuts(down.take_rows(down.order()).group, ranks)
    for part in parts:
        assert all(w.sorted for w in (*part.column, part.row))
        assert (part.gathered_order is not None) == (layout == "naive")
        assert (part.own_order is not None) == (layout == "local_sort")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layouts_run_on_the_operations(dtype):
    gate, up, down = linear(64, 256, seed=1), linear(64, 256, seed=2), linear(256, 64, seed=3)
    x = torch.randn(3, 64).to(dtype)
    expected = reference_matmul(swiglu(*(reference_matmul(x.double(), w) for w in (gate, up))), down)
    parts = [shard("tp_aware", (gate, up), down, rank, 4) for rank in range(4)]
    y = simulate(parts, x, swiglu, lambda x, w: ops.matmul(x, ops.prepare(w, "cpu")))
    assert (y.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_tp_aware_shards_hold_their_own_scales_and_local_sort_all_of_them():
    gate, down = linear(64, 512, seed=1), linear(512, 96, seed=3)
    aware = [shard("tp_aware", (gate,), down, rank, 4) for rank in range(4)]
    assert [p.row.groups for p in aware] == [4, 4, 4, 4]  # 16 groups, each with its rank
    assert [p.row.groups for p in (shard("local_sort", (gate,), down, r, 4) for r in range(4))] == [16, 16, 16, 16]
    assert sum(p.row.bias is not None for p in aware) == 0
    with_bias = linear(512, 96, seed=3, bias=True)
    assert [shard("naive", (gate,), with_bias, r, 4).row.bias is not None for r in range(4)] == [True] + [False] * 3


def test_uneven_cuts_at_ends_of_groups():
    assert cuts(group_index(231 * 128, 128), 2) == [0, 116 * 128, 231 * 128]
    assert cuts(group_index(100, 32), 3) == [0, 64, 96, 100]
    assert cuts(group_index(96, 96), 4) == [0, 24, 48, 72, 96]


def attend(q, k, v, heads, kv_heads, head_dim):
    """Non-causal attention over the first dim of [tokens, heads * head_dim]."""
    q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
    return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).transpose(0, 1).flatten(1)


def head_local_group(heads, kv_heads, head_dim, group_size, seed=0):
    g = torch.Generator().manual_seed(seed)
    group = torch.empty(heads, head_dim, dtype=torch.int32)
    inner = torch.stack([torch.randperm(head_dim, generator=g) for _ in range(kv_heads)])
    for head in range(heads):
        own = group_index(head_dim, group_size) + head * (head_dim // group_size)
        group[head, inner[head * kv_heads // heads]] = own
    return group.flatten()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ["head_local", "global", "sequential"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_layout_computes_attention(layout, ranks, order, dtype):
    heads, kv_heads, head_dim, width = 8, 4, 32, 64
    group = {"head_local": head_local_group(heads, kv_heads, head_dim, 16), "global": None,
             "sequential": group_index(heads * head_dim, 16)}[order]  # fmt: skip
    q = linear(width, heads * head_dim, seed=1)
    k, v = (linear(width, kv_heads * head_dim, seed=seed, group=q.group) for seed in (2, 3))
    o = linear(heads * head_dim, width, 16, group, seed=4, bias=True)
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).to(dtype)

    def dense(x):
        return attend(*(reference_matmul(x, w) for w in (q, k, v)), heads, kv_heads, head_dim)

    expected = reference_matmul(dense(x.double()), o)
    parts = [shard_attention(layout, q, k, v, o, head_dim, rank, ranks) for rank in range(ranks)]
    own_kv = max(1, kv_heads // ranks)
    y = simulate(parts, x, lambda q, k, v: attend(q, k, v, heads // ranks, own_kv, head_dim))
    exact = simulate(parts, x.double(), lambda q, k, v: attend(q, k, v, heads // ranks, own_kv, head_dim))
    assert (exact.double() - expected).norm() <= 1e-6 * expected.norm()
    assert (y.double() - expected).norm() <= 30 * TOLERANCE[dtype] * expected.norm()  # softmax of rounded scores
    absorbed = layout == "tp_aware" and order != "global"
    for part in parts:
        assert part.row.sorted and all(w.sorted for w in part.column)
        assert (part.own_order is None and part.gathered_order is None) == absorbed


def test_head_local_orders_are_told_from_others():
    group = head_local_group(8, 4, 32, 16)
    inner = head_local_order(group, 8, 4, 32)
    assert inner is not None and inner.shape == (4, 32)
    assert head_local_order(head_local_group(8, 8, 32, 16), 8, 4, 32) is None  # heads of one KV head disagree
    assert head_local_order(group[torch.randperm(256, generator=torch.Generator().manual_seed(0))], 8, 4, 32) is None
    spanning = head_local_order(group_index(256, 64), 8, 4, 32)  # groups of whole heads
    assert spanning is not None and torch.equal(spanning, torch.arange(32).expand(4, 32))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="none of naive"):
        shard("clever", (linear(64, 96),), linear(96, 64), 0, 1)
    with pytest.raises(ValueError, match="96 outputs"):
        shard("naive", (linear(64, 96),), linear(128, 64), 0, 1)
    with pytest.raises(ValueError, match="do not divide among 3"):
        shard_attention("naive", linear(64, 256), linear(64, 128), linear(64, 128), linear(256, 64), 32, 0, 3)


def test_only_the_naive_layout_gathers():
    gate, down = linear(64, 128, seed=1), linear(128, 64, seed=2)
    x = torch.randn(2, 64)
    for layout in LAYOUTS:
        called = []

        def gather(t, called=called):
            called.append("all_gather")
            return t

        def reduce(t, called=called):
            called.append("all_reduce")
            return t

        layouts.forward(shard(layout, (gate,), down, 0, 1), x, torch.relu, gather, reduce)
        assert called == (["all_gather", "all_reduce"] if layout == "naive" else ["all_reduce"])
