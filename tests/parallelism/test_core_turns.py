"""Stages that share a host's cores take turns, and cores never idle while a stage could compute."""

from __future__ import annotations

import pytest
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pipeline import core_turns
from tpshard.parallelism.pipeline.core_turns import HostShare, host_shares
from tpshard.parallelism.pipeline.schedules import StageTask, Table, make

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1)]
TABLES = [make(name, 4, 8, rounds) for name, rounds in SCHEDULES]
ONE_HOST = [HostShare(0, 1)] * 4


def seconds(task: StageTask) -> float:
    return {"F": 1.0, "B": 2.0, "I": 1.1, "W": 0.9}[task.kind] * (1 + 0.1 * task.stage)


def late(task: StageTask) -> float:
    return 0.3


def length(table: Table, shares: list[HostShare], cores: int) -> float:
    return max(slot.end for slot in core_turns.timetable(table, seconds, late, shares, cores))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.schedule)
def test_with_a_core_for_each_process_tasks_run_as_in_the_table(table: Table) -> None:
    plain = {slot.task: slot for slot in table.timetable(seconds, late)}
    for shares, cores in ((ONE_HOST, 4), ([HostShare(d, 1) for d in range(4)], 1), ([HostShare(0, 2)] * 4, 8)):
        slots = core_turns.timetable(table, seconds, late, shares, cores)
        assert len(slots) == len(plain)
        for task, start, end in slots:
            assert (start, end) == pytest.approx((plain[task].start, plain[task].end), abs=1e-9)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.schedule)
def test_fewer_cores_take_longer_but_fill_the_bubble(table: Table) -> None:
    work = sum(seconds(task) for row in table.rows for task in row)
    four, two, one = (length(table, ONE_HOST, cores) for cores in (4, 2, 1))
    assert four < two < 2 * four, "stages that wait leave their core to others"
    assert work / 2 <= two
    assert work - 1e-9 <= one <= 1.01 * work + 5, "one core always computes, but for what travels"
    twice = length(table, [HostShare(d // 2, 1) for d in range(4)], 1)
    assert four < twice <= 2 * four + 1e-9, "two hosts with a core and two stages each"
    assert length(table, [HostShare(d, 2) for d in range(4)], 1) == pytest.approx(
        max(s.end for s in table.timetable(lambda task: 2 * seconds(task), late))
    ), "two processes of one stage always compute together"


def test_two_stages_share_one_core_by_halves() -> None:
    table = Table("by hand", 2, 2, 2, ((StageTask("F", 0, 0), StageTask("F", 0, 1)), (StageTask("F", 1, 0),)))
    slots = core_turns.timetable(table, lambda task: 1.0, lambda task: 0.5, [HostShare(0, 1)] * 2, 1)
    # F1 of stage 0 has the core from 1 to 1.5; from then on both at half speed: its rest of 0.5 takes 1 second
    assert [(str(task), start, end) for task, start, end in slots] == [
        ("F0 of stage 0", 0.0, 1.0), ("F1 of stage 0", 1.0, 2.5), ("F0 of stage 1", 1.5, 3.0)
    ]  # fmt: skip


def test_a_position_on_the_pipelines_axis_knows_its_host() -> None:
    mesh = Mesh({"pp": 4, "tp": 2})
    assert host_shares(mesh, mesh.axis("pp"), 8) == [HostShare(0, 2)] * 4
    assert host_shares(mesh, mesh.axis("pp"), 4) == [HostShare(0, 2), HostShare(0, 2), HostShare(1, 2), HostShare(1, 2)]
    mesh = Mesh({"fsdp": 2, "pp": 2})
    assert host_shares(mesh, mesh.axis("pp"), 2) == [HostShare(0, 1)] * 2
