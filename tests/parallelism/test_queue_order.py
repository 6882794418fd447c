"""No schedule hangs on a GPU, where transfers of one communicator run in the order of their issue."""

from __future__ import annotations

import pytest
from tpshard.parallelism.pipeline.queue_order import check_queues, edges_of, streams_of
from tpshard.parallelism.pipeline.schedules import ROUNDS, SCHEDULES, make, refusal
from tpshard.parallelism.pipeline.stepping import RECEIVES_AHEAD

SIZES = [(2, 2), (2, 6), (3, 6), (4, 4), (4, 8), (8, 8), (8, 16), (16, 32)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_a_queue_per_edge_nothing_hangs(schedule: str) -> None:
    for devices, micros in SIZES:
        for rounds in (1, 2, 3) if schedule in ROUNDS and devices < 16 else (1,):
            if not refusal(schedule, devices, micros, rounds):
                check_queues(make(schedule, devices, micros, rounds), RECEIVES_AHEAD, groups=2)


@pytest.mark.parametrize(
    ("schedule", "devices", "micros", "rounds"),
    [
        ("1f1b", 4, 8, 1),
        ("1f1b", 8, 8, 1),
        ("zero_bubble", 8, 8, 1),
        ("interleaved_1f1b", 2, 4, 2),
        ("circular", 2, 4, 2),
    ],
)
def test_a_queue_per_direction_hangs(schedule: str, devices: int, micros: int, rounds: int) -> None:
    table = make(schedule, devices, micros, rounds)
    with pytest.raises(ValueError, match=r"wait for each other forever: device 0 at the receive of"):
        check_queues(table, RECEIVES_AHEAD, queue=lambda edge: edge.up)


def test_streams_that_share_connections_may_hang() -> None:
    table = make("interleaved_1f1b", 4, 8, 2)
    check_queues(table, RECEIVES_AHEAD, groups=3, connections=streams_of(table, 0, 3))
    with pytest.raises(ValueError, match="forever"):
        check_queues(table, RECEIVES_AHEAD, groups=3, connections=4)


def test_an_edge_is_a_pair_of_devices_and_a_way() -> None:
    assert [(e.sender, e.receiver, e.up) for e in edges_of(make("1f1b", 3, 3))] == [
        (1, 0, False), (2, 1, False), (0, 1, True), (1, 2, True)
    ]  # fmt: skip
    wrapped = {(e.sender, e.receiver, e.up) for e in edges_of(make("interleaved_1f1b", 2, 2, 2))}
    assert wrapped == {(0, 1, True), (1, 0, True), (0, 1, False), (1, 0, False)}
