"""Products with quantized weights on a CPU: every path against the reference, traced and real."""

import dataclasses
import platform
import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from tpshard.kernels import llvm_launch, llvm_quantized
from tpshard.kernels import quantized_ops as ops
from tpshard.kernels.blocked import block, unblocked
from tpshard.kernels.quantized import Quantized, concatenate, group_count, group_index, longer, reference_matmul

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def linear(inputs=128, outputs=64, bits=4, group_size=32, order=False, bias=False, seed=0, sort=True):
    g = torch.Generator().manual_seed(seed)
    groups = group_count(inputs, group_size)
    group = group_index(inputs, group_size)
    if order:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(9))]
    weight = Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs), generator=g).to(torch.uint8),
        (torch.rand(groups, outputs, generator=g) * 0.05 + 1e-3).half(),
        torch.randint(0, 1 << bits, (groups, outputs), generator=g).to(torch.uint8),
        group,
        bits,
        torch.randn(outputs, generator=g).half() if bias else None,
    )
    return weight.take_rows(weight.order()) if sort else weight


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 40])
@pytest.mark.parametrize("invariant", [False, True])
def test_products_equal_the_reference(dtype, bits, group_size, invariant):
    weight = linear(bits=bits, group_size=group_size, bias=True)
    packed = ops.prepare(weight, "cpu")
    for rows in (1, 3, 70):
        x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = reference_matmul(x.double(), weight)
        y = ops.matmul(x, packed, invariant)
        assert y.dtype == dtype and (y.double() - expected).norm() <= ROUNDING[dtype] * expected.norm()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("outputs", [16, 40])
