"""A run's saved programs load with the same code, reasons and results."""

from __future__ import annotations

import pytest
import torch
from tpshard.parallelism import Mesh, partition, program_file
from tpshard.parallelism.program import Program
from tpshard.programs import saved_step, training
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads

RECIPE = """
name: saved
cluster: {device: cpu}
mesh: {fsdp: 2, tp: 2}
model: {preset: tiny, layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 24, vocab: 32, seq_len: 8}
batch: {global_sequences: 8, per_device: 2}
"""


def everything(program: Program) -> tuple[object, ...]:
    """Everything that a program contains, for comparison."""
    why = {name: program.explanation_of(name) for name in program.records}
    infos = [node.meta.get("tpshard") for node in program.graph.nodes]
    same = program.mesh, program.inputs, program.outputs, program.records, program.donated, program.warnings
    return program.fingerprint, program.to_json(), infos, why, program.in_tree, program.out_tree, *same


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["fsdp.accumulate.gather=step", "fsdp.accumulate.reduce=last"],
        ["mesh={pp: 2, fsdp: 2}", "pipeline={schedule: zero_bubble}", "model.tie_embeddings=true"],
    ],
)
def test_the_programs_of_a_run_are_read_as_they_were_written(changes: list[str]) -> None:
    setting = Setting.of(loads(RECIPE, changes))
    programs = training.build(setting)
    text = saved_step.pack(programs)
    assert text is not None
    read = saved_step.unpack(text, setting)
    assert read.fingerprints == programs.fingerprints and read.storage == programs.storage
    for one, other in ((programs.micro, read.micro), (programs.update, read.update)):
        assert everything(one) == everything(other)
    assert (read.gather is None) == (programs.gather is None) and (read.reduce is None) == (programs.reduce is None)
    if programs.pipeline is not None:
        assert read.pipeline is not None and read.pipeline.table == programs.pipeline.table
        assert read.pipeline.layers == programs.pipeline.layers
    assert saved_step.pack(read) == text


def test_a_program_that_was_read_computes_the_same_bits() -> None:
    mesh = Mesh({"x": 2, "y": 2})

    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        values = torch.tensor([1.0, float("inf"), -2.0, 0.5])
        positions = torch.arange(8)
        return [
            torch.softmax(x @ w, -1)[:, ::2].to(torch.bfloat16),
            torch.minimum(w[:4, :4], values),
            positions[x.argmax(1)],
        ]

    args = torch.randn(4, 8), torch.randn(8, 8)
    program = partition(step, args, mesh, in_shardings=[("x", None), (None, "y")])
    read = program_file.load(program_file.dump(program))
    assert everything(read) == everything(program)
    for one, other in zip(program.simulate(*args), read.simulate(*args), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    "code",
    [["op", "other.mm.default"], ["op", "aten.nothing.default"], ["function", "os", "system"], ["torch", "load"]],
)
def test_a_file_names_no_code_but_operations(code: list[str]) -> None:
    values = [
        1 + 2j,
        float("nan"),
        torch.Size([2, 3]),
        slice(1, None, 2),
        torch.bfloat16,
        torch.strided,
        frozenset({"x"}),
    ]
    assert repr(program_file.load(program_file.dump(values))) == repr([(2, 3) if v == (2, 3) else v for v in values])
    with pytest.raises(ValueError, match="not a stored program"):
        program_file.load({"pool": [], "value": code})
