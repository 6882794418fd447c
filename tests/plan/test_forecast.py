"""The forecast of a run's duration agrees with runs whose failures are drawn at random."""

from __future__ import annotations

import json
import math
import random

import pytest
from tpshard.cli import main
from tpshard.diagnostics.diagnostic import Exit
from tpshard.plan.step.forecast import (
    ASSUMED_FAILURES,
    Conditions,
    amount,
    best_interval,
    expected_seconds,
    forecast,
    rows,
)


def lifetime(work: float, interval: float, save: float, restart: float, between: float, rng: random.Random) -> float:
    """Seconds of one run with randomly drawn failures."""
    spent, done, failure = 0.0, 0.0, rng.expovariate(1 / between)
    while done < work:
        part = min(interval, work - done)
        while failure < part + save:
            spent += failure
            failure = rng.expovariate(1 / between)
            while failure < restart:  # it may fail while it restarts
                spent += failure
                failure = rng.expovariate(1 / between)
            spent, failure = spent + restart, failure - restart
        spent, failure, done = spent + part + save, failure - part - save, done + part
    return spent


@pytest.mark.parametrize(
    ("interval", "save", "restart", "between"), [(600, 20, 100, 20_000), (2000, 60, 300, 5000), (500, 100, 0, 1000)]
)
def test_the_expected_time_is_the_mean_of_runs(interval: float, save: float, restart: float, between: float) -> None:
    rng, work, runs = random.Random(1), 200_000.0, 400
    mean = sum(lifetime(work, interval, save, restart, between, rng) for _ in range(runs)) / runs
    assert expected_seconds(work, interval, save, restart, between) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("save", "between"), [(10, 1e5), (60, 1e4), (300, 3e4)])
def test_no_other_interval_is_shorter(save: float, between: float) -> None:
    best = best_interval(save, between)
    least = expected_seconds(1e6, best, save, 60, between)
    others = [expected_seconds(1e6, best * 1.1**k, save, 60, between) for k in range(-20, 21)]
    assert min(others) >= least * (1 - 1e-4)
    assert best == pytest.approx(math.sqrt(2 * save * between), rel=0.2)  # Young's, for rare failures


def test_what_is_not_given_is_assumed_and_named() -> None:
    forecasted = forecast(2.0, 1000, 500, 64, 8, 16e9, 100, "calibrated", Conditions(tokens=1e6, price=2.0))
    assert (forecasted.steps, forecasted.tokens, forecasted.work_s) == (1000, 1e6, 2000.0)
    assert forecasted.assumed == ("failures", "restart_s", "save_s") and forecasted.save_s == pytest.approx(1.0)
    assert forecasted.between_failures_s == pytest.approx(3600 / (64 * ASSUMED_FAILURES))
    as_json = forecasted.to_json()
    assert as_json["cost"] == pytest.approx(2 * 64 * forecasted.total_s / 3600) and as_json["kwh"] is None
    sure = forecast(2.0, 1000, 500, 64, 8, 16e9, 100, "roofline", Conditions(failures=0, restart_s=1, save_s=5))
    assert sure.assumed == () and sure.total_s == pytest.approx(500 * 2.0 + 5 * 5)
    assert sure.to_json()["between_failures_s"] is None and "without failures" in rows(sure)[-1]


def test_a_better_interval_is_offered() -> None:
    conditions = Conditions(failures=1e-3, restart_s=60, save_s=10)
    forecasted = forecast(1.0, 1000, 100_000, 100, 1, 0, 20_000, "roofline", conditions)
    assert forecasted.best_total_s < 0.8 * forecasted.total_s
    assert f"checkpoint.every_steps: {forecasted.best_every_steps}" in rows(forecasted)[-1]


def test_tokens_are_written_as_people_write_them() -> None:
    assert [amount(text) for text in ("15T", "1.5e12", "300B", "20")] == [15e12, 1.5e12, 3e11, 20]
    for text in ("", "T", "-3B", "many", "0", "1e400", "1e308T", "1.2.3"):
        with pytest.raises(ValueError, match="15T"):
            amount(text)


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "quickstart", "model.layers=1", "--dry-run"]
    assert main.run([*small, "--tokens", "1B", "--price", "3", "--json"]) == Exit.DONE
    parsed = json.loads(capsys.readouterr().out)["forecast"]
    assert parsed["tokens"] >= 1e9 and parsed["cost"] == pytest.approx(3 * parsed["device_hours"])
    assert main.run([*small, "--tokens", "some"]) == Exit.USAGE
    assert main.run([*small, "--price", "1", "--for", "decode"]) == Exit.USAGE
