"""Fixtures of this folder's tests: one small plan; and the path of helpers that importlib mode does not find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tpshard.plan import make
from tpshard.plan.report import Report
from tpshard.programs import training
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE


@pytest.fixture(scope="session")
def programs() -> training.TrainingPrograms:
    return make.build_programs(Setting.of(loads(RECIPE)))


@pytest.fixture(scope="session")
def report(programs: training.TrainingPrograms) -> Report:
    return make.report_of_training(programs, "small.yaml")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path / "small.yaml"
