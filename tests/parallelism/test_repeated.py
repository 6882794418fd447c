"""A program reports what its devices compute redundantly: the share of the step, the cause, and a fix."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from tpshard.parallelism import Mesh, ShardingWarning, mesh_split, partition

MESH = Mesh({"x": 2, "y": 2})


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.relu(x @ up) @ down


ARGS = [torch.rand(8, 16), torch.rand(16, 32), torch.rand(32, 16)]


def test_an_axis_that_nothing_uses_is_told_with_what_would_use_it() -> None:
    (warning,) = partition(mlp, ARGS, MESH, [("x",), None, None]).warnings
    assert "and 1 like it: 2 devices along y compute the same, 49" in warning
    assert "nothing shards dim 1 of `mm` [8, 32]" in warning

    def mend(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.relu(mesh_split(x @ up, MESH, [0, 1])) @ down

    program = partition(mend, ARGS, MESH, [("x",), None, None])
    assert not program.warnings and program.flop_efficiency == 1


def test_what_annotations_do_not_ask_for_is_a_warning_in_python() -> None:
    """Each sentence once: work done twice, and reshards that nothing asks for."""
    with pytest.warns(ShardingWarning) as caught:
        partition(mlp, ARGS, MESH, [("x", "y"), (None, None), ("y", None)], [("x", None)])
    told = [str(warning.message) for warning in caught]
    assert len(told) == len(set(told)) and any("1 reshard that nothing asks for moves 256 B" in one for one in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition(lambda x: x * 2, ARGS[:1], MESH, [("x", "y")])


def test_a_dim_with_too_few_parts_is_told() -> None:
    (warning,) = partition(
        lambda x, y: x @ y, [torch.rand(3, 3), torch.rand(3, 3)], Mesh({"x": 4}), [None, None]
    ).warnings
    assert (
        "4 devices along x compute the same, 75.0%" in warning and "has fewer than 4 parts; make x smaller" in warning
    )


def test_what_costs_little_is_not_told() -> None:
    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return mlp(x, up, down) + torch.ones(16).sin()

    program = partition(fn, ARGS, Mesh({"x": 2}), [("x",), None, None])
    assert program.flop_efficiency < 1 and not program.warnings


@pytest.mark.parametrize("op", [torch.linalg.eigvalsh, torch.linalg.inv, lambda x: torch.fft.fft2(x).abs()])
def test_a_factorization_that_every_device_repeats_is_told(op: Callable[[Tensor], Tensor]) -> None:
    """Unless a batch of matrices is sharded."""
    matrix, mesh = torch.empty(32, 32, device="meta"), Mesh({"x": 2})
    (warning,) = partition(lambda x: op(x @ x), [matrix], mesh, in_shardings=[("x",)]).warnings
    assert "2 devices along x compute the same" in warning and "needs dim" in warning
    batch = torch.empty(4, 32, 32, device="meta")
    assert not partition(lambda x: op(x @ x), [batch], mesh, in_shardings=[("x",)]).warnings
