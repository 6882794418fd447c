"""`doctor --measure` recovers the constants behind synthetic measurements, in a file that can be priced."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest
from tpshard.devices.measuring import measure, measure_blocks
from tpshard.devices.measuring.measure import device_file, fit
from tpshard.devices.read import parse
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pricing.cost import Device, ServingOverhead, collective, wire_bytes
from tpshard.parallelism.pricing.network import Topology

CORES = 2
FLOPS, BF16, PACKING, STREAM, FRESH = 80e9, 20e9, 8e9, 25e9, 4e9
"""Of one process with a core to itself; bytes/s of fresh memory."""
EXPONENTIAL = 1.2e-9
SOFTMAX, ATTENTION, BACK = 24.0, 40e9, 35e9
OP, VIEW = 4e-6, 6e-6
HOP, SENT, SKEW, SPREAD = 2e-4, 0.9e9, {2: 5e-4, 4: 3e-3}, {2: 0.04, 4: 0.07}
LOOP, MESSAGE = 6e-3, 4e-4
STORED, COLD = 9e9, 2.5


def process(n: int) -> dict[str, Any]:
    """The measurements of one of n processes on two cores that share evenly; four of them lose a fifth."""
    slower = max(1.0, n / CORES) / (CORES if n == 1 else 1)
    lost = slower * (1.2 if n == 4 else 1.0)
    turns = max(1.0, n / CORES)
    kinds = [(kind, m, b) for kind in ("all_reduce", "all_gather", "all_to_all") for m in {2, n} for b in (64, 1 << 22)]
    return {
        "matmul": [
            [dtype, f, b, (f / rate + (b / PACKING if dtype == "float32" else 0.0)) * slower]
            for dtype, rate in (("float32", FLOPS), ("bfloat16", BF16))
            for f, b in ((3e7, 1.6e6), (2e8, 4e6), (1e9, 5e6), (2e9, 1.2e7))
        ],
        "served": [["fp32", rows, (1.0 + rows / 8) * 1e-9 * slower] for rows in (1, 8, 64)],
        "attention": [
            [[1e8, d, 9, 8 * OP * turns + 1e8 * (1 + SOFTMAX / d) / rate * slower] for d in (16, 32, 64, 128)]
            for rate in (ATTENTION, BACK)
        ],
        "stream": [
            [ops, moved, exps, ops * OP * turns + (moved / STREAM + exps * EXPONENTIAL) * lost]
            for ops, moved, exps in ((496, 3e8, 2e6), (248, 5e8, 4e6), (62, 6e8, 4e6), (31, 6e8, 4e6))
        ],
        "overhead": {
            "op": [OP * turns], "view": [VIEW * turns], "exponential": [EXPONENTIAL * lost],
            "fresh": [lost / FRESH] * 3, "stored": [lost / STORED], "warm": [OP * turns],
            "cold": [OP * turns * COLD],
        },
        "comm": [
            [k, m, b, before, SKEW[n] + measure._hops(k, m) * HOP * turns + wire_bytes(k, b, m, "gloo") / SENT * turns
             + (b / STREAM * lost if k == "all_reduce" else 0.0) + before * SPREAD[n], 0.7 if before < 0.01 else 0.1]
            for k, m, b in kinds for before in ((2e-3, 3e-2) if m == n else (2e-3,))
        ] if n > 1 else [],
        "message": [MESSAGE * n, MESSAGE * n, 9 * MESSAGE] if n > 1 else [],
        "loop": [LOOP, LOOP, 9 * LOOP],
    }  # fmt: skip


@pytest.fixture(scope="module")
def text() -> str:
    result = {n: [process(n) for _ in range(n)] for n in (1, 2, 4)}
    return device_file("synthetic", "2026-01-02", CORES, 8 << 30, result)


@pytest.fixture(scope="module")
def machine(text: str) -> Device:
    return parse(text.encode(), "synthetic.yaml")


def test_fit_recovers_costs_and_leaves_out_negative_ones() -> None:
    exact = fit([(a, b, 3 * a + 0.5 * b) for a, b in ((1, 9), (4, 2), (7, 30), (2, 2))])
    assert exact.costs == pytest.approx((3, 0.5)) and exact.error < 1e-9
    falling = fit([(1, a, 10 / a) for a in (1, 2, 4, 8)])  # more work in less time: no rate explains it
    assert min(falling.costs) >= 0 and falling.error > 0.1


def test_a_slow_round_of_three_does_not_count(text: str) -> None:
    def slower(times: Any) -> Any:
        rows = {k: [[*row[:-1], row[-1] * 3] for row in times[k]] for k in ("matmul", "stream")}
        ways = [[[*row[:-1], row[-1] * 3] for row in way] for way in times["attention"]]
        overhead = {k: [3 * t for t in v] for k, v in times["overhead"].items()}
        return times | rows | {"attention": ways, "overhead": overhead}

    rounds = [{n: [process(n) for _ in range(n)] for n in (1, 2, 4)} for _ in range(3)]
    rounds[1] = {n: [slower(one) for one in times] for n, times in rounds[1].items()}
    typical = {n: measure.typical([one[n] for one in rounds]) for n in (1, 2, 4)}
    assert device_file("synthetic", "2026-01-02", CORES, 8 << 30, typical) == text
    assert device_file("synthetic", "2026-01-02", CORES, 8 << 30, rounds[1]) != text


def test_constants_come_back_from_synthetic_measurements(machine: Device) -> None:
    two = machine.shared_by(2)  # a core each
    assert two.rate("float32") == pytest.approx(FLOPS, rel=0.02)
    assert two.rate("bfloat16") == pytest.approx(BF16, rel=0.02)
    assert two.memory_bandwidth * two.cpu.packing == pytest.approx(PACKING, rel=0.03)
    assert two.stream_rate == pytest.approx(STREAM, rel=0.02)
    assert (two.overhead.eager_op_s, two.cpu.view_s) == (pytest.approx(OP, rel=0.02), pytest.approx(VIEW, rel=0.02))
    assert two.cpu.softmax == pytest.approx(SOFTMAX, rel=0.05)
    assert two.rate("fp32") * two.efficiency.attention == pytest.approx(ATTENTION, rel=0.05)
    assert two.rate("fp32") * two.efficiency.attention_backward == pytest.approx(BACK, rel=0.05)
    assert two.inside.latency_s == pytest.approx(HOP, rel=0.05)
    assert two.inside.bandwidth == pytest.approx(SENT, rel=0.05) and not two.inside.shared
    assert two.cpu.growth == pytest.approx(FRESH, rel=0.02)
    assert two.cpu.cold_bandwidth == pytest.approx(STORED, rel=0.02)
    assert two.cpu.cold_overhead == pytest.approx(COLD, rel=0.02)
    assert two.cpu.exponential / two.memory_bandwidth == pytest.approx(EXPONENTIAL, rel=0.02)
    assert (two.cpu.skew_s, two.cpu.spread) == (pytest.approx(SKEW[2], rel=0.05), pytest.approx(SPREAD[2], rel=0.05))
    assert two.overhead.step_s == pytest.approx(LOOP)
    assert [two.cpu.product_s("fp32", rows) for rows in (1, 4, 8, 128)] == pytest.approx(
        [1.125e-9, 1.125e-9 + 3 / 7 * 0.875e-9, 2e-9, 18e-9], rel=0.02
    )  # as measured, or between and beyond what was
    assert two.cpu.product_s("int4", 1) is None
    assert (two.cpu.message_s, machine.shared_by(4).cpu.message_s) == pytest.approx((2 * MESSAGE, 4 * MESSAGE))
    assert machine.with_own_core(4).cpu.message_s == pytest.approx(4 * MESSAGE)


def test_the_time_of_a_servers_host_is_written_and_read() -> None:
    result = {n: [process(n) for _ in range(n)] for n in (1, 2, 4)}
    host = ServingOverhead(0.0021, 0.0003, 0.006)
    machine = parse(device_file("synthetic", "2026-01-02", CORES, 8 << 30, result, host).encode(), "synthetic.yaml")
    read = machine.overhead.serving
    assert astuple(read) == pytest.approx(astuple(host)) and machine.shared_by(4).overhead.serving == read
    assert "1 and 8 clients" in machine.fitted["serving"]


def test_four_processes_on_two_cores_take_turns_and_lose_some(machine: Device) -> None:
    two, four = machine.shared_by(2), machine.shared_by(4)
    assert four.rate("fp32") == pytest.approx(two.rate("fp32") / 2, rel=0.02)
    assert four.memory_bandwidth == pytest.approx(two.memory_bandwidth / 2 / 1.2, rel=0.02)
    assert four.cpu.growth == pytest.approx(two.cpu.growth / 2 / 1.2, rel=0.02)
    assert four.overhead.eager_op_s == pytest.approx(2 * two.overhead.eager_op_s, rel=0.02)
    assert (four.cpu.skew_s, four.cpu.spread) == (pytest.approx(SKEW[4], rel=0.05), pytest.approx(SPREAD[4], rel=0.05))
    eight = machine.shared_by(8)  # as nobody measured: what four lose, and turns twice as long
    assert eight.overhead.eager_op_s == pytest.approx(2 * four.overhead.eager_op_s)
    assert eight.rate("fp32") == pytest.approx(four.rate("fp32") / 2)
    assert eight.inside.bandwidth == pytest.approx(four.inside.bandwidth / 2)
    assert eight.cpu.skew_s == pytest.approx(2 * four.cpu.skew_s)


def test_a_collective_costs_what_was_measured(machine: Device) -> None:
    four, mesh = machine.shared_by(4), Mesh({"a": 2, "b": 2})
    cost = collective(four, Topology(mesh, 4), "all_gather", (mesh.axis("a"),), 1 << 22)
    assert cost.seconds == pytest.approx(SKEW[4] + 2 * (HOP + (1 << 21) / SENT), rel=0.05)
    prompt = replace(four, cpu=replace(four.cpu, skew_s=0.0))
    alone = collective(prompt, Topology(mesh, 4), "all_gather", (mesh.axis("a"),), 1 << 22)
    assert cost.seconds - alone.seconds == pytest.approx(four.cpu.skew_s)
    assert four.inside.slowdown == pytest.approx(0.7)


def test_what_one_process_waits_for_another_is_not_late_with() -> None:
    """A collective's cost is the mean over its members, whichever of them was first."""
    even = [process(2) for _ in range(2)]
    uneven = [
        {**one, "comm": [[*row[:4], row[4] * share, row[5]] for row in one["comm"]]}
        for one, share in zip(even, (0.5, 1.5), strict=True)
    ]
    (actual, error), (expected, expected_error) = (measure.communicating(one, STREAM) for one in (uneven, even))
    assert (*astuple(actual), error) == pytest.approx((*astuple(expected), expected_error))


def test_blocks_count_what_they_move() -> None:
    size = 1 << 16
    tape, result = measure_blocks.blocks(size, 2)
    (got,) = tape.module(result)(*tape.inputs)
    assert got.shape == result.meta["value"].shape and got.isfinite().all()
    assert tape.ops % 2 == 0 and tape.exponentials == 2 * 2 * size
    assert tape.moved > 2 * tape.ops * 4 * size
