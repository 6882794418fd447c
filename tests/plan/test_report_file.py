"""A saved report answers what needs no programs, without torch."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from small_model import of_small_model
from small_recipe import RECIPE
from tpshard.cli.main import run as tpshard
from tpshard.diagnostics.diagnostic import Exit
from tpshard.plan import outputs, planner, saved_plan
from tpshard.plan.questions import diff
from tpshard.plan.report import report_file
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import Report
from tpshard.recipes.reading.load import loads

ANSWERS = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from tpshard.plan import outputs
from tpshard.plan.questions import diff
from tpshard.plan.report import report_file
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report
report, drawing = (report_file.loads(Path(sys.argv[1], kind.__name__).read_text(), kind) for kind in (Report, Drawing))
for kind in ("json", "screen", "verbose", "page", "trace", "svg"):
    sys.stdout.write(outputs.text(kind, report, lambda: drawing))
sys.stdout.write(diff.text(diff.diff(report, report)))
"""
STAGED = of_small_model(
    """
name: staged
cluster: {device: cpu}
mesh: {pp: 2, fsdp: 2}
batch: {global_sequences: 8, per_device: 1}
pipeline: {schedule: interleaved_1f1b, rounds: 2}
""",
    layers=4,
)


def test_a_report_and_its_drawing_are_read_back_whole() -> None:
    planned = planner.planned(loads(STAGED), "staged.yaml")
    for value in (planned.report, planned.drawing):
        text = report_file.dumps(value)
        assert report_file.dumps(report_file.loads(text, type(value))) == text  # type: ignore[type-var, arg-type]
    assert report_file.loads("[]", Report) is None and report_file.loads("no JSON", Report) is None


def test_a_saved_report_answers_as_the_plan_did_without_torch(planned: Planned, tmp_path: Path) -> None:
    report = planned.report
    for value in (report, planned.drawing):
        (tmp_path / type(value).__name__).write_text(report_file.dumps(value))
    done = subprocess.run([sys.executable, "-c", ANSWERS, str(tmp_path)], capture_output=True, text=True, check=False)
    kinds = ("json", "screen", "verbose", "page", "trace", "svg")
    expected = [outputs.text(kind, report, lambda: planned.drawing) for kind in kinds]
    expected.append(diff.text(diff.diff(report, report)))
    assert (done.returncode, done.stdout) == (0, "".join(expected)), done.stderr


def test_what_is_not_drawn_makes_no_drawing() -> None:
    """It is many times as large as the report."""

    def refuse() -> Drawing:
        raise AssertionError("a screen needs no drawing")

    report = planner.report(loads(STAGED), "staged.yaml")
    assert all(outputs.text(kind, report, refuse) for kind in ("json", "screen", "verbose"))
    assert not outputs.draws(outputs.PlanOptions(dry_run=True)) and outputs.draws(outputs.PlanOptions())


def test_a_saved_plan_is_read_as_a_recipe_is_planned(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a comparison; what only its programs can answer is refused."""
    file = str(tmp_path / "plan.json")
    monkeypatch.setenv("COLUMNS", "100")
    saved_plan.write(Path(file), saved_plan.dumps(planned, loads(RECIPE)))
    monkeypatch.setattr(planner, "planned", lambda *_: pytest.fail("a saved plan is planned again"))
    for words, kind in ([], "screen"), (["--json"], "json"), (["-v", "--dry-run"], "verbose"):
        assert tpshard(["plan", file, *words]) == Exit.DONE
        assert capsys.readouterr().out == outputs.text(kind, planned.report, lambda: planned.drawing)
    assert tpshard(["plan", file, "--diff", file, "--json"]) == Exit.DONE
    changed = json.loads(capsys.readouterr().out)
    assert (changed["before"], changed["after"], changed["shardings"]) == (file, file, [])
    assert tpshard(["plan", file, "--tokens", "1B"]) == Exit.DONE
    assert "1.00 B tokens" in capsys.readouterr().out
    for words in (
        ["mesh.tp=1"],
        ["--explain", "logits"],
        ["--device", "h200"],
        ["--svg", "x"],
        ["--diff", "mesh.tp=1"],
    ):
        assert tpshard(["plan", file, *words]) == Exit.USAGE
        assert "saved plan" in capsys.readouterr().err


def test_a_recipe_may_be_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"model": {"preset": "tiny", "layers": 1}}')
    assert tpshard(["plan", str(file), "--dry-run", "mesh.tp=1"]) == Exit.DONE
    assert "mine" in capsys.readouterr().out
    for text in ("{}", "no JSON", '{"schema": 1, "plan": {}, "programs": 3}'):
        file.write_text(text)
        assert tpshard(["plan", str(file)]) == Exit.RECIPE and "not a saved plan" in capsys.readouterr().err


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    for key, one in enumerate(data) if isinstance(data, list) else data.items() if isinstance(data, dict) else ():
        yield from places(one, (*place, key))


def test_a_damaged_report_is_refused_or_shown(
    planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = json.loads(saved_plan.dumps(planned, loads(RECIPE), with_programs=False))
    random, file, codes = Random(3), tmp_path / "plan.json", set()
    report = json.loads(held["report"])
    everywhere = list(places(report))[1:]
    for _ in range(60):
        damaged = copy.deepcopy(report)
        *way, last = random.choice(everywhere)
        inner = damaged
        for key in way:
            inner = inner[key]
        inner[last] = random.choice([None, True, -1, 10**30, 0.5, float("inf"), "\x1b[2J", [], {}, [[[]]], [1, 2, 3]])
        file.write_text(json.dumps(held | {"report": json.dumps(damaged)}))
        codes.add(tpshard(["plan", str(file)]))
        assert "\x1b" not in "".join(capsys.readouterr())
    assert codes <= {Exit.DONE, Exit.RECIPE, Exit.FIT} and Exit.RECIPE in codes
