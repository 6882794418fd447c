"""A pipeline as a sharded dim of stages (GSPMD, section 3.3): a shift along it becomes a permute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from tpshard.parallelism import Mesh, mesh_split, partition

STAGES, ROWS, WIDTH = 4, 64, 64
MESHES = [Mesh({"pp": 4}), Mesh({"pp": 4, "data": 2})]
Fn = Callable[[Tensor, Tensor], Tensor]


def pipeline(mesh: Mesh, rounds: int) -> Fn:
    """x: [micro-batches, rows, width], w: [rounds, stages, width, width] -> [micro-batches, rows, width].

    Layer i is on stage i mod stages; what the last stage made goes to the first one until all rounds are done. With one
    round there may be any number of micro-batches (GPipe), with several as many as stages. Steps before a stage has its
    first micro-batch, and after its last one, compute what nothing reads.
    """
    place = torch.arange(STAGES)[:, None, None]

    def run(x: Tensor, w: Tensor) -> Tensor:
        micros = x.shape[0]
        result, results = x.new_zeros(STAGES, *x.shape[1:]), []
        for t in range(micros + rounds * STAGES - 1):
            turn = torch.div(t - place, STAGES, rounding_mode="floor").clamp(0, rounds - 1)
            mine = sum(torch.where(turn == r, w[r], 0.0) for r in range(rounds)) if rounds > 1 else w[0]
            shifted = torch.roll(result, 1, 0)
            if t < micros:
                shifted = torch.where(place == 0, x[t], shifted)
            shifted = mesh_split(shifted, mesh, [0, *[1 if "data" in mesh.axes else -1], -1])
            result = torch.tanh(torch.einsum("srk,skn->srn", shifted, mine))
            if t >= rounds * STAGES - 1:
                results.append(torch.where(place == STAGES - 1, result, 0.0).sum(0))
        return torch.stack(results)

    return run


def layers_of(x: Tensor, w: Tensor) -> Tensor:
    """The same, a layer after the other."""
    for layer in w.flatten(0, 1):
        x = torch.tanh(x @ layer)
    return x


def with_gradients(fn: Fn) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = fn(x, w)
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    return both


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("rounds", "micros"), [(1, 6), (2, 4)], ids=["gpipe", "circular"])
def test_the_shift_is_a_permute_and_never_a_gather(mesh: Mesh, rounds: int, micros: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(micros, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(rounds, STAGES, WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    rows, stages = (None, "data" if "data" in mesh.axes else None), (None, "pp")
    program = partition(
        with_gradients(pipeline(mesh, rounds)), (x, w), mesh, in_shardings=[rows, stages],
        out_shardings=[rows, rows, stages],
    )  # fmt: skip
    for actual, expected in zip(program.simulate(x, w), with_gradients(layers_of)(x, w), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    over = [c for c in program.collectives if "pp" in c.axes]
    shifts = [c for c in over if c.kind == "permute"]
    assert {c.kind for c in over} <= {"permute", "all_reduce"}, [c.reason for c in over]
    assert {c.bytes for c in shifts} == {ROWS // mesh.axes.get("data", 1) * WIDTH * 8}, "one micro-batch's rows"
    steps = micros + rounds * STAGES - 1
    assert len(shifts) == 2 * (steps - 1), "between two steps, forward and back: stages begin with zeros"
