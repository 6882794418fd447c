"""The comparison of serving speed measures every engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from patience import PATIENCE

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving_speed.py"
SMALLEST = ("--layers", "1", "--width", "256", "--requests", "1", "--new", "2", "--repeat", "1", "--tp", "1")


@pytest.mark.slow
def test_every_engine_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *SMALLEST, "--no-compile", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["engine"] for row in rows] == ["transformers eager", "tpshard tp 1 fp32", "tpshard tp 1 4-bit"]
    assert all(row["tokens_per_s"] > 0 for row in rows)
