"""Lists at the end of a run the tests that were left out, and the commands that run them. For `conftest.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

HOW = {"slow": "make test-all", "gpu": "make gpu, on a machine with a CUDA device"}
"""Marker to the command that runs its tests."""

_LEFT_OUT = pytest.StashKey[set[tuple[str, str]]]()


def _of(config: pytest.Config) -> set[tuple[str, str]]:
    """The pairs (marker, test) of all tests left out so far."""
    return config.stash.setdefault(_LEFT_OUT, set())


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in HOW:
            if item.get_closest_marker(marker) is not None:
                _of(item.config).add((marker, item.nodeid))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist, whose terminal nobody sees
        session.config.workeroutput["left_out"] = sorted(_of(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _of(node.config).update(map(tuple, getattr(node, "workeroutput", {}).get("left_out", [])))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = _of(config)
    if not left_out:
        return
    terminalreporter.section("not run", sep="-")
    for marker, how in HOW.items():
        files = Counter(test.partition("::")[0] for kind, test in left_out if kind == marker)
        if files:
            terminalreporter.line(f"{sum(files.values())} {marker} tests: {how}")
        for file, count in sorted(files.items()):
            terminalreporter.line(f"    {count:3} of {file}")
    terminalreporter.line("other processors, versions of torch and Python, a busy machine, hours: see tests/README.md")


__all__ = ["pytest_deselected", "pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown"]
