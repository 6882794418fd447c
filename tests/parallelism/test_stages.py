"""Stages cut from a program give its results, and hand over only the residual stream."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from small_model import of_small_model
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.passes.run import run
from tpshard.parallelism.pipeline.schedules import make
from tpshard.parallelism.pipeline.stages import blocks_of, cut
from tpshard.parallelism.pipeline.stepping import ranks_of, simulate_step
from tpshard.parallelism.program import Program
from tpshard.parallelism.simulate import cut as part_of
from tpshard.parallelism.simulate import join, run_lockstep
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.parts import passes, step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

torch.set_num_threads(1)
RECIPE = of_small_model(
    """
name: small
cluster: {device: cpu}
mesh: {fsdp: FSDP, tp: TP}
batch: {global_sequences: 8, per_device: 2}
""",
    layers=4,
)
SEQUENCE = """\
sharding:
  rules: {batch: [dp, fsdp], vocab: tp, heads: tp, mlp: tp, seq_sp: tp}
  annotate: {"layers.*.residual": [batch, seq_sp, embed], embedded: [batch, seq_sp, embed]}
"""


@cache
def whole(fsdp: int, tp: int, stages: int, sequence: bool = False, *overrides: str) -> Program:
    text = RECIPE.replace("FSDP", str(fsdp)).replace("TP", str(tp)) + SEQUENCE * sequence
    setting = Setting.of(loads(text, overrides))
    setting = replace(setting, mesh=Mesh({"pp": stages, "fsdp": fsdp, "tp": tp}))
    return run([passes.remat(setting, True)], step_programs.micro_program(setting))


def arguments(program: Program, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    result = []
    for port in program.inputs:
        if port.kind == "batch":
            result.append({"positions": torch.arange(8).expand(port.shape), "documents": torch.zeros(port.shape).long()}
                        .get(port.name, torch.randint(0, 32, port.shape, generator=random)))  # fmt: skip
        else:
            scale = 0.2 if port.kind == "parameter" else 0.0
            result.append(scale * torch.randn(port.shape, generator=random, dtype=torch.float64))
    return result


CASES = [
    ("gpipe", 2, 1, 1, 1, False, []), ("1f1b", 2, 1, 2, 1, False, []), ("1f1b", 4, 1, 1, 1, False, []),
    ("1f1b", 2, 1, 1, 2, True, []), ("interleaved_1f1b", 2, 2, 1, 1, False, []),
    ("circular", 2, 2, 1, 1, False, ["model.tie_embeddings=true"]),
    ("zero_bubble", 2, 1, 2, 2, True, []), ("zero_bubble", 4, 1, 1, 1, False, ["model.tie_embeddings=true"]),
    ("1f1b", 2, 1, 1, 2, False, ["remat=full"]), ("zero_bubble", 2, 1, 1, 1, False, ["remat=none"]),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "devices", "rounds", "fsdp", "tp", "sequence", "overrides"), CASES)
def test_stages_sum_the_gradients_of_the_whole_program(
    schedule: str, devices: int, rounds: int, fsdp: int, tp: int, sequence: bool, overrides: list[str]
) -> None:
    program = whole(fsdp, tp, devices, sequence, *overrides)
    mesh, axis, micros = program.mesh, program.mesh.axis("pp"), devices
    table = make(schedule, devices, micros, rounds)
    stages = cut(program, axis, [4 // table.stages] * table.stages, split_backward=table.splits_backward)
    inputs = [arguments(program, 0)[:-4] + arguments(program, m)[-4:] for m in range(micros)]
    ports = {port.name: (port, i) for i, port in enumerate(program.inputs)}

    def parts(name: str, device: int, micro: int = 0) -> list[torch.Tensor]:
        port, i = ports[name]
        return [part_of(inputs[micro][i], port.layout, mesh, rank) for rank in ranks_of(mesh, axis, device)]

    values, batches = [], []
    for device in range(devices):
        keys = {port.key for stage in table.stages_of(device) for p in stages[stage].programs for port in p.inputs}
        values.append({key: parts(key[1], device) for key in keys if key[0] in ("parameter", "gradient")})
        read = [key for key in keys if key[0] == "batch"]
        batches.append([{key: parts(key[1], device, m) for key in read} for m in range(micros)])
    with float64():
        sums, scalars = simulate_step(table, stages, axis, values, batches)
        running, losses = inputs[0], []
        for m in range(micros):
            feeds = [[part_of(t, p.layout, mesh, rank) for t, p in zip(running[:-4] + inputs[m][-4:], program.inputs)]
                     for rank in ranks_of(mesh, axis, 0)]  # fmt: skip
            outs = run_lockstep(program, feeds, ranks=ranks_of(mesh, axis, 0))
            whole_of = [on_all([out[i] for out in outs], mesh.ranks) for i in range(len(outs[0]))]
            joined = [join(port, mesh, parts) for port, parts in zip(program.outputs, whole_of)]
            count = len(joined) - 2
            losses.append(joined[0])
            running = [*running[:count], *joined[2:], *running[2 * count :]]
    for m in range(micros):
        assert distance(scalars[m]["loss"][0], losses[m]) <= BOUND
    for name, (port, i) in ports.items():
        if port.kind == "gradient":
            blocks = [own[port.key] for own in sums if port.key in own]
            summed = [sum(block[r] for block in blocks[1:]) + blocks[0][r] for r in range(len(blocks[0]))]
            assert distance(join(port, mesh, on_all(summed, mesh.ranks)), running[i]) <= BOUND, name


def on_all(parts: list[torch.Tensor], world: int) -> list[torch.Tensor]:
    """The parts of one device's ranks as those of all: the layout does not know of the pipeline's axis."""
    return parts * (world // len(parts))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tied", ["false", "true"])
def test_the_residual_stream_and_its_gradient_alone_are_sent(split: bool, tied: str) -> None:
    program = whole(2, 2, 4, False, f"model.tie_embeddings={tied}")
    stages = cut(program, program.mesh.axis("pp"), [1, 1, 1, 1], split_backward=split)
    for i, stage in enumerate(stages):
        moved = [[c for c in p.collectives if c.kind in ("send", "recv")] for p in stage.programs]
        assert all(c.axes == ("pp",) and c.bytes == 2 * 8 * 16 * 4 for cs in moved for c in cs)
        kinds = [[c.kind for c in cs] for cs in moved]
        ahead, back = ["recv"] * (i > 0) + ["send"] * (i < 3), ["recv"] * (i < 3) + ["send"] * (i > 0)
        assert kinds == [ahead, back, *([[]] if split else [])]
        assert all(f"stage {i + 1}" in c.reason or f"stage {i - 1}" in c.reason for cs in moved for c in cs)


def test_a_tied_table_lies_on_the_first_and_the_last_stage() -> None:
    program = whole(1, 1, 4, False, "model.tie_embeddings=true")
    stages = cut(program, program.mesh.axis("pp"), [1, 1, 1, 1])
    assert [("tok_embed.weight" in stage.parameters) for stage in stages] == [True, False, False, True]
    assert blocks_of(program) == [f"layers.{i}" for i in range(4)]
    assert [stage.blocks for stage in stages] == [(f"layers.{i}",) for i in range(4)]


def test_layers_that_are_not_there_cannot_be_cut() -> None:
    program = whole(1, 1, 4, False)
    with pytest.raises(ValueError, match=r"\[2, 3\] are 5 layers, but the program has 4"):
        cut(program, program.mesh.axis("pp"), [2, 3])
