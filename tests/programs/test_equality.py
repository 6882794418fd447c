"""`compare` tells rounding from a fault, and `first_difference` names the operation with the fault."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import pytest
import torch
from planted_faults import FAULTS, plant
from torch import Tensor, nn
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.families.layers import Linear
from tpshard.parallelism.partitioning import partitioner
from tpshard.parallelism.program import INFO, info
from tpshard.programs.compare.equality import compare, first_difference
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads
from training_cases import setting_of

ONE_BATCH = "batch.per_device={}"


CASES = [
    ({"fsdp": 2}, ()), ({"tp": 2}, ("remat=full",)), ({"fsdp": 2, "tp": 2}, ("batch.per_device=3", "fsdp.bucket=none")),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "overrides"), CASES)
def test_meshes_and_policies_differ_by_rounding_alone(mesh: dict[str, int], overrides: tuple[str, ...]) -> None:
    compared = compare(setting_of(mesh, *overrides), setting_of({}), steps=2)
    assert compared.equal and compared.largest.apart > 0
    assert len(compared.losses) == 2
    assert {"loss", "gradient norm", "gradient of layers.0.attention.wq.weight"} <= {d.name for d in compared.distances}


def test_a_pipeline_is_compared_with_the_plain_model() -> None:
    """Also with unequal stages, tied embeddings, and gradients reduced once per step."""
    overrides = ("model.layers=3", "model.tie_embeddings=true", "fsdp.accumulate={gather: step, reduce: last}")
    staged = setting_of({"pp": 2, "fsdp": 2}, "pipeline={split: [1, 2]}", *overrides)
    compared = compare(staged, setting_of({}, *overrides[:2]), steps=2)
    assert compared.equal and compared.largest.apart > 0


def test_padding_of_uneven_shards_adds_nothing_to_the_gradients_norm() -> None:
    """The vocabulary's gradient has numbers in its padding, of logits that no token has."""
    padded = setting_of({"tp": 3}, "sharding.on_uneven=pad")
    compared = compare(padded, setting_of({}), steps=2)
    assert compared.equal and compared.largest.apart > 0


def test_a_fault_in_an_operation_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault makes the gate of the second layer a thousandth too large."""
    plain = partitioner._Partitioner._emit_local

    def faulty(self: Any, local: Any) -> Any:
        reference_run = plain(self, local)
        if local.op.module == "layers.1.mlp.gate" and local.op.phase == "forward" and self.mesh.axes.get("tp", 1) > 1:
            node = self.emitter.graph.call_function(torch.ops.aten.mul.Tensor, (reference_run[0], 1.001))
            node.meta[INFO] = info(reference_run[0])
            return [node, *reference_run[1:]]
        return reference_run

    monkeypatch.setattr(partitioner._Partitioner, "_emit_local", faulty)
    one, other = setting_of({"tp": 2}, ONE_BATCH.format(12)), setting_of({}, ONE_BATCH.format(12))
    assert not compare(one, other).equal
    first = first_difference(one, other)
    assert first is not None
    assert (first.module, first.phase) == ("layers.1.mlp.gate", "forward")
    assert first.apart == pytest.approx(1e-3, rel=1e-6)
    assert "tp" in first.shardings[0] and "mlp: tp" in first.shardings[0]


def test_a_fault_of_a_pass_is_in_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = training.apply

    def faulty(setting: Any, program: Any, *how: Any) -> Any:
        reference_run = plain(setting, program, *how)
        named = {port.name for port in program.inputs if port.kind == "parameter"}
        fault = FAULTS["a norm's gradient halved"]
        return (
            plant(reference_run, fault)
            if fault.parameter in named and setting.mesh.ranks > 1 and len(reference_run.donated)
            else reference_run
        )

    monkeypatch.setattr(training, "apply", faulty)
    one, other = setting_of({"fsdp": 2}, ONE_BATCH.format(6)), setting_of({}, ONE_BATCH.format(12))
    compared = compare(one, other)
    assert compared.largest.name == "gradient of layers.1.mlp_norm.weight"
    assert first_difference(one, other) is None


def test_different_trainings_are_refused() -> None:
    for change, output in (("model.mlp=48", "different models"), ("batch.global_sequences=24", "different batches")):
        with pytest.raises(Mistakes) as refused:
            compare(setting_of({}), setting_of({}, change))
        assert refused.value.exit == Exit.USAGE and output in refused.value.diagnostics[0].message


class Shifted(nn.Module):
    """Classes of frames; the loss does not depend on `shift`, so that its gradient is zero but for rounding."""

    inputs = ("frames",)

    def __init__(self) -> None:
        super().__init__()
        self.output = Linear(32, 16, dims=("mlp", "feature"))
        self.shift = nn.Parameter(torch.zeros(1))
        self.dims = {"shift": ("",)}

    def forward(self, frames: Tensor) -> Tensor:
        return self.output(frames) + self.shift


FRAMES = """
model: {module: "shifted:Shifted", seq_len: 8, dtype: fp32}
task: frames
cluster: {device: cpu}
batch: {global_sequences: 4}
compile: eager
"""


def test_a_task_without_text_is_compared_on_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_from_spec(ModuleSpec("shifted", None))
    vars(module)["Shifted"] = Shifted
    monkeypatch.setitem(sys.modules, "shifted", module)
    one, other = (Setting.of(loads(FRAMES, [f"mesh={mesh}"])) for mesh in ("{tp: 2}", "{tp: 1}"))
    compared = compare(one, other)
    assert compared.equal and compared.largest.apart > 0
    assert any(d.name == "gradient of shift" for d in compared.distances)
    assert first_difference(one, other) is None
