"""A pipeline's timetable on hosts with fewer cores than processes, which then take turns on the cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.pipeline.schedules import Slot, StageTask, Table


class HostShare(NamedTuple):
    """The host of one pipeline device, and the number of the device's processes on it."""

    host: int
    processes: int


def host_shares(mesh: Mesh, axis: Axis, per_host: int) -> list[HostShare]:
    """The share of each position on the pipeline's axis: the host of its first rank, and its number of ranks there."""
    ranks: dict[int, list[int]] = {}
    for rank in range(mesh.ranks):
        ranks.setdefault(mesh.index(axis, rank), []).append(rank // per_host)
    return [HostShare(hosts[0], hosts.count(hosts[0])) for _, hosts in sorted(ranks.items())]


def timetable(
    table: Table, seconds: Callable[[StageTask], float], late: Callable[[StageTask], float],
    shares: Sequence[HostShare], cores: int,
) -> list[Slot]:  # fmt: skip
    """The start and end of every task of a pipeline whose processes share `cores` cores per host.

    While n > cores processes of a host compute, each runs at cores / n of its speed. seconds(task): its time with a
    core per process. late(task): seconds until another device has its result. shares: one per device of the table.
    Raises ValueError for a deadlock.
    """
    at, now = [0] * table.devices, 0.0
    began: dict[StageTask, float] = {}
    ended: dict[StageTask, float] = {}
    left: dict[int, float] = {}  # seconds of the task that each device runs, at full speed
    slots: list[Slot] = []
    while True:
        due = math.inf  # when the next input arrives
        for device, row in enumerate(table.rows):
            if device in left or at[device] == len(row):
                continue
            task = row[at[device]]
            needed = list(table.needs(task))
            if all(other in ended for other in needed):
                arrivals = (ended[n] + (late(n) if table.device_of(n.stage) != device else 0.0) for n in needed)
                start = max([now, *arrivals])
                if start <= now:
                    began[task], left[device] = now, seconds(task)
                due = min(due, start) if start > now else due
        if not left and due == math.inf:
            break
        busy: dict[int, int] = {}
        for device in left:
            busy[shares[device].host] = busy.get(shares[device].host, 0) + shares[device].processes
        speed = {device: min(1.0, cores / busy[shares[device].host]) for device in left}
        first = min(((work / speed[device], device) for device, work in left.items()), default=(math.inf, -1))
        step = min(first[0], due - now)
        for device in left:
            left[device] -= step * speed[device]
        now = due if step < first[0] else now + step
        if step == first[0]:
            device = first[1]
            task = table.rows[device][at[device]]
            ended[task] = now
            slots.append(Slot(task, began[task], now))
            del left[device]
            at[device] += 1
    if any(at[d] < len(row) for d, row in enumerate(table.rows)):
        table.timetable(seconds, late)  # raises, and names what waits
    return sorted(slots, key=lambda slot: (slot.start, slot.end, table.device_of(slot.task.stage)))
