"""Convolution, pooling and resizing of a sharded height or width exchange halos with neighbours."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.parallelism import Mesh, Program, partition

torch.set_num_threads(1)
MESHES = [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 2, "y": 2})]


def images(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def step(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function and its gradients."""

    def run(*args: Tensor) -> Any:
        args = tuple(a.detach().requires_grad_() for a in args)
        out = fn(*args)
        return [out.detach(), *torch.autograd.grad((out.sin() * out.detach().cos()).sum(), args)]

    return run


def same(fn: Callable[..., Tensor], args: list[Tensor], mesh: Mesh, dims: Any, out: Any = None) -> Program:
    whole = step(fn)
    program = partition(whole, args, mesh, [dims, *[None] * (len(args) - 1)], [out, *[None] * len(args)])
    torch.testing.assert_close(program.simulate(*args), whole(*args))
    return program


def drawn(seed: int) -> tuple[str, Callable[..., Tensor], list[Tensor]]:
    """A layer over 1 to 3 dims with random windows."""
    rng = random.Random(seed)
    rank = rng.choice([1, 2, 2, 3])
    kernel = [rng.randint(1, 4) for _ in range(rank)]
    stride = [rng.choice([1, 1, 2, 3]) for _ in kernel]
    dilation = [rng.choice([1, 1, 2]) for _ in kernel]
    padding = [rng.randint(0, k // 2) for k in kernel]
    size = [rng.randint(6, 13) for _ in kernel]
    x, groups = images(2, 4, *size), rng.choice([1, 2])
    weights = [images(4, 4 // groups, *kernel), images(4)]
    more = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation)]
    ceil, count = rng.random() < 0.3, rng.random() < 0.7
    kinds: list[tuple[str, Callable[..., Tensor], list[Tensor]]] = [
        ("conv", lambda x, w, b: getattr(F, f"conv{rank}d")(x, w, b, stride, padding, dilation, groups), weights),
        ("transposed", lambda x, w, b: getattr(F, f"conv_transpose{rank}d")(
            x, w, b, stride, padding, more, groups, dilation), weights),
        ("max", lambda x: getattr(F, f"max_pool{rank}d")(x, kernel, stride, padding, dilation, ceil), []),
        ("average", lambda x: getattr(F, f"avg_pool{rank}d")(x, kernel, stride, padding, ceil, count), []),
        ("nearest", lambda x: F.interpolate(x, scale_factor=2), []),
        ("linear", lambda x: F.interpolate(x, scale_factor=2, mode=("linear", "bilinear", "trilinear")[rank - 1]), []),
        ("cubic", lambda x: F.interpolate(x, scale_factor=3, mode="bicubic" if rank == 2 else "nearest"), []),
        ("any ratio", lambda x: F.interpolate(
            x, [n + more[0] + 2 for n in size], mode=("linear", "bilinear", "trilinear")[rank - 1],
            align_corners=count), []),
        ("any cubic ratio", lambda x: F.interpolate(
            x, [2 * n + 1 - 3 * more[0] for n in size], mode="bicubic" if rank == 2 else "nearest-exact",
            align_corners=count if rank == 2 else None), []),
        ("any nearest", lambda x: F.interpolate(x, [n + 3 - 4 * more[0] for n in size]), []),
        ("reflect", lambda x: F.pad(x, [2, 1] * rank, "reflect"), []),
        ("replicate", lambda x: F.pad(x, [1, 2] * rank, "replicate"), []),
        ("any windows", lambda x: getattr(F, f"adaptive_avg_pool{rank}d")(x, [n // 2 + more[0] for n in size]), []),
    ]  # fmt: skip
    name, fn, rest = kinds[seed % len(kinds)]
    return name, fn, [x, *rest]


@pytest.mark.parametrize("part", range(5))
def test_layers_over_cut_images_and_their_gradients(part: int) -> None:
    permuted = 0
    for seed, mesh in itertools.product(range(part, 54, 5), MESHES):
        if mesh is MESHES[seed % len(MESHES)]:  # two meshes each
            continue
        _, fn, args = drawn(seed)
        try:
            fn(*args)
        except RuntimeError:  # a window larger than the image
            continue
        d = 2 + seed % (args[0].dim() - 2)
        dims = [None] * args[0].dim()
        dims[d] = "x"  # type: ignore[call-overload]
        if "y" in mesh.axes:
            dims[2 + (d - 1) % (args[0].dim() - 2)] = "y" if args[0].dim() > 3 else ("x", "y")  # type: ignore
        for inputs, expected in ((tuple(dims), None), (None, tuple(dims))):
            program = same(fn, args, mesh, inputs, expected)
            permuted += any(c.kind == "permute" for c in program.collectives)
    assert permuted > 2, "halos are exchanged"


def test_a_convolution_reads_a_row_of_each_neighbour() -> None:
    x, w = images(2, 4, 16, 16), images(4, 4, 3, 3)
    program = same(lambda x, w: F.conv2d(x, w, padding=1), [x, w], Mesh({"x": 4}), (None, None, "x"))
    rows = [c.bytes for c in program.collectives if c.kind == "permute"]
    assert set(rows) == {2 * 4 * 16 * 8} and {c.kind for c in program.collectives} == {"permute", "all_reduce"}
    assert program.flop_efficiency > 0.99


def test_a_convolution_and_its_weights_gradient_read_a_neighbours_rows_once() -> None:
    """Patches that overlap, as in SegFormer's stem: three rows of the image, and three of its gradient."""
    x, w = images(2, 3, 128, 64).requires_grad_(), images(4, 3, 7, 7).requires_grad_()

    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.conv2d(x, w, stride=4, padding=3).square().sum(), (x, w))

    program = partition(gradients, [x, w], Mesh({"x": 4}), [(None, None, "x"), None], [(None, None, "x"), None])
    for mine, theirs in zip(program.simulate(x, w), gradients(x, w), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    rows = 2 * 3 * 3 * 64 * 8
    assert [(c.kind, c.bytes) for c in program.collectives] == [
        ("permute", rows), ("permute", rows), ("all_reduce", w.numel() * 8)
    ]  # fmt: skip
    image = None, None, "x", "y"
    cut = partition(gradients, [x, w], Mesh({"x": 2, "y": 2}), [image, None], [image, None])
    assert [c.kind for c in cut.collectives].count("permute") == 4  # of each dim: one forward, one of the gradient
    for mine, theirs in zip(cut.simulate(x, w), gradients(x, w), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_resizing_and_padding_send_rows_not_images() -> None:
    x = images(2, 4, 64, 16)
    for fn, rows in (
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 2),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 4),
        (lambda x: F.interpolate(x, (96, 16), mode="bicubic", align_corners=True), 6),
        (lambda x: F.interpolate(x, (127, 31), mode="bilinear", align_corners=True), 2),
        (lambda x: F.interpolate(x, (96, 20)), 1),
        (lambda x: F.interpolate(x, (32, 7), mode="bilinear", antialias=True), 2),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True), 4),
        (lambda x: F.pad(x, [1, 1, 0, 0], "reflect"), 0), (lambda x: F.pad(x, [0, 0, 1, 1], "replicate"), 16),
        (lambda x: F.pad(x, [0, 0, 1, 1], "reflect"), 16), (lambda x: F.pad(x, [0, 0, 1, 1], "circular"), 16),
        (lambda x: F.instance_norm(x), 1), (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True), 1),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), 1),
    ):  # fmt: skip
        program = partition(fn, [x], Mesh({"x": 4}), [(None, None, "x")], [(None, None, "x")])
        torch.testing.assert_close(program.simulate(x)[0], fn(x), rtol=1e-12, atol=1e-12)
        assert sum(c.bytes for c in program.collectives) <= rows * 2 * 4 * 16 * 8


