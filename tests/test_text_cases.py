"""Tiny programs and their answers (tests/texts): what a stage or a pass makes of them reads as it did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from text_case import FOLDER, answer_of, cases, parse, results_of

CASES = [pytest.param(path, id=str(path.relative_to(FOLDER).with_suffix(""))) for path in cases()]


@pytest.mark.parametrize("path", CASES)
def test_a_program_reads_as_its_file_says(path: Path) -> None:
    """If it is the answer that should change, `make texts` writes it anew, for review."""
    answer = answer_of(path)
    assert answer == parse(path)[2]


@pytest.mark.parametrize("path", CASES)
def test_devices_compute_what_the_function_does(path: Path) -> None:
    for simulated, eager in zip(*(results_of(path) or ((), ())), strict=True):
        torch.testing.assert_close(simulated, eager.detach(), rtol=1e-5, atol=1e-6)


def test_every_file_says_why() -> None:
    assert len(CASES) >= 30
    for path in cases():
        assert path.read_text().startswith("# ") and ": " not in path.read_text().splitlines()[0][:10], path
