"""Products with quantized weights on a device: the same in every batch, and under CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from tpshard.kernels.experts.quantized_experts import PackedExpert, StackedExperts, quantized_experts
from tpshard.kernels.norm import NORM, rms_norm
from tpshard.kernels.quantized import quantized_linear as ops
from tpshard.kernels.quantized.int4 import Int4, int4_linear
from tpshard.kernels.quantized.packed import Packed
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index, reference_matmul

BOUND = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-3}
"""Relative, of a whole product; weights pass through fp16, and a gate is rounded before it multiplies."""
ROWS = (1, 7, 16, 65, 300)


def linear(inputs: int, outputs: int, bits: int = 4, group_size: int = 64, sym: bool = False) -> Quantized:
    g = torch.Generator().manual_seed(inputs + outputs + bits)
    groups = group_count(inputs, group_size)
    zeros = torch.randint(0, 1 << bits, (groups, outputs), generator=g)
    return Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs), generator=g).to(torch.uint8),
        (torch.rand(groups, outputs, generator=g) * 0.02 + 1e-3).half(),
        (torch.full_like(zeros, 1 << (bits - 1)) if sym else zeros).to(torch.uint8),
        group_index(inputs, group_size), bits, torch.randn(outputs, generator=g).half(),
    )  # fmt: skip


def drawn(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype) / inputs**0.5


def gated(x: Tensor, weight: Quantized) -> Tensor:
    gate, up = reference_matmul(x, weight).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual.cpu().double() - expected).norm() <= BOUND[actual.dtype] * expected.norm()


def packed(weight: Quantized) -> Packed:
    result = ops.prepare(weight, "cuda")
    assert isinstance(result, Packed)
    return result


def product(x: Tensor, weight: ops.Prepared, invariant: bool) -> Tensor:
    return int4_linear(x, weight) if isinstance(weight, Int4) else ops.quantized_linear(x, weight, invariant)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_products_equal_their_reference(bits: int, sym: bool, dtype: torch.dtype, device: str) -> None:
    if not ops.multiplies(bits, dtype, "cpu" if device == "cpu" else "gpu"):
        pytest.skip("these weights are multiplied dense here")
    weight = linear(384, 160, bits, sym=sym)
    if device == "cpu":
        weight = replace(weight, bias=None)  # its product knows none
    prepared = ops.prepare(weight, device)
    for rows in ROWS:
        x = drawn(rows, 384, dtype)
        for invariant in (True, False):
            for _ in range(2):  # as measured, then as chosen
                assert_close(product(x.to(device), prepared, invariant), reference_matmul(x.double(), weight))
                if isinstance(prepared, Packed):
                    actual = ops.quantized_gate(x.to(device), prepared, invariant)
                    assert_close(actual, gated(x.double(), weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    prepared, x = packed(linear(640, 256)), drawn(70, 640, dtype).cuda()
    together = ops.quantized_linear(x, prepared, True)
    both = ops.quantized_gate(x, prepared, True)
    for rows in (1, 5, 16, 33):
        assert torch.equal(ops.quantized_linear(x[:rows], prepared, True), together[:rows])
        assert torch.equal(ops.quantized_gate(x[-rows:], prepared, True), both[-rows:])


@pytest.mark.parametrize("width", [64, 96, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_store_in_order(width: int, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, 3, width, generator=g).to(dtype), torch.rand(width, generator=g).to(dtype)
    order = torch.randperm(width, generator=g)
    straight = NORM(x.to(device), weight.to(device), None, 1e-5).cpu()
    expected = rms_norm(x.double(), weight.double(), None, 1e-5)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(straight.double(), expected, rtol=bound, atol=bound)
    turned = NORM(x.to(device), weight.to(device), order.to(device), 1e-5).cpu()
    assert torch.equal(turned, straight[..., order])
    wide = torch.cat([x.flatten(1), x.flatten(1).roll(1, 0)], 1).to(device)  # as the heads of one of several matrices
    own = NORM(wide[:, 3 * width :].unflatten(1, (3, width)), weight.to(device), None, 1e-5).cpu()
    assert torch.equal(own, straight.roll(1, 0))


# ---- what only a GPU does ----------------------------------------------------------------------------------------
@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Shapes that a choice measures from now on, in order."""
    from tpshard.kernels import triton_launch

    products: list[object] = []
    measure = triton_launch.TileChoice._measure

    def note(self: triton_launch.TileChoice, x: Tensor, packed: object, gated: bool, guesses: list[object]) -> object:
        products.append((x.shape[0], gated))
        return measure(self, x, packed, gated, guesses)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_launch.TileChoice, "_measure", note)
    ops._choice.cache_clear()
    yield products
    ops._choice.cache_clear()


