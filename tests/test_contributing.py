"""Every exercise of `docs/contributing` works word for word in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_pages_are_linked() -> None:
    linked = re.findall(r"\(docs/contributing/(\w[\w-]*\.md)\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert sorted(linked) == [page.name for page in PAGES] and len(PAGES) == 7


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in ("model-family", "model-source"))) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_an_exercise_does_what_it_says(page: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    skip = shutil.ignore_patterns(
        ".git", ".venv*", "*.egg-info", "build", "dist", "runs", ".*_cache"
    )  # bytecode is kept
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=skip)
    printed = ""
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "diff":
            change(checkout, text)
        elif kind == "sh":
            printed = done(checkout, text)
        elif kind == "text":
            assert all(line in printed for line in text.splitlines()), printed
        else:
            write(checkout, text)


FILES = {"op": 1, "pass": 2, "model-family": 2, "model-source": 3, "device": 1, "command": 2, "text-case": 0}
"""Files of the rooms that an addition touches, without its test."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_addition_touches_few_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    touched = {*re.findall(r"^--- (\S+)$", text, re.MULTILINE), *re.findall(r"^# (\S+/\S+\.\w+)$", text, re.MULTILINE)}
    assert len([file for file in touched if not file.startswith("tests/")]) == FILES[page.stem], touched


def write(checkout: Path, text: str) -> None:
    """Writes a new file, which the block's first line names."""
    name, _, rest = text.partition("\n")
    path = checkout / name.removeprefix("# ")
    assert not path.exists()
    path.write_text(rest, encoding="utf-8")


def change(checkout: Path, text: str) -> None:
    """Applies a diff: its lines without a plus occur once in the file and become those without a minus."""
    for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines(keepends=True)
        path = checkout / name.strip()
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        old = path.read_text(encoding="utf-8")
        assert old.count(before) == 1, f"{name}: {before}"
        path.write_text(old.replace(before, after), encoding="utf-8")


def done(checkout: Path, commands: str) -> str:
    """The stdout of commands, which must exit with 0."""
    bin_ = checkout.parent / "bin"
    bin_.mkdir(exist_ok=True)
    for name, line in (("python", '"$@"'), ("tpshard", '-m tpshard.cli.main "$@"')):
        (bin_ / name).write_text(f"#!/bin/sh\nexec {sys.executable} {line}\n")
        (bin_ / name).chmod(0o755)
    paths = {"PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(checkout / "types")}
    ran = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=checkout, env=os.environ | paths, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
