"""What `tpshard plan` does with a recipe that was read and checked: one function from a recipe to text and files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tpshard.plan import between, describe, make, page, pictures, save, screen, search
from tpshard.plan import diff as diffs
from tpshard.plan import skew as skews
from tpshard.plan import trace as traces
from tpshard.plan.forecast import Conditions
from tpshard.plan.report import Report
from tpshard.programs.setting import Setting, devices_of
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import Recipe


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    source: str = ""
    what: str = "train"
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False
    html: Path | None = None
    trace: Path | None = None
    svg: Path | None = None
    explain: str | None = None
    search: bool = False
    passes: bool = False
    run: Conditions | None = None
    """Of the whole run; None where no option asks for it."""
    skew: float | None = None
    """Tokens of the busiest expert, in means; None where it is not asked for."""
    compared: tuple[str, str] = ("", "")
    """What the two recipes of a comparison are called; "" for their own names."""


@dataclass(frozen=True)
class Done:
    text: str
    """For stdout."""
    exit: Exit


def run(recipe: Recipe, asked: Asked, other: Recipe | None = None, note: Callable[[str], None] | None = None) -> Done:
    """Plans; writes the files that were asked for, and without `dry_run` those of the run's folder.

    Exit 0, or 4 where the recipe does not fit its devices (everything is said and written all the same). Raises
    `Mistakes` (exit 5) before planning where a file cannot be written.
    """
    tell = note or (lambda _: None)
    folder = Path(recipe.run.dir)
    saved = [folder / name for name in ("plan.json", "plan.html", "plan.trace.json")]
    plans = not (asked.search or asked.passes) and asked.explain is None and other is None
    if asked.search:
        saved = [folder / "fastest.yaml"]
    kept = saved if (plans or asked.search) and not asked.dry_run else []
    for path in (asked.html, asked.trace, asked.svg, *kept):
        if path is not None:
            save.check_writable(path)
    if asked.search:
        return _searched(recipe, asked, tell, kept)
    if asked.passes and recipe.pipeline is not None:
        raise Mistakes.one(
            "the passes of a pipeline's stages are not shown", exit=Exit.USAGE, where=recipe.where("pipeline"),
            fix="--passes of the recipe without `pipeline`: every stage goes through the same ones",
        )  # fmt: skip
    if asked.passes:
        rows = between.rows(Setting.of(recipe, devices_of(recipe)))
        shown = json.dumps(between.to_json(rows), indent=1) + "\n" if asked.as_json else between.text(rows)
        return Done(shown, Exit.DONE)
    report = make.report(recipe, asked.source or recipe.name, asked.what, accuracy())
    if asked.explain is not None:
        told = _explained(report, asked.explain)
        found = {"name": asked.explain, "lines": told.splitlines()}
        return Done(json.dumps(found, indent=1) + "\n" if asked.as_json else told, Exit.DONE)
    if other is not None:
        before, after = asked.compared
        changed = diffs.diff(report, make.report(other, other.name, asked.what))
        changed |= {"before": before or recipe.name, "after": after or other.name}
        return Done(json.dumps(changed, indent=1) + "\n" if asked.as_json else diffs.text(changed), Exit.DONE)
    if asked.run is not None:
        report.forecast = make.forecast_of(report, recipe, asked.run)
    if asked.skew is not None:
        report.skew = skews.skew(report.pricing, Setting.of(recipe, devices_of(recipe)), asked.skew)
    if not report.fits:
        report.edits = search.edits(report, recipe)
    elif asked.what == "train":
        report.suggestions = search.suggestions(report, recipe)
    files = [(asked.html, page.page), (asked.trace, traces.trace), (asked.svg, pictures.svg)]
    if not asked.dry_run:
        save.write(saved[0], save.dumps(report, recipe))
        files += [(saved[1], page.page), (saved[2], traces.trace)]
        tell(f"saved {folder}/plan.json, plan.html, plan.trace.json")
    for path, make_text in files:
        if path is not None:
            save.write(path, make_text(report))
    shown = screen.screen(report, verbose=asked.verbose)
    if asked.as_json:
        shown = json.dumps(report.to_json(), indent=1) + "\n"
    return Done(shown, Exit.DONE if report.fits else Exit.FIT)


def _searched(recipe: Recipe, asked: Asked, tell: Callable[[str], None], kept: Sequence[Path]) -> Done:
    result = search.search(recipe, tell)
    winner = search.winner(result, recipe)
    for path in kept if winner else ():
        save.write(path, winner)
        tell(f"saved {path}; next: tpshard plan {path}, tpshard train {path}")
    code = Exit.DONE if winner else Exit.FIT
    if asked.as_json:
        rows = [dataclasses.asdict(c) for c in result.candidates]
        found = {"candidates": rows, "refused": result.refused, "recipe": winner or None}
        return Done(json.dumps(found, indent=1) + "\n", code)
    return Done(search.text(result, recipe), code)


def _explained(report: Report, name: str) -> str:
    try:
        return describe.explain(report.pricing.parts[0].part.program, name)
    except KeyError as error:
        raise Mistakes.one(str(error.args[0]), exit=Exit.USAGE, fix="names are those of `plan --verbose`") from error


def accuracy() -> str:
    """The mean errors that `benchmarks/plan_accuracy.py` last wrote; empty where it never ran."""
    file = resources.files("tpshard.plan").joinpath("accuracy.txt")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
