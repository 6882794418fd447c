"""Pipeline schedules are complete and free of deadlock, with the length and memory that theory gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpshard.parallelism.pipeline.schedules import SCHEDULES, StageTask, Table, check, make, refusal

SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 8), (5, 20), (8, 24)]


def unit(task: StageTask) -> float:
    """A backward pass takes two units: gradients of inputs, and of weights."""
    return 2.0 if task.kind == "B" else 1.0


def tables(*names: str) -> list[Table]:
    result = []
    for schedule in names or SCHEDULES:
        for devices, micros in SIZES:
            for rounds in (1, 2, 3):
                if not refusal(schedule, devices, micros, rounds):
                    result.append(make(schedule, devices, micros, rounds))
    return result


def seconds(table: Table) -> float:
    return max(slot.end for slot in table.timetable(unit))


def test_every_stage_runs_once_forward_and_back_on_every_micro_batch() -> None:
    for table in tables():
        tasks = [task for row in table.rows for task in row]
        kinds = ("F", "I", "W") if table.schedule == "zero_bubble" else ("F", "B")
        assert sorted(tasks) == sorted(
            StageTask(kind, stage, m)
            for kind in kinds for stage in range(table.stages) for m in range(table.micro_batches)
        )  # fmt: skip
        assert list(table.in_order) != [] and set(table.in_order) == set(tasks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_plain_schedules_idle_for_what_fills_and_drains_the_pipeline(schedule: str) -> None:
    for table in tables(schedule):
        if table.rounds == 1:
            p, m = table.devices, table.micro_batches
            assert seconds(table) == 3 * (m + p - 1)
            assert table.bubble(table.timetable(unit)) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("schedule", ["circular", "interleaved_1f1b"])
def test_rounds_divide_the_bubble(schedule: str) -> None:
    for table in tables(schedule):
        p, m, v = table.devices, table.micro_batches, table.rounds
        assert table.bubble(table.timetable(unit)) == pytest.approx((p - 1) / (v * m + p - 1))


def test_gradients_of_weights_fill_two_thirds_of_the_bubble() -> None:
    for table in tables("zero_bubble"):
        assert seconds(table) == 3 * table.micro_batches + table.devices - 1


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_no_more_micro_batches_are_held_than_there_are_stages(schedule: str) -> None:
    for table in tables(schedule):
        assert max(map(table.most_held, range(table.devices))) <= table.devices
    assert make("gpipe", 4, 8).most_held(0) == 8


def test_what_cannot_run_is_said_before_it_runs() -> None:
    table = make("1f1b", 2, 2)
    first, second = table.rows
    late = replace(table, rows=(tuple(sorted(first, key=lambda t: t.kind == "F")), second))
    with pytest.raises(ValueError, match=r"deadlock: device 0 at B0 of stage 0, which needs F0 of stage 0"):
        check(late)
    with pytest.raises(ValueError, match="device 1 lacks, or should not run"):
        check(replace(table, rows=(first, second[:-1])))
    with pytest.raises(ValueError, match="device 1 runs B1 of stage 1 twice"):
        check(replace(table, rows=(first, (*second, second[-1]))))
    gpipe = make("gpipe", 2, 2)
    swapped = tuple(t._replace(micro=1 - t.micro) if t.kind == "F" else t for t in gpipe.rows[1])
    with pytest.raises(ValueError, match="device 1 needs F1 of stage 0 when device 0 sends F0 of stage 0"):
        check(replace(gpipe, rows=(gpipe.rows[0], swapped)))


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (("1f1b", 4, 3, 1), "at least 4 micro-batches, not 3"),
        (("zero_bubble", 4, 3, 1), "at least 4 micro-batches, not 3"),
        (("interleaved_1f1b", 2, 5, 2), "a multiple of its 2 stages"),
        (("1f1b", 2, 4, 2), "1f1b has one round"),
        (("2f2b", 2, 4, 1), "there is no schedule `2f2b`"),
    ],
)
def test_numbers_that_a_schedule_cannot_have_are_refused(numbers: tuple[str, int, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make(*numbers)


def test_a_table_is_drawn_in_units_of_time() -> None:
    assert str(make("1f1b", 2, 2)) == "  0 F0 F1 .  .  B0 -  .  B1 -\n  1 .  F0 B0 -  F1 B1 -  .  ."
    assert "F0/2" in str(make("circular", 2, 2, rounds=2))
