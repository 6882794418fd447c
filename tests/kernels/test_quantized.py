"""Quantized linears can be padded and concatenated without changing results; a norm can store its result permuted."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tpshard.kernels.norm import NORM
from tpshard.kernels.quantized.dequantize import DEQUANTIZE, DTYPES, Coding
from tpshard.kernels.quantized.packed import pack, unpack
from tpshard.kernels.quantized.quantized import Quantized, concatenate, extend_groups, group_count, group_index


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


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (3, 64), (4, -1), (8, 40)])
def test_padding_multiplies_to_zero(bits, group_size):
    weight = linear(bits=bits, group_size=group_size)
    wider = weight.pad(320, 96).check()
    dense = wider.dequantize()
    assert torch.equal(dense[:128, :64], weight.dequantize())
    assert dense.count_nonzero() == weight.dequantize().count_nonzero() and wider.sorted
    assert weight.pad(128, 64) is weight


@pytest.mark.parametrize("symmetric", [True, False])
def test_padding_fills_the_last_group(symmetric):
    weight = linear(inputs=144, bits=4, group_size=64, order=True, sort=False)
    if symmetric:
        weight = dataclasses.replace(weight, zeros=torch.full_like(weight.zeros, 8))
    wider = weight.pad(320, 64)
    assert torch.bincount(wider.group).tolist() == [64] * 5 and wider.symmetric == symmetric
    assert torch.equal(wider.group, extend_groups(weight.group, 320))
    assert not wider.dequantize()[144:].any() and torch.equal(wider.dequantize()[:144], weight.dequantize())


def test_linears_lie_side_by_side_only_where_their_groups_agree():
    ragged = torch.tensor([0] * 20 + [1] * 44 + [2] * 64, dtype=torch.int32)
    for group in (group_index(128, 32), ragged):
        one, two = (dataclasses.replace(linear(seed=seed), group=group) for seed in (1, 2))
        both = pack(concatenate([one, two]))
        assert both.columns == 128
        assert torch.equal(unpack(both).dequantize(), torch.cat([one.dequantize(), two.dequantize()], 1))
    for other in (linear(group_size=64), dataclasses.replace(linear(), group=ragged), linear(bits=3)):
        with pytest.raises(ValueError, match="same g_idx"):
            concatenate([linear(), other])


def test_norm_in_order_is_the_norm_reordered():
    x, scale, order = torch.randn(4, 96), torch.rand(96), torch.randperm(96)
    straight = NORM(x, scale, None, 1e-6)
    torch.testing.assert_close(straight, F.rms_norm(x, (96,), scale, 1e-6))
    assert torch.equal(NORM(x, scale, order, 1e-6), straight[:, order])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group_size", "order"), [(32, False), (32, True), (48, False), (-1, False)])
def test_a_packed_weight_is_dense_again_bit_for_bit(bits, group_size, order):
    weight = linear(bits=bits, group_size=group_size, order=order, sort=False)
    coding = Coding(bits, weight.groups, ordered=order or group_size == 48)
    tensors = coding.tensors(weight)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == coding.shapes((64, 128))
    assert {name: x.dtype for name, x in tensors.items()} == {name: DTYPES[name] for name in tensors}
    dense = DEQUANTIZE(*(tensors.get(name) for name in DTYPES), bits, torch.float32)
    assert torch.equal(dense, weight.dequantize(torch.float32).T)