@pytest.mark.gpu
def test_a_choice_is_measured_once_for_a_power_of_two_of_rows(measured: list[object]) -> None:
    prepared = packed(linear(512, 256))
    for rows in (5, 8, 5, 9, 16):
        ops.quantized_linear(drawn(rows, 512, torch.bfloat16).cuda(), prepared, False)
    ops.quantized_gate(drawn(8, 512, torch.bfloat16).cuda(), prepared, False)
    assert measured == [(5, False), (9, False), (8, True)]
    ops.quantized_linear(drawn(8, 512, torch.bfloat16).cuda(), prepared, True)
    assert len(measured) == 3, "what is the same in every batch is not measured"


@pytest.mark.gpu
@pytest.mark.parametrize("gate_and_up", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_every_tile_that_may_be_chosen_is_right(rows: int, gate_and_up: bool) -> None:
    from tpshard.kernels import triton_launch

    weight = linear(1024, 512, sym=True)
    prepared, x = packed(weight), drawn(rows, 1024, torch.bfloat16)
    expected = gated(x.double(), weight) if gate_and_up else reference_matmul(x.double(), weight)
    tiles = triton_launch.tiles(rows, prepared, gate_and_up, 132)
    assert len(tiles) > 1
    for tile in tiles:
        assert_close(triton_launch.matmul(x.cuda(), prepared, gate_and_up, tile), expected)
    assert_close(triton_launch.dense_matmul(x.cuda(), prepared, gate_and_up), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_a_captured_product_is_the_one_that_was_measured(rows: int, measured: list[object]) -> None:
    """Replayed, with other inputs, and again after other launches; nothing is measured while capturing."""
    prepared = packed(linear(1024, 256))
    first, second = (drawn(rows, 1024, torch.float16).cuda() * factor for factor in (1, -2))

    def both(x: Tensor) -> Tensor:
        return ops.quantized_linear(x, prepared, False) + ops.quantized_gate(x, prepared, False).repeat(1, 2)

    expected = [both(first), both(second)]
    count = len(measured)
    held = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both(held)
    for x, reference in zip((second, first, second), (expected[1], expected[0], expected[1])):
        held.copy_(x)
        graph.replay()
        assert torch.equal(out, reference)
        assert torch.equal(both(x), reference)
    assert len(measured) == count == 2


@pytest.mark.gpu
def test_a_product_that_was_never_measured_can_be_captured() -> None:
    weight = linear(1536, 320)
    prepared, x = packed(weight), drawn(3, 1536, torch.bfloat16)
    ops.quantized_linear(x.cuda(), prepared, True)  # compiled, not measured
    held, graph = x.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.quantized_linear(held, prepared, True)
    graph.replay()
    assert_close(out, reference_matmul(x.double(), weight))


@pytest.mark.parametrize("alike", [True, False])
def test_experts_equal_their_reference_and_add_up_from_parts(alike: bool, device: str) -> None:
    """Act-ordered experts of two devices, whose gate and up have one order or two."""
    generator, width, hidden = torch.Generator().manual_seed(0), 128, 192

    def ordered(inputs: int, outputs: int, order: Tensor | None = None) -> Quantized:
        weight = linear(inputs, outputs, group_size=64)
        order = torch.randperm(inputs, generator=generator) if order is None else order
        return replace(weight, group=weight.group[order], bias=None)

    experts = []
    for _ in range(3):
        order = torch.randperm(width, generator=generator)
        up = ordered(width, hidden, order if alike else None)
        experts.append((ordered(width, hidden, order), up, ordered(hidden, width)))
    x = drawn(9, width, torch.bfloat16)
    ids = torch.rand(9, 3, generator=generator).topk(2, -1).indices
    weights = torch.rand(9, 2, generator=generator)
    halves = [
        [PackedExpert.pack(*matrices, slice(start, start + hidden // 2), device) for matrices in experts]
        for start in (0, hidden // 2)
    ]
    assert len(halves[0][0].inward) == (1 if alike else 2)
    given = [tensor.to(device) for tensor in (x, ids, weights)]
    stacks = [StackedExperts.of(half) for half in halves]
    assert all((stack is not None) == (alike and device == "cuda") for stack in stacks)
    halves = halves if None in stacks else stacks  # type: ignore[assignment]
    actual = sum(quantized_experts(*given, half, True).cpu().double() for half in halves)  # type: ignore[arg-type]
    expected = torch.zeros(9, width, dtype=torch.float64)
    for e, (gate, up, down) in enumerate(experts):
        inside = torch.nn.functional.silu(reference_matmul(x.double(), gate)) * reference_matmul(x.double(), up)
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        expected += reference_matmul(inside, down) * share
    assert (actual - expected).norm() <= 2e-2 * expected.norm()  # type: ignore[operator]
