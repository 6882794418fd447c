"""What a device's memory holds beside the program of a step that runs: stored tensors, and what other tasks saved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache

from tpshard.parallelism.pipeline.schedules import Kind, StageTask, Table
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.parallelism.pipeline.stepping import RECEIVES_AHEAD, program_of
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs.setting.setting import Setting

CATEGORIES = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer"}
"""What the memory of a port of each kind is called."""


def stored_ports(setting: Setting, storage: Mapping[str, Layout], names: Iterable[str]) -> list[Port]:
    """The ports of parameters as they are stored, trained or not."""
    stored = dict(setting.model.named_parameters())
    return [Port(n, tuple(stored[n].shape), stored[n].dtype, storage[n], "parameter") for n in names]


def bytes_of(ports: Iterable[Port], kind: str) -> int:
    """Bytes of a device's inputs or outputs of one kind."""
    return sum(port.local_bytes for port in ports if port.kind == kind)


def stored_bytes(
    setting: Setting, storage: Mapping[str, Layout], names: Iterable[str], trained: Collection[str],
    read: Iterable[Port] = (),
) -> dict[str, int]:  # fmt: skip
    """Bytes of a device's parameters `names`, and of the gradient sums and moments of those that are `trained`.

    read: the inputs of the programs of its micro-batches; parameters that are gathered once a step stay beside stored
    ones.
    """
    ports = stored_ports(setting, storage, names)
    elements = {port.name: math.prod(port.local) for port in ports if port.name in trained}
    gathered = bytes_of(read, "parameter") if setting.gathers_once else 0
    return {
        "parameters": sum(port.local_bytes for port in ports) + gathered,
        "gradients": sum(elements.values()) * setting.sum_dtype.itemsize,
        "optimizer": setting.moment_bytes(elements),
    }


def activations(table: Table, stages: Sequence[Stage], place: int) -> Iterator[tuple[StageTask, int, int]]:
    """Yields the tasks of the device at a place of a schedule with the bytes of activations beside each: those of other
    tasks and of messages to come, and those that its own micro-batch saved for a later task."""
    row = table.rows[place]

    @cache
    def input_bytes(kind: Kind, stage: int, ports: str) -> int:
        return bytes_of(program_of(stages, StageTask(kind, stage, 0)).inputs, ports)

    @cache
    def saved_after(kind: Kind, stage: int) -> int:
        if kind == "I":
            return input_bytes("W", stage, "saved")
        return bytes_of(program_of(stages, StageTask(kind, stage, 0)).outputs, "saved") if kind == "F" else 0

    held: Counter[tuple[int, int]] = Counter()
    held_bytes = 0  # the sum of `held`
    for i, task in enumerate(row):
        key = task.stage, task.micro
        messages = sum(input_bytes(*later[:2], "received") for later in row[i + 1 : i + 1 + RECEIVES_AHEAD])
        yield task, held_bytes - held[key] + messages, max(0, held[key] - input_bytes(*task[:2], "saved"))
        after = saved_after(*task[:2])
        held_bytes += after - held[key]
        held[key] = after


def beside(stored: Mapping[str, int], program: Program, activations: int = 0) -> dict[str, int]:
    """Bytes by category that stay in memory while a program runs, besides its own inputs."""
    own = Counter[str]()
    for port in program.inputs:
        own[CATEGORIES.get(port.kind, "")] += port.local_bytes
    sizes = {name: size - own[name] for name, size in stored.items()} | {"activations": activations}
    return {name: size for name, size in sizes.items() if size > 0}