def test_blocks_hold_what_they_were_made_of(bits, outputs):
    regular, ragged = linear(outputs=outputs, bits=bits, bias=True), linear(outputs=outputs, bits=bits, seed=3)
    ragged = dataclasses.replace(ragged, group=torch.tensor([0] * 5 + [1] * 90 + [3] * 33, dtype=torch.int32))
    width = {2: 2, 3: 4, 4: 4, 8: 8}[bits]
    for weight, filled in ((regular, 128), (ragged, 32 + 96 + 64)):
        blocked = block(weight)
        assert blocked.width == width and blocked.codes.shape == (-(-outputs // 16), filled * 16 * width // 8)
        back = unblocked(blocked)
        for name in ("codes", "scales", "zeros", "group"):
            assert torch.equal(getattr(back, name), getattr(weight, name)), name
        x = torch.randn(9, 128, generator=torch.Generator().manual_seed(2))
        expected = reference_matmul(x.double(), weight)
        assert (ops.matmul(x, blocked).double() - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.skipif(not llvm_launch.available(), reason="the program is not made for this CPU")
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("group_size", [40, 64])
def test_the_number_of_rows_and_of_threads_changes_no_bit(monkeypatch, lanes, group_size):
    monkeypatch.setattr(llvm_launch, "lanes", lambda: lanes)
    weight = linear(inputs=320, outputs=200, group_size=group_size)
    blocked, x, threads = block(weight), torch.randn(75, 320), torch.get_num_threads()
    together, exact = ops.matmul(x, blocked), reference_matmul(x.double(), weight)
    assert (together.double() - exact).norm() <= 2e-6 * exact.norm()
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 70):
        assert torch.equal(ops.matmul(x[:count], blocked), together[:count])
        assert torch.equal(ops.matmul(x[-count:], blocked), together[-count:])
    try:
        torch.set_num_threads(3)
        assert torch.equal(ops.matmul(x, blocked), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not llvm_launch.available(), reason="the program is not made for this CPU")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_the_files_fp16_values_bit_for_bit(bits):
    """Scales from the smallest subnormal fp16 number to large ones: every weight is rounded once, as readers do."""
    weight = linear(bits=bits, group_size=40)
    spread = torch.logspace(-24, 7, weight.scales.numel(), base=2).view_as(weight.scales).half()
    weight = dataclasses.replace(weight, scales=spread)
    ones = torch.eye(128)
    for rows in (slice(0, 128), slice(0, 3), slice(100, 108)):
        y = ops.matmul(ones[rows], block(weight))
        assert torch.equal(y, weight.dequantize(torch.float32)[rows])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_row_that_is_not_finite_spoils_no_other(bits):
    ragged = dataclasses.replace(
        linear(bits=bits), group=torch.tensor([0] * 5 + [1] * 90 + [3] * 33, dtype=torch.int32)
    )
    x = torch.randn(11, 128)
    expected = ops.matmul(x, block(ragged))
    x[3], x[10] = float("nan"), float("inf")
    y = ops.matmul(x, block(ragged))
    whole = [row for row in range(11) if row not in (3, 10)]
    assert torch.equal(y[whole], expected[whole]) and not torch.isfinite(y[[3, 10]]).any()


def test_a_cpu_without_the_instructions_multiplies_dense_weights(monkeypatch):
    weight, x = linear(bits=3, bias=True), torch.randn(5, 128)
    monkeypatch.setattr(llvm_launch, "available", lambda: False)
    monkeypatch.setattr(llvm_launch, "matmul", None)
    expected = reference_matmul(x.double(), weight)
    assert (ops.matmul(x, ops.prepare(weight, "cpu")).double() - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize(("cpu", "lanes"), [("haswell", 8), ("znver3", 8), ("skylake-avx512", 16)])
@pytest.mark.skipif("x86" not in platform.machine(), reason="LLVM knows other CPUs here")
def test_sums_stay_in_registers(cpu, lanes):
    machine = llvm_launch.target_machine(cpu)
    assembly = machine.emit_assembly(llvm_launch.optimized(llvm_quantized.module(4, lanes, "x86_64"), machine))
    tile, across = llvm_quantized.TILE, llvm_quantized.ACROSS
    for function, products in (("fused_8", 8 * 32 // lanes), (f"tile_{tile}", tile * across)):
        body = assembly.split(f"\n{function}:")[1].split("\n.Lfunc_end")[0]
        loop = max(re.split(r"\n\.L\w+:", body), key=lambda part: part.count("vfmadd")).split("jl\t")[0]
        assert loop.count("vfmadd") == products
        assert "(%rsp)" not in loop and "(%rbp)" not in loop


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (3, 64), (4, -1), (8, 40)])
def test_padding_multiplies_to_zero(dtype, bits, group_size):
    weight = linear(bits=bits, group_size=group_size, bias=True)
    wider = weight.padded(320, 96).check()
    dense = wider.dequantize()
    assert torch.equal(dense[:128, :64], weight.dequantize())
    assert dense.count_nonzero() == weight.dequantize().count_nonzero() and wider.sorted
    packed = ops.prepare(wider, "cpu")
    x = torch.randn(3, 320, generator=torch.Generator().manual_seed(1)).to(dtype)
    y, cut = ops.matmul(x, packed), ops.matmul(x * (torch.arange(320) < 128), packed)
    assert torch.equal(y, cut) and not y[:, 64:].any()
    expected = reference_matmul(x[:, :128].double(), weight)
    assert (y[:, :64].double() - expected).norm() <= ROUNDING[dtype] * expected.norm()
    assert weight.padded(128, 64) is weight


@pytest.mark.parametrize("symmetric", [True, False])
def test_padding_fills_the_last_group(symmetric):
    weight = linear(inputs=144, bits=4, group_size=64, order=True, sort=False)
    if symmetric:
        weight = dataclasses.replace(weight, zeros=torch.full_like(weight.zeros, 8))
    wider = weight.padded(320, 64)
    assert torch.bincount(wider.group).tolist() == [64] * 5 and wider.symmetric == symmetric
    assert torch.equal(wider.group, longer(weight.group, 320))
    assert not wider.dequantize()[144:].any() and torch.equal(wider.dequantize()[:144], weight.dequantize())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_row_does_not_depend_on_the_others_when_asked(dtype):
    packed = ops.prepare(linear(), "cpu")
    x = torch.randn(70, 128).to(dtype)
    together = ops.matmul(x, packed, invariant=True)
    for rows in (slice(0, 1), slice(5, 9), slice(60, 70)):
        assert torch.equal(ops.matmul(x[rows], packed, invariant=True), together[rows])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_gate_and_up_share_one_product(dtype):
    gate, up = linear(seed=1, order=True), linear(seed=2, order=True)
    packed = ops.prepare([gate, up], "cpu")
    x = torch.randn(2, 5, 128).to(dtype)
    expected = F.silu(reference_matmul(x.double(), gate)) * reference_matmul(x.double(), up)
    y = ops.gate_up(x, packed)
    assert y.shape == (2, 5, 64) and (y.double() - expected).norm() <= 3 * ROUNDING[dtype] * expected.norm()


def test_weights_that_cannot_be_multiplied_are_refused():
    with pytest.raises(ValueError, match="adjacent"):
        ops.prepare(linear(order=True, sort=False), "cpu")
    with pytest.raises(ValueError, match="same g_idx"):
        concatenate([linear(), linear(group_size=64)])


def test_operations_are_traced_whole():
    packed = ops.prepare([linear(seed=1), linear(seed=2)], "cpu")
    order = torch.randperm(128)

    def block(x, scale):
        return ops.gate_up(ops.rms_norm_permuted(x, scale, order, 1e-5), packed) + ops.matmul(x, packed)[..., :64]

    x, scale = torch.randn(2, 3, 128).bfloat16(), torch.rand(128).bfloat16()
    traced = make_fx(block, tracing_mode="fake", _allow_non_fake_inputs=True)(x, scale)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    for name in ("quantized_gate_up", "quantized_matmul", "rms_norm_permuted"):
        assert f"tpshard.{name}.default" in names
    assert torch.equal(traced(x, scale), block(x, scale))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = block(mode.from_tensor(x), mode.from_tensor(scale))
    assert y.shape == (2, 3, 64) and y.dtype == torch.bfloat16


def test_norm_in_order_is_the_norm_reordered():
    x, scale, order = torch.randn(4, 96), torch.rand(96), torch.randperm(96)
    straight = ops.rms_norm_permuted(x, scale, None, 1e-6)
    torch.testing.assert_close(straight, F.rms_norm(x, (96,), scale, 1e-6))
    assert torch.equal(ops.rms_norm_permuted(x, scale, order, 1e-6), straight[:, order])
