"""Operations that change nothing or repeat others are left out, and gradients are summed where they are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from small_model import of_small_model
from torch import Tensor
from tpshard.kernels.add_parts import add_parts_formula
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.node_info import shape_of
from tpshard.parallelism.passes.accumulate import accumulate
from tpshard.parallelism.passes.run import Pass, run
from tpshard.parallelism.passes.simplify import simplify
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.runtime.execute import localize
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

aten = torch.ops.aten
MESH = Mesh({"x": 2})
X, SUM = torch.arange(32.0).reshape(4, 8), torch.ones(8, 8)


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def checked(one: Pass, function: Callable[..., Any], *args: Tensor, donated: dict[int, int] | None = None) -> list[str]:
    """The operations of the function's program after a pass, which must leave its results equal."""
    program = replace(partition(function, args, MESH), donated=donated or {})
    after = run([one], program)
    for expected, actual in zip(program.simulate(*args), after.simulate(*args), strict=True):
        assert torch.equal(expected, actual)
    return targets(after)


def test_a_view_of_a_view_reads_the_first_value() -> None:
    program = reading_views(
        (aten.reshape.default, [32]), (aten.reshape.default, [2, 16]), (aten.reshape.default, [4, 8])
    )
    assert targets(program).count("aten.reshape.default") >= 3
    assert "aten.reshape.default" not in targets(run([simplify], program))


def test_a_reshape_that_copies_stays() -> None:
    """Its result is contiguous, as the readers of the second reshape may need."""
    reshape, permute = aten.reshape.default, aten.permute.default
    program = reading_views((permute, [1, 0]), (reshape, [32]), (reshape, [8, 4]), (permute, [1, 0]))
    assert targets(run([simplify], program)).count("aten.reshape.default") == 2


def reading_views(*views: tuple[Any, list[int]]) -> Program:
    """A product whose first operand [4, 8] is read through views: (op, its argument)."""
    program = partition(lambda x: (x + 1) @ X.T, (X,), MESH)
    graph = program.graph
    product = next(node for node in graph.nodes if node.target is aten.mm.default)
    source, value = product.all_input_nodes[0], product.all_input_nodes[0]
    spec = info(source).specs[0]
    for op, argument in views:
        shape = tuple(argument) if op is aten.reshape.default else shape_of(value)[::-1]
        with graph.inserting_before(product):
            value = graph.call_function(op, (value, argument))
        value.meta["tpshard"] = replace(info(source), specs=(replace(spec, shape=shape),))
    product.replace_input_with(source, value)
    return program


def test_a_product_is_added_to_the_sum_that_it_overwrites() -> None:
    assert "aten.addmm.default" in checked(accumulate, lambda s, x: s + x.T @ x, SUM, X, donated={0: 0})
    assert "aten.addmm.default" in checked(accumulate, lambda s, x: x.T @ x + s, SUM, X, donated={0: 0})
    batch, sums = X.reshape(2, 4, 4), torch.ones(2, 4, 4)
    assert "aten.baddbmm.default" in checked(accumulate, lambda s, x: s + x @ x, sums, batch, donated={0: 0})


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 0, 3, 1, 2)])
def test_a_long_sum_of_products_is_added_up_product_by_product(order: tuple[int, ...]) -> None:
    """In whatever order they are computed and added."""

    def total(x: Tensor) -> Tensor:
        parts = [x[i : i + 2].T @ x[i : i + 2] for i in range(5)]
        return sum((parts[i] for i in order[1:]), parts[order[0]])

    x = torch.arange(48.0).reshape(6, 8) / 32
    assert checked(accumulate, total, x).count("aten.addmm.default") == 4
    short = checked(accumulate, lambda x: x[:2].T @ x[:2] + x[2:4].T @ x[2:4] + x[4:].T @ x[4:], x)
    assert "aten.addmm.default" not in short


@pytest.mark.parametrize(
    ("function", "donated"),
    [
        (lambda s, x: s + x.T @ x, {}),
        (lambda s, x: s - x.T @ x, {0: 0}),
        (lambda s, x: torch.add(s, x.T @ x, alpha=2), {0: 0}),
        (lambda s, x: [s + x.T @ x, s.sum()], {0: 0}),
        (lambda s, x: [s + (p := x.T @ x), p.exp().sum()], {0: 0}),
        (lambda s, x: s + (x.T @ x).to(torch.float64), {0: 0}),
        (lambda s, x: s + x[:1] @ x.T @ x, {0: 0}),
    ],
    ids=["kept", "subtracted", "scaled", "read twice", "read elsewhere", "another dtype", "broadcast"],
)
def test_other_sums_stay_as_they_are(function: Callable[..., Any], donated: dict[int, int]) -> None:
    assert "aten.addmm.default" not in checked(accumulate, function, SUM, X / 32, donated=donated)


@cache
def step(mesh: str) -> Program:
    recipe = f"""
name: small
cluster: {{device: cpu}}
mesh: {mesh}
batch: {{global_sequences: 4}}
"""
    return step_programs.micro_program(Setting.of(loads(of_small_model(recipe))))


@pytest.mark.parametrize(("mesh", "fused"), [("{tp: 2}", 2 * 7 + 1), ("{fsdp: 2}", 0)])
def test_gradients_are_summed_in_their_products_unless_they_are_reduced_before(mesh: str, fused: int) -> None:
    before = run([simplify], step(mesh))
    after = run([accumulate], before)
    assert targets(after).count("aten.addmm.default") == fused
    assert after.useful_flops == before.useful_flops and after.collectives == before.collectives
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(port.shape, generator=generator) if port.dtype.is_floating_point
        else torch.arange(port.shape[1]).expand(port.shape).contiguous() if port.name == "positions"
        else torch.zeros(port.shape, dtype=port.dtype)
        for port in before.inputs
    ]  # fmt: skip
    for expected, actual in zip(before.simulate(*inputs), after.simulate(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_parts_of_a_gradient_are_added_each_in_its_place() -> None:
    """As those of experts' gates and ups, which one parameter holds: they are not joined, and the sum stays where it
    is. A sum that others read, or that is not overwritten, is left alone."""

    def joined(total: Tensor, *parts: Tensor) -> Tensor:
        return total + torch.cat([part.sin() for part in parts], 1).to(total.dtype)

    parts = [torch.randn(8, n).bfloat16() for n in (3, 5)]
    assert "tpshard.add_parts.default" in checked(accumulate, joined, SUM, *parts, donated={0: 0})
    assert "aten.cat.default" in checked(accumulate, joined, SUM, *parts)
    read_again = checked(accumulate, lambda s, *p: (joined(s, *p), s.cos()), SUM, *parts, donated={0: 0})
    assert "aten.cat.default" in read_again
    program = run([accumulate], replace(partition(joined, (SUM, *parts), MESH), donated={0: 0}))
    total = SUM.clone()
    module = localize(program, 0, torch.device("cpu"), lambda started, node: started, exchange=False)
    (result,) = module(total, *parts)
    assert result.data_ptr() == total.data_ptr() and torch.equal(total, joined(SUM, *parts))
    assert torch.equal(add_parts_formula(SUM, [part.sin() for part in parts], 1), total)
