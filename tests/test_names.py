"""File names and public class names are unique in the project."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = sorted(mark.parent.name for mark in ROOT.glob("*/py.typed"))


def test_a_file_name_stands_once() -> None:
    paths = [path for room in (*ROOMS, "benchmarks", "tests") for path in (ROOT / room).rglob("*.py")]
    twins = more_than_once((path.name, path) for path in paths) - {"__init__.py", "conftest.py"}
    assert twins == set()


def test_a_public_class_name_stands_once() -> None:
    actual = [
        (node.name, path)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    twins = more_than_once(actual)
    assert twins == set()


def more_than_once(pairs: Iterable[tuple[str, Path]]) -> set[str]:
    places: dict[str, set[Path]] = defaultdict(set)
    for name, path in pairs:
        places[name].add(path)
    return {name for name, where in places.items() if len(where) > 1}


SAYS_NOTHING = {"found", "kept", "given", "told", "taken", "said", "held"}


def test_signatures_name_what_they_hold() -> None:
    names = [
        name.strip("_")
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in (node.name, *(one.arg for one in [*node.args.args, *node.args.kwonlyargs]))
    ]
    assert sum(name in SAYS_NOTHING for name in names) < 10  # those left are a noun of the field: what a device holds
