"""`tpshard check` prints the comparison and exits as documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tpshard.cli import main
from tpshard.diagnostics.diagnostic import Exit
from tpshard.programs.compare import equality, float64
from training_cases import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("vocab: 40", "vocab: 2048") + "mesh: {fsdp: 2}\n")
    return str(path)


def test_equal_runs_end_with_0(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check", recipe, "--against", "mesh.fsdp=1", "--against", "mesh.tp=2", "--json"]) == Exit.DONE
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["equal"] and parsed["first_difference"] is None
    assert 0 < parsed["largest"]["apart"] <= float64.BOUND


def test_a_difference_ends_with_1(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "BOUND", 0.0)  # so that rounding counts as a fault
    assert main.run(["check", recipe, "--against", "mesh.fsdp=1"]) == Exit.BUG
    printed = capsys.readouterr()
    assert "They differ" in printed.out and "The first operation that differs computes" in printed.out
    assert "here: " in printed.out and "there: " in printed.out and "comparing every value" in printed.err


def test_rounding_to_half_precision_is_no_difference(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums of bf16 gradients in another order differ by more than float64's rounding; `check` widens them."""
    half = [f"fsdp.{key}_dtype=bf16" for key in ("param", "reduce")]
    assert main.run(["check", recipe, *half, "--against", "mesh.fsdp=1"]) == Exit.DONE
    assert "They are the same" in capsys.readouterr().out


def test_without_another_recipe_it_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check", recipe]) == Exit.USAGE
    assert "--against mesh.tp=2" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["mesh={}", "mesh={dp: 1}"])
def test_a_change_that_changes_nothing_is_refused(recipe: str, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A map is merged into the recipe's mesh, whose other axes stay."""
    assert main.run(["check", recipe, "--against", change]) == Exit.USAGE
    error = capsys.readouterr().err
    assert f"`--against {change}` changes nothing" in error and "what it does not name stays" in error
    assert "such as --against mesh.fsdp=1" in error
    assert main.run(["plan", recipe, "--diff", change]) == Exit.USAGE
    assert f"`--diff {change}` changes nothing" in capsys.readouterr().err
