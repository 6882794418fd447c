"""A simulated optimizer step has the same result on every mesh, however often parameters are gathered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, Fault, plant
from small_model import of_small_model
from tpshard.models import build, to_hf
from tpshard.models.families.config import ModelConfig
from tpshard.parallelism.program import Port
from tpshard.parallelism.simulate import block
from tpshard.programs.compare.float64 import BOUND, distance
from tpshard.programs.compare.lockstep import Lockstep, Values
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads

torch.set_num_threads(1)
VOCAB, SEQ = 32, 8
RECIPE = of_small_model("""
name: small
cluster: {device: cpu}
mesh: MESH
batch: {global_sequences: 12}
""")
SEQUENCE = """\
sharding:
  rules: {batch: [dp, fsdp], vocab: tp, heads: tp, mlp: tp, seq_sp: tp}
  annotate: {"layers.*.residual": [batch, seq_sp, embed], embedded: [batch, seq_sp, embed]}
"""
MESHES = {
    "fsdp2": "{fsdp: 2}", "fsdp3": "{fsdp: 3}", "tp2": "{tp: 2}", "fsdp2 x tp2": "{fsdp: 2, tp: 2}",
    "dp2 x fsdp2": "{dp: 2, fsdp: 2}", "dp2 x fsdp2 x tp2": "{dp: 2, fsdp: 2, tp: 2}",
}  # fmt: skip


@cache
def built(mesh: str, overrides: tuple[str, ...] = (), sequence: bool = False, recipe: str = RECIPE) -> TrainingPrograms:
    return training.build(Setting.of(loads(recipe.replace("MESH", mesh) + SEQUENCE * sequence, overrides)))


class Simulated(Lockstep):
    """A simulated run of the recipe, with a planted fault if one is given."""

    def __init__(
        self, mesh: str, *overrides: str, sequence: bool = False, fault: Fault | None = None, recipe: str = RECIPE
    ):
        programs = built(mesh, overrides, sequence, recipe)
        super().__init__(programs if fault is None else replace(programs, micro=plant(programs.micro, fault)), VOCAB)

    def join(self, ports: Sequence[Port], values: Values) -> dict[str, torch.Tensor]:
        """Joins the ranks' parts; asserts that equal parts have equal bits."""
        joined = super().join(ports, values)
        for name, port in zip(joined, ports, strict=True):
            for rank, part in enumerate(values[port.key]):
                blocks = block(port.shape, port.layout, self.mesh, rank)
                held = part[tuple(slice(size) for _, size in blocks)]
                whole = joined[name][tuple(slice(start, start + size) for start, size in blocks)]
                assert torch.equal(held, whole), f"replicas of {name} differ"
        return joined

    def gradients(self) -> dict[str, torch.Tensor]:
        """Summed gradients of the next step's micro-batches, whole."""
        return self.join([port for port in self.update.inputs if port.kind == "gradient"], self.sums()[0])


def assert_close(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert distance(actual[name], tensor) <= BOUND, name


@dataclass(frozen=True)
class Trained:
    """The results of training: the first step's gradients, and losses, norms and weights of five AdamW steps."""

    gradients: dict[str, torch.Tensor]
    record: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]

    def assert_equals(self, expected: Trained) -> None:
        assert_close(self.gradients, expected.gradients)
        for result, reference in zip(self.record, expected.record, strict=True):
            assert result == (pytest.approx(reference[0], rel=BOUND), pytest.approx(reference[1], rel=BOUND))
        assert_close(self.weights, expected.weights)


def train(*arguments: Any, **options: Any) -> Trained:
    run = Simulated(*arguments, **options)
    steps = [run.step(1e-2) for _ in range(STEPS)]
    return Trained(steps[0].gradients, [(step.loss, step.grad_norm) for step in steps], run.weights())


@pytest.fixture(scope="module")
def alone() -> Trained:
    return train("{}")


STEPS = 5
CASES = [(name, [], False) for name in MESHES] + [
    ("fsdp2 x tp2", [], True), ("fsdp2 x tp2", ["batch.per_device=2"], False),
    ("dp2 x fsdp2", ["fsdp.axis=[dp, fsdp]"], False),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "overrides", "sequence"), CASES)
def test_steps_are_those_of_one_device(mesh: str, overrides: list[str], sequence: bool, alone: Trained) -> None:
    train(MESHES[mesh], *overrides, sequence=sequence).assert_equals(alone)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mesh", ["fsdp2", "dp2 x fsdp2", "fsdp2 x tp2"])
def test_a_fault_is_seen(mesh: str, fault: str, alone: Trained) -> None:
    gradients = Simulated(MESHES[mesh], fault=FAULTS[fault]).gradients
    with pytest.raises(AssertionError):
        assert_close(gradients(), alone.gradients)