def test_windows_that_touch_no_neighbour_send_nothing() -> None:
    """A patch for each position, pooling by twos, and repeating."""
    x, w = images(2, 4, 16, 16), images(4, 4, 4, 4)
    for fn, args in (
        (lambda x, w: F.conv2d(x, w, stride=4), [x, w]), (lambda x: F.max_pool2d(x, 2), [x]),
        (lambda x: F.avg_pool2d(x, 2), [x]), (lambda x: F.interpolate(x, scale_factor=2), [x]),
        (lambda x: F.adaptive_avg_pool2d(x, 4), [x]), (lambda x: F.adaptive_max_pool2d(x, 4), [x]),
    ):  # fmt: skip
        program = same(fn, args, Mesh({"x": 4}), (None, None, "x"))  # type: ignore[arg-type]
        assert {c.kind for c in program.collectives} <= {"all_reduce"}
    sharded = [(None, None, "x"), None]
    large = partition(lambda x, w: F.conv2d(x, w, stride=8), [x, images(4, 4, 8, 8)], Mesh({"x": 2}), sharded)
    assert not large.collectives  # patches of 8 in a result of 2, which nobody annotated


def test_instance_norm_of_sharded_channels_or_images_sends_nothing() -> None:
    x, w = images(4, 8, 6, 6), images(8)
    for dims in (("x",), (None, "x")):
        for mesh in (Mesh({"x": 4}), Mesh({"x": 3})):
            program = partition(lambda x, w: F.instance_norm(x, weight=w), [x, w], mesh, [dims, dims[1:] or None])
            torch.testing.assert_close(program.simulate(x, w)[0], F.instance_norm(x, weight=w))
            assert not program.collectives


def test_windows_that_pooling_made_are_undone_in_place() -> None:
    def fn(x: Tensor) -> Tensor:
        values, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values * 2, places, 2)

    for x, dims in ((images(2, 4, 16, 8), (None, None, "x")), (images(4, 4, 8, 8), ("x",))):
        assert not same(fn, [x], Mesh({"x": 4}), dims).collectives


def test_images_of_an_uneven_number_of_windows_in_two_dims_change_places() -> None:
    def fn(x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        parts = x.reshape(n, h // 8, 8, w // 8, 8, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, c).softmax(1)
        return parts.reshape(n, h // 8, w // 8, 8, 8, c).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)

    program = same(fn, [images(8, 56, 24, 2)], Mesh({"x": 4, "y": 2}), (None, "x", "y"), (None, "x", "y"))
    assert {c.kind for c in program.collectives} == {"all_to_all"}


def test_a_network_of_layers_keeps_images_cut() -> None:
    """Down by a stride, pooled, up again, joined with what was before: only neighbours and sums are sent."""

    def network(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first = F.silu(F.group_norm(F.conv2d(x, a, padding=1), 2))
        lower = F.max_pool2d(F.conv2d(first, b, stride=2, padding=1), 3, 1, 1)
        upper = torch.cat([F.interpolate(lower, scale_factor=2), first], 1)
        return F.conv2d(upper, c, padding=1)

    args = [images(2, 3, 16, 16), images(4, 3, 3, 3), images(4, 4, 3, 3), images(3, 8, 3, 3)]
    program = same(network, args, Mesh({"x": 4}), (None, None, "x"))
    assert {c.kind for c in program.collectives} == {"permute", "all_reduce"}
    assert program.flop_efficiency > 0.99 and not program.warnings
