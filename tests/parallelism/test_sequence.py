"""Attention over a sharded sequence equals attention over the whole one, in every implementation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from tpshard.kernels.attention.attention import attention
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.partitioning import choose
from tpshard.parallelism.sharding import padded_behind

torch.set_num_threads(1)
MESHES = [Mesh({"x": 2}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2})]
WAYS = {"gathered keys": (20_000, 1000.0), "ring": (0, 1e-9)}
"""What starting a collective costs, in bytes; and FLOPs in the time of a byte: a ring hides behind slow computing."""


def inputs(b: int, s: int, h: int, kv: int, packed: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s)
    tensors = [torch.randn(b, s, n, 4, dtype=torch.float64, generator=generator) for n in (h, kv, kv, h)]
    return [*tensors, (torch.arange(s) // 5)[None].repeat(b, 1)] if packed else tensors


@pytest.mark.parametrize("rows", [16, 15])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_the_whole_with_gradients(mesh: Mesh, way: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "FLOPS_PER_BYTE", WAYS[way][1])
    for packed, window, (h, kv) in itertools.product((False, True), (None, 3), ((3, 1), (6, 3))):
        args = inputs(1, rows, h, kv, packed)

        def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *rest: Tensor, window: int | None = window) -> object:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            softcap = None if window is None else 0.7
            out = attention(q, k, v, rest[0] if rest else None, None, window, softcap)
            return out, *torch.autograd.grad((out * grad).sum(), (q, k, v))

        over = (None, tuple(mesh.axes))
        program = partition(step, args, mesh, [over] * len(args), [over] * 4, latency=WAYS[way][0])
        for mine, theirs in zip(program.simulate(*args), step(*args), strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        assert program.flop_efficiency == pytest.approx(rows / 16, rel=1e-3)
        kinds = {c.kind for c in program.collectives if c.bytes > 8}
        assert kinds == ({"permute"} if way == "ring" else {"all_gather", "reduce_scatter"})


def test_a_ring_holds_one_part_of_the_keys_at_a_time() -> None:
    args = inputs(1, 64, 1, 1, False)[:3]
    program = partition(attention, args, Mesh({"x": 4}), [(None, "x")] * 3, [(None, "x")], latency=0)
    assert [c.kind for c in program.collectives] == ["permute"] * 6  # keys and values to three neighbours
    assert all(c.bytes == 64 // 4 * 4 * 8 for c in program.collectives)
    torch.testing.assert_close(program.simulate(*args)[0], attention(*args))


def test_heads_take_the_axes_where_that_sends_less() -> None:
    args = [torch.randn(1, 4096, 8, 64) for _ in range(3)]
    program = partition(attention, args, Mesh({"x": 4}), [(None, "x")] * 3, [(None, "x")])
    assert {c.kind for c in program.collectives} == {"all_to_all"}


def test_parts_of_keys_add_up() -> None:
    """Any cut of queries and keys: shares weighed by their log-sums are the whole; a share without keys is nothing."""
    q, k, v, _, documents = inputs(2, 12, 4, 2, True)
    part = torch.ops.tpshard.attention_part
    for window, docs in itertools.product((None, 4), (None, documents)):
        whole, lse = torch.ops.tpshard.attention(q, k, v, docs, 0.5, window)
        for first, keys in itertools.product((0, 3, 8), ((0, 5, 12), (0, 2, 9, 12))):
            rows = slice(first, first + 4)
            shares = []
            for a, b in itertools.pairwise(keys):
                own, other = (None, None) if docs is None else (docs[:, rows], docs[:, a:b])
                shares.append(part(q[:, rows], k[:, a:b], v[:, a:b], own, other, 0.5, window, first, a))
            total = torch.stack([logs for _, logs in shares]).logsumexp(0)
            torch.testing.assert_close(total, lse[..., rows])
            out = sum(share * (logs - total).exp().transpose(1, 2).unsqueeze(-1) for share, logs in shares)
            torch.testing.assert_close(out, whole[:, rows])
    nothing, logs = part(q[:, :4], k[:, 6:], v[:, 6:], None, None, 0.5, None, 0, 6)
    assert not nothing.any() and torch.isneginf(logs).all()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_torch_attention_has_the_same_ways(mesh: Mesh, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys of equal and of different number, also such that devices do not divide: 1 / 0 in the padding."""
    monkeypatch.setattr(choose, "FLOPS_PER_BYTE", WAYS[way][1])
    for rows, keys, scale in ((16, 16, None), (15, 15, 0.3), (15, 11, None)):
        generator = torch.Generator().manual_seed(rows)
        q, k, v = (torch.rand(1, 3, n, 4, dtype=torch.float64, generator=generator) + 0.5 for n in (rows, keys, keys))

        def gradients(*args: Tensor, scale: float | None = scale) -> tuple[Tensor, ...]:
            leaves = [arg.detach().requires_grad_() for arg in args]
            inverse = [1 / leaf for leaf in leaves]
            out = torch.nn.functional.scaled_dot_product_attention(*inverse, is_causal=True, scale=scale)
            return out, *torch.autograd.grad(out.square().sum(), leaves)

        by_rows = (None, None, tuple(mesh.axes))
        program = partition(gradients, [q, k, v], mesh, [by_rows] * 3, [by_rows] * 4, latency=WAYS[way][0])
        torch.testing.assert_close(program.simulate(q, k, v), list(gradients(q, k, v)), rtol=1e-10, atol=1e-10)
        assert program.flop_efficiency > 0.85
        kinds = {c.kind for c in program.collectives if c.bytes > 8}
        assert kinds == ({"permute"} if way == "ring" and rows == keys else {"all_gather", "reduce_scatter"})


