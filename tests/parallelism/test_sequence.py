"""Attention over a sharded sequence equals attention over the whole one, in every implementation."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from tpshard.kernels.attention.attention import attention
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.graph import Value
from tpshard.parallelism.partitioning import choose
from tpshard.parallelism.passes.moves import wait
from tpshard.parallelism.passes.run import run
from tpshard.parallelism.passes.wait_late import wait_late
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules import sequence
from tpshard.parallelism.rules.sequence_rows import Call
from tpshard.parallelism.sharding import padded_behind

torch.set_num_threads(1)
MESHES = [Mesh({"x": 2}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2})]
WAYS = {
    "gathered keys": (False, False), "mirrored, gathered keys": (False, True), "ring": (True, False),
    "mirrored ring": (True, True),
}  # fmt: skip
"""Whether keys rotate, and whether devices are mirrored."""


def allow(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a sharded sequence computed in one way, where there is that one, on devices that compute slowly."""
    every = sequence._ways

    def ways(call: Call, q: Value, k: Value) -> list[tuple[bool, bool]]:
        return [one for one in every(call, q, k) if one == WAYS[way]] or every(call, q, k)

    monkeypatch.setattr(sequence, "_ways", ways)
    monkeypatch.setattr(choose, "FLOPS_PER_BYTE", 1e-9)
    monkeypatch.setattr(choose, "busiest", lambda rule, choice: 1.0)  # else uneven heads would cost less


def mean_share(way: str, mesh: Mesh, window: int | None) -> float:
    """The mean work of a device over that of the busiest."""
    members = math.prod(mesh.axes.values())
    return 1 if WAYS[way][1] or window is not None else members / (2 * members - 1)


def inputs(b: int, s: int, h: int, kv: int, packed: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s)
    tensors = [torch.randn(b, s, n, 4, dtype=torch.float64, generator=generator) for n in (h, kv, kv, h)]
    return [*tensors, (torch.arange(s) // 5)[None].repeat(b, 1)] if packed else tensors


@pytest.mark.parametrize("rows", [16, 15])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_the_whole_with_gradients(mesh: Mesh, way: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(way, monkeypatch)
    for packed, window, (h, kv) in itertools.product((False, True), (None, 3, 16), ((3, 1), (9, 3))):
        args = inputs(1, rows, h, kv, packed)

        def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *rest: Tensor, window: int | None = window) -> object:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            softcap = None if window is None else 0.7
            out = attention(q, k, v, rest[0] if rest else None, None, window, softcap)
            return out, *torch.autograd.grad((out * grad).sum(), (q, k, v))

        over = (None, tuple(mesh.axes))
        program = partition(step, args, mesh, [over] * len(args), [over] * 4, latency=0)
        for mine, theirs in zip(program.simulate(*args), step(*args), strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        window = None if window == 16 else window  # as long as the sequence, it hides nothing
        assert program.flop_efficiency == pytest.approx(rows / 16 * mean_share(way, mesh, window), rel=5e-3)
        if window is None or not WAYS[way][1]:
            assert kinds_of(program) == KINDS[way]


KINDS = {
    "gathered keys": {"all_gather", "reduce_scatter"},
    "mirrored, gathered keys": {"all_gather", "reduce_scatter", "permute"},
    "ring": {"permute"},
    "mirrored ring": {"permute"},
}


def kinds_of(program: Program) -> set[str]:
    return {c.kind for c in program.collectives if c.bytes > 8}


def test_a_ring_holds_one_part_of_the_keys_at_a_time() -> None:
    args = inputs(1, 64, 1, 1, False)[:3]
    program = partition(attention, args, Mesh({"x": 4}), [(None, "x")] * 3, [(None, "x")], latency=0)
    assert [c.kind for c in program.collectives] == ["permute"] * 6  # keys and values to three neighbours
    assert all(c.bytes == 64 // 4 * 4 * 8 for c in program.collectives)
    torch.testing.assert_close(program.simulate(*args)[0], attention(*args))


@pytest.mark.parametrize("way", ["ring", "mirrored ring"])
def test_keys_travel_while_a_device_computes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each permute of keys, values and their gradients spans a part's computation, but those before and behind all."""
    allow(way, monkeypatch)

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [arg.detach().requires_grad_() for arg in args]
        return torch.autograd.grad(attention(*leaves).square().sum(), leaves)

    args = inputs(1, 64, 1, 1, False)[:3]
    plain = partition(step, args, Mesh({"x": 4}), [(None, "x")] * 3, [(None, "x")] * 3, latency=0)
    program = run([wait_late], plain)
    for expected, actual in zip(plain.simulate(*args), program.simulate(*args)):
        assert torch.equal(expected, actual)
    hidden = []
    nodes = list(program.graph.nodes)
    for i, node in enumerate(nodes):
        comm = info(node).comm
        if comm is not None and comm.kind == "permute":
            end = next(j for j in range(i, len(nodes)) if nodes[j].target is wait and nodes[j].args[0] is node)
            hidden.append(any("attention_part" in str(one.target) for one in nodes[i:end]))
    assert sum(hidden) == 3 * 2 * 3, "keys and values forward and backward, and their gradients but for the last hop"


def test_long_sequences_are_mirrored() -> None:
    """Where computing costs more than moving the queries; within a window all devices compute equally much."""
    with FakeTensorMode():
        long = [torch.empty(1, 65536, n, 128, dtype=torch.bfloat16) for n in (32, 8, 8)]
        short = [torch.empty(1, 64, n, 128, dtype=torch.bfloat16) for n in (32, 8, 8)]
        mesh = Mesh({"x": 4, "tp": 8})
        for inputs, window, efficiency in ((long, None, 1.0), (long, 512, 1.0), (short, None, 4 / 7)):
            spec = (None, "x", "tp")
            program = partition(partial(attention, window=window), inputs, mesh, [spec] * 3, [spec])
            assert program.flop_efficiency == pytest.approx(efficiency, rel=1e-3)


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
    allow(way, monkeypatch)
    for rows, keys, scale in ((16, 16, None), (15, 15, 0.3), (15, 11, None)):
        generator = torch.Generator().manual_seed(rows)
        q, k, v = (torch.rand(1, 3, n, 4, dtype=torch.float64, generator=generator) + 0.5 for n in (rows, keys, keys))

        def gradients(*args: Tensor, scale: float | None = scale) -> tuple[Tensor, ...]:
            leaves = [arg.detach().requires_grad_() for arg in args]
            inverse = [1 / leaf for leaf in leaves]
            out = torch.nn.functional.scaled_dot_product_attention(*inverse, is_causal=True, scale=scale)
            return out, *torch.autograd.grad(out.square().sum(), leaves)

        by_rows = (None, None, tuple(mesh.axes))
        program = partition(gradients, [q, k, v], mesh, [by_rows] * 3, [by_rows] * 4, latency=0)
        torch.testing.assert_close(program.simulate(q, k, v), list(gradients(q, k, v)), rtol=1e-10, atol=1e-10)
        assert program.flop_efficiency > 0.85 * (mean_share(way, mesh, None) if rows == keys else 4 / 7)
        assert kinds_of(program) == KINDS[way if rows == keys else "gathered keys"]


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
    assert program.flop_efficiency > 0.9 * 4 / 7, "so short a sequence is not mirrored"


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
