"""Files that tpshard wrote at b40c33f, kept in old_files, are read as it read them, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import tpshard

OLD = Path(__file__).with_name("old_files")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


def test_an_old_run_goes_on(old: Path) -> None:
    """The loss of its third step is the one that the old version had."""
    done = tpshard(old, "train", "run", "train.steps=3", "data.source=text.txt", "compile=eager")
    assert done.returncode == 0, done.stderr
    last = json.loads((old / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3 and last["loss"] == pytest.approx(5.986949443817139, abs=1e-5)


def test_an_old_quantized_folder_answers(old: Path) -> None:
    options = ["--temperature", "0", "--max-tokens", "8", "--json"]
    done = tpshard(old, "generate", "quantized", "1 times", "serve.mesh.tp=1", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["text"] == "\ufffda" + 6 * "\ufffd"


def test_an_old_plan_is_refused_by_name(old: Path) -> None:
    done = tpshard(old, "train", "recipe.yaml", "--plan", "plan.json")
    assert done.returncode == 4
    changed = r"= (the code of tpshard has changed since|torch \S+, planned with 2\.13\.0)"
    assert re.search(changed, done.stderr), done.stderr
    assert "plan again with `tpshard plan`" in done.stderr
