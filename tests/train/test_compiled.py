"""`compile: inductor` against `compile: eager`, on two real processes."""

from __future__ import annotations

import torch
from tpshard.models import Blueprint
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.programs import training
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads

RECIPE = """
name: small
cluster: {device: cpu}
mesh: {fsdp: 2}
model: {preset: tiny, layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 24, vocab: 32, seq_len: 8}
batch: {global_sequences: 4}
"""


def both(context: Context) -> list[float]:
    """How far compiled results are from interpreted ones, relative, per output."""
    setting = Setting.of(loads(RECIPE))
    program = training.build(setting).micro
    recipe = setting.recipe.model
    blueprint = Blueprint.of(preset="tiny", overrides=recipe.overrides())
    generator = torch.Generator().manual_seed(1 + context.rank)
    inputs = []
    for port in program.inputs:
        if port.kind == "parameter":
            whole = blueprint.initial_block(port.name, (0,) * len(port.shape), port.shape, seed=0, dtype=port.dtype)
            inputs.append(whole.chunk(2)[context.rank].contiguous())
        elif port.kind == "gradient":
            inputs.append(torch.zeros(port.local))
        elif port.name == "positions":
            inputs.append(torch.arange(8).expand(port.local).contiguous())
        elif port.name == "documents":
            inputs.append(torch.zeros(port.local, dtype=torch.int64))
        else:
            inputs.append(torch.randint(0, 32, port.local, generator=generator))
    compiled = Executor(program, context, compiled=True)(*inputs)
    eager = Executor(program, context)(*inputs)
    return [float((a - b).float().norm() / b.float().norm().clamp(min=1e-9)) for a, b in zip(compiled, eager)]


def test_inductor_runs_the_same_program(pool) -> None:
    for distances in pool.run(both, world=2, mesh={"fsdp": 2}):
        assert max(distances) < 1e-5
