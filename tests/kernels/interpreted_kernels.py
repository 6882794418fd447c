"""Every Triton kernel equals its plain reference in Triton's interpreter; `test_triton_kernels.py` runs this file.

On a GPU: pytest tests/kernels/interpreted_kernels.py
"""

import dataclasses

import pytest
import torch
from tpshard.kernels import triton_launch as launch
from tpshard.kernels.experts import quantized_experts, triton_experts
from tpshard.kernels.experts.expert_linear import fixed_rows_expert_linear
from tpshard.kernels.experts.grouped_rows import GroupedRows
from tpshard.kernels.fp8 import fp8, fp8_launch
from tpshard.kernels.norm import rms_norm
from tpshard.kernels.optimizer_steps import adamw_formula, lion_formula
from tpshard.kernels.quantized.packed import pack, unpack
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index, reference_matmul
from tpshard.kernels.quantized.reorder import REORDER
from tpshard.kernels.recurrences import delta_rule, selective_scan, triton_recurrences
from tpshard.kernels.rotary import rotate
from tpshard.kernels.triton_launch import Tile
from triton_interpreter import prepare

prepare()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 4e-4}  # weights pass through fp16


def linear(inputs, outputs, bits=4, group_size=64, order=True, sym=False, bias=False):
    g = torch.Generator().manual_seed(inputs + outputs + bits)
    groups = group_count(inputs, group_size)
    group = group_index(inputs, group_size)
    if order:
        group = group[torch.randperm(inputs, generator=g)]
    zeros = torch.randint(0, 1 << bits, (groups, outputs), generator=g)
    weight = Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs), generator=g).to(torch.uint8),
        (torch.rand(groups, outputs, generator=g) * 0.05 + 1e-3).half(),
        (torch.full_like(zeros, 1 << (bits - 1)) if sym else zeros).to(torch.uint8),
        group,
        bits,
        torch.randn(outputs, generator=g).half() if bias else None,
    )
    return weight.take_rows(weight.order())


def check(weight, rows, dtype, tile, gated=False, quads=False):
    packed = pack(weight.to(DEVICE), quads)
    back = unpack(packed)
    assert torch.equal(back.codes.cpu(), weight.codes)
    for name in ("scales", "zeros"):
        own, packed_own = (getattr(of, name)[of.group.long()].cpu() for of in (weight, back))
        assert torch.equal(packed_own, own.to(packed_own.dtype)), name
    x = torch.randn(rows, weight.inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = reference_matmul(x.double(), weight)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    for _ in range(min(2, tile.parts)):  # twice: the counters of split sums must be left at zero
        y = launch.matmul(x.to(DEVICE), packed, gated, tile).cpu()
        assert y.dtype == dtype
        assert (y.double() - expected).norm() <= ROUNDING[dtype] * expected.norm()
    dense = launch.dequantize(packed, dtype).cpu()
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts bf16 off where devices round
        torch.testing.assert_close(dense, weight.dequantize(dtype).T, rtol=2**-7, atol=0)
    else:
        assert torch.equal(dense, weight.dequantize(dtype).T)
    return packed


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("dtype", "sym"), [(torch.float16, True), (torch.bfloat16, False)])
def test_bits_and_dtypes(bits, dtype, sym):
    check(linear(256, 64, bits, sym=sym), 3, dtype, Tile(16, 64))


def test_places_in_64_bits(monkeypatch):
    sizes = launch.constants
    monkeypatch.setattr(launch, "constants", lambda *how: sizes(*how[:-1], True))
    check(linear(256, 64), 3, torch.float16, Tile(16, 64))
    check(linear(256, 64), 3, torch.float16, Tile(16, 32, 2), gated=True)


