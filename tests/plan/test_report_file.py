"""A saved report answers what needs no programs, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from small_model import of_small_model
from tpshard.plan import outputs, planner
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
