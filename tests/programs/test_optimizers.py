"""Every optimizer stores the state that the plan counts, trains as defined, and resumes from a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch
from tpshard.parallelism.float64 import BOUND, distance
from tpshard.parallelism.runtime.context import alone
from tpshard.plan import make
from tpshard.programs import training
from tpshard.programs.choices import Chooser
from tpshard.programs.lockstep import Lockstep
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads
from tpshard.train.spmd import SpmdEngine

torch.set_num_threads(1)
RECIPE = """
name: small
cluster: {device: cpu}
model: {preset: tiny, layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 24, vocab: 32, seq_len: 8}
batch: {global_sequences: 8}
compile: eager
"""
LION = "optimizer.name=lion"


def built(*overrides: str) -> training.TrainingPrograms:
    return training.build(Setting.of(loads(RECIPE, overrides)))


def test_lion_trains_the_same_on_every_mesh() -> None:
    one, four = (Lockstep(built(LION, f"mesh={mesh}"), 32) for mesh in ("{}", "{fsdp: 2, tp: 2}"))
    for _ in range(3):
        actual, expected = four.step(), one.step()
        assert actual.loss == pytest.approx(expected.loss, rel=BOUND)
    weights = one.weights()
    assert all(distance(tensor, weights[name]) <= BOUND for name, tensor in four.weights().items())


@pytest.mark.parametrize(
    ("told", "a_parameter"),
    [((), 8), ((LION,), 4), (("optimizer.state_dtype=bf16",), 4), ((LION, "optimizer.state_dtype=bf16"), 2)],
)
def test_what_is_kept_is_what_is_planned(told: tuple[str, ...], a_parameter: int) -> None:
    """The bytes of a parameter's state are equal in the plan, on a rank, and in the estimate of `auto` choices."""
    programs = built(*told, "mesh={}")
    report = make.report_of_training(programs)
    assert report.static_bytes()["optimizer"] == a_parameter * report.job.params
    engine = SpmdEngine(programs, alone(), lambda name, starts, sizes, **_: torch.zeros(sizes))
    kept = {name: shard.tensor for name, shard in engine.tensors().items() if name.startswith("optimizer/")}
    assert sum(tensor.nbytes for tensor in kept.values()) == a_parameter * report.job.params
    assert {name: (tuple(shape), dtype) for name, (shape, dtype) in engine.expected().items() if name in kept} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()
    }
    peak, bare = Chooser(programs.setting).peak(programs.micro), report.pricing.parts[0].memory
    held = sum(math.prod(port.local) for port in programs.micro.inputs if port.kind == "parameter")
    assert bare.at_peak["optimizer"] == a_parameter * held and peak == bare.peak_bytes
