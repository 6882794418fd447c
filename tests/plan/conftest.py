"""Fixtures of this folder's tests: one small plan; and the path of helpers that importlib mode does not find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tpshard.plan import planner
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import Report
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.reading.load import loads

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE


@pytest.fixture(scope="session")
def programs() -> TrainingPrograms:
    return planner.build_programs(Setting.of(loads(RECIPE)))


@pytest.fixture(scope="session")
def planned(programs: TrainingPrograms) -> Planned:
    return planner.planned_training(programs, "small.yaml")


@pytest.fixture(scope="session")
def report(planned: Planned) -> Report:
    return planned.report


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path / "small.yaml"
