"""Training on real processes equals one plain model, and equals the simulation bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, plant
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.programs.compare.float64 import float64
from tpshard.programs.parts import step_programs
from tpshard.programs.step import training
from training_cases import assert_trained, global_batch, reference, setting_of, train


def steps(context: Context, *overrides: str) -> dict[str, Any]:
    """Trains a few steps in float64; the record, and the whole state at the end."""
    with float64():
        return train(context, training.build(setting_of(dict(context.mesh.axes), *overrides)))


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ({"fsdp": 2, "tp": 2}, ()),
        ({"fsdp": 3}, ()),
        pytest.param({"fsdp": 2}, ("compile=blocks",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_steps_equal_the_plain_model(pool: Any, mesh: dict[str, int], overrides: tuple[str, ...]) -> None:
    world = math.prod(mesh.values())
    for actual in pool.run(steps, *overrides, world=world, mesh={"dp": 1, "fsdp": 1, "tp": 1} | mesh):
        assert_trained(actual, reference())


def with_each_fault(context: Context) -> dict[str, dict[str, Any]]:
    """The first step of `steps` by the fault planted in its program, which is built once."""
    with float64():
        programs = training.build(setting_of(dict(context.mesh.axes)))
        faulty = {fault: replace(programs, micro=plant(programs.micro, edit)) for fault, edit in FAULTS.items()}
        return {fault: train(context, one, 1) for fault, one in faulty.items()}


def test_a_fault_is_seen(pool: Any) -> None:
    for actual in pool.run(with_each_fault, world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1}):
        assert actual.keys() == FAULTS.keys()
        for result in actual.values():
            with pytest.raises(AssertionError):
                assert_trained(result, reference(1))


def against_simulation(context: Context) -> list[bool]:
    """The executor's results on this rank, and those of a lock-step simulation of all ranks, bit for bit."""
    from tpshard.parallelism.simulate import local_arguments, run_lockstep

    setting = setting_of(dict(context.mesh.axes))
    program = step_programs.micro_program(setting)
    generator = torch.Generator().manual_seed(0)
    batch = global_batch(0)
    arguments = []
    for port in program.inputs:
        if port.kind == "batch":
            arguments.append(batch[port.name][: port.shape[0]])
        else:
            arguments.append(torch.randn(port.shape, generator=generator) * 0.1)
    feeds = [local_arguments(program, rank, arguments) for rank in range(context.world)]
    expected = run_lockstep(program, [[t.clone() for t in feed] for feed in feeds])[context.rank]
    result = Executor(program, context)(*feeds[context.rank])
    return [torch.equal(a, b) for a, b in zip(result, expected, strict=True)]


def test_processes_and_simulation_agree_bit_for_bit(pool: Any) -> None:
    for equal in pool.run(against_simulation, world=4, mesh={"dp": 1, "fsdp": 2, "tp": 2}):
        assert len(equal) > 10 and all(equal)
