"""Pipeline schedules as tables: which device runs which stage on which micro-batch, in which order.

A table is plain data: it is built, checked for deadlock, timed and drawn before anything runs. The layers are divided
into `devices x rounds` stages; stage i is on device i mod devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "M"]
"""F: forward. B: backward. I and W: the two halves of a backward pass, for the stage's inputs and for its weights. M:
forward and backward in one program, of a step without stages."""

SCHEDULES = ("gpipe", "circular", "1f1b", "interleaved_1f1b", "zero_bubble")
ROUNDS = ("circular", "interleaved_1f1b")
"""Schedules with several stages per device."""


class StageTask(NamedTuple):
    """The work of a stage on one micro-batch: a forward or a backward pass."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro} of stage {self.stage}"


class Slot(NamedTuple):
    """The time of a task, in seconds from the start of the step."""

    task: StageTask
    start: float
    end: float


@dataclass(frozen=True)
class Table:
    """The tasks of each device of a pipeline, in order. `make` builds a table; `check` verifies that it can run."""

    schedule: str
    devices: int
    stages: int
    """The number of stages on all devices together."""
    micro_batches: int
    rows: tuple[tuple[StageTask, ...], ...]
    """The tasks of each device."""

    @property
    def rounds(self) -> int:
        """The number of stages per device."""
        return self.stages // self.devices

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of tasks that a stage runs on each micro-batch, in order."""
        return tuple(dict.fromkeys(task.kind for task in self.rows[0]))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are separate tasks."""
        return any(task.kind == "W" for row in self.rows for task in row)

    def device_of(self, stage: int) -> int:
        """The device, along the pipeline's axis, that has a stage."""
        return stage % self.devices

    def stages_of(self, device: int) -> range:
        """The stages of a device."""
        return range(device, self.stages, self.devices)

    def needs(self, task: StageTask) -> Iterator[StageTask]:
        """The tasks whose results this task reads."""
        kind, stage, micro = task
        back: Kind = "I" if self.splits_backward else "B"
        if kind == "F" and stage:
            yield StageTask("F", stage - 1, micro)
        if kind in ("B", "I"):
            yield StageTask("F", stage, micro)
            if stage < self.stages - 1:
                yield StageTask(back, stage + 1, micro)
        if kind == "W":
            yield StageTask("I", stage, micro)

    @cached_property
    def in_order(self) -> tuple[StageTask, ...]:
        """All tasks in an order that keeps each device's order, and in which a task comes after those that it needs.

        Raises ValueError if there is none.
        """
        return tuple(slot.task for slot in self.timetable(lambda task: 1.0))

    def timetable(
        self, seconds: Callable[[StageTask], float], late: Callable[[StageTask], float] = lambda task: 0.0
    ) -> list[Slot]:
        """The time of every task, sorted by start, if each runs as soon as its device and its inputs are ready.

        A task takes `seconds(task)`; its result arrives on another device `late(task)` seconds after its end. Raises
        ValueError for a deadlock, with the tasks that wait.
        """
        ended: dict[StageTask, float] = {}
        slots: list[Slot] = []
        at, free = [0] * self.devices, [0.0] * self.devices
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(self.rows):
                while at[device] < len(row):
                    task = row[at[device]]
                    needed = list(self.needs(task))
                    if any(n not in ended for n in needed):
                        break
                    arrivals = (ended[n] + (late(n) if self.device_of(n.stage) != device else 0.0) for n in needed)
                    start = max([free[device], *arrivals])
                    ended[task] = free[device] = start + seconds(task)
                    slots.append(Slot(task, start, free[device]))
                    at[device] += 1
                    moved = True
        stuck = [f"device {d} at {row[at[d]]}, which needs {self._missing(row[at[d]], ended)}"
                 for d, row in enumerate(self.rows) if at[d] < len(row)]  # fmt: skip
        if stuck:
            raise ValueError("the schedule is a deadlock: " + "; ".join(stuck))
        place = {task: (d, i) for d, row in enumerate(self.rows) for i, task in enumerate(row)}
        return sorted(slots, key=lambda slot: (slot.start, slot.end, *place[slot.task]))

    def _missing(self, task: StageTask, ended: Mapping[StageTask, float]) -> str:
        return " and ".join(str(n) for n in self.needs(task) if n not in ended)

    def bubble(self, slots: Sequence[Slot]) -> float:
        """The share of the devices' time that they wait for other stages, in a timetable."""
        busy, last = sum(slot.end - slot.start for slot in slots), max(slot.end for slot in slots)
        return 1.0 - busy / (self.devices * last) if last else 0.0

    def most_held(self, device: int) -> int:
        """The largest number of (micro-batch, stage) pairs whose activations a device holds at once.

        It holds them from the start of F to the end of B, or of W.
        """
        now = most = 0
        for task in self.rows[device]:
            now += task.kind == "F"
            most = max(most, now)
            now -= task.kind in ("B", "W")
        return most

    def __str__(self) -> str:
        """A line per device, a column per unit of time; F, I and W take one unit, B two. `.` is idle."""
        width = len(str(self.micro_batches - 1)) + 1 + (self.rounds > 1) * (len(str(self.stages - 1)) + 1)
        lines = [[""] * 0 for _ in range(self.devices)]
        for task, start, end in self.timetable(lambda task: 2.0 if task.kind == "B" else 1.0):
            line = lines[self.device_of(task.stage)]
            line.extend(["."] * (round(start) - len(line)))
            text = f"{task.kind}{task.micro}" + (f"/{task.stage}" if self.rounds > 1 else "")
            line.extend([text, *["-"] * (round(end - start) - 1)])
        last = max(map(len, lines))
        rows = (" ".join(cell.ljust(width) for cell in line + ["."] * (last - len(line))) for line in lines)
        return "\n".join(f"{device:>3} {row.rstrip()}" for device, row in enumerate(rows))


