"""metrics.jsonl stays complete when the disk is full or the run is killed."""

from __future__ import annotations

import json
import logging
import math
import resource
import signal
from pathlib import Path

import pytest
from tpshard.train.records.records import STEP_KEYS, Records, last_attempt, read_rows


def test_rows_of_steps_have_every_key_and_null_where_unknown(tmp_path: Path) -> None:
    record = Records(tmp_path / "metrics.jsonl")
    record({"step": 1, "loss": 7.5, "lr": 1e-4, "run": 1})
    record({"step": 2, "loss": math.nan, "grad_norm": math.inf, "run": 1})
    record({"step": 2, "eval_loss": 7.25, "run": 1})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert set(rows[0]) == set(rows[1]) == set(STEP_KEYS)
    assert rows[0]["loss"] == 7.5 and rows[0]["mfu"] is None
    assert rows[1]["loss"] is None and rows[1]["grad_norm"] is None
    assert rows[2] == {"step": 2, "eval_loss": 7.25, "run": 1}, "an evaluation row has no loss"


def test_resumed_runs_append_and_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_attempt(path) == 0
    for run, steps in ((1, range(1, 6)), (2, range(4, 8))):
        record = Records(path)
        for step in steps:
            record({"step": step, "loss": float(run), "run": run})
    assert len(read_rows(path)) == 9
    assert {step: row["loss"] for step, row in {row["step"]: row for row in read_rows(path)}.items()} == {
        1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 2.0, 7: 2.0,
    }  # fmt: skip
    assert last_attempt(path) == 2


def test_what_a_killed_run_left_of_a_row_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Records(path)({"step": 1, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert len(read_rows(path)) == 1
    Records(path)({"step": 2, "loss": 2.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_disk_that_is_full_for_a_while_loses_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    record = Records(path)
    record({"step": 1, "loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
    try:
        with caplog.at_level(logging.WARNING):
            for step in range(2, 20):
                record({"step": step, "loss": float(step)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert len(caplog.records) == 1, "one warning"
    assert len(read_rows(path)) == 1
    record({"step": 20, "loss": 20.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 21))
