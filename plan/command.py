"""Running `tpshard plan` on a checked recipe: returns the text, and writes the requested files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from tpshard.plan import (
    between,
    check_run,
    describe,
    fitting,
    make,
    outputs,
    page,
    pictures,
    pinning,
    placements,
    save,
    screen,
    search,
    suggest,
)  # fmt: skip
from tpshard.plan import diff as diffs
from tpshard.plan import skew as skews
from tpshard.plan import trace as traces
from tpshard.plan.outputs import Asked, Done
from tpshard.plan.plan_cache import PlanEntry
from tpshard.plan.report import Report
from tpshard.programs.setting import Setting, devices_of
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import Recipe


def run(
    recipe: Recipe, asked: Asked, other: Recipe | None = None, note: Callable[[str], None] | None = None,
    entry: PlanEntry | None = None,
) -> Done:  # fmt: skip
    """Plans; writes the files that were asked for, and without `dry_run` those of the run's folder. `entry` keeps what
    a plan says.

    Exit code 0, or 4 where the recipe does not fit its devices; the output is the same. Raises `Mistakes` (exit 5)
    before planning where a file cannot be written.
    """
    tell = note or (lambda _: None)
    folder = Path(recipe.run.dir)
    saved = [folder / name for name in ("plan.json", "plan.html", "plan.trace.json")]
    writes = {"fastest.yaml": asked.search, "fits.yaml": asked.fit, "pinned.yaml": asked.pin}
    recipes = [folder / name for name, on in writes.items() if on]
    plans = not (recipes or asked.passes or asked.net) and asked.explain is None and other is None
    saved = recipes or saved
    kept = saved if (plans or recipes) and not asked.dry_run else []
    for path in (asked.html, asked.trace, asked.svg, *kept):
        if path is not None:
            save.check_writable(path)
    if asked.search:
        return _searched(recipe, asked, tell, kept)
    if asked.passes:
        rows = between.rows(Setting.of(recipe, devices_of(recipe)))
        shown = json.dumps(between.to_json(rows), indent=1) + "\n" if asked.as_json else between.text(rows)
        return Done(shown, Exit.DONE)
    report = make.report(recipe, asked.source or recipe.name, asked.what, accuracy())
    if asked.fit or asked.pin:
        return _recipe_made(report, recipe, asked, tell, kept)
    if asked.explain is not None:
        told = _explained(report, asked.explain)
        found = {"name": asked.explain, "lines": told.splitlines()}
        return Done(json.dumps(found, indent=1) + "\n" if asked.as_json else told, Exit.DONE)
    if other is not None:
        before, after = asked.compared
        changed = diffs.diff(report, make.report(other, other.name, asked.what))
        changed |= {"before": before or recipe.name, "after": after or other.name}
        return Done(json.dumps(changed, indent=1) + "\n" if asked.as_json else diffs.text(changed), Exit.DONE)
    if asked.net:
        network = placements.net(report, recipe)
        shown = json.dumps(network.to_json(), indent=1) + "\n" if asked.as_json else placements.text(network)
        return Done(shown, Exit.DONE)
    if asked.run is not None:
        report.forecast = make.forecast_of(report, recipe, asked.run)
    if asked.skew is not None:
        report.skew = skews.skew(report.pricing, Setting.of(recipe, devices_of(recipe)), asked.skew)
    if not report.fits:
        report.edits = search.edits(report, recipe)
    elif asked.suggest:
        faster = suggest.suggest(report, recipe, tell)
        report.suggestions, report.searched, report.search_said = faster.edits, faster.to_json(), faster.words
    elif asked.what == "train":
        report.suggestions = suggest.promising(report, recipe)
    code = Exit.DONE if report.fits else Exit.FIT
    made = texts(report, recipe, asked)
    if entry is not None:
        entry.write(made)
    return Done(outputs.deliver(asked, folder, made, tell), code)


def texts(report: Report, recipe: Recipe, asked: Asked) -> dict[str, str]:
    """All that a plan is to say, by kind; and `exit`, the code that the command ends with."""
    code = Exit.DONE if report.fits else Exit.FIT
    return {kind: _text(kind, report, recipe) for kind in outputs.kinds(asked)} | {"exit": str(int(code))}


def _text(kind: str, report: Report, recipe: Recipe) -> str:
    """What a plan says, in one of its forms."""
    if kind == "json":
        return json.dumps(report.to_json(), indent=1) + "\n"
    if kind == "saved":
        return save.dumps(report, recipe)
    if kind in ("screen", "verbose"):
        return screen.screen(report, verbose=kind == "verbose")
    forms = {"page": page.page, "trace": traces.trace, "svg": pictures.svg}
    return forms[kind](report)


def _recipe_made(
    report: Report, recipe: Recipe, asked: Asked, tell: Callable[[str], None], kept: Sequence[Path]
) -> Done:
    """Of `--fit` and `--pin`: a recipe, whose first lines say what was done to it."""
    if asked.fit:
        fitted = None if report.fits else fitting.fit(report, recipe)
        made = fitting.text(fitted, report, recipe)
        shown: dict[str, object] = {"edits": [] if fitted is None else fitted.changes, "recipe": made}
        if fitted is not None:
            shown |= {"harms": [harm.name.lower() for harm in fitted.harms], **dataclasses.asdict(fitted.found)}
    else:
        pinned = pinning.pin(report, recipe)
        made = pinning.text(pinned, report.job.name)
        shown = {"pins": pinned.pins, "left": pinned.left, "programs": dict(pinned.fingerprints), "recipe": made}
    for path in kept:
        save.write(path, made)
        tell(f"saved {path}; next: tpshard plan {path}, tpshard train {path}")
    return Done(json.dumps(shown, indent=1) + "\n" if asked.as_json else made, Exit.DONE)


def check(folder: Path, as_json: bool = False) -> Done:
    """A run held against its plan. Raises `Mistakes` where there is nothing to hold."""
    found = check_run.check(folder)
    return Done(json.dumps(found.to_json(), indent=1) + "\n" if as_json else check_run.text(found), Exit.DONE)


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
        raise Mistakes.one(str(error.args[0]), exit=Exit.USAGE, fix="`plan --verbose` lists the names") from error


def accuracy() -> str:
    """The mean errors last written by `benchmarks/plan_accuracy.py`; empty if it never ran."""
    file = resources.files("tpshard.plan").joinpath("accuracy.txt")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
