"""`plan --for serve`: interpolated step times, the highest rate within limits, the search's front, the command."""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path

import pytest
from tpshard.cli.main import run as tpshard
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.parallelism.pricing.timeline import price
from tpshard.plan.questions.serving_answers import FrontPoint, TimeLimits, answers, screen, unbeaten
from tpshard.plan.server.rehearse import rehearse
from tpshard.plan.server.server_prices import ServerBuilder
from tpshard.plan.server.traffic import Traffic
from tpshard.recipes.reading.load import loads

RECIPE = """name: tiny
model: {preset: tiny, layers: 1}
cluster: {device: cpu, devices_per_node: 2}
serve: {mesh: {tp: 2}}
"""


def test_a_step_between_priced_states_takes_what_its_program_does() -> None:
    server = ServerBuilder().build(loads(RECIPE, ["cluster.device=h100-sxm-80g"]))
    prices, draw = server.prices, random.Random(0)
    for _ in range(8):
        rows = draw.randrange(129, 500)  # smaller steps are replayed
        actual = CacheReads(draw.uniform(1, 300), draw.uniform(1, 100))
        size = server.programs.fitting(rows)
        padded = CacheReads(actual.blocks, (actual.by_row * rows + size.rows - rows) / size.rows)
        program = server.programs.by_size[size]
        exact = price(program, prices.device, prices.per_host, compiled="none", cached=padded)
        chosen_s = prices.choosing_s(size.rows)
        assert 0 < chosen_s < prices(rows, actual) == pytest.approx(exact.run().seconds + chosen_s, rel=0.01)


@pytest.mark.parametrize("ways", [1, 2])
def test_the_host_launches_small_steps_of_gpus_at_once(ways: int) -> None:
    """As CUDA graphs; large ones an operation at a time."""
    prices = ServerBuilder().build(loads(RECIPE, ["cluster.device=h100-sxm-80g", f"serve.mesh.tp={ways}"])).prices
    read = CacheReads(1, 1)
    small, large = min(prices.steps, key=lambda size: size.rows), max(prices.steps, key=lambda size: size.rows)
    eager, exact = (
        price(prices.steps[size], prices.device, prices.per_host, compiled="none", cached=read).run().seconds
        for size in (small, large)
    )
    assert prices(small.rows, read) - prices.choosing_s(small.rows) < 0.75 * eager
    assert prices(large.rows, read) - prices.choosing_s(large.rows) == pytest.approx(exact)


def test_the_highest_rate_keeps_the_limits_and_a_higher_one_does_not() -> None:
    recipe, limits = loads(RECIPE), TimeLimits(ttft=0.03, tpot=0.005)
    answered = answers(recipe, Traffic(40, 16, count=200), limits)
    assert (
        answered.highest is not None
        and answered.highest.within_limits
        and 0 < answered.highest.rate < answered.saturated.rate
    )
    assert answered.highest.ttft_s[1] <= 0.03 and answered.highest.tpot_s[1] <= 0.005
    more = rehearse(
        answered.server.room, Traffic(40, 16, 1.1 * answered.highest.rate, count=200), answered.server.prices
    )
    assert not limits.hold_for(more)


def test_a_device_file_with_the_hosts_time_adds_it_and_one_without_says_so(tmp_path: Path) -> None:
    shipped = resources.files("tpshard.devices").joinpath("cpu.yaml").read_text()
    assert "constants: {" in shipped
    host = "constants: {serve_step: 40 ms, serve_token: 2 ms, serve_request: 300 ms, "
    file = tmp_path / "host.yaml"
    file.write_text(shipped.replace("constants: {", host))
    load = Traffic(40, 16, rate=0.1, count=20)
    without, with_host = (
        answers(loads(RECIPE, [f"cluster.device={device}"]), load, TimeLimits()) for device in ("cpu", file)
    )
    assert without.at_rate is not None and with_host.at_rate is not None
    assert with_host.at_rate.tpot_s[0] - without.at_rate.tpot_s[0] == pytest.approx(0.042, rel=1e-6)
    assert with_host.at_rate.ttft_s[0] - without.at_rate.ttft_s[0] == pytest.approx(0.342, rel=1e-6)
    assert "has no `serve_step`" in screen(without) and "40 ms a step" in screen(with_host)
    assert with_host.to_json()["host"] == {"step_s": 0.04, "token_s": 0.002, "request_s": 0.3}


def test_no_point_of_a_front_beats_another() -> None:
    points = [
        FrontPoint("tp 1", i, tokens, tpot, 0.0, 0.0) for i, (tokens, tpot) in enumerate([(9, 3), (5, 1), (4, 2)])
    ]
    assert {point.requests for point in unbeaten(points)} == {0, 1}


def test_the_command_answers_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(RECIPE)
    load = ["plan", str(file), "--for", "serve", "--prompt", "40", "--answer", "8", "--count", "50"]
    assert tpshard([*load, "--rate", "20", "--ttft", "0.1", "--json", "--svg", str(tmp_path / "load.svg")]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["at_rate"]["kept"] and parsed["at_rate"]["ttft_s"][0] <= parsed["at_rate"]["ttft_s"][1] <= 0.1
    assert parsed["cache"]["requests"] == parsed["cache"]["tokens"] // 48 and len(parsed["curve"]) == 10
    assert (tmp_path / "load.svg").read_text().count("<polyline") == 4
    assert tpshard([*load[:-2], "--answer", "800"]) == 4
    assert "longer than the 256 that the model is made for" in capsys.readouterr().err
    for wrong in (load[:4], ["plan", str(file), "--rate", "2"], [*load, "--html", "x.html"], [*load, "--rate", "0"]):
        assert tpshard(wrong) == 2
