"""Servers of other engines: what a step computes by its rows, its time as an engine runs it, and its traffic."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tpshard.devices.read import device
from tpshard.plan.server.server_steps import server_of
from tpshard.plan.server.traffic import Traffic
from tpshard.programs.server.serve_setting import Size
from tpshard.programs.server.serving import build_serving
from tpshard.recipes.reading.load import loads

from engines.engine_steps import EngineProfile, EngineSteps, StepLoad, WeightFormat
from engines.engine_traffic import serve_traffic
from engines.step_work import StepWork, step_work

ENGINE = EngineProfile("engine", host_s=1e-3, request_s=5e-3, step_tokens=64)


@cache
def work_of(preset: str, built: int, layers: int) -> StepWork:
    recipe = loads(
        f"name: tiny\nmodel: {{preset: {preset}, layers: {built}, dtype: bf16}}\n"
        "cluster: {device: a100-80g, devices_per_node: 2}\nmesh: {tp: 2}\nserve: {mesh: {tp: 2}, requests: 32}\n"
    )
    programs = build_serving(server_of(recipe)[0], (Size(16), Size(32))).by_size
    return step_work({size.rows: program for size, program in programs.items()}, layers, built)


def steps_of(preset: str = "tiny", engine: EngineProfile = ENGINE, **changes: object) -> EngineSteps:
    return replace(EngineSteps(work_of(preset, 2, 8), device("a100-80g"), engine), **changes)


def test_two_layers_say_what_more_compute() -> None:
    few, more = work_of("tiny", 2, 4), work_of("tiny", 4, 4)
    assert few.weight_bytes == more.weight_bytes and few.position_bytes == more.position_bytes == 4 * 2 * 2 * 2 * 16
    for name in ("flops", "weights", "summed"):
        sums = [sum(getattr(one, name) * one.times for one in work.kernels) for work in (few, more)]
        assert sums[0] == pytest.approx(sums[1]) and sums[0] > 0


def test_a_step_reads_the_experts_that_its_rows_choose() -> None:
    work, one = work_of("tiny-moe", 2, 8), steps_of("tiny-moe", weights=WeightFormat(1.0, only="experts"))
    (routed,) = {kernel.routed for kernel in work.kernels if kernel.routed}
    assert routed == 3 * 8 * 128 * 64 * 2 and {k.chosen for k in work.kernels if k.routed} == {2 / 8}
    assert work.weight_bytes - one.weight_bytes == pytest.approx(8 * routed / 2)


def test_an_engine_s_ways_count() -> None:
    loads_of = StepLoad(sequences=4, positions=100)
    base = steps_of().seconds(loads_of)
    assert steps_of(engine=replace(ENGINE, host_s=3e-3)).seconds(loads_of) == pytest.approx(base + 2e-3)
    assert steps_of(engine=replace(ENGINE, captured=1, launch_s=1e-3)).seconds(loads_of) > base + 50e-3
    slow = replace(device("a100-80g"), efficiency=replace(device("a100-80g").efficiency, reading=0.1))
    assert slow.serving.stream_rate == 0.1 * slow.memory_bandwidth and steps_of(device=slow).seconds(loads_of) > base
    assert steps_of(cache_bytes=1.0).seconds(loads_of) < base < steps_of().seconds(replace(loads_of, prompt=64))


@pytest.mark.parametrize("reserves", [True, False])
def test_all_are_answered_however_little_the_cache_holds(reserves: bool) -> None:
    steps = steps_of(engine=replace(ENGINE, reserves=reserves, running=8))
    steps.__dict__["positions"] = 100  # of the cache, in place of the device's
    run = serve_traffic(steps, Traffic(20, 20, clients=6, count=12), 0.2)
    assert run.limit == 2 and len(run.rehearsal.answers) == 12 and (run.rehearsal.preempted > 0) == (not reserves)
    free = serve_traffic(steps_of(), Traffic(20, 20, clients=6, count=12), 0.2)
    assert free.rehearsal.seconds < run.rehearsal.seconds and free.limit == 256
    assert all(a.ttft > ENGINE.request_s for a in free.rehearsal.answers)
    with pytest.raises(ValueError, match="120 tokens do not fit"):
        serve_traffic(steps, Traffic(100, 20))
