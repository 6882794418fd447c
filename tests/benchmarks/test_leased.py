"""Steps on a lent machine: what each says is kept, whatever it does, and no stage takes longer than it may."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.program import group_name

import first_lease
import first_node
import leased
from leased import Step, json_lines, parser_of, python, rows_of, run_all
from node_collectives import MESHES, sets_of_axes
from record import ROOT


@pytest.mark.parametrize(
    "steps",
    [partial(first_lease.steps, preset="llama3-8b")]
    + [partial(first_node.steps, ranks=ranks, device=device) for ranks in (2, 8) for device in ("cpu", "h100-sxm-80g")],
)
def test_a_stage_takes_at_most_nine_minutes(steps: partial[list[Step]], tmp_path: Path) -> None:
    limits = Counter[str]()
    listed = list(steps(tmp_path))
    for step in listed:
        limits[step.stage] += step.limit_s
    assert set(limits) == set("ABC") and len({step.name for step in listed}) == len(listed)
    if steps.func is first_node.steps:
        assert max(limits.values()) <= 540


def test_each_step_leaves_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def steps(out: Path) -> list[Step]:
        broken = partial(lambda folder, output: output.index("never said"))
        return [
            Step("rows", "A", ["echo", json.dumps({"n": 1}) + "\nnoise {"], 9, json_lines),
            Step("slow", "A", ["sleep", "9"], 0),
            Step("fails", "B", ["sh", "-c", "pwd; exit 3"], 9, broken),
            Step("left out", "C", ["false"], 9),
        ]

    options = parser_of(None).parse_args(["--out", str(tmp_path), "--stages", "AB"])
    assert run_all(options, lambda out: iter(steps(out))) == 1
    rows = rows_of(tmp_path)
    assert {name: row["code"] for name, row in rows.items()} == {"rows": 0, "slow": "stopped after 0 s", "fails": 3}
    assert rows["rows"]["figures"] == [{"n": 1}] and rows["fails"]["figures"].startswith("none: ValueError")
    assert rows["fails"]["end"].strip() == str(tmp_path / "work" / "fails")
    assert (tmp_path / "logs.txt").read_text().count("====") == 3
    assert python("gpu_serving.py")[1].endswith("benchmarks/gpu_serving.py") and python("-m", "pytest")[1] == "-m"
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["rows", "slow", "fails"]


def test_a_stage_ends_after_nine_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taking_long(step: Step, out: Path) -> dict[str, Any]:
        return {"step": step.name, "code": step.limit_s, "seconds": 400.5}

    monkeypatch.setattr(leased, "run", taking_long)
    steps = [Step(name, stage, ["false"], 300) for name, stage in (("a", "A"), ("b", "A"), ("c", "A"), ("d", "B"))]
    run_all(parser_of(None).parse_args(["--out", str(tmp_path)]), lambda out: iter(steps))
    assert {name: row["code"] for name, row in rows_of(tmp_path).items()} == {"a": 300, "b": 139, "c": 0, "d": 300}


def test_tests_of_a_gpu_go_on_after_a_file_that_cannot_be_collected(tmp_path: Path) -> None:
    (tests,) = (step for step in first_lease.steps(tmp_path, "llama3-8b") if step.name == "tests")
    (line,) = re.findall(r"^gpu:\n\t.*\$\(PYTHON\) (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "test_sound.py").write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_it(): pass\n")
    for arguments in (tests.command[1:], line.split()):
        assert arguments[-1].endswith("tests/gpu")
        command = [sys.executable, *arguments[:-1], "-n", "0", "--rootdir", str(tmp_path), str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and "1 passed" in done.stdout and "nothing_of_this_name" in done.stdout, done.stdout


def test_a_pipelines_losses_stand_beside_those_of_fsdp(tmp_path: Path) -> None:
    def run_of(name: str, losses: list[float]) -> Path:
        folder = tmp_path / "work" / name / "runs" / "run"
        folder.mkdir(parents=True)
        lines = [json.dumps({"loss": loss, "step_s": 0.5}) for loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        return folder.parents[1]

    fsdp = first_node.trained(run_of("fsdp", [8.0, 7.5, 7.0, 6.5]), "")
    (tmp_path / "lease.jsonl").write_text(json.dumps({"step": "fsdp", "figures": fsdp}) + "\n")
    beside = first_node.beside_fsdp(tmp_path, run_of("1f1b", [8.0, 7.25, 7.0, 6.5]), "")
    assert beside["largest_difference"] == 0.25 and beside["step_s"] == 0.5


def test_groups_of_all_axes_and_of_parts_of_one_are_made() -> None:
    names = [{group_name(axes) for axes in sets_of_axes(Mesh(sizes))} for sizes in MESHES[8]]
    assert len(names[0]) == 7 and "dp:(1)2+fsdp:(1)2+tp:(1)2" in names[0]
    assert names[1] == {"pp:(1)4", "fsdp:(1)2", "pp:(1)4+fsdp:(1)2", "pp:(1)2", "pp:(2)2"}
    assert names[2] == {"tp:(1)8", "tp:(1)2", "tp:(2)4"}