def plain(micro_batches: int) -> Table:
    """The table of a step without stages: its one device runs one micro-batch after another."""
    return Table("", 1, 1, micro_batches, (tuple(StageTask("M", 0, micro) for micro in range(micro_batches)),))


def make(schedule: str, devices: int, micro_batches: int, rounds: int = 1) -> Table:
    """Makes and checks the table of a schedule. Raises ValueError for unsupported numbers; see `refusal`."""
    if why := refusal(schedule, devices, micro_batches, rounds):
        raise ValueError(why)
    rows = _MAKERS[schedule](devices, micro_batches, rounds)
    table = Table(schedule, devices, devices * rounds, micro_batches, tuple(map(tuple, rows)))
    check(table)
    return table


def refusal(schedule: str, devices: int, micro_batches: int, rounds: int = 1, vectorized: bool = False) -> str:
    """Why a schedule does not support these numbers; "" if it does. vectorized: whether all devices run one program."""
    if schedule not in _MAKERS:
        return f"there is no schedule `{schedule}`; the schedules are {', '.join(SCHEDULES)}"
    if rounds > 1 and schedule not in ROUNDS:
        return f"{schedule} has one round: {' and '.join(ROUNDS)} have several"
    if schedule != "gpipe" and micro_batches < devices:
        return f"{schedule} on {devices} stages needs at least {devices} micro-batches, not {micro_batches}"
    if schedule == "interleaved_1f1b" and micro_batches % devices:
        return f"interleaved_1f1b needs a multiple of its {devices} stages as micro-batches, not {micro_batches}"
    if vectorized and rounds > 1 and micro_batches % devices:
        return f"vectorized, {schedule} needs a multiple of its {devices} stages as micro-batches, not {micro_batches}"
    return ""


