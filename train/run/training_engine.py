"""A model on one rank with its optimizer: its shards of parameters, gradient sums and moments, and its counters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.pipeline.queue_order import MAX_CONNECTIONS, check_queues, streams_of
from tpshard.parallelism.pipeline.schedules import StageTask
from tpshard.parallelism.pipeline.stepping import RECEIVES_AHEAD, Walk, neighbour, program_of
from tpshard.parallelism.pricing.fusion import Compiled
from tpshard.parallelism.program import Port, PortKey, Program
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.mail import Mail
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.parallelism.runtime.step_profile import StepProfile
from tpshard.parallelism.runtime.tally import Tally
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.simulate import block, cut
from tpshard.programs.parts.held import stored_ports
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.parts.step_programs import COUNT, COUNTERS, LOSS, seeds
from tpshard.programs.step.training_step import TrainingPrograms, part_of
from tpshard.train.checkpoints.checkpoint import OPTIMIZER
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run.outcome import StepResult

COUNTED = 2
"""The step of an attempt whose bytes are counted, which slows it down. Not the first, which allocates the state."""

EVALUATION = "evaluation"
"""The part of programs that are not of a step."""

LOSSES, COUNTS = ("scalar", "losses"), ("scalar", "counts")
"""Losses and numbers of targets of all micro-batches."""

InitialBlock = Callable[..., Tensor]
"""(name, starts, sizes, seed=, dtype=) -> that block of a parameter's initial value."""

ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""A function (name, starts, sizes) -> that block of a global tensor, from a checkpoint or an initial value."""


class TrainingEngine:
    """Forward, backward and update of a model on this rank, which runs its row of the step's table. Every tensor is
    this rank's shard in the layout of the program's ports, padded if uneven."""

    def __init__(
        self, programs: TrainingPrograms, context: Context, initial_block: InitialBlock, trains: bool = True
    ):  # fmt: skip
        """trains: whether there are gradients and moments; evaluating needs none."""
        self.programs, self.context, self.initial_block = programs, context, initial_block
        setting, axis, table = programs.setting, programs.axis, programs.table
        self.compiled = compiled_by(setting.recipe)
        self.executors: list[Executor] = []
        """The executors whose waiting time is measured."""
        self.place = 0 if axis is None else context.mesh.index(axis, context.rank)
        self.mine, self.row = programs.devices[self.place], table.rows[self.place]
        self.last = {task.micro: i for i, task in enumerate(self.row)}
        """The index of each micro-batch's last task."""
        self.trains = trains
        self.ports = stored_ports(setting, programs.storage, self.mine.names)
        state = list(self.ports)
        if trains:
            moments = (port for port in self.mine.update.inputs if port.kind == "optimizer")
            state += [*programs.sum_ports(self.place), *moments]
        self.state = {port.key: self._zeros(port) for port in state}
        """The parameters, gradient sums and moments, by port."""
        self.batch_ports = [port for port in programs.micro.inputs if port.kind == "batch"]
        self.flops_per_sequence = programs.micro.useful_flops // self.batch_ports[0].shape[0]
        """Floating-point operations of forward and backward for one sequence, over all devices."""
        every = programs.programs.values()
        sets = {c.refs for program in every for c in program.collectives if c.kind not in ("send", "recv")}
        if axis is not None and context.device.type == "cuda":
            self._check_queues(len(sets))
        context.groups.ensure(sets)  # in one order on all ranks
        self.mail = None if axis is None else Mail(context, axis, programs.transferring)
        self.runs: dict[int, Executor] = {}
        """Executors by the id of their stage's program, which `programs` keeps alive."""
        for i in table.stages_of(self.place):
            for kind, program in zip(table.kinds, programs.stages[i].programs):
                self.runs[id(program)] = self._executor(program, part_of(kind, i), self.compiled, self.mail)
            forward = programs.evaluation[i].forward
            self.runs[id(forward)] = self._executor(forward, EVALUATION, self.compiled, self.mail)
        self.once: dict[str, Executor] = {}
        """Executors by role of the programs that run once per step."""
        for role, program in self.mine.by_role.items():
            compiled: Compiled = self.compiled if role == "update" else "none"
            self.once[role] = self._executor(program, role, compiled, self.mail if role == "exchange" else None)
        self.share = None if programs.share is None else self._executor(programs.share, EVALUATION)
        self._walk: Walk[Tensor] | None = None
        """The running step; None between two steps."""
        self._steps = self._done = 0
        self._tally: Tally | None = None
        self._sent_before = self._sent_between = 0
        """Bytes sent to other stages, before the counted step and in it."""

    def _executor(self, program: Program, part: str, compiled: Compiled = "none", mail: Mail | None = None) -> Executor:
        self.executors.append(Executor(program, self.context, compiled=compiled, mail=mail))
        self.executors[-1].part = part
        return self.executors[-1]

    def _zeros(self, port: Port) -> Tensor:
        return torch.zeros(port.local, dtype=port.dtype, device=self.context.device)

    def _check_queues(self, groups: int) -> None:
        """Raises WorkerFault (exit 5) where devices could wait for each other forever. groups: sets of axes."""
        connections, table = int(os.environ[MAX_CONNECTIONS]), self.programs.table
        try:
            check_queues(table, RECEIVES_AHEAD, groups=groups, connections=connections)
        except ValueError as error:
            needed = streams_of(table, self.place, groups)
            raise WorkerFault(
                f"the pipeline could hang with {MAX_CONNECTIONS}={connections}", exit=Exit.MACHINE, why=str(error),
                fix=f"unset {MAX_CONNECTIONS}, or set it to {needed} or more",
            ) from error  # fmt: skip

    @property
    def params(self) -> list[Tensor]:
        """This rank's shards of its parameters."""
        return [self.state[port.key] for port in self.ports]

    # ---- which part of the data is this rank's ---------------------------------------------------------------
    @property
    def data_rank(self) -> int:
        """The part of a step's rows that this rank reads, from 0; ranks that share a part (tensor parallelism) read the
        same."""
        return self.context.mesh.linear_index(self.batch_ports[0].layout.dims[0], self.context.rank)

    @property
    def exposed_comm_s(self) -> float | None:
        """Seconds spent waiting for communication since the last reading; None where it cannot be measured."""
        if self.context.device.type != "cpu" or self.compiled == "all":  # the compiler's code waits unobserved
            return None
        waited = sum(e.waited_s for e in self.executors)
        for executor in self.executors:
            executor.waited_s = 0.0
        return waited

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank sends per step, as counted in an early step; None before it is counted."""
        counted = self._tally is not None and self._steps >= COUNTED
        return self._tally.sent_bytes + self._sent_between if counted and self._tally is not None else None

    @property
    def collectives(self) -> int | None:
        """Collectives that this rank issues per step, as counted; None before they are counted."""
        return None if self._tally is None or self._steps < COUNTED else self._tally.collectives

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of all tensors in the counted step; None before it, and where a compiler allocates."""
        unseen = self.compiled != "none" or self._steps < COUNTED
        return None if self._tally is None or unseen else self._tally.peak_bytes

    def profile(self, profile: StepProfile | None) -> None:
        """Lets all programs record their operations in `profile`; None ends it."""
        for executor in self.executors:
            executor.profile = profile if executor.part != EVALUATION else None

    def _counting(self) -> AbstractContextManager[object]:
        """A context that counts the bytes sent and held, if this step is the counted one."""
        if self._steps != COUNTED - 1:
            return nullcontext()
        if self._tally is None:
            self._tally = Tally(self.state.values())
        return self._tally

    # ---- one step -------------------------------------------------------------------------------------------
    def accumulate(self, batch: StepBatch, seed: int) -> None:
        """Adds a micro-batch, and runs the tasks up to the first one whose micro-batch is not there yet.

        seed: for the random numbers that the model draws in this step.
        """
        with self._counting():
            if self._walk is None:
                self._sent_before = 0 if self.mail is None else self.mail.sent_bytes
                gathered = self._run("gather", self.state)
                self._walk, self._done = Walk(self.programs.stages, self._call, self, gathered, self.state), 0
            walk = self._walk
            walk.batches.append(self._local(batch, seed, len(walk.batches)))
            while self._done < len(self.row) and self.row[self._done].micro < len(walk.batches):
                task = self.row[self._done]
                self._do(walk, self.row, self._done)
                if self._done == self.last[task.micro]:
                    walk.batches[task.micro] = {}
                self._done += 1

    def update(self, lr: float, number: int) -> StepResult:
        """Runs update number `number` (from 1) on the accumulated gradients, and resets them."""
        walk, self._walk = self._walk, None
        assert walk is not None and self._done == len(self.row), "a step has all its micro-batches"
        with self._counting():
            self._finish_sends()
            values = self.state | self._scalars(walk)
            del walk  # and with it the gathered parameters
            values |= self._run("reduce", values)
            values |= self._run_exchange(values)
            values |= self._run("totals", values)
            losses, counts = values[LOSSES], values[COUNTS]
            scalars = {"loss_sum": losses.sum(), "count": counts.sum(), "lr": self._scalar(lr),
                       "update": self._scalar(number)}  # fmt: skip
            results = self._run("update", values | {("scalar", name): value for name, value in scalars.items()})
        if self._steps == COUNTED - 1 and self.mail is not None:
            self._sent_between = self.mail.sent_bytes - self._sent_before
        self._steps += 1
        norm, finite = (results.pop(("scalar", name)) for name in ("grad_norm", "finite"))
        self.state |= results
        for (kind, _), value in self.state.items():
            if kind == "gradient":
                value.zero_()
        return self._result(losses, counts, norm, finite, values.get(COUNTERS))

    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        """(summed loss in nats, number of targets) of one micro-batch, over all data ranks."""
        scalars = self._evaluated(batch)
        if self.share is not None:
            program = self.share.program
            scalars = {port.key: self._zeros(port) for port in program.inputs} | scalars
            scalars = program.results(self.share(*program.arguments(scalars)))
        return float(scalars[LOSS]), int(scalars[COUNT])

    def token_losses(self, batch: StepBatch) -> Shard | None:
        """This rank's block of each token's loss [all data ranks' rows, seq] in one micro-batch, 0 without a target, by
        programs that are `scoring`; None on stages before the last one, and where the block is empty."""
        losses = self._evaluated(batch).get(LOSS)
        if losses is None:
            return None
        port = next(port for port in self.programs.evaluation[-1].forward.outputs if port.key == LOSS)
        return dict(self.named_shards("", port, losses)).get(port.name)

    def _evaluated(self, batch: StepBatch) -> dict[PortKey, Tensor]:
        """The results of an evaluation of one micro-batch; none on stages before the last one."""
        row = [StageTask("F", stage, 0) for stage in self.programs.table.stages_of(self.place)]
        walk: Walk[Tensor] = Walk(self.programs.evaluation, self._call, self, {}, self.state)
        walk.batches.append(self._local(batch, 0, 0))
        for i in range(len(row)):
            self._do(walk, row, i)
        self._finish_sends()
        return {("scalar", name): value for name, value in walk.scalars.get(0, {}).items()}

    # ---- the programs of a step ------------------------------------------------------------------------------
    def _run(self, role: str, values: Mapping[PortKey, Tensor]) -> dict[PortKey, Tensor]:
        """The results of a program that runs once per step; none where this device has no such program."""
        if (executor := self.once.get(role)) is None:
            return {}
        return executor.program.results(executor(*executor.program.arguments(values)))

    def _run_exchange(self, values: Mapping[PortKey, Tensor]) -> dict[PortKey, Tensor]:
        """The gradient sums of parameters that several devices have, added up over these."""
        if (executor := self.once.get("exchange")) is None or self.mail is None:
            return {}
        self.mail.number = 0
        self.mail.expect(executor.program, 0)
        ports = (port for port in executor.program.inputs if port.kind == "received")
        results = self._run("exchange", {**values, **{port.key: self.mail.take(port.name, 0) for port in ports}})
        self.mail.finish()
        return {key: value for key, value in results.items() if key[0] == "gradient"}

    def _do(self, walk: Walk[Tensor], row: Sequence[StageTask], i: int) -> None:
        """Runs a task of a row, after posting the receives of the next ones."""
        if self.mail is not None:
            for coming in row[i : i + 1 + RECEIVES_AHEAD]:
                self.mail.expect(program_of(walk.stages, coming), self._number(coming, coming.stage))
        walk.do(row[i])

    def _number(self, task: StageTask, stage: int) -> int:
        """The number that identifies a value's message among those of other micro-batches and stages."""
        return task.micro * self.programs.table.stages + stage

    def _call(self, program: Program, task: StageTask, inputs: list[Tensor]) -> list[Tensor]:
        if self.mail is not None:
            self.mail.number = self._number(task, neighbour(task))
        return self.runs[id(program)](*inputs)

    def receive(self, task: StageTask, port: Port) -> Tensor:
        """The buffer of a value from another stage, which the task's program waits for."""
        assert self.mail is not None
        return self.mail.take(port.name, self._number(task, task.stage))

    def send(self, task: StageTask, port: Port, value: Tensor) -> None:
        """Does nothing: the task's program has started to send the value itself."""

    def _finish_sends(self) -> None:
        if self.mail is not None:
            self.mail.finish()

    # ---- results of a step -----------------------------------------------------------------------------------
    def _scalars(self, walk: Walk[Tensor]) -> dict[PortKey, Tensor]:
        """Loss and tokens of every micro-batch, and the sum of the model's counters: zeros except on the last stage."""
        each = [walk.scalars[micro] for micro in sorted(walk.scalars)]
        if not each:
            assert self.mine.totals is not None, "only stages before the last one have no loss"
            return {port.key: self._zeros(port) for port in self.mine.totals.inputs if port.kind == "scalar"}
        losses, counts = (torch.stack([one[name] for one in each]) for name in ("loss", "count"))
        counted = [one["counters"] for one in each if "counters" in one]
        return {LOSSES: losses, COUNTS: counts} | ({COUNTERS: torch.stack(counted).sum(0)} if counted else {})

    def _result(
        self, losses: Tensor, counts: Tensor, norm: Tensor, finite: Tensor, counters: Tensor | None
    ) -> StepResult:
        """The result of an update. losses, counts: per micro-batch. counters: the sum of the model's."""
        further = [] if counters is None else [counters]
        on_device = [losses, counts, norm.reshape(1), finite.reshape(1), *further]
        # one copy, and the only place of a step where the host waits for the device
        together = torch.cat([one.double() for one in on_device]).cpu()
        losses, counts, norm, finite, *further = together.split([one.numel() for one in on_device])
        each, targets = losses / counts.clamp(min=1), int(counts.sum())
        mean = float(losses.sum()) / max(1, targets)
        named: dict[str, list[float]] = {}
        for counters in further:
            sizes = self.programs.counted
            named = {name: part.tolist() for name, part in zip(sizes, counters.split(list(sizes.values())))}
        return StepResult(tuple(each.tolist()), mean, targets, float(norm), bool(finite), named)

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self.context.device)  # waits for no device

    def _local(self, batch: StepBatch, seed: int, micro: int) -> dict[PortKey, Tensor]:
        """The inputs of programs from a micro-batch of this data rank; other sharded dims are cut here. A seed is with
        them for a model that draws random numbers."""
        local = {}
        for name, port in zip(self.programs.setting.task.fields, self.batch_ports):
            rows = batch[name]
            assert rows.shape[0] == port.local[0], f"{rows.shape[0]} rows for a program of {port.local[0]}"
            rest = Layout(((), *port.layout.dims[1:]))
            local[port.key] = self.context.put(cut(rows, rest, self.context.mesh, self.context.rank))
        drawn = seeds(self.programs.setting, self.programs.micro, seed, micro)
        return local | {key: self.context.put(tensor) for key, tensor in drawn.items()}

    # ---- state -----------------------------------------------------------------------------------------------
    def _moments(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """(moment, parameter) for everything that the optimizer keeps of parameters; nothing where none is trained."""
        return self.programs.setting.moments(names) if self.trains else []

    def _named_tensors(self) -> Iterator[tuple[str, Port, Tensor]]:
        """(prefix of the name in checkpoints, port of the parameter, tensor) of every parameter and moment."""
        ports = {port.name: port for port in self.ports}
        yield from (("", port, self.state[port.key]) for port in self.ports)
        for state, name in self._moments(self.mine.trained):
            yield f"{OPTIMIZER}{state}/", ports[name], self.state["optimizer", f"{name}.{state}"]

    def named_shards(self, prefix: str, port: Port, tensor: Tensor) -> Iterator[tuple[str, Shard]]:
        """Yields this rank's part of a tensor by the names in checkpoints, where a stacked tensor is one per layer."""
        pairs = block(port.shape, port.layout, self.context.mesh, self.context.rank)
        starts, sizes = tuple(start for start, _ in pairs), tuple(size for _, size in pairs)
        if not all(sizes):  # with uneven sizes the last ranks may hold only padding
            return
        inside, members = tensor[tuple(slice(0, n) for n in sizes)], self.programs.setting.members(port.name)
        if members is None:
            yield prefix + port.name, Shard(inside, port.shape, starts)
            return
        for layer, one in zip(members[starts[0] :], inside):
            yield prefix + layer, Shard(one, port.shape[1:], starts[1:])

    def tensors(self) -> dict[str, Shard]:
        """This rank's blocks of parameters (by name) and moments (`optimizer/exp_avg/NAME`, ...), as checkpoints have
        them."""
        out = self.programs.setting.spec.left_out
        pairs = (pair for named in self._named_tensors() for pair in self.named_shards(*named))
        return {name: shard for name, shard in pairs if name not in out}

    def stored_shapes(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        """Global shape and dtype of the tensors of `tensors` of all ranks."""
        setting, ports = self.programs.setting, {port.name: port for port in self.programs.stored}
        out = setting.spec.left_out
        every = [("", name, port.dtype) for name, port in ports.items()]
        every += [(f"{OPTIMIZER}{state}/", name, setting.state_dtype)
                  for state, name in self._moments(self.programs.trained)]  # fmt: skip
        return {
            prefix + member: (setting.shape_in_layer(name, ports[name].shape), dtype)
            for prefix, name, dtype in every for member in setting.members(name) or [name] if member not in out
        }  # fmt: skip

    def load(self, read: ReadBlock) -> None:
        """Sets parameters and moments block by block; those that checkpoints leave out get their initial values."""
        setting = self.programs.setting

        def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
            if name not in setting.spec.left_out:
                return read(name, starts, sizes)
            return self.initial_block(name, starts, sizes, seed=setting.recipe.seed, dtype=None)

        for prefix, port, tensor in self._named_tensors():
            self._fill(prefix, port, tensor, block)

    def initialize(self, seed: int) -> None:
        """Sets parameters to their initial values (the same on every mesh) and moments to zero."""
        for prefix, port, tensor in self._named_tensors():
            if prefix:
                tensor.zero_()
            else:
                self._fill("", port, tensor, partial(self.initial_block, seed=seed, dtype=port.dtype))

    def _fill(self, prefix: str, port: Port, tensor: Tensor, read: Callable[..., Tensor]) -> None:
        """Reads this rank's part of a tensor, by the names, starts and sizes of its blocks in checkpoints, each of
        which is progress to the watchdog."""
        tensor.zero_()
        for name, shard in self.named_shards(prefix, port, tensor):
            self.context.watchdog.beat()
            shard.tensor[...] = read(name, shard.starts, tuple(shard.tensor.shape)).to(shard.tensor)
