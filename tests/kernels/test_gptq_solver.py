"""GPTQ agrees with its definition, beats rounding, and has the properties it documents."""

import pytest
import torch
from tpshard.kernels.quantized.gptq_format import encode
from tpshard.kernels.quantized.gptq_solver import (
    Heads,
    Hessian,
    Settings,
    compensate,
    grid,
    ordering,
    relative_error,
    round_to_nearest,
    solve,
)
from tpshard.kernels.quantized.quantized import group_index
from tpshard.kernels.quantized.reorder import head_local_order


def correlate(inputs, rows=512, seed=0):
    """Activations with correlated inputs of different sizes."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs // 4, inputs, generator=g)
    sizes = torch.exp(torch.randn(inputs, generator=g))
    return (torch.randn(rows, inputs // 4, generator=g) @ mix + 0.3 * torch.randn(rows, inputs, generator=g)) * sizes


def hessian_of(x):
    h = Hessian(x.shape[-1])
    for part in x.split(100):
        h.add(part)
    return h.mean()


def literal_gptq(weight, hessian, settings, plan):
    """GPTQ by its definition: after each input, the best change of all later ones, solved with their Hessian."""
    sequence = plan.sequence
    w = weight.double()[:, sequence].clone()
    h = hessian.double()[sequence][:, sequence]
    h = h + torch.eye(len(h)) * settings.damp * h.diagonal().mean()
    group = plan.group[sequence]
    out = torch.empty_like(w)
    grids = {}
    for i in range(w.shape[1]):
        g = int(group[i])
        if g not in grids:
            members = (group == g).nonzero().flatten()
            source = weight.double()[:, sequence] if settings.static_groups else w
            grids[g] = grid(source[:, members], settings)
        scale, zero = (t.double() for t in grids[g])
        code = (torch.round(w[:, i] / scale) + zero).clamp(0, 2**settings.bits - 1)
        out[:, i] = scale * (code - zero)
        if i + 1 < w.shape[1]:
            # minimise over later weights: d_later = -H_ll^-1 H_li d_i
            change = torch.linalg.solve(h[i + 1 :, i + 1 :], h[i + 1 :, i])
            w[:, i + 1 :] += (w[:, i] - out[:, i])[:, None] * change
    back = torch.empty_like(out)
    back[:, sequence] = out
    return back


@pytest.mark.parametrize("order", ["global", "none"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sym", [True, False])
def test_solver_is_gptq_by_its_definition(order, static, sym):
    x = correlate(192)
    h = hessian_of(x)
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(1)) * 0.05
    settings = Settings(bits=4, group_size=40, sym=sym, static_groups=static)
    plan = ordering(h.diagonal(), settings, order)
    actual = solve(weight, h, settings, plan).dequantize(torch.float64).T
    expected = literal_gptq(weight, h, settings, plan)
    # fp32 against fp64: a rounding that falls differently changes what follows, so compare almost all values
    same = (actual - expected).abs() <= 1e-3 * expected.abs() + 1e-6
    assert same.double().mean() > 0.98


@pytest.mark.parametrize("order", ["global", "head_local", "none"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 16, 48])
def test_identity_hessian_is_round_to_nearest(order, bits, group_size):
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(bits)) * 0.1
    settings = Settings(bits=bits, group_size=group_size, sym=False)
    plan = ordering(torch.ones(96), settings, order, Heads(6, 3, 16))
    actual = solve(weight, torch.eye(96) * 7, settings, plan)
    assert torch.equal(plan.group, group_index(96, group_size))
    for g in range(actual.groups):
        rows = (actual.group == g).nonzero().flatten()
        scales, zeros = grid(weight[:, rows], settings)
        assert torch.equal(actual.scales[g], scales) and torch.equal(actual.zeros[g], zeros)
        nearest = (torch.round(weight[:, rows] / scales.float()[:, None]) + zeros[:, None]).clamp(0, 2**bits - 1)
        assert torch.equal(actual.codes[rows].T.float(), nearest)
    control = round_to_nearest(weight, settings)
    assert torch.equal(control.codes, actual.codes)


def test_compensation_makes_up_for_errors_of_earlier_layers():
    dense = correlate(64, rows=1024)
    g = torch.Generator().manual_seed(5)
    x = dense + 0.1 * dense @ torch.randn(64, 64, generator=g)  # an error that depends on the inputs
    hessian = Hessian(64)
    hessian.add(x, dense)
    weight = torch.randn(16, 64, generator=g)
    better = compensate(weight, hessian.mean(), hessian.cross(), 1e-6)
    target = dense @ weight.T
    assert (x @ better.T - target).norm() < 0.02 * (x @ weight.T - target).norm()
    unharmed = Hessian(64)
    unharmed.add(dense)
    assert torch.equal(compensate(weight, unharmed.mean(), unharmed.cross(), 0.01), weight)


def test_gptq_loses_less_than_rounding_and_order_helps():
    x = correlate(256, rows=2048)
    h = hessian_of(x)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.05
    settings = Settings(bits=3, group_size=64)
    nearest = relative_error(weight, round_to_nearest(weight, settings), h)
    errors = {o: relative_error(weight, solve(weight, h, settings, ordering(h.diagonal(), settings, o)), h)
              for o in ("none", "global")}  # fmt: skip
    assert errors["none"] < 0.7 * nearest and errors["global"] < errors["none"]
    q = solve(weight, h, settings, ordering(h.diagonal(), settings, "global"))
    measured = ((weight - q.dequantize(torch.float32).T) @ x.T).norm() / (weight @ x.T).norm()
    assert abs(float(measured) - errors["global"]) < 1e-3


def test_head_local_groups_stay_within_heads_and_can_be_absorbed():
    importance = torch.rand(8 * 32, generator=torch.Generator().manual_seed(0))
    for size in (16, 32, 64):
        plan = ordering(importance, Settings(group_size=size), "head_local", Heads(8, 4, 32))
        assert torch.equal(plan.sequence.sort().values, torch.arange(256))
        assert head_local_order(plan.group, 8, 4, 32) is not None
        if size < 32:
            within = plan.group.view(8, 32) - torch.arange(8)[:, None] * (32 // size)
            place = torch.argsort(torch.argsort(importance.view(4, 2, 32).sum(1), dim=1, descending=True), dim=1)
            assert torch.equal(within, place.repeat_interleave(2, 0) // size)
        else:
            assert torch.equal(plan.group, group_index(256, size))
    assert head_local_order(ordering(importance, Settings(group_size=16), "global").group, 8, 4, 32) is None
    with pytest.raises(ValueError, match="do not divide one another"):
        ordering(importance, Settings(group_size=24), "head_local", Heads(8, 4, 32))
    with pytest.raises(ValueError, match="do not divide one another"):
        ordering(importance, Settings(group_size=48), "head_local", Heads(8, 4, 32))


def test_awkward_weights():
    settings = Settings(group_size=32)
    h = hessian_of(correlate(64))
    plan = ordering(h.diagonal(), settings, "global")
    zero = torch.zeros(32, 64)
    zero[3] = torch.randn(64, generator=torch.Generator().manual_seed(0))
    q = solve(zero, h, settings, plan)
    assert torch.equal(q.dequantize().T[[0, 1, 2]], torch.zeros(3, 64).half()) and q.check() is q
    for bad in (float("nan"), float("inf")):
        broken = zero.clone()
        broken[0, 0] = bad
        with pytest.raises(ValueError, match="not finite"):
            solve(broken, h, settings, plan)
    with pytest.raises(ValueError, match="beyond the range of fp16"):
        solve(zero + 1e7, h, settings, plan)
    with pytest.raises(ValueError, match="calibration"):
        solve(zero, h * float("inf"), settings, plan)
    dead = h.clone()
    dead[5], dead[:, 5] = 0, 0  # an input that is always zero
    assert solve(zero, dead, settings, plan).check()
    singular = torch.ones(64, 64)
    assert solve(zero, singular, settings, plan).check()
    tiny = solve(zero * 1e-9, h, settings, plan)
    assert bool((tiny.scales > 0).all())


def test_what_is_found_can_be_written_as_version_1():
    weight = torch.rand(32, 64, generator=torch.Generator().manual_seed(0))  # no negatives: the natural zero is 0
    settings = Settings(bits=2, group_size=32, sym=False)
    q = solve(weight, torch.eye(64), settings, ordering(torch.ones(64), settings, "none"))
    assert int(q.zeros.min()) == 1
    encode(q, "gptq")