@pytest.mark.parametrize("group_size", [-1, 32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("quads", [False, True])
def test_group_sizes(group_size, quads):
    packed = check(linear(384, 48, group_size=group_size), 2, torch.float16, Tile(16, 32), quads=quads)
    assert (packed.pieces is not None) == (group_size == 40)


@pytest.mark.parametrize(("rows", "tile"), [(1, Tile(16, 32, 3)), (16, Tile(16, 64, 2)), (17, Tile(16, 32, 4)),
                                            (40, Tile(32, 64, 1)), (70, Tile(64, 32, 2))])  # fmt: skip
def test_rows_and_split_sums(rows, tile):
    check(linear(640, 64, group_size=128, bias=True), rows, torch.bfloat16, tile)


@pytest.mark.parametrize("outputs", [32, 80, 72])
@pytest.mark.parametrize("parts", [1, 2])
def test_gate_and_up_in_one_launch(outputs, parts):
    check(linear(256, 2 * outputs, bias=outputs == 80), 5, torch.float16, Tile(16, 32, parts), gated=True)


@pytest.mark.parametrize("rows", [slice(64, 320), slice(33, 300), slice(0, 200), slice(70, 90)])
@pytest.mark.parametrize("gated", [False, True])
def test_shards_that_begin_within_a_group(rows, gated):
    whole = linear(384, 64, group_size=128)
    check(whole.take_rows(torch.arange(384)[rows]), 4, torch.float16, Tile(16, 32, 2), gated)


def test_ragged_groups_of_a_rank_that_sorts_alone():
    weight = linear(512, 64, group_size=64, order=False)
    own = torch.randperm(512, generator=torch.Generator().manual_seed(3))[:128]
    local = weight.take_rows(own.sort().values)
    packed = check(local, 3, torch.bfloat16, Tile(16, 32))
    assert packed.pieces is not None and local.groups == weight.groups


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_padding_multiplies_to_zero(sym, dtype):
    weight = linear(160, 48, group_size=64, sym=sym, bias=True)
    packed = check(weight.pad(320, 96), 3, dtype, Tile(16, 32, 2))  # fills a group, and two more
    assert packed.pieces is None and (packed.zeros is None) == sym
    x = torch.randn(3, 320, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    y, cut = (launch.matmul(part, packed, False, Tile(16, 32, 2)) for part in (x, x * (torch.arange(320) < 160).to(x)))
    assert torch.equal(y, cut) and not y[:, 48:].any()


def test_fp32():
    check(linear(256, 64), 3, torch.float32, Tile(16, 32, 2))


def test_a_row_does_not_depend_on_the_others():
    packed = pack(linear(256, 64).to(DEVICE))
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    together = launch.matmul(x, packed, False, Tile(16, 32, 2))
    for row in (0, 15, 16):
        assert torch.equal(launch.matmul(x[row : row + 1], packed, False, Tile(16, 32, 2))[0], together[row])


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_a_dense_product_does_not_depend_on_the_others(gated):
    packed = pack(linear(256, 64, bias=True).to(DEVICE))
    x = torch.randn(67, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    together = launch.dense_matmul(x, packed, gated, fixed_rows=True)
    torch.testing.assert_close(together, launch.dense_matmul(x, packed, gated), rtol=1e-5, atol=1e-5)
    for rows in (1, 5, 16, 33):
        assert torch.equal(launch.dense_matmul(x[:rows], packed, gated, fixed_rows=True), together[:rows])


@pytest.mark.parametrize("width", [64, 96, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_stores_in_order(width, dtype):
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(5, width, generator=g).to(dtype), torch.rand(width, generator=g).to(dtype)
    order = torch.randperm(width, generator=g)
    for chosen in (None, order):
        on_device = None if chosen is None else chosen.to(DEVICE)
        y = launch.rms_norm(x.to(DEVICE), weight.to(DEVICE), on_device, 1e-5).cpu()
        tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}[dtype]  # see above: cut off, twice
        torch.testing.assert_close(y, rms_norm(x, weight, chosen, 1e-5), rtol=tolerance, atol=tolerance)
    straight = launch.rms_norm(x.to(DEVICE), weight.to(DEVICE), None, 1e-5).cpu()
    assert torch.equal(y, straight[:, order])
    wide = torch.cat([x.view(5, 1, width), x.flip(0).view(5, 1, width)], 1).to(DEVICE)
    for part in (wide[:, 1:], wide.view(1, 5, 2 * width)[..., width:].unflatten(-1, (1, width)), wide[:, 1]):
        own = launch.rms_norm(part, weight.to(DEVICE), None, 1e-5).cpu()
        assert own.shape == part.shape and torch.equal(own.view(5, width), straight.flip(0))


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("moments", [2, 1])
def test_steps_of_optimizers(moments, dtypes, finite):
    dtype, of_moments = dtypes
    random = torch.Generator().manual_seed(0)
    param, grad, *states = (torch.randn(3, 700, generator=random, dtype=torch.float64) for _ in range(2 + moments))
    scalars = [torch.tensor(x, dtype=dtype) for x in (0.25, 0.01, 1.0)[: 1 + moments]]
    states = [x.abs().to(of_moments) for x in states]
    before = [param.to(dtype), grad.to(dtype), *states, torch.tensor(finite), *scalars]
    step, formula, settings = (
        (launch.adamw_step_, adamw_formula, (0.9, 0.999, 1e-6, 0.1)) if moments == 2
        else (launch.lion_step_, lion_formula, (0.9, 0.99, 0.1))
    )  # fmt: skip
    written = [x.to(DEVICE, copy=True) for x in before]
    step(*written, *settings)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6}  # see above: cut off
    for actual, expected in zip((written[0], *written[2 : 2 + moments]), formula(*before, *settings), strict=True):
        rounding = tolerance[expected.dtype]
        torch.testing.assert_close(actual.cpu(), expected, rtol=rounding, atol=rounding if finite else 0)


def test_rows_of_a_group_must_be_adjacent():
    weight = linear(64, 32, group_size=32)
    with pytest.raises(ValueError, match="adjacent"):
        pack(dataclasses.replace(weight, group=weight.group.flip(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_fp8_blocks_are_those_of_plain_torch(dtype, transposed):
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, :128] = 0
    x = x.t().contiguous() if transposed else x
    values, scales = fp8.quantize(x, transposed)
    actual, actual_scales = (tensor.cpu() for tensor in fp8_launch.quantize(x.to(DEVICE), transposed))
    assert torch.equal(actual_scales, scales)
    differ = actual.float() != values.float()
    if DEVICE == "cpu":  # the interpreter rounds ties down, and loses the carry of what is rounded to a power of two
        numbers = (x.t() if transposed else x).float().unflatten(1, (-1, 128)) / scales.t().unsqueeze(-1)
        errors = [(rounded.float() - numbers.flatten(1)).abs() for rounded in (actual, values)]
        differ &= (errors[0] > errors[1]) & (values.float().abs().log2().frac() != 0)
    assert not differ.any()


def test_fp8_blocks_are_multiplied_as_by_plain_torch():
    g = torch.Generator().manual_seed(0)
    a, b = (fp8.quantize(torch.randn(rows, 384, generator=g), False) for rows in (150, 40))
    expected = fp8.multiply(*a, *b, torch.float32)
    actual = fp8_launch.multiply(*(tensor.to(DEVICE) for tensor in (*a, *b)), torch.float32).cpu()
    assert (actual - expected).norm() <= 1e-3 * expected.norm()  # a GPU sums a block's products in 14 bits and more


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def assert_recurrences_equal(compute, operation, inputs):
    """`compute` on the device equals the operation on the CPU, in values and in strides."""
    actual, expected = compute(*(x.to(DEVICE) for x in inputs)), operation(*inputs)
    rounding = 1e-12 if inputs[0].dtype == torch.float64 else 1e-5
    for own, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(own.cpu(), reference, rtol=rounding, atol=rounding)
        assert own.stride() == reference.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decays", [1, 24])
@pytest.mark.parametrize("tokens", [1, 5])
def test_delta_rule_token_by_token(tokens, decays, dtype):
    b, h, i, o = 2, 3, 24, 40
    q, k, v = (
        draw(b, h, tokens, i, dtype=dtype).transpose(1, 2),
        draw(b, tokens, h, i + 1)[..., 1:],
        draw(b, tokens, h, o),
    )
    decay, beta, state = -draw(b, tokens, h, decays).abs(), draw(b, tokens, h).sigmoid(), draw(b, h, i, o)
    inputs = [x.to(dtype) for x in (q, k * 0.2, v, decay, beta, state)]
    assert_recurrences_equal(triton_recurrences.delta_rule, delta_rule.delta_rule, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [1, 70])
def test_selective_scan_token_by_token(tokens, dtype):
    b, d, n = 2, 80, 12
    x, step, a = draw(b, d, tokens).transpose(1, 2), draw(b, tokens, d).abs(), -draw(d, n).abs()
    inputs = [
        each.to(dtype) for each in (x, step, a, draw(b, tokens, n), draw(b, tokens, n + 1)[..., 1:], draw(b, d, n))
    ]
    assert_recurrences_equal(triton_recurrences.selective_scan, selective_scan.selective_scan, inputs)


def routed(rows, k, e, h, m, dtype):
    """x, ids, weights, gate, up and down; some ids belong to another device."""
    ids = torch.rand(rows, e + 2, generator=torch.Generator().manual_seed(e)).topk(k, -1).indices - 1
    gate, up, down = draw(e, h, m), draw(e, h, m + 1)[..., 1:], draw(e, m, h)
    tensors = [draw(rows, m), ids, draw(rows, k + 1)[:, 1:], gate * 0.2, up * 0.2, down * 0.2]
    return [x if x is ids else x.to(DEVICE, dtype) for x in tensors]


SHARES = [(9, 2, 4, 24, 40), (1, 1, 3, 8, 16), (70, 2, 2, 40, 24), (300, 1, 2, 16, 24), (3, 4, 32, 16, 8)]


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_experts_and_their_gradients(shares, library, monkeypatch):
    monkeypatch.setattr(triton_experts, "by_library", lambda *how: library)
    given = routed(*shares, torch.float32)
    wide = [x if i == 1 else x.cpu().double() for i, x in enumerate(given)]
    dout = draw(shares[0], shares[4])
    expected = torch.ops.tpshard.experts(*wide), *torch.ops.tpshard.experts_backward(dout, *wide)
    own = [x.to(DEVICE) for x in given]
    actual = triton_experts.experts(*own, fixed=False), *triton_experts.experts_backward(dout.to(own[0]), *own)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-4)


MULTIPLIED = [torch.float32, torch.float16]
if DEVICE == "cuda":  # the interpreter multiplies the bits of bf16 as integers
    MULTIPLIED.append(torch.bfloat16)


@pytest.mark.parametrize("dtype", MULTIPLIED)
def test_a_tokens_experts_have_the_same_bits_in_every_batch(dtype):
    x, ids, *others = routed(67, 2, 3, 24, 40, dtype)
    ids = ids.to(DEVICE)
    together = triton_experts.experts(x, ids, *others, fixed=True)
    wide = [each.cpu().double() for each in (x, *others)]
    expected = torch.ops.tpshard.experts(wide[0], ids.cpu(), *wide[1:])
    assert (together.cpu().double() - expected).norm() <= 2 * ROUNDING[dtype] * expected.norm()
    products = triton_experts.SortedChoices(ids, 3, dtype, fixed=True).linear(x, others[1]).view(67, 2, 24)
    for rows in (slice(1), slice(40, 47)):
        own = triton_experts.SortedChoices(ids[rows], 3, dtype, fixed=True).linear(x[rows], others[1])
        assert torch.equal(own, products[rows].flatten(0, 1))
        if DEVICE == "cuda":  # a CPU's silu depends on a vector's length
            alone = triton_experts.experts(x[rows], ids[rows], others[0][rows], *others[1:], fixed=True)
            assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [5, 150])
def test_products_with_experts_and_with_their_transposes(shared, rows):
    k, e = 2, 3
    _, ids, _, weight, *_ = routed(rows, k, e, 24, 40, torch.float32)
    x = draw(rows, 1 if shared else k, 40, dtype=torch.float32).to(DEVICE)
    dout = draw(rows, k, 24, dtype=torch.float32).to(DEVICE)
    ids_there = ids.to(DEVICE)
    wide = x.cpu().double(), ids, weight.cpu().double()
    expected = fixed_rows_expert_linear(*wide)
    outer = torch.ops.tpshard.expert_outer(dout.cpu().double(), wide[0], ids, e)
    back = fixed_rows_expert_linear(dout.cpu().double(), ids, wide[2].transpose(1, 2))
    rows_of = [each.reshape(-1, each.shape[-1]) for each in (x, dout)]
    for routing in (triton_experts.SortedChoices(ids_there, e, x.dtype, fixed=False), GroupedRows(ids_there, e)):
        inputs, grads = map(routing.rows, rows_of)
        products = routing.linear(inputs, weight), routing.linear(grads, weight.transpose(1, 2))
        forward, backward = map(routing.in_choices, products)
        results = (forward, expected), (backward, back), (routing.outer(grads, inputs), outer)
        for ours, theirs in results:
            torch.testing.assert_close(ours.cpu().double(), theirs.reshape(ours.shape), rtol=1e-4, atol=1e-4)


def test_no_tokens_and_no_owned_choices():
    none = [x[:0] if i < 3 else x for i, x in enumerate(routed(3, 2, 3, 24, 40, torch.float32))]
    assert triton_experts.experts(*none, fixed=False).shape == (0, 40)
    assert not any(x.any() for x in triton_experts.experts_backward(none[0], *none))
    x, ids, *others = routed(3, 2, 3, 24, 40, torch.float32)
    assert not triton_experts.experts(x, torch.full_like(ids, 7), *others, fixed=True).any()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("rows", "parts"), [(5, 1), (36, 3)])
def test_quantized_experts_in_one_launch(rows, parts, ordered, monkeypatch):
    """Act-ordered, or of ragged groups; some ids belong to another device; several `parts` share a block's inputs."""
    tiles = launch.tiles
    monkeypatch.setattr(launch, "tiles", lambda *how: [dataclasses.replace(tiles(*how)[0], columns=32, parts=parts)])
    monkeypatch.setattr(quantized_experts, "prepare", lambda weight, device: pack(weight.to(device)))
    k, e, h, m = 2, 3, 64, 128
    size = 64 if ordered else 48
    experts = [[linear(*shape, group_size=size, sym=i == 0) for shape in ((m, h), (m, h), (h, m))] for i in range(e)]
    if ordered:
        for i, matrices in enumerate(experts):
            order = torch.randperm(m, generator=torch.Generator().manual_seed(i))
            matrices[:2] = [w.take_rows(order) for w in matrices[:2]]
    own = [quantized_experts.PackedExpert.pack(*matrices, slice(None), DEVICE) for matrices in experts]
    stack = quantized_experts.StackedExperts.of(own)
    assert stack is not None and (stack.order is not None) == ordered
    assert (stack.inward.pieces is None) == ordered
    x, ids, weights, *_ = routed(rows, k, e, 8, m, torch.float16)
    dense = [torch.stack([matrices[i].dequantize(torch.float64).T for matrices in experts]) for i in range(3)]
    expected = torch.ops.tpshard.experts(x.cpu().double(), ids, weights.cpu().double(), *dense)
    actual = quantized_experts.quantized_experts(x, ids.to(DEVICE), weights, stack, True).cpu().double()
    assert (actual - expected).norm() <= 2 * ROUNDING[torch.float16] * expected.norm()


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize(("heads", "head"), [((4, 2), 16), ((3, 1), 24), ((5,), 64)])
def test_rotary_positions_have_the_bits_of_torch(heads, head, dtype):
    wide = draw(1, 5, sum(heads) + 1, head).to(dtype)  # heads in a wider tensor, as after a joined product
    xs = [one.to(DEVICE) for one in wide.split([*heads, 1], 2)[: len(heads)]]
    angles = draw(1, 5, 1, head // 2)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    cos, sin = cos.to(DEVICE, dtype), sin.to(DEVICE, dtype)
    for ours, theirs in zip(launch.rotate(xs, cos, sin), rotate(xs, cos, sin), strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_sum_and_its_norm_are_those_of_two_kernels(ordered, dtype):
    x, y = (draw(2, 3, 40).to(DEVICE, dtype) for _ in range(2))
    weight, order = draw(40).to(DEVICE, dtype), torch.randperm(40).to(DEVICE) if ordered else None
    total, normed = launch.add_rms_norm(x, y * 2, weight, order, 1e-5)
    assert torch.equal(total, x + y * 2)
    assert torch.equal(normed, launch.rms_norm(total, weight, order, 1e-5))


def test_keys_and_values_are_stored_at_their_slots():
    pools = torch.zeros(2, 4, 16, 3, 8, device=DEVICE)
    wide = draw(1, 5, 3, 16).to(DEVICE, torch.float32)
    k, v = wide[..., :8], wide[..., 8:].contiguous()
    slots = torch.tensor([[17, 3, 63, 40, 18]], device=DEVICE)
    launch.store_rows(k, v, *pools, slots)
    expected = torch.zeros_like(pools)
    for pool, x in zip(expected, (k, v)):
        pool.view(-1, 3, 8)[slots[0]] = x[0]
    assert torch.equal(pools, expected)


@pytest.mark.parametrize("blocks", [1, 3])
def test_columns_are_put_in_order(blocks):
    x = draw(2, 5, 48).to(DEVICE, torch.float16)
    order = torch.cat([torch.randperm(48 // blocks) for _ in range(blocks)]).to(DEVICE)
    expected = REORDER(x.cpu(), order.cpu(), blocks)
    assert torch.equal(launch.reorder(x, order, blocks).cpu(), expected)


@pytest.mark.parametrize("spread", [2**62, 2**12, 40])
@pytest.mark.parametrize("count", [1, 7, 20, 40])
def test_the_largest_keys_are_those_of_topk(count, spread):
    """Keys that differ in their first digits, or in their last alone."""
    keys = torch.stack([torch.randperm(40) if spread == 40 else torch.randint(spread, (40,)) for _ in range(3)])
    keys = keys if spread == 40 else keys // 64 * 64 + torch.arange(40)
    keys[2] += 2**62 - 2**20
    assert torch.equal(launch.largest(keys.clamp(max=2**63 - 1).to(DEVICE), count).cpu(), keys.topk(count).values)
