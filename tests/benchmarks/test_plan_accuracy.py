"""The comparison with published runs says which rows it could not plan."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

import plan_accuracy
from plan_accuracy import Outcome

ROW = {"src": "run", "model": "8B", "gpu": "A100-80GB", "gpus": "8", "mem_gib": "40", "step_s": "2", "fsdp": "8"}
ROW |= {"tp": "1", "dp_rep": "1", "ac": "full", "compile": "1", "local_bs": "1", "seq": "8192"}
ROW |= {"master_dtype": "fp32", "gather_dtype": "bf16", "reduce_dtype": "fp32"}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ([{}], 0, ""),
        ([{"cp": "2"}, {}], 0, "left out: run (8B, 8 devices): cp above 1: not in a recipe"),
        ([{"model": "9Q"}, {}], 1, "left out: run (9Q, 8 devices): no model is known as '9Q'; known: 7B, 8B"),
        ([{"cp": "2"}], 1, "left out: run (8B, 8 devices): cp above 1"),
    ],
)
def test_rows_that_are_left_out_are_listed_and_an_unknown_model_fails(
    changes: list[dict[str, str]], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def predict(row: dict[str, str], quick: bool) -> Outcome:
        plan_accuracy.recipe_of(row)
        return Outcome(row, 41.0, 2.1, 0.0)

    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [*ROW, "cp"])
        writer.writeheader()
        writer.writerows([{**ROW, "cp": "1", **change} for change in changes])
    monkeypatch.setattr(plan_accuracy, "predict", predict)
    monkeypatch.setattr(sys, "argv", ["plan_accuracy.py", str(file), "--json"])
    with pytest.raises(SystemExit) as ended:
        plan_accuracy.main()
    assert ended.value.code == code
    out_text = capsys.readouterr()
    assert words in out_text.err + out_text.out
