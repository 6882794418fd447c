"""A file and a public class have names of their own, so that a name in a message or a search leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = sorted(mark.parent.name for mark in ROOT.glob("*/py.typed"))

# Twins of rooms that share a word. No name may be added; one that is told apart is taken out.
FILES = {
    "attention.py", "checks.py", "experts.py", "kernels.py", "launch.py", "layers.py", "layouts.py", "main.py",
    "patterns.py", "pipeline.py", "quantize.py", "record.py", "reorder.py", "report.py", "serving.py",
    "test_pipeline.py", "text.py", "worker.py", "workers.py",
}  # fmt: skip
CLASSES = {
    "Choice", "Device", "Event", "Job", "Linear", "Link", "Mail", "Need", "Order", "Part", "Pipeline", "Place",
    "Report", "RopeScaling", "Sharding", "Step", "Task", "Weights",
}  # fmt: skip


def test_a_file_name_stands_once() -> None:
    paths = [path for room in (*ROOMS, "benchmarks", "tests") for path in (ROOT / room).rglob("*.py")]
    assert more_than_once((path.name, path) for path in paths) <= FILES | {"__init__.py", "conftest.py"}


def test_a_public_class_name_stands_once() -> None:
    found = [
        (node.name, path)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert more_than_once(found) <= CLASSES


def more_than_once(pairs: Iterable[tuple[str, Path]]) -> set[str]:
    places: dict[str, set[Path]] = defaultdict(set)
    for name, path in pairs:
        places[name].add(path)
    return {name for name, where in places.items() if len(where) > 1}
