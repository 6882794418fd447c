"""Programs and runners of small servers: of a model in memory or a folder, in this process or in workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.runtime.context import alone
from tpshard.parallelism.simulate import cut, join, run_lockstep
from tpshard.programs.server.adapter_slots import open_adapters, slot_values
from tpshard.programs.server.sampling_programs import Choice
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import Served, model_to_serve
from tpshard.programs.server.serving import BLOCK_SIZE, ServingPrograms, build_serving
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.job import Job
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.ranks import Ranks
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.sampling import Recalled, pick
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Filler, Weights

WORKER = [sys.executable, "-m", "tpshard.cli.shared.serve_worker"]


def recipe(*overrides: str) -> Recipe:
    return loads("name: small\ncluster: {device: cpu}\nmodel: {preset: tiny}\nserve: {mesh: {tp: 1}}\n", overrides)


def setting(config: ModelConfig, *overrides: str, dtype: str = "fp32", kind: Any = "cpu") -> ServeSetting:
    """The setting of a dense model's server; `overrides` change keys of its recipe."""
    return ServeSetting.of(recipe(*overrides), Served(FamilyModel(config), dtype), kind)


def weights_of(model: torch.nn.Module) -> Weights:
    own = {name: p.detach() for name, p in model.named_parameters()}

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return own[name][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

    return Weights({name: tuple(p.shape) for name, p in own.items()}, block)


def runner_of(model: torch.nn.Module, *overrides: str, blocks: int = 64, dtype: str = "fp32") -> ProgramRunner:
    """A runner of a model in memory, on the model's device."""
    device = next(model.parameters()).device
    kind = "gpu" if device.type == "cuda" else "cpu"
    programs = build_serving(setting(model.config, *overrides, dtype=dtype, kind=kind))  # type: ignore[arg-type]
    return ProgramRunner(alone(device), programs, weights_of(model), blocks)


def programs_of(folder: Path, *overrides: str, kind: Any = "cpu") -> ServingPrograms:
    overridden = recipe(f"serve.checkpoint={folder}", *overrides)
    return build_serving(ServeSetting.of(overridden, model_to_serve(overridden, kind), kind))


def folder_runner(folder: Path, *overrides: str, blocks: int = 16, device: str = "cpu") -> ProgramRunner:
    """A runner of a folder, in this process."""
    weights = stored_weights(open_source(str(folder), modules=True))
    kind = "cpu" if device == "cpu" else "gpu"
    return ProgramRunner(alone(torch.device(device)), programs_of(folder, *overrides, kind=kind), weights, blocks)


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


def sequences_for(chunks: tuple[int, ...] | None = None) -> list[np.ndarray]:
    """The tokens of two prompts: those of `prompts`, or, with recurrent layers, enough for several chunks."""
    lengths = (5, 3) if chunks is None else (11, 6)
    return np.split(np.arange(sum(lengths)) * 7 % 64, lengths[:1])


class Lockstep:
    """A runner of every device's programs in this process, which checks that all devices agree."""

    block_size = BLOCK_SIZE

    def __init__(self, programs: ServingPrograms, weights: Weights, blocks: int = 2) -> None:
        s, self.programs, self.blocks = programs.setting, programs, blocks
        self.vocab, self.max_seq = programs.vocab, s.max_seq
        self.max_rows, self.max_logit_rows = s.most, s.logit_rows(s.most)
        self.chunks = s.chunks if s.states else None
        self.slots = 0 if s.slots is None else s.slots.count
        self._recalled = Recalled(0, self.vocab, self.max_logit_rows, torch.device("cpu"))
        self._fill = [
            Filler(
                weights,
                programs.arrangement,
                programs.shapes,
                s.mesh,
                rank,
                torch.device("cpu"),
                blocks,
                programs.slotted,
            )
            for rank in range(s.mesh.ranks)
        ]

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        return pick(self.logits(batch), picks, self._recalled, self._choose)

    def _choose(self, choice: Choice, *tensors: torch.Tensor, **static: Any) -> list[torch.Tensor]:
        if not self.programs.any.outputs[0].layout.axes:
            return choice(*tensors, **static)
        return self.programs.chooses(len(tensors[0]), choice, **static).simulate(*tensors)

    def logits(self, batch: StepInput) -> torch.Tensor:
        s = self.programs.setting
        size = Size(len(batch.tokens), True) if batch.is_chunk else self.programs.fitting(len(batch.tokens))
        program = self.programs.by_size[size]
        brought = batch.pad(size.rows, s.logit_rows(size.rows)).arguments(size.chunk)
        inputs = [
            [cut(torch.from_numpy(brought[p.name]), p.layout, s.mesh, rank) if p.name in brought else fill(p)
             for p in program.inputs]
            for rank, fill in enumerate(self._fill)
        ]  # fmt: skip
        with torch.no_grad():
            results = run_lockstep(program, inputs)
        port, parts = program.outputs[0], [result[0] for result in results]
        for other in () if port.layout.axes else parts[1:]:
            assert torch.equal(parts[0], other)
        return join(port, s.mesh, parts)[: len(batch.logit_rows)]

    def adapt(self, slot: int, folder: str) -> None:
        values = slot_values(open_adapters(Path(folder), self.programs.setting.served.spec))
        for port in self.programs.any.inputs:
            for fill in self._fill if port.name in self.programs.slotted else ():
                fill.put(port, slot, values.get(port.name))

    def check(self) -> None: ...

    def close(self) -> None:
        self._fill.clear()


Piece = tuple[int, int, int]
"""A sequence's number, and the first and the number of its tokens that a step computes."""


def step_of(sequences: Sequence[np.ndarray], pieces: Sequence[Piece], recurrent: bool) -> StepInput:
    """A step with logits for all of its rows. Sequence i has the cache's block i + 1, and the state i + 1."""
    places = [range(start, start + count) for _, start, count in pieces]
    tokens = [sequences[s][start : start + count] for s, start, count in pieces]
    slots = [(s + 1) * BLOCK_SIZE + p for (s, _, _), part in zip(pieces, places) for p in part]
    owners = [i for i, part in enumerate(places) for _ in part]
    own = np.array([s + 1 for s, _, _ in pieces])
    rows = [np.array([p for part in places for p in part]), np.array(slots), np.array(owners)]
    states = own if recurrent else own[:0]
    return StepInput(np.concatenate(tokens), *rows, own[:, None], np.arange(len(owners)), states)


def pieces_of(lengths: Sequence[int], chunks: tuple[int, ...] | None) -> list[list[Piece]]:
    """Steps that compute sequences of these lengths: all at once, or as recurrent layers need it (`Runner.chunks`)."""
    if chunks is None:
        return [[(i, 0, length) for i, length in enumerate(lengths)]]
    steps, done = [], [0] * len(lengths)
    for size in reversed(chunks):
        for i, length in enumerate(lengths):
            while length - done[i] >= size:
                steps.append([(i, done[i], size)])
                done[i] += size
    while any(done[i] < length for i, length in enumerate(lengths)):
        steps.append([(i, done[i], 1) for i, length in enumerate(lengths) if done[i] < length])
        done = [min(before + 1, length) for before, length in zip(done, lengths)]
    return steps


def lockstep(programs: ServingPrograms, weights: Weights, blocks: int = 2) -> torch.Tensor:
    """The logits [tokens, vocab] of the prompts of `sequences_for`, one after the other, from every device."""
    runner = Lockstep(programs, weights, blocks)
    sequences = sequences_for(runner.chunks)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for pieces in pieces_of([len(tokens) for tokens in sequences], runner.chunks):
        rows = iter(
            runner.logits(step_of(sequences, pieces, runner.chunks is not None)).split([n for _, _, n in pieces])
        )
        for (i, _, _), part in zip(pieces, rows):
            logits[i].append(part)
    return torch.cat([part for parts in logits for part in parts])
