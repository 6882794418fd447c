"""Layers on shards equal whole ones: masked attention, norms over a sharded batch, convolutions over channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.experts.experts import experts
from tpshard.parallelism import Mesh, Program, partition

MESHES = [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 2, "y": 2})]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_gradients(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(*args: Tensor) -> Any:
        args = tuple(a.detach().requires_grad_() if a.is_floating_point() else a for a in args)
        out = fn(*args)
        expected = [a for a in args if a.requires_grad]
        return out.detach(), *torch.autograd.grad((out.sin() * out.detach().cos()).sum(), expected)

    return run


def same(fn: Callable[..., Any], args: Sequence[Tensor], mesh: Mesh, shardings: Sequence[Any]) -> Program:
    program = partition(fn, args, mesh, shardings)
    torch.testing.assert_close(tuple(program.simulate(*args)), tuple(fn(*args)))
    return program


MASKS = [(4, 4, 6, 6), (4, 1, 6, 6), (1, 4, 6, 6), (6, 6), (1, 1, 6, 6), (4, 1, 1, 6)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("cut", range(4))
def test_attention_takes_a_mask_of_any_shape(shape: tuple[int, ...], cut: int) -> None:
    q, k, v = (normal(4, 4, 6, 8, seed=i) for i in range(3))
    mask = normal(*shape, seed=3) > -0.5
    mask[..., 0] = True

    @with_gradients
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    for mesh in MESHES:
        dims: list[Any] = [None] * 4
        dims[cut] = "x"
        if "y" in mesh.axes:
            dims[(cut + 1) % 4] = "y"
        same(attend, [q, k, v], mesh, [tuple(dims), None, None])
        same(attend, [q, k, v], mesh, [None, tuple(dims), None])


def test_rows_of_queries_stay_spread() -> None:
    """Every row sees all keys: only keys and values are sent, to the other device."""
    q, k, v = (normal(2, 2, 64, 8, seed=i) for i in range(3))
    rows = (None, None, "x")
    program = same(lambda q, k, v: [F.scaled_dot_product_attention(q, k, v)], [q, k, v], Mesh({"x": 2}), [rows] * 3)
    assert program.out_shardings == [(None, None, "x", None)]
    assert [(c.kind, c.bytes) for c in program.collectives] == [("permute", k.nbytes // 2)] * 2


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_over_cut_batch_and_channels(groups: int, transposed: bool) -> None:
    x, bias = normal(4, 8, 5, 5), normal(8, seed=1)
    weight = normal(8, 8 // groups, 3, 3, seed=2)
    convolve = F.conv_transpose2d if transposed else F.conv2d
    fn = with_gradients(lambda x, w, b: convolve(x, w, b, stride=2, padding=1, groups=groups))
    for mesh, cut in itertools.product(MESHES, (("x",), (None, "x"))):
        same(fn, [x, weight, bias], mesh, [cut, None, None])
        same(fn, [x, weight, bias], mesh, [None, cut, None])
    program = partition(fn, [x, weight, bias], Mesh({"x": 2}), [("x",), None, None])
    assert {c.kind for c in program.collectives} == {"all_reduce"}, "sums of gradients, and nothing gathered"


def test_statistics_are_those_of_the_whole_batch() -> None:
    x, weight, bias = normal(8, 6, 4, 4), normal(6, seed=1), normal(6, seed=2)

    def batch(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
        mean, var = torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype)
        y = F.batch_norm(x, mean, var, g, b, training=True)
        return y + (mean * var).view(1, -1, 1, 1)

    def group(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return F.group_norm(x, 6, g, b)

    for fn in (batch, group):
        for mesh, cut in itertools.product(MESHES, (("x",), (None, "x"), (None, None, "x"))):
            program = same(with_gradients(fn), [x, weight, bias], mesh, [cut, None, None])
            gathered = [c for c in program.collectives if c.kind == "all_gather" and c.bytes >= x.nbytes // 2]
            assert not gathered, "no activation is gathered"


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_what_is_created_on_a_cut_dim_keeps_its_type(kind: torch.dtype) -> None:
    x = normal(6, 4)

    def fn(x: Tensor) -> list[Tensor]:
        places = torch.arange(6, dtype=kind if kind is not torch.bool else torch.int64)
        steps = torch.arange(1.5, 4.5, 0.5)
        return [
            places[:, None] + x.to(places.dtype), torch.full((6, 4), 3, dtype=kind), torch.ones(6, 4, dtype=kind),
            x.new_zeros(6, 4, dtype=kind), torch.full((6, 4), 2) * x, steps[:, None] * x, torch.eye(6, dtype=kind),
        ]  # fmt: skip

    for mesh in MESHES:
        out = [("x",)] * 7
        program = partition(fn, [x], mesh, [("x",)], out)
        torch.testing.assert_close(program.simulate(x), fn(x))


def test_kernels_get_operands_as_they_need_them() -> None:
    """torch's kernels of these ops read dense dims; what devices exchange lies otherwise."""
    x = normal(4, 6, 8)

    def fn(x: Tensor) -> list[Tensor]:
        pairs = torch.view_as_complex(x.view(4, 6, 4, 2))
        return [
            torch.view_as_real(pairs * pairs.conj()), x.view(torch.int64) >> 50,
            F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
            torch.linalg.inv(x[:, :, :6] @ x[:, :, :6].mT),
        ]  # fmt: skip

    for mesh, dim in itertools.product(MESHES, range(3)):
        same(fn, [x], mesh, [tuple("x" if d == dim else None for d in range(3))])


def test_experts_without_capacity_send_what_room_for_every_routing_would() -> None:
    """Each device's 16 tokens may all choose experts of any device: 4 x 16 rows, as the gather has."""
    x, ids = normal(64, 6), torch.randint(0, 8, (64, 2), generator=torch.Generator().manual_seed(0))
    gate, up, down = normal(8, 40, 6), normal(8, 40, 6, seed=1), normal(8, 6, 40, seed=2)
    args = [x, ids, normal(64, 2, seed=3), gate, up, down]
    program = partition(experts, args, Mesh({"x": 4}), [("x",)] * 6, [("x",)])
    torch.testing.assert_close(program.simulate(*args)[0], experts(*args), rtol=1e-10, atol=1e-10)
    assert sorted(c.kind for c in program.collectives) == ["all_gather"] * 3 + ["reduce_scatter"]
    assert sorted(c.bytes for c in program.collectives)[-2:] == [x.nbytes, x.nbytes]
