"""torch's int4 product multiplies weights of up to 4 bits with only the documented rounding."""

import dataclasses

import pytest
import torch
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index, reference_matmul

RAGGED = torch.tensor([0] * 5 + [1] * 90 + [3] * 33, dtype=torch.int32)


def linear(inputs: int = 128, outputs: int = 64, bits: int = 4, size: int = 32, symmetric: bool = False) -> Quantized:
    g = torch.Generator().manual_seed(bits * outputs)
    groups = group_count(inputs, size)
    zeros = torch.randint(0, 1 << bits, (groups, outputs), generator=g)
    return Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs), generator=g).to(torch.uint8),
        (torch.rand(groups, outputs, generator=g) * 0.05 + 1e-3).half(),
        (torch.full_like(zeros, 8) if symmetric else zeros).to(torch.uint8),
        group_index(inputs, size),
        bits,
    )


def round_to(weight: Quantized) -> Quantized:
    """The weight with its scales rounded to bf16."""
    return dataclasses.replace(weight, scales=weight.scales.bfloat16().half())


@pytest.mark.parametrize(("bits", "size", "outputs"), [(2, 32, 16), (3, 64, 40), (4, -1, 64), (4, 40, 48), (4, 96, 16)])
def test_the_product_is_the_reference_rounded_to_bf16(bits: int, size: int, outputs: int) -> None:
    weight = linear(192, outputs, bits, size)
    packed = int4.pack(weight)
    x = torch.randn(70, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, expected = int4.int4_linear(x, packed), reference_matmul(x.double(), weight)
    assert y.shape == (70, outputs) and y.dtype == torch.bfloat16
    assert (y.double() - expected).norm() <= 6e-3 * expected.norm()


@pytest.mark.parametrize("group", [group_index(128, 32), group_index(128, -1), RAGGED])
def test_symmetric_weights_are_exact_but_for_their_scales(group: torch.Tensor) -> None:
    """Products with rows of the identity show single weights, rounded only to bf16."""
    weight = round_to(dataclasses.replace(linear(symmetric=True), group=group))
    read = int4.int4_linear(torch.eye(128).bfloat16(), int4.pack(weight))
    exact = weight.scales.float()[group.long()] * (weight.codes.float() - 8)
    assert torch.equal(read, exact.bfloat16())


@pytest.mark.parametrize("size", [32, 40])
def test_the_other_rows_change_no_bit(size: int) -> None:
    packed = int4.pack(linear(320, 208, size=size))
    x = torch.randn(75, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = int4.int4_linear(x, packed)
    for count in (1, 2, 3, 4, 5, 8, 9, 70):
        assert torch.equal(int4.int4_linear(x[:count], packed), together[:count])
        assert torch.equal(int4.int4_linear(x[-count:], packed), together[-count:])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    packed = int4.pack(dataclasses.replace(linear(), group=RAGGED))
    x = torch.randn(11, 128).bfloat16()
    expected = int4.int4_linear(x, packed)
    x[3], x[10] = float("nan"), float("inf")
    y = int4.int4_linear(x, packed)
    whole = [row for row in range(11) if row not in (3, 10)]
    assert torch.equal(y[whole], expected[whole]) and not torch.isfinite(y[[3, 10]]).any()


@pytest.mark.parametrize("size", [-1, 32, 40, 64, 96])
def test_bytes_are_those_that_are_held(size: int) -> None:
    weight = linear(192, 48, size=size)
    held, sizes = int4.pack(weight), torch.bincount(weight.group.long()).tolist()
    assert held.codes.nbytes + held.scales.nbytes == 48 * int4.row_bytes(sizes)
    assert (held.take is None) == all(n % held.group == 0 for n in sizes)


def test_weights_that_it_does_not_take_are_refused() -> None:
    apart = dataclasses.replace(linear(), group=torch.arange(128, dtype=torch.int32) % 4)
    with pytest.raises(ValueError, match="adjacent"):
        int4.pack(apart)
    with pytest.raises(ValueError, match="8 bits"):
        int4.pack(linear(bits=8))


@pytest.mark.parametrize(("inputs", "outputs", "size"), [(256, 64, 32), (1600, 208, 64), (960, 96, 40)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_dense_parts_have_the_bits_of_int4_parts(inputs: int, outputs: int, size: int, symmetric: bool) -> None:
    weight = linear(inputs, outputs, size=size, symmetric=symmetric)
    dense, few = int4.pack_parts(weight, dense=True), int4.pack_parts(weight, dense=False)
    x = torch.randn(75, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = int4.parts_linear(x, dense)
    expected = reference_matmul(x.double(), weight)
    assert (together.double() - expected).norm() <= 9e-3 * expected.norm()
    for count in (1, 2, 5, 32, 64, 75):
        assert torch.equal(int4.parts_linear(x[-count:], few), together[-count:])
        assert torch.equal(int4.parts_linear(x[:count], dense), together[:count])
    if torch.backends.mkldnn.is_available() and int4.agrees():
        assert all(isinstance(part, torch.Tensor) for part in dense.parts)