def test_a_ring_needs_its_padding_behind_the_last_position() -> None:
    """14 rows on 2 x 2 devices: each half of 7 is padded, so keys of the first half would stand in the second's."""
    axes = tuple(MESHES[2].axis(name) for name in MESHES[2].axes)
    assert padded_behind(15, axes) and not padded_behind(14, axes)


@pytest.mark.parametrize("rows", [32, 30])
def test_torch_attention_is_causal_where_its_sequence_is_sharded(rows: int) -> None:
    """Two heads on four devices: the queries stay sharded, and a mask hides what is behind them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, rows, 8, generator=generator, dtype=torch.float64) for _ in range(3))

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [arg.detach().requires_grad_() for arg in args]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        return torch.autograd.grad(out.square().sum(), leaves)

    by_rows = [(None, None, "x")] * 3
    program = partition(gradients, [q, k, v], Mesh({"x": 4}), by_rows, by_rows)
    torch.testing.assert_close(program.simulate(q, k, v), list(gradients(q, k, v)))
    assert program.flop_efficiency > 0.9


MASKS = {"none": None, "rows": (1, 1, 0, 0), "heads": (1, 3, 0, 0), "plane": (0, 0)}
"""Shapes of masks, 0 for the number of rows; some hide all keys from a query, or all of a device's keys."""


@pytest.mark.parametrize("rows", [16, 15])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_keys_rotate_under_any_mask(mask: str, mesh: Mesh, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is not causal, also where devices do not divide the rows: 1 / 0 stands in the padding."""
    monkeypatch.setattr(choose, "FLOPS_PER_BYTE", 1e-9)
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.rand(1, 3, rows, 4, dtype=torch.float64, generator=generator) + 0.5 for _ in range(3))
    shape = MASKS[mask]
    visible = None if shape is None else torch.rand([n or rows for n in shape], generator=generator) > 0.6
    if visible is not None and visible.shape[-2] > 1:
        visible[..., 3, :] = False

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [arg.detach().requires_grad_() for arg in args[:3]]
        inverse = [1 / leaf for leaf in leaves]
        out = torch.nn.functional.scaled_dot_product_attention(*inverse, *args[3:])
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    by_rows = (None, None, tuple(mesh.axes))
    args = [q, k, v] if visible is None else [q, k, v, visible]
    by_mask = [] if visible is None else [None]
    program = partition(gradients, args, mesh, [by_rows] * 3 + by_mask, [by_rows] * 4, latency=0)
    torch.testing.assert_close(program.simulate(*args), list(gradients(*args)), rtol=1e-10, atol=1e-10)
    assert {c.kind for c in program.collectives if c.bytes > 8} == {"permute"}
