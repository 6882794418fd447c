"""mypy checks every room, and an installed wheel or sdist works outside the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
ROOMS = sorted({mark.parent.name for mark in ROOT.glob("*/py.typed")} - {"package"})


def copy(tmp_path: Path) -> Path:
    """The checkout without what is built in it."""
    skip = shutil.ignore_patterns(
        ".git", ".venv", "*.egg-info", "build", "dist", "runs", "__pycache__", ".*_cache", "tests"
    )
    return Path(shutil.copytree(ROOT, tmp_path / "copied", symlinks=True, ignore=skip))


def test_every_room_is_seen_by_mypy() -> None:
    links = ROOT / "types" / "tpshard"
    assert sorted(p.name for p in links.iterdir() if p.is_symlink() and p.is_dir()) == ROOMS
    assert all((links / room).resolve() == (ROOT / room).resolve() for room in ROOMS)


def test_a_planted_error_is_found_by_mypy(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "types").mkdir(parents=True)
    shutil.copytree(ROOT / "types" / "tpshard", checkout / "types" / "tpshard", symlinks=True)
    for folder in ("package", "recipes"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for link in (checkout / "types" / "tpshard").iterdir():
        if not link.exists():
            link.unlink()

    def mypy() -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "mypy", "-p", "tpshard.recipes", "--cache-dir", str(tmp_path / "cache")]
        env = {**os.environ, "MYPYPATH": "types"}
        return subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True, timeout=PATIENCE)

    assert mypy().returncode == 0
    planted = checkout / "recipes" / "reading" / "hints.py"
    planted.write_text(planted.read_text() + "\nplanted: int = 'text'\n")
    actual = mypy()
    assert actual.returncode == 1
    assert "recipes/reading/hints.py" in actual.stdout and "[assignment]" in actual.stdout


def test_a_wheel_holds_every_room_and_works_outside_the_checkout(tmp_path: Path) -> None:
    """A wheel of the checkout and one of the sdist hold the same."""
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    quiet = {"capture_output": True, "text": True, "timeout": PATIENCE}
    source = copy(tmp_path)

    def build(what: str, out: Path, folder: Path) -> None:
        """As pip does it, which takes twice as long."""
        call = "import sys; from setuptools import build_meta as b; getattr(b, f'build_{sys.argv[1]}')(sys.argv[2])"
        done = subprocess.run([sys.executable, "-c", call, what, str(out)], cwd=folder, **quiet)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr

    build("sdist", tmp_path, source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    contents = []
    for kind, place in (("checkout", source), ("sdist", unpacked)):
        build("wheel", tmp_path / kind, place)
        (wheel,) = (tmp_path / kind).glob("*.whl")
        contents.append({file.filename: file.CRC for file in zipfile.ZipFile(wheel).infolist()})
    assert contents[0] == contents[1]
    names = set(contents[0])
    for room in ROOMS:
        for file in (ROOT / room).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith("."):
                assert f"tpshard/{file.relative_to(ROOT)}" in names
    assert {"tpshard/__init__.py", "tpshard/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "tpshard/tests/"))]
    assert [name for name in names if name.endswith("/LICENSE")]
    site = tmp_path / "site"
    subprocess.run(
        [*argv, "install", "-q", "--no-deps", "--no-compile", "--target", str(site), str(wheel)], check=True, **quiet
    )  # type: ignore[call-overload]
    shutil.rmtree(source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def tpshard(*words: str) -> str:
        code = "import sys, tpshard.cli.main as m; assert sys.argv.pop(1) in m.__file__, m.__file__; m.main()"
        line = [sys.executable, "-c", code, str(site), *words]
        done = subprocess.run(line, cwd=elsewhere, env=env, **quiet)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert re.fullmatch(r"tpshard \d\S*, torch \d\S*, Python \d\S*\n", tpshard("--version"))
    line = [sys.executable, "-c", "import tpshard; print(tpshard.__version__, tpshard.__file__)"]
    named = subprocess.run(line, cwd=elsewhere, env=env, check=True, **quiet).stdout.split()  # type: ignore[call-overload]
    assert named[0] == metadata.version("tpshard") and named[1].startswith(str(site))
    assert "quickstart" in tpshard("recipes", "ls")
    assert "extends" in json.loads(tpshard("recipes", "schema"))["properties"]  # read from the installed source
    plan = json.loads(tpshard("plan", "quickstart", "model.layers=1", "--dry-run", "--json"))
    assert plan["mesh"] == {"dp": 1, "fsdp": 2, "tp": 2}
    assert list(elsewhere.iterdir()) == []


def test_packages_are_listed_by_a_glob() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "setuptools" not in project.get("tool", {})
    assert not any(f'"tpshard.{room}"' in (ROOT / "setup.py").read_text() for room in ROOMS)
    assert (ROOT / "LICENSE").read_text().count("Apache License") >= 1
    assert project["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("gate", [".ci/run", "Makefile"])
def test_the_gate_runs_the_tests(gate: str) -> None:
    assert "make test" in (ROOT / gate).read_text() or "pytest" in (ROOT / gate).read_text()
