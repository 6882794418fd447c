"""A plan on disk: what it says, the recipe it was made from, and the fingerprints that `train --plan` compares."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.plan.report import SCHEMA, Report
from tpshard.recipes.diagnostic import Exit, Mistakes


@dataclass(frozen=True)
class SavedPlan:
    """A plan read back from its file."""

    path: str
    recipe: str
    """The resolved recipe, as YAML."""
    fingerprints: Mapping[str, str]
    """Part of the step -> fingerprint of its program."""
    report: Mapping[str, Any]


def fingerprints(report: Report) -> dict[str, str]:
    if report.pricing.pipeline is not None:
        return dict(report.pricing.pipeline.programs.fingerprints)
    return {entry.part.name: entry.part.program.fingerprint for entry in report.pricing.parts}


def dumps(report: Report, recipe_yaml: str) -> str:
    """The text of `plan.json`; same recipe and code, same bytes."""
    return (
        json.dumps(
            {"schema": SCHEMA, "recipe": recipe_yaml, "programs": fingerprints(report), "plan": report.to_json()},
            indent=1,
            sort_keys=True,
        )
        + "\n"
    )


def write(path: Path, text: str) -> None:
    """Writes beside, then renames: a reader sees the old file or the new one. Raises `Mistakes` (exit 5)."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise Mistakes.one(f"{path} cannot be written", exit=Exit.MACHINE, why=why) from error


def check_writable(path: Path) -> None:
    """Raises `Mistakes` (exit 5) where `write` could not: what is said before a plan is made. Makes nothing."""
    there = path.parent
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if path.is_dir():
        why = "it is a folder"
    elif not there.is_dir():
        why = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"no right to write in {there}"
    else:
        return
    raise Mistakes.one(f"{path} cannot be written", exit=Exit.MACHINE, why=why)


def read(path: str) -> SavedPlan:
    """A saved plan. Raises `Mistakes` (exit 3) where the file is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected" if isinstance(found, dict) else "no object")
        return SavedPlan(path, found["recipe"], dict(found["programs"]), found["plan"])
    except OSError as error:
        raise Mistakes.one(f"the plan {path} cannot be read", why=error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Mistakes.one(f"{path} is not a saved plan", why=str(error)) from error


ADVICE = ("accuracy", "edits", "suggestions")
"""What a plan says beside the run itself: a run neither knows nor needs it."""


def check(saved: SavedPlan, report: Report, recipe_yaml: str) -> None:
    """Refuses (`Mistakes`, exit 4) where the recipe or the code would now give another plan than the saved one.

    Both the programs and every figure are compared: the number of micro-batches is in no program.
    """
    now = json.loads(json.dumps(report.to_json()))
    differs = [key for key in {**saved.report, **now} if key not in ADVICE and saved.report.get(key) != now.get(key)]
    if dict(saved.fingerprints) == fingerprints(report) and not differs:
        return
    before, after = saved.recipe.splitlines(), recipe_yaml.splitlines()
    changed = [line.strip() for line in after if line not in before] + [
        f"(was) {line.strip()}" for line in before if line not in after
    ]
    if changed:
        why = "the recipe differs: " + "; ".join(changed[:4])
    else:
        why = "the recipe is the same: the code has changed, a device file, or the plan itself"
    if differs:
        why += f" (not as planned: {', '.join(sorted(differs)[:6])})"
    raise Mistakes.one(
        f"the plan {saved.path} is for another program",
        exit=Exit.FIT,
        why=why,
        fix="plan again with `tpshard plan`, or train without --plan",
    )
