"""The page of faults says what really happened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fault_cases import CASES, Case
from faults import run, table


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 80


@pytest.mark.parametrize(
    ("command", "codes", "words", "held"),
    [
        ("echo error: gone; exit 3", (3,), "gone", True),
        ("echo error: gone; exit 3", (3,), "another", False),
        ("echo error: gone; exit 3", (0, 5), "gone", False),
        ("test -e inside", (0,), "", True),
    ],
)
def test_a_case_holds_by_its_code_and_its_words(
    command: str, codes: tuple[int, ...], words: str, held: bool, tmp_path: Path
) -> None:
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "inside").touch()
    row = run(Case("A", "a fault", command, codes, words), tmp_path, os.environ)
    assert row["held"] is held and not (tmp_path / "case").exists()
    shown = table([row])
    assert f"{int(held)} of 1 hold" in shown and ("expected" in shown) is not held


def test_a_case_that_cannot_be_tried_does_not_count_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("faults").NEEDS, "curl", "exit 1")
    row = run(Case("A", "a fault", "true", (0,), needs="curl"), tmp_path, os.environ)
    assert row["held"] is None and "0 of 1 hold; 1 could not be tried" in table([row])
