"""Every optimizer stores the state that the plan counts, trains as defined, and resumes from a checkpoint."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from small_model import of_small_model
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.runtime.context import alone
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.simulate import run_lockstep
from tpshard.plan import planner
from tpshard.programs.compare.float64 import BOUND, distance
from tpshard.programs.compare.lockstep import Lockstep
from tpshard.programs.parts.pass_choices import Chooser
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads
from tpshard.train.run.training_engine import TrainingEngine

torch.set_num_threads(1)
RECIPE = of_small_model("""
name: small
cluster: {device: cpu}
batch: {global_sequences: 8}
compile: eager
""")
LION = "optimizer.name=lion"
MUON = "optimizer.name=muon"


def build(*overrides: str) -> TrainingPrograms:
    return training.build(Setting.of(loads(RECIPE, overrides)))


@pytest.mark.parametrize("optimizer", [LION, MUON])
def test_an_optimizer_trains_the_same_on_every_mesh(optimizer: str) -> None:
    one, four = (Lockstep(build(optimizer, f"mesh={mesh}"), 32) for mesh in ("{}", "{fsdp: 2, tp: 2}"))
    for _ in range(3):
        actual, expected = four.step(), one.step()
        assert actual.loss == pytest.approx(expected.loss, rel=BOUND)
    weights = one.weights()
    assert all(distance(tensor, weights[name]) <= BOUND for name, tensor in four.weights().items())


def test_muon_exchanges_matrices_once_in_each_direction() -> None:
    """Those of one shape and layout together: wq; wo; wk and wv; gate and up; down. None is computed twice."""
    programs = build(MUON, "model.layers=4", "mesh={fsdp: 2, tp: 2}")
    exchanges = [(c.kind, c.of) for c in programs.update.collectives if c.bytes > 8]
    assert exchanges == [("all_to_all", "optimizer")] * 10, exchanges
    assert not programs.update.warnings


@pytest.mark.parametrize(
    ("overrides", "a_parameter", "a_matrix"),
    [
        ((), 8, 8), ((LION,), 4, 4), (("optimizer.state_dtype=bf16",), 4, 4),
        ((LION, "optimizer.state_dtype=bf16"), 2, 2), ((MUON,), 8, 4),
    ],
)  # fmt: skip
def test_what_is_state_is_what_is_planned(overrides: tuple[str, ...], a_parameter: int, a_matrix: int) -> None:
    """The bytes of the moments are equal in the plan, on a rank, and in the estimate of `auto` choices."""
    programs = build(*overrides, "mesh={}")
    report = planner.planned_training(programs).report
    sizes = {port.name: math.prod(port.local) for port in programs.micro.inputs if port.kind == "parameter"}
    in_layers = {name for name in sizes if "layers." in name and "norm" not in name}
    held = sum(size * (a_matrix if name in in_layers else a_parameter) for name, size in sizes.items())
    assert report.pricing.static_bytes["optimizer"] == held
    engine = TrainingEngine(programs, alone(), lambda name, starts, sizes, **_: torch.zeros(sizes))
    state = {name: shard.tensor for name, shard in engine.tensors().items() if name.startswith("optimizer/")}
    assert sum(tensor.nbytes for tensor in state.values()) == held
    assert {
        name: (tuple(shape), dtype) for name, (shape, dtype) in engine.stored_shapes().items() if name in state
    } == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    peak, bare = Chooser(programs.setting).peak(programs.micro), report.pricing.parts[0]
    assert bare.at_peak["optimizer"] == held and peak == bare.peak_bytes


def update_inputs(programs: TrainingPrograms) -> list[torch.Tensor]:
    """Tensors for an update on one device."""
    random = torch.Generator().manual_seed(0)
    return [(torch.rand(port.local, generator=random) + 1).to(port.dtype) for port in programs.update.inputs]


@pytest.mark.parametrize("overrides", [(), (LION,), ("optimizer.state_dtype=bf16",)])
def test_an_update_is_an_op_per_parameter_that_writes_over_old_values(overrides: tuple[str, ...]) -> None:
    programs = build(*overrides, "mesh={}")
    update, inputs = programs.update, update_inputs(programs)
    (expected,) = run_lockstep(update, [[tensor.clone() for tensor in inputs]])
    executor = Executor(update, alone())
    results = executor(*inputs)
    assert all(map(torch.equal, results, expected))
    assert all(results[output] is inputs[source] for output, source in update.donated.items())
    steps = [node for node in executor.module.graph.nodes if getattr(node.target, "namespace", "") == "tpshard"]
    assert Counter(node.target._schema.name.endswith("step_") for node in steps) == dict.fromkeys(
        (True, False), len(programs.names)
    )


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), (LION,)])
def test_a_compiled_update_equals_the_interpreted_one(overrides: tuple[str, ...]) -> None:
    programs = build(*overrides, "mesh={}")
    inputs = update_inputs(programs)
    compiled, interpreted = (
        Executor(programs.update, alone(), compiled=how)(*[tensor.clone() for tensor in inputs])
        for how in ("all", "none")
    )
    for one, other in zip(compiled, interpreted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_groups_are_those_of_torch() -> None:
    """A matrix with another rate, and a vector with a decay, move as torch's groups move them; others as before."""
    groups = "optimizer.groups=[{match: layers.*.mlp, lr: 0.002}, {match: [norm], weight_decay: 0.5}]"
    run = Lockstep(build("mesh={fsdp: 2}", "optimizer.lr=0.01", groups), 32)
    before = run.weights()
    stepped = run.step(0.01)
    for name, value in run.weights().items():
        rate = 0.002 if ".mlp." in name else 0.01
        decay = 0.5 if name == "norm.weight" else 0.1 if value.dim() > 1 else 0.0
        own = torch.nn.Parameter(before[name])
        optimizer = torch.optim.AdamW([own], lr=rate, betas=(0.9, 0.95), weight_decay=decay)
        share = min(1.0, 1.0 / stepped.grad_norm) / 64
        own.grad = stepped.gradients[name] * share
        optimizer.step()
        assert torch.allclose(value, own.detach(), rtol=1e-4, atol=1e-5), name


def test_a_group_of_nothing_is_refused() -> None:
    with pytest.raises(Mistakes, match=r"`layers\.\*\.mlq` matches no parameter that is trained"):
        build("optimizer.groups=[{match: layers.*.mlq, lr: 0.1}]")
