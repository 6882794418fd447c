"""Whether a schedule's transfers can hang on a GPU, where what is issued on one queue runs in the order of its issue.

NCCL runs the unbatched sends and receives of a communicator one after another, and a send ends when its receive runs. A
device's connections (`CUDA_DEVICE_MAX_CONNECTIONS`) are queues too: streams that share one wait for each other. gloo
has no such order, so that a program may run on CPUs and stand still on GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from tpshard.parallelism.pipeline.schedules import StageTask, Table

MAX_CONNECTIONS, CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The variable with the number of connections of a CUDA device, and the most that there can be, which a worker asks
for."""


@dataclass(frozen=True)
class TransferEdge:
    """The way of values from one device of a pipeline to another, up the stages or down."""

    sender: int
    receiver: int
    up: bool


def own_queue(edge: TransferEdge) -> Hashable:
    """Every edge has a queue (a communicator of two ranks) of its own, as `runtime.mail` makes them."""
    return edge


def edges_of(table: Table) -> list[TransferEdge]:
    """The edges over which a table sends, in an order that is the same on every device."""
    edges = {_edge(table, before, task) for row in table.rows for task in row for before in _remote(table, task)}
    return sorted(edges, key=lambda edge: (edge.up, edge.sender, edge.receiver))


def streams_of(table: Table, device: int, groups: int = 0) -> int:
    """The number of CUDA streams of a device: computation, its edges, and collectives over `groups` sets of axes."""
    return 1 + groups + sum(device in (edge.sender, edge.receiver) for edge in edges_of(table))


def check_queues(
    table: Table, ahead: int, *, groups: int = 0, connections: int = CONNECTIONS,
    queue: Callable[[TransferEdge], Hashable] = own_queue,
) -> None:  # fmt: skip
    """Raises ValueError for a table whose devices would wait for each other forever, with what each one waits for.

    ahead: the number of tasks for which a device posts the receives before it runs them. groups: the number of sets of
    axes over which a task's programs have collectives; the ranks of a group run the same tasks. queue: the queue of an
    edge on its sender and its receiver.
    """
    streams: list[dict[Hashable, int]] = [{"computation": 0} for _ in range(table.devices)]
    for edge in edges_of(table):
        for end in (edge.sender, edge.receiver):
            streams[end].setdefault(queue(edge), len(streams[end]))
    for of_device in streams:
        of_device.update({("group", i): len(of_device) + i for i in range(groups)})
    devices = [_Device(table, i, ahead, groups, queue, streams[i], connections) for i in range(table.devices)]
    running: dict[tuple[TransferEdge, int], _Operation] = {}
    moved = True
    while moved:
        moved = False
        for device in devices:
            for operation in device.start():
                moved = True
                if operation.message is None:
                    operation.done = True
                elif (other := running.pop(operation.message, None)) is not None:
                    operation.done = other.done = True
                else:
                    running[operation.message] = operation
    if stuck := [text for device in devices for text in device.waiting()]:
        raise ValueError("the devices would wait for each other forever: " + "; ".join(stuck))


@dataclass(eq=False)
class _Operation:
    """What a device issues on a stream; it starts once the operations that it needs are done."""

    text: str
    stream: int
    needs: tuple[_Operation, ...] = ()
    message: tuple[TransferEdge, int] | None = None
    """The edge and number of a message: its send and its receive end together."""
    done: bool = False


@dataclass
class _Device:
    """The operations of one device in the order of their issue, by connection."""

    table: Table
    device: int
    ahead: int
    groups: int
    queue: Callable[[TransferEdge], Hashable]
    streams: dict[Hashable, int]
    connections: int
    queues: list[deque[_Operation]] = field(default_factory=list)
    latest: dict[int, _Operation] = field(default_factory=dict)
    """The operation that was last started on each stream."""

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(min(self.connections, len(self.streams)))]
        self.numbers: dict[TransferEdge, int] = {}
        received: dict[StageTask, _Operation] = {}
        row, last = self.table.rows[self.device], None
        for i, task in enumerate(row):
            for coming in row[i : i + 1 + self.ahead]:
                for before in _remote(self.table, coming):
                    if before not in received:
                        received[before] = self._transfer(_edge(self.table, before, coming), f"the receive of {before}")
            needs = [received[before] for before in _remote(self.table, task)] + ([last] if last else [])
            for group in range(self.groups):
                needs.append(self._issue(f"a collective of {task}", ("group", group), needs))
            last = self._issue(str(task), "computation", needs)
            for after in self._readers(task):
                self._transfer(_edge(self.table, task, after), f"the send of {task}", last)

    def _readers(self, task: StageTask) -> list[StageTask]:
        """The tasks of other devices that read a task's result."""
        back = "I" if self.table.splits_backward else "B"
        if task.kind == "F" and task.stage + 1 < self.table.stages:
            readers = [StageTask("F", task.stage + 1, task.micro)]
        elif task.kind == back and task.stage:
            readers = [StageTask(task.kind, task.stage - 1, task.micro)]
        else:
            readers = []
        return [reader for reader in readers if task in _remote(self.table, reader)]

    def _transfer(self, edge: TransferEdge, text: str, *needs: _Operation) -> _Operation:
        number = self.numbers[edge] = self.numbers.get(edge, -1) + 1
        return self._issue(text, self.queue(edge), needs, (edge, number))

    def _issue(
        self, text: str, stream: Hashable, needs: list[_Operation] | tuple[_Operation, ...],
        message: tuple[TransferEdge, int] | None = None,
    ) -> _Operation:  # fmt: skip
        operation = _Operation(text, self.streams[stream], tuple(needs), message)
        self.queues[operation.stream % len(self.queues)].append(operation)
        return operation

    def start(self) -> list[_Operation]:
        """Starts every operation that is first in its connection, whose stream is free and whose needs are done."""
        started = []
        for waiting in self.queues:
            while waiting and self._is_ready(waiting[0]):
                started.append(waiting.popleft())
                self.latest[started[-1].stream] = started[-1]
                if started[-1].message is not None:
                    break  # done once its other end runs, too
                started[-1].done = True
        return started

    def _is_ready(self, operation: _Operation) -> bool:
        latest = self.latest.get(operation.stream)
        return (latest is None or latest.done) and all(needed.done for needed in operation.needs)

    def waiting(self) -> list[str]:
        """What the device waits for, if anything."""
        left = [f"{x.text}" for x in self.latest.values() if not x.done]
        return [f"device {self.device} at {' and '.join(left)}"] if left or any(self.queues) else []


def _remote(table: Table, task: StageTask) -> list[StageTask]:
    """The tasks of other devices whose results a task reads."""
    return [before for before in table.needs(task) if table.device_of(before.stage) != table.device_of(task.stage)]


def _edge(table: Table, before: StageTask, after: StageTask) -> TransferEdge:
    return TransferEdge(table.device_of(before.stage), table.device_of(after.stage), before.kind == "F")
