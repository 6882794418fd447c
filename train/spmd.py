"""The engine of a run: a recipe's programs on this rank, with its shards of parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from tpshard.parallelism.program import Port, Program, info
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.tally import Tally
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.simulate import block, cut
from tpshard.programs.training import BATCH, TrainingPrograms
from tpshard.train.checkpoint import OPTIMIZER
from tpshard.train.shards import Shard
from tpshard.train.stream import TokenBatch
from tpshard.train.training_engine import ReadBlock, StepResult

MOMENTS = (f"{OPTIMIZER}exp_avg/", f"{OPTIMIZER}exp_avg_sq/")

COUNTED = 2
"""Which step of an attempt is counted: not the first, which makes what stays. Counting makes it slower."""

InitialBlock = Callable[..., Tensor]
"""(name, starts, sizes, seed=, dtype=) -> that block of a parameter's initial value."""


class SpmdEngine:
    """See `TrainingEngine`. Every tensor is this rank's part as the program's ports lay it out, padded where uneven."""

    def __init__(self, programs: TrainingPrograms, context: Context, initial_block: InitialBlock):
        self.programs, self.context, self.initial_block = programs, context, initial_block
        compiled = programs.setting.recipe.compile == "inductor"
        self.micro, self.step, self.evaluation = (
            Executor(program, context, compiled=compiled)
            for program in (programs.micro, programs.update, programs.evaluate)
        )
        self.gather, self.reduce = (
            Executor(program, context) if program is not None else None
            for program in (programs.gather, programs.reduce)
        )
        count = len(programs.names)
        self.ports = programs.update.inputs[:count]
        self.batch_ports = programs.micro.inputs[2 * count :]
        moments = programs.update.inputs[2 * count : 4 * count]
        self.params = self._zeros(self.ports)
        self.sums = self._zeros(programs.micro.inputs[count : 2 * count])
        self.moments = (self._zeros(moments[:count]), self._zeros(moments[count:]))
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._counts: list[Tensor] = []
        self._used: list[Tensor] | None = None
        """Parameters gathered for all micro-batches of this step."""
        self._steps = 0
        self._tally: Tally | None = None
        rows = self.batch_ports[0].shape[0]
        self.flops_per_sequence = flops(programs.micro) // rows

    def _zeros(self, ports: Sequence[Port]) -> list[Tensor]:
        return [torch.zeros(port.local, dtype=port.dtype, device=self.context.device) for port in ports]

    # ---- which part of the data is this rank's ---------------------------------------------------------------
    @property
    def data_ranks(self) -> int:
        return self.programs.setting.batch.data_ranks

    @property
    def data_rank(self) -> int:
        return self.context.mesh.linear_index(self.batch_ports[0].layout.dims[0], self.context.rank)

    @property
    def exposed_comm_s(self) -> float | None:
        if self.context.device.type != "cpu" or self.micro.compiled:  # waits are in the compiler's code
            return None
        executors = [e for e in (self.micro, self.step, self.evaluation, self.gather, self.reduce) if e is not None]
        waited = sum(e.waited_s for e in executors)
        for executor in executors:
            executor.waited_s = 0.0
        return waited

    @property
    def sent_bytes(self) -> int | None:
        return None if self._tally is None or self._steps < COUNTED else self._tally.sent_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Of all tensors in the counted step; None before it, and where a compiler allocates unseen."""
        unseen = self.micro.compiled or self._steps < COUNTED
        return None if self._tally is None or unseen else self._tally.peak_bytes

    def _counted(self) -> AbstractContextManager[object]:
        """Counts what the step sends and holds, if it is the one that is counted."""
        if self._steps != COUNTED - 1:
            return nullcontext()
        if self._tally is None:
            self._tally = Tally([*self.params, *self.sums, *self.moments[0], *self.moments[1]])
        return self._tally

    # ---- computing -------------------------------------------------------------------------------------------
    def accumulate(self, batch: TokenBatch) -> None:
        with self._counted():
            if self.gather is not None and self._used is None:
                self._used = self.gather(*self.params)
            params = self.params if self._used is None else self._used
            loss, count, *rest = self.micro(*params, *self.sums, *self._local(batch))
        self.sums, counted = rest[: len(self.sums)], rest[len(self.sums) :]
        self._sums.append((loss, count))
        self._counts += counted

    def update(self, lr: float, number: int) -> StepResult:
        losses = torch.stack([loss for loss, _ in self._sums])
        counts = torch.stack([count for _, count in self._sums])
        scalars = (losses.sum(), counts.sum(), self._scalar(lr), self._scalar(number))
        with self._counted():
            sums = self.sums if self.reduce is None else self.reduce(*self.sums)
            self._used = None
            made = self.step(*self.params, *sums, *self.moments[0], *self.moments[1], *scalars)
        self._steps += 1
        count = len(self.params)
        self.params = made[:count]
        self.moments = (made[count : 2 * count], made[2 * count : 3 * count])
        norm, finite = made[3 * count :]
        for total in self.sums:
            total.zero_()
        self._sums.clear()
        each, targets = losses.double() / counts.clamp(min=1), int(counts.sum())
        mean = float(losses.double().sum()) / max(1, targets)
        return StepResult(tuple(each.tolist()), mean, targets, float(norm), bool(finite), self._counted_by_name())

    def _counted_by_name(self) -> dict[str, list[float]]:
        sizes = self.programs.counted
        if not sizes:
            return {}
        numbers = torch.stack(self._counts).sum(0).split(list(sizes.values()))
        self._counts.clear()
        return {name: part.tolist() for name, part in zip(sizes, numbers)}

    def evaluate(self, batch: TokenBatch) -> tuple[float, int]:
        loss, count = self.evaluation(*self.params, *self._local(batch))
        return float(loss), int(count)

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(float(value), device=self.context.device)

    def _local(self, batch: TokenBatch) -> Iterator[Tensor]:
        """The micro-batch's rows are this data rank's already; what other axes cut (the sequence) is cut here."""
        for name, port in zip(BATCH, self.batch_ports):
            rows = getattr(batch, name)
            assert rows.shape[0] == port.local[0], f"{rows.shape[0]} rows for a program of {port.local[0]}"
            rest = Layout(((), *port.layout.dims[1:]))
            yield cut(rows, rest, self.context.mesh, self.context.rank).to(self.context.device)

    # ---- state -----------------------------------------------------------------------------------------------
    def _named(self) -> Iterator[tuple[str, Port, Tensor]]:
        for prefix, tensors in (("", self.params), *zip(MOMENTS, self.moments)):
            for port, tensor in zip(self.ports, tensors):
                yield prefix + port.name, port, tensor

    def _block(self, port: Port) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pairs = block(port.shape, port.layout, self.context.mesh, self.context.rank)
        return tuple(start for start, _ in pairs), tuple(size for _, size in pairs)

    def tensors(self) -> dict[str, Shard]:
        found = {}
        for name, port, tensor in self._named():
            starts, sizes = self._block(port)
            if all(sizes):  # Of an uneven tensor the last ranks may hold padding alone.
                found[name] = Shard(tensor[tuple(slice(0, n) for n in sizes)], port.shape, starts)
        return found

    def expected(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        return {name: (port.shape, tensor.dtype) for name, port, tensor in self._named()}

    def load(self, read: ReadBlock) -> None:
        for name, port, tensor in self._named():
            self._fill(port, tensor, partial(read, name))

    def initialize(self, seed: int) -> None:
        for port, tensor in zip(self.ports, self.params):
            starting = partial(self.initial_block, port.name, seed=seed, dtype=port.dtype)
            self._fill(port, tensor, starting)
        for moments in self.moments:
            for tensor in moments:
                tensor.zero_()

    def _fill(
        self, port: Port, tensor: Tensor, read: Callable[[tuple[int, ...], tuple[int, ...]], Tensor]
    ) -> None:
        starts, sizes = self._block(port)
        tensor.zero_()
        if all(sizes):
            tensor[tuple(slice(0, n) for n in sizes)] = read(starts, sizes).to(tensor)


def flops(program: Program) -> int:
    """Floating-point operations of all devices together, recomputation left out."""
    known = (info(node) for node in program.graph.nodes)
    return sum(k.global_flops for k in known if k.phase != "recompute")


__all__ = ["SpmdEngine", "flops"]