# ---- other families ------------------------------------------------------------------------------------------------
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"window": 3}, "qwen2": {"window": 5, "full_layers": (0,), "tie_embeddings": True}, "qwen3": {},
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe that trains a small model of a Hugging Face folder."""
    small = loads(RECIPE.replace("MESH", "{}")).model.overrides() | FAMILIES[request.param]
    config = ModelConfig(request.param, **small, max_seq=SEQ, seq_len=SEQ, dtype="fp32")
    to_hf(build(config, device="cpu"), place := tmp_path_factory.mktemp("families") / request.param)
    model = f"model: {{hf: {str(place)!r}, seq_len: {SEQ}, dtype: fp32}}\n"
    return re.sub(r"model:.*\n", lambda _: model, RECIPE)


@pytest.mark.parametrize("mesh", ["tp2", "fsdp2 x tp2", "dp2 x fsdp2 x tp2"])
def test_gradients_of_a_folders_model_are_those_of_one_device(folder: str, mesh: str) -> None:
    whole = Simulated("{}", recipe=folder).gradients()
    assert_close(Simulated(MESHES[mesh], recipe=folder).gradients(), whole)


# ---- experts -------------------------------------------------------------------------------------------------------
EXPERTS = (
    "model: {preset: tiny-moe, layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 8, vocab: 32, seq_len: 8"
)
MIXTURES = {
    "dropless": "experts: 4, top_k: 2",
    "dropping": "experts: 8, top_k: 3, capacity: 1.0, shared_experts: 0",
    "loss": "experts: 4, top_k: 1, capacity: 2.0, balance: loss, balance_rate: 0.1, routing: softmax",
}
EXPERT_MESHES = {
    "ep2": ("{ep: 2}", []), "dp2 x ep2": ("{dp: 2, ep: 2}", []), "fsdp2 x ep2": ("{fsdp: 2, ep: 2}", []),
    "ep2 x tp2": ("{ep: 2, tp: 2}", []), "experts over fsdp2": ("{fsdp: 2}", ["sharding.rules.expert=fsdp"]),
    "experts over fsdp2 x tp2": ("{fsdp: 2, tp: 2}", ["sharding.rules.expert=[fsdp, tp]"]),
}  # fmt: skip


def with_experts(mixture: str) -> str:
    return re.sub(r"model:.*\n", lambda _: f"{EXPERTS}, {MIXTURES[mixture]}}}\n", RECIPE)


QUICK = {
    ("dropless", "fsdp2 x ep2"), ("dropless", "experts over fsdp2 x tp2"), ("dropping", "ep2"),
    ("dropping", "ep2 x tp2"), ("loss", "experts over fsdp2"), ("loss", "dp2 x ep2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mixture", "mesh"),
    [
        pytest.param(mixture, mesh, marks=() if (mixture, mesh) in QUICK else pytest.mark.slow)
        for mixture in MIXTURES
        for mesh in EXPERT_MESHES
    ],
)
def test_experts_train_as_on_one_device(mixture: str, mesh: str) -> None:
    sizes, overrides = EXPERT_MESHES[mesh]
    train(sizes, *overrides, recipe=with_experts(mixture)).assert_equals(alone_with(mixture))


def test_what_experts_count_is_the_same_on_every_device_and_mesh() -> None:
    actual = []
    for mesh in ("{}", "{dp: 2, ep: 2}"):
        run = Simulated(mesh, recipe=with_experts("dropping"))
        run.sums()
        assert all(torch.equal(some[0], other) for some in run.counted for other in some)
        actual.append(torch.stack([some[0] for some in run.counted]).sum(0))
    assert torch.equal(*actual)
    tokens = run.setting.batch.global_sequences * SEQ
    sizes = run.programs.counted
    parts = dict(zip(sizes, actual[0].split(list(sizes.values()))))
    assert list(sizes) == [f"layers.{n}.mlp.{label}" for n in range(2) for label in ("load", "dropped")]
    for n in range(2):
        assert parts[f"layers.{n}.mlp.load"].sum() == 3 * tokens
        # an expert has 3 slots for a sequence of 8 tokens: what goes beyond them is dropped
        assert 0 < parts[f"layers.{n}.mlp.dropped"] < 3 * tokens


@cache
def alone_with(mixture: str) -> Trained:
    return train("{}", recipe=with_experts(mixture))


# ---- accumulation --------------------------------------------------------------------------------------------------
def accumulating(gather: str, reduce: str, per_device: int = 1) -> Simulated:
    overrides = [f"fsdp.accumulate={{gather: {gather}, reduce: {reduce}}}", f"batch.per_device={per_device}"]
    return Simulated(MESHES["dp2 x fsdp2"], *overrides)


def sent_bytes(run: Simulated) -> Counter[tuple[str, str]]:
    """Parameter and gradient collectives of a whole step."""
    result, times = run.programs, run.setting.batch.micro_batches
    counted: Counter[tuple[str, str]] = Counter()
    for program, n in ((result.gather, 1), (result.micro, times), (result.reduce, 1)):
        for comm in program.collectives if program is not None else ():
            if comm.of in ("parameter", "gradient"):
                counted[comm.kind, comm.of] += n * comm.members
    return counted


@pytest.mark.parametrize(("gather", "reduce"), [("step", "each"), ("microbatch", "last"), ("step", "last")])
def test_sums_are_the_same_however_often_it_is_sent(gather: str, reduce: str) -> None:
    plain, other = accumulating("microbatch", "each"), accumulating(gather, reduce)
    assert_close(other.gradients(), plain.gradients())


def test_less_is_sent() -> None:
    plain, least = accumulating("microbatch", "each"), accumulating("step", "last")
    count, times = len(plain.programs.names), plain.setting.batch.micro_batches
    assert times == 3
    # the table's gradient needs no gathered table, and the norm and the head are gathered already
    assert sent_bytes(plain) == {
        ("all_gather", "parameter"): times * (2 * count - 3), ("reduce_scatter", "gradient"): times * count,
        ("all_reduce", "gradient"): times * count,
    }  # fmt: skip
    assert sent_bytes(least) == {
        ("all_gather", "parameter"): count, ("reduce_scatter", "gradient"): count, ("all_reduce", "gradient"): count
    }  # fmt: skip


def test_one_micro_batch_needs_neither() -> None:
    actual = accumulating("step", "last", per_device=3).programs
    assert actual.gather is None and actual.reduce is None
