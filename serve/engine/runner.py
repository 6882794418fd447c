"""One rank of a server: runs its programs on its shards of the weights and of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tpshard.parallelism.program import Port
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.simulate import block, cut
from tpshard.programs.server.adapter_slots import open_adapters, slot_values
from tpshard.programs.server.captured_steps import MOST_ROWS, can_capture
from tpshard.programs.server.sampling_programs import Choice
from tpshard.programs.server.serve_setting import Size
from tpshard.programs.server.serving import BLOCK_SIZE, STEP, ServingPrograms
from tpshard.programs.server.token_choice import drawn, likeliest, nucleus
from tpshard.serve.engine.cuda_graphs import Captured
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.sampling import Choosing, Recalled, alone, brought, pick
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Filler, Weights

_ALIGNED = 32
"""Numbers of int64 from whose multiples on kernels may read an input: 256 bytes, as of a tensor of its own."""


class ChoosingPrograms:
    """The `Choosing` of devices that each have a part of the vocabulary, and of a GPU, which replays it: by programs,
    which are built at first use."""

    def __init__(self, programs: ServingPrograms, context: Context) -> None:
        self._programs, self._context = programs, context
        self._pool = torch.cuda.graph_pool_handle() if context.device.type == "cuda" else None
        self._run: dict[tuple[Any, ...], Callable[..., list[Tensor]]] = {}

    def __call__(self, choice: Choice, *tensors: Tensor, **static: Any) -> list[Tensor]:
        rows = len(tensors[0])
        size = self._programs.setting.choosing_rows(rows)
        key = (choice, size, *static.values())
        if key not in self._run:
            run = Executor(self._programs.chooses(size, choice, **static), self._context)
            on_gpu = self._context.device.type == "cuda"
            self._run[key] = Captured(run, range(len(tensors)), self._pool) if on_gpu else run
        if size > rows:
            at = torch.arange(size, device=tensors[0].device).clamp(max=rows - 1)
            tensors = tuple(tensor[at] for tensor in tensors)
        return [result[:rows] for result in self._run[key](*tensors)]


class ProgramRunner:
    """Computes steps as one rank. Used directly for a server of one rank in this process (see `step.Runner`)."""

    block_size = BLOCK_SIZE

    def __init__(
        self, context: Context, programs: ServingPrograms, weights: Weights, blocks: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """progress: called before each parameter is read."""
        setting = programs.setting
        self.blocks, self.vocab, self.max_seq = blocks, programs.vocab, setting.max_seq
        self.max_rows, self.max_logit_rows = setting.most, setting.logit_rows(setting.most)
        self.chunks = setting.chunks if setting.states else None
        self.slots = 0 if setting.slots is None else setting.slots.count
        self._programs, self._device, self._rank = programs, context.device, context.rank
        fill = self._fill = Filler(
            weights, programs.arrangement, programs.shapes, setting.mesh, context.rank, context.device, blocks,
            programs.slotted,
        )  # fmt: skip
        for same_input in zip(*(program.inputs for program in programs.by_size.values())):
            progress()
            for port in same_input:  # in all its layouts, while it is at hand
                if port.name not in STEP:
                    fill(port)
        self._given = {
            size: [None if port.name in STEP else fill(port) for port in program.inputs]
            for size, program in programs.by_size.items()
        }
        """The inputs of the program of each size; None for those that change with every step."""
        self._run: dict[Size, Callable[..., list[Tensor]]] = {
            size: Executor(program, context) for size, program in programs.by_size.items()
        }
        layout = programs.any.outputs[0].layout
        ((first, count),) = block((self.vocab,), Layout(layout.dims[1:]), setting.mesh, context.rank)
        self._recalled = Recalled(first, count, self.max_logit_rows, context.device)
        self.choose_together = bool(layout.axes)
        """Whether every rank has a part of the vocabulary, and is needed to choose a token."""
        by_programs = self.choose_together or context.device.type == "cuda"
        self._choosing: Choosing = ChoosingPrograms(programs, context) if by_programs else alone
        if context.device.type == "cuda":
            self._capture()

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        """The tokens and log-probabilities that are asked of each row with logits, the same bits on every rank."""
        return pick(self.logits(batch), picks, self._recalled, self._choosing)

    def logits(self, batch: StepInput) -> Tensor:
        """Logits [logit_rows, vocab] in fp32 on the device, of its part of the vocabulary, until the next step."""
        size = Size(len(batch.tokens), True) if batch.is_chunk else self._programs.fitting(len(batch.tokens))
        arrays = batch.pad(size.rows, self._programs.setting.logit_rows(size.rows)).arguments(size.chunk)
        whole = dict(zip(arrays, self._bring(list(arrays.values()))))
        arguments = [self._own(p, whole[p.name]) if p.name in whole else x
                     for p, x in zip(self._programs.by_size[size].inputs, self._given[size])]  # fmt: skip
        logits, *_ = self._run[size](*arguments)
        return logits[: len(batch.logit_rows)].float()

    def adapt(self, slot: int, folder: str) -> None:
        self.put_adapter(slot, self.read_adapter(folder))

    def read_adapter(self, folder: str) -> dict[str, Tensor]:
        """The factors in a folder by name. ValueError where they cannot be loaded."""
        setting = self._programs.setting
        assert setting.slots is not None, "this server has no adapters"
        values = slot_values(open_adapters(Path(folder), setting.served.spec, setting.slots))
        program = self._programs.any
        read = {p.name for node, p in zip(program.graph.find_nodes(op="placeholder"), program.inputs) if node.users}
        if unread := next((name for name in values if name not in read), None):
            raise ValueError(f"{folder}: the model computes `{unread.rpartition('.')[0]}` without calling the layer")
        return values

    def put_adapter(self, slot: int, values: Mapping[str, Tensor]) -> None:
        """Puts the factors that were read into a slot."""
        for port in self._programs.any.inputs:
            if port.name in self._programs.slotted:
                self._fill.put(port, slot, values.get(port.name))

    def check(self) -> None: ...

    def _bring(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Arrays of int64 on the device by one copy, each at a place that kernels read as an aligned one's."""
        sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
        flat, at = np.zeros(sum(sizes), dtype=np.int64), np.cumsum([0, *sizes]).tolist()
        for start, array in zip(at, arrays):
            flat[start : start + array.size] = array.ravel()
        there = brought(flat, self._device)
        return [there[start : start + array.size].view(array.shape) for start, array in zip(at, arrays)]

    def _own(self, port: Port, whole: Tensor) -> Tensor:
        return cut(whole, port.layout, self._programs.setting.mesh, self._rank) if port.layout.axes else whole

    def warm(self) -> None:
        """Runs a step of every size, so that compilation and measurements happen before the first request."""
        for size in self._run:
            none = np.zeros(size.rows, dtype=np.int64)  # block 0 and state 0 belong to no sequence
            last = np.arange(self._programs.setting.logit_rows(size.rows))
            states = np.zeros(0 if self.chunks is None else 1 if size.chunk else 2, dtype=np.int64)
            adapters = none - 1 if self.slots else none[:0]
            self.logits(StepInput(none, none, none, none, np.zeros((1, 1), dtype=np.int64), last, states, adapters))
        if self._device.type == "cuda":
            self._warm_choosing()

    def _warm_choosing(self) -> None:
        """Captures what chooses tokens by the usual settings, for every number of rows."""
        vocab = self._recalled.vocab
        for rows in sorted({self._programs.setting.choosing_rows(n) for n in range(1, self.max_logit_rows + 1)}):
            logits = torch.zeros(rows, vocab, device=self._device)
            settings = torch.tensor([[1.0, 0.0, 0.9, 0.0, 0.5]], dtype=torch.float64, device=self._device)
            self._choosing(likeliest, logits, logits)
            for choice in (drawn, nucleus):
                self._choosing(choice, logits, settings.repeat(rows, 1))

    def close(self) -> None:
        self._given.clear()
        self._fill.made.clear()
        self._run.clear()

    def _capture(self) -> None:
        """Prepares small steps to be captured as CUDA graphs at first use."""
        width, pool = -(-self.max_seq // self.block_size), None
        for size, run in self._run.items():
            apart = any(isinstance(given, list) for given in self._given[size])  # experts that no stack could hold
            if size.rows <= MOST_ROWS and can_capture(self._programs.by_size[size]) and not apart:
                ports = self._programs.by_size[size].inputs
                brought = [i for i, port in enumerate(ports) if port.name in STEP]
                tables = next(i for i, port in enumerate(ports) if port.name == "tables")
                pool = pool or torch.cuda.graph_pool_handle()
                self._run[size] = Captured(run, brought, pool, tables, width)
