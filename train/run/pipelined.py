"""The training engine of a pipeline: this rank runs its row of the schedule and sends values to other stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.draws import SEED
from tpshard.parallelism.pipeline.queue_order import MAX_CONNECTIONS, check_queues, streams_of
from tpshard.parallelism.pipeline.schedules import StageTask
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.parallelism.pipeline.stepping import RECEIVES_AHEAD, Walk, neighbour, program_of
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.mail import Mail
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.programs.parts.step_programs import stored_ports
from tpshard.programs.step.training import TrainingPrograms
from tpshard.train.checkpoints.checkpoint import OPTIMIZER
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run.training_engine import COUNTED, InitialBlock, StepResult, TrainingEngine


class PipelineEngine(TrainingEngine):
    """An engine whose ranks run the programs of their stage.

    Micro-batches are collected, and run as the schedule says when the step ends.
    """

    def __init__(
        self, programs: TrainingPrograms, context: Context, initial_block: InitialBlock, trains: bool = True
    ):  # fmt: skip
        assert programs.pipeline is not None
        self.pipeline = programs.pipeline
        self.place = context.mesh.index(self.pipeline.axis, context.rank)
        self.mine = self.pipeline.devices[self.place]
        own_stages, sums = self.pipeline.table.stages_of(self.place), self.pipeline.sum_ports(self.place)
        self.sum_names = [port.name for port in sums]
        stored = stored_ports(programs.setting, programs.storage, self.mine.names)
        super().__init__(programs, context, initial_block, stored, self.mine.update, sums, trains)
        every = self.pipeline.programs.values()
        sets = {c.refs for program in every for c in program.collectives if c.kind not in ("send", "recv")}
        if context.device.type == "cuda":
            self._check_queues(len(sets))
        context.groups.ensure(sets)  # in one order on all ranks
        self.mail = Mail(context, self.pipeline.axis, self.pipeline.transferring)
        self.runs: dict[int, Executor] = {}
        """Executors by the id of their stage's program, which the pipeline keeps alive."""
        for stages in (self.pipeline.stages, self.pipeline.evaluation):
            for stage in own_stages:
                for program in stages[stage].programs:
                    self.runs[id(program)] = self._executor(program, compiled=self.compiled, mail=self.mail)
        self.totals, self.share = self._executor(self.mine.totals), self._executor(self.pipeline.share)
        self.step = self._executor(self.mine.update, compiled=self.compiled)
        self.gather = None if self.mine.gather is None else self._executor(self.mine.gather)
        self.reduce = None if self.mine.reduce is None else self._executor(self.mine.reduce)
        self.exchange = None if self.mine.exchange is None else self._executor(self.mine.exchange, mail=self.mail)
        self._batches: list[dict[str, Tensor]] = []
        self._sent_between = 0
        """Bytes sent to other stages in the counted step."""

    def _check_queues(self, groups: int) -> None:
        """Raises WorkerFault (exit 5) where devices could wait for each other forever. groups: sets of axes."""
        connections = int(os.environ[MAX_CONNECTIONS])
        try:
            check_queues(self.pipeline.table, RECEIVES_AHEAD, groups=groups, connections=connections)
        except ValueError as error:
            needed = streams_of(self.pipeline.table, self.place, groups)
            raise WorkerFault(
                f"the pipeline could hang with {MAX_CONNECTIONS}={connections}", exit=Exit.MACHINE, why=str(error),
                fix=f"unset {MAX_CONNECTIONS}, or set it to {needed} or more",
            ) from error  # fmt: skip

    @property
    def sent_bytes(self) -> int | None:
        sent = super().sent_bytes
        return None if sent is None else sent + self._sent_between

    def stored_shapes(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        """Global shape and dtype of every tensor of all stages."""
        setting = self.programs.setting
        params = {port.name: (port.shape, port.dtype) for port in self.programs.stored}
        moment_names = setting.moments(self.programs.trained)
        return params | {
            f"{OPTIMIZER}{state}/{name}": (params[name][0], setting.state_dtype) for state, name in moment_names
        }

    def accumulate(self, batch: StepBatch, seed: int) -> None:
        self._batches.append(self._named_batch(batch, seed))

    def _named_batch(self, batch: StepBatch, seed: int) -> dict[str, Tensor]:
        names = [*(port.name for port in self.batch_ports), SEED]
        return dict(zip(names, self._local(batch, self.programs.micro, seed, len(self._batches))))

    def update(self, lr: float, number: int) -> StepResult:
        before = self.mail.sent_bytes
        with self._counting():
            row = self.pipeline.table.rows[self.place]
            params = self.params if self.gather is None else self.gather(*self.params)
            walk = self._walk(self.pipeline.stages, params, self._batches, row)
            del params
            self.sums = [walk.sums[name] for name in self.sum_names]
            sums = self.sums if self.reduce is None else self.reduce(*self.sums)
            sums = self._exchange_sums(sums)
            losses, counts, noted = self._scalars(walk)
            squares, losses, counts, *noted = self.totals(*sums, losses, counts, *noted)
            scalars = (losses.sum(), counts.sum(), self._scalar(lr), self._scalar(number), squares)
            results = self.step(*self.trained, *sums, *self.moments, *scalars)
        if self._steps == COUNTED - 1:
            self._sent_between = self.mail.sent_bytes - before
        norm, finite = self._store_update(results)
        self._batches.clear()
        return self._result(losses, counts, norm, finite, noted[0] if noted else None)

    def _walk(
        self, stages: Sequence[Stage], params: Sequence[Tensor], batches: Sequence[dict[str, Tensor]],
        row: Sequence[StageTask],
    ) -> Walk[Tensor]:  # fmt: skip
        sums = dict(zip(self.sum_names, self.sums))
        named = {port.name: value for port, value in zip(self.ports, params)}
        walk: Walk[Tensor] = Walk(self.pipeline.table, stages, self._call, self, named, sums, batches)
        for i, task in enumerate(row):
            for coming in row[i : i + 1 + RECEIVES_AHEAD]:
                self.mail.expect(program_of(stages, coming), self._number(coming, coming.stage))
            walk.do(task)
        self.mail.finish()
        return walk

    def _number(self, task: StageTask, stage: int) -> int:
        """The number that identifies a value's message among those of other micro-batches and stages."""
        return task.micro * self.pipeline.table.stages + stage

    def _call(self, program: Program, task: StageTask, inputs: list[Tensor]) -> list[Tensor]:
        self.mail.number = self._number(task, neighbour(task))
        return self.runs[id(program)](*inputs)

    def receive(self, task: StageTask, port: Port) -> Tensor:
        return self.mail.take(port.name, self._number(task, task.stage))

    def send(self, task: StageTask, port: Port, value: Tensor) -> None:
        """Does nothing: the task's program has started to send the value itself."""

    def _exchange_sums(self, sums: list[Tensor]) -> list[Tensor]:
        """The gradient sums, with those of shared parameters added up over their devices."""
        if self.exchange is None:
            return sums
        program = self.exchange.program
        sums_by_name = dict(zip(self.sum_names, sums))
        self.mail.number = 0
        self.mail.expect(program, 0)
        exchanged = self.exchange(*(sums_by_name[p.name] if p.kind == "gradient" else self.mail.take(p.name, 0)
                               for p in program.inputs))  # fmt: skip
        self.mail.finish()
        sums_by_name |= {p.name: value for p, value in zip(program.outputs, exchanged) if p.kind == "gradient"}
        return [sums_by_name[name] for name in self.sum_names]

    def _scalars(self, walk: Walk[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss and tokens of every micro-batch, and the model's counters: zeros except on the last stage."""
        ports = self.mine.totals.inputs[len(self.sum_names) :]
        zeros = [torch.zeros(port.local, dtype=port.dtype, device=self.context.device) for port in ports]
        if not walk.scalars:
            return zeros[0], zeros[1], zeros[2:]
        per_micro = [walk.scalars[micro] for micro in sorted(walk.scalars)]
        losses, counts = torch.stack([one[0] for one in per_micro]), torch.stack([one[1] for one in per_micro])
        return losses, counts, [torch.stack([one[2] for one in per_micro]).sum(0)] if zeros[2:] else []

    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        row = [StageTask("F", stage, 0) for stage in self.pipeline.table.stages_of(self.place)]
        walk = self._walk(self.pipeline.evaluation, self.params, [self._named_batch(batch, 0)], row)
        zeros = [torch.zeros((), dtype=port.dtype, device=self.context.device) for port in self.pipeline.share.inputs]
        loss, count = self.share(*walk.scalars.get(0, zeros))
        return float(loss), int(count)
