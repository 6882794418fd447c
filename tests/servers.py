"""Programs and runners of small servers: of a model in memory or a folder, in this process or in workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tpshard.cli.serve_worker import open_weights
from tpshard.models import Blueprint
from tpshard.models.config import ModelConfig
from tpshard.parallelism.runtime.context import alone
from tpshard.parallelism.simulate import cut, run_lockstep
from tpshard.programs.served import Served, model_to_serve
from tpshard.programs.serving import ServeSetting, ServingPrograms, build_serving
from tpshard.recipes.load import loads
from tpshard.recipes.schema import Recipe
from tpshard.serve.job import Job
from tpshard.serve.ranks import Ranks
from tpshard.serve.runner import ProgramRunner
from tpshard.serve.step import StepInput
from tpshard.serve.weights import Filler, Weights

WORKER = [sys.executable, "-m", "tpshard.cli.serve_worker"]


def recipe(*overrides: str) -> Recipe:
    return loads("name: small\ncluster: {device: cpu}\nmodel: {preset: tiny}\nserve: {mesh: {tp: 1}}\n", overrides)


def setting(config: ModelConfig, *overrides: str, dtype: str = "fp32", kind: Any = "cpu") -> ServeSetting:
    """The setting of a dense model's server; `overrides` change keys of its recipe."""
    return ServeSetting.of(recipe(*overrides), Served(Blueprint(config), dtype), kind)


def weights_of(model: torch.nn.Module) -> Weights:
    own = {name: p.detach() for name, p in model.named_parameters()}

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return own[name][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

    return Weights({name: tuple(p.shape) for name, p in own.items()}, block)


def runner_of(model: torch.nn.Module, *overrides: str, blocks: int = 64, dtype: str = "fp32") -> ProgramRunner:
    """A runner of a model in memory."""
    programs = build_serving(setting(model.config, *overrides, dtype=dtype))  # type: ignore[arg-type]
    device = next(model.parameters()).device
    return ProgramRunner(alone(device), programs, weights_of(model), blocks)


def programs_of(folder: Path, *overrides: str) -> ServingPrograms:
    overridden = recipe(f"serve.checkpoint={folder}", *overrides)
    return build_serving(ServeSetting.of(overridden, model_to_serve(overridden, "cpu"), "cpu"))


def folder_runner(folder: Path, *overrides: str, blocks: int = 16) -> ProgramRunner:
    """A runner of a folder, in this process."""
    return ProgramRunner(alone(), programs_of(folder, *overrides), open_weights(str(folder)), blocks)


def job_of(folder: Path, *overrides: str, blocks: int = 256, **more: Any) -> Job:
    return replace(Job.of(programs_of(folder, *overrides), str(folder), blocks), **more)


def ranks_of(folder: Path, *overrides: str, **more: Any) -> Ranks:
    """A runner of a folder, in worker processes."""
    return Ranks(WORKER, job_of(folder, *overrides, **more))


def prompts(rows: int = 8) -> StepInput:
    """A prompt of 5 tokens and one of 3, both from the start, in blocks 1 and 2; the rest of the rows is padding."""
    places, sequences = [*range(5), *range(3)], [0] * 5 + [1] * 3
    slots = [(s + 1) * 16 + p for s, p in zip(sequences, places)]
    whole = [np.array(x) for x in (np.arange(8) * 7 % 64, places, slots, sequences)]
    return StepInput(*whole, tables=np.array([[1], [2]]), logit_rows=np.arange(8)).pad(rows, 8)


def lockstep(programs: ServingPrograms, weights: Weights, blocks: int = 2) -> torch.Tensor:
    """The logits [8, vocab] of `prompts` from every device's program of 8 rows, in this process; all devices agree."""
    s, program = programs.setting, programs.steps[8]
    b = prompts()
    brought = {
        "tokens": b.tokens[None], "positions": b.positions[None], "slots": b.slots[None],
        "sequences": b.sequences[None], "tables": b.tables, "logit_rows": b.logit_rows,
    }  # fmt: skip
    inputs = []
    for rank in range(s.mesh.ranks):
        fill = Filler(weights, programs.arrangement, programs.shapes, s.mesh, rank, torch.device("cpu"), blocks)
        inputs.append([
            cut(torch.from_numpy(brought[p.name]), p.layout, s.mesh, rank) if p.name in brought else fill(p)
            for p in program.inputs
        ])  # fmt: skip
    with torch.no_grad():
        results = run_lockstep(program, inputs)
    for (other,) in results[1:]:
        assert torch.equal(results[0][0], other)
    return results[0][0]
