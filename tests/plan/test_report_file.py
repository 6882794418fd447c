"""A saved report answers what needs no programs, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from small_model import of_small_model
from tpshard.plan import outputs, planner
from tpshard.plan.questions import diff
from tpshard.plan.report import report_file
from tpshard.plan.report.report import Report
from tpshard.recipes.reading.load import loads

ANSWERS = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from tpshard.plan import outputs
from tpshard.plan.questions import diff
from tpshard.plan.report import report_file
report = report_file.loads(Path(sys.argv[1]).read_text())
for kind in ("json", "screen", "verbose", "page", "trace", "svg"):
    sys.stdout.write(outputs.text(kind, report))
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


def test_a_report_is_read_back_whole() -> None:
    report = planner.report(loads(STAGED), "staged.yaml")
    assert report_file.dumps(report_file.loads(report_file.dumps(report))) == report_file.dumps(report)  # type: ignore[arg-type]
    assert report_file.loads("[]") is None and report_file.loads("no JSON") is None


def test_a_saved_report_answers_as_the_plan_did_without_torch(report: Report, tmp_path: Path) -> None:
    (tmp_path / "report").write_text(report_file.dumps(report))
    done = subprocess.run([sys.executable, "-c", ANSWERS, str(tmp_path / "report")], capture_output=True, text=True,
                          check=False)  # fmt: skip
    kinds = ("json", "screen", "verbose", "page", "trace", "svg")
    expected = [*(outputs.text(kind, report) for kind in kinds), diff.text(diff.diff(report, report))]
    assert (done.returncode, done.stdout) == (0, "".join(expected)), done.stderr