def check(table: Table) -> None:
    """Raises ValueError if a table is incomplete, deadlocks, or receives in another order than it sends.

    A device must run each of its stages, and no other, forward and backward on every micro-batch once. Between two
    devices the tensors of one direction must arrive in the order in which they are read, since communication libraries
    match sends and receives by order.
    """
    for device, row in enumerate(table.rows):
        backward: tuple[Kind, ...] = ("I", "W") if table.splits_backward else ("B",)
        whole = {StageTask(kind, stage, micro) for kind in ("F", *backward) for stage in table.stages_of(device)
                 for micro in range(table.micro_batches)}  # fmt: skip
        if wrong := sorted(whole ^ set(row)):
            raise ValueError(f"device {device} lacks, or should not run, {wrong[0]}")
        if len(row) != len(whole):
            raise ValueError(f"device {device} runs {next(t for t in row if row.count(t) > 1)} twice")
    table.timetable(lambda task: 1.0)
    for forward in (True, False):
        sends: dict[tuple[int, int], list[StageTask]] = {}
        read: dict[tuple[int, int], list[StageTask]] = {}
        for device, row in enumerate(table.rows):
            for task in row:
                if (task.kind == "F") != forward or task.kind == "W":
                    continue
                after = task.stage + (1 if forward else -1)
                if 0 <= after < table.stages:
                    sends.setdefault((device, table.device_of(after)), []).append(task)
                before = [n for n in table.needs(task) if n.stage != task.stage]
                for needed in before:
                    read.setdefault((table.device_of(needed.stage), device), []).append(needed)
        for pair, tasks in sends.items():
            for one, other in zip(tasks, read[pair]):
                if one != other:
                    raise ValueError(f"device {pair[1]} needs {other} when device {pair[0]} sends {one}")


# ---- the schedules ---------------------------------------------------------------------------------------------------
def _all_forward_first(devices: int, micro_batches: int, rounds: int) -> list[list[StageTask]]:
    """The rows of GPipe (Huang et al. 2019); with several rounds, of GSPMD's circular pipeline (section 3.3).

    In the latter, a micro-batch passes around the devices once per round.
    """
    micros = range(micro_batches)
    rows = []
    for device in range(devices):
        stages = [device + r * devices for r in range(rounds)]
        forward = [StageTask("F", stage, m) for stage in stages for m in micros]
        rows.append(forward + [StageTask("B", stage, m) for stage in reversed(stages) for m in micros])
    return rows


def _one_forward_one_backward(devices: int, micro_batches: int, rounds: int) -> list[list[StageTask]]:
    """The rows of 1F1B (Narayanan et al. 2021): forward passes to fill the pipeline, then forward and backward in turn.

    With several rounds the stages of a device take turns, each on a group of `devices` micro-batches.
    """

    def forward(k: int, device: int) -> StageTask:
        group, rest = divmod(k, devices * rounds)
        return StageTask("F", rest // devices * devices + device, group * devices + rest % devices)

    def backward(k: int, device: int) -> StageTask:
        group, rest = divmod(k, devices * rounds)
        turn = rounds - 1 - rest // devices
        return StageTask("B", turn * devices + device, group * devices + rest % devices)

    total = micro_batches * rounds
    rows = []
    for device in range(devices):
        ahead = devices - device - 1
        if rounds > 1:
            ahead = 2 * ahead + (rounds - 1) * devices
        ahead = min(ahead, total)
        row = [forward(k, device) for k in range(ahead)]
        for k in range(total - ahead):
            row += [forward(ahead + k, device), backward(k, device)]
        rows.append(row + [backward(k, device) for k in range(total - ahead, total)])
    return rows


def _zero_bubble(devices: int, micro_batches: int, rounds: int) -> list[list[StageTask]]:
    """The rows of ZB-H1 (Qi et al. 2023): 1F1B, but gradients of weights are computed where a device would wait.

    Device d computes the gradients of weights d micro-batches after those of inputs. This work fills the waiting time
    at the start of the first devices and at the end of the last ones. Every device then holds as many micro-batches as
    the first one in 1F1B.
    """
    rows = []
    for device in range(devices):
        ahead = devices - device - 1
        row = [StageTask("F", device, m) for m in range(ahead)]
        for m in range(micro_batches):
            row += [StageTask("F", device, ahead + m)] * (ahead + m < micro_batches) + [StageTask("I", device, m)]
            row += [StageTask("W", device, m - device)] * (m >= device)
        rows.append(row + [StageTask("W", device, m) for m in range(max(0, micro_batches - device), micro_batches)])
    return rows


_MAKERS: Mapping[str, Callable[[int, int, int], list[list[StageTask]]]] = {
    "gpipe": _all_forward_first, "circular": _all_forward_first, "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _one_forward_one_backward, "zero_bubble": _zero_bubble,
}  # fmt: skip
