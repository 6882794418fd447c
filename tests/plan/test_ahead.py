"""What a forked process computes ahead is what this process would have computed, however the fork ends."""

from __future__ import annotations

import os
import signal
import time

import pytest
from small_recipe import RECIPE
from tpshard.plan import planner
from tpshard.plan.report import report_file
from tpshard.plan.search import suggest
from tpshard.programs.parts import ahead as module
from tpshard.programs.parts.ahead import ahead
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import loads


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forks whatever this machine's cores, memory and threads are; the list has each fork's id."""
    ids: list[int] = []
    real = module._start

    def counted(function):
        if (started := real(function)) is not None:
            ids.append(started[0])
        return started

    monkeypatch.setattr(module, "_can_fork", lambda: True)
    monkeypatch.setattr(module, "_start", counted)
    return ids


def has_ended(process: int) -> bool:
    with pytest.raises(ChildProcessError):
        os.waitpid(process, 0)
    return True


def test_a_fork_computes_the_result_and_forks_no_other(forks: list[int]) -> None:
    def nested() -> tuple[int, int]:
        with ahead(os.getpid) as result:
            return os.getpid(), result()

    with ahead(nested) as result, ahead(os.getpid) as second:
        assert second() == os.getpid() and result() == (forks[0], forks[0])
    assert len(forks) == 1 and has_ended(forks[0])
    with ahead(os.getpid) as result:
        assert result() == forks[1]


def test_an_error_is_raised_in_this_process_and_a_fork_that_dies_is_replaced(forks: list[int]) -> None:
    here = os.getpid()

    def fails() -> None:
        raise ValueError("no")

    def dies() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with pytest.raises(ValueError, match="no"), ahead(fails) as nothing:
        nothing()
    with ahead(dies) as result:
        assert result() == here
    assert len(forks) == 2


def test_a_fork_that_nobody_waits_for_ends(forks: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), ahead(lambda: time.sleep(60)):
        raise KeyboardInterrupt
    assert has_ended(forks[0])


def test_a_plan_is_the_same_with_forks(forks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggest, "GAIN", 10.0)  # shows the price of every change that is tried
    recipe = loads(RECIPE, ["remat=full"])

    def plan(variants: Variants) -> str:
        report = planner.planned(recipe, "", variants=variants).report
        report.suggestions = suggest.promising(report, recipe, variants)
        assert len(report.suggestions) == 2
        return report_file.dumps(report)

    alone = plan(Variants())
    assert not forks and plan(Variants(fork=True)) == alone
    assert len(forks) == 2  # the base's buckets, and the second suggestion
