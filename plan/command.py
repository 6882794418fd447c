"""The command `tpshard plan` on a checked recipe: returns the text for stdout, and writes the requested files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan import outputs, planner, saved_plan  # fmt: skip
from tpshard.plan.outputs import CommandResult, PlanOptions, answer
from tpshard.plan.plan_cache import PlanEntry
from tpshard.plan.questions import fitting, pass_prices, pinning, placements, stage_texts  # fmt: skip
from tpshard.plan.report import describe, report_file
from tpshard.plan.report.planned import Planned
from tpshard.plan.search import edits, search, search_result, suggest  # fmt: skip
from tpshard.plan.step import skew as skews
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe


def run(
    recipe: Recipe, options: PlanOptions, other: Recipe | None = None, note: Callable[[str], None] | None = None,
    entry: PlanEntry | None = None,
) -> CommandResult:  # fmt: skip
    """Plans a recipe, and answers with the text that the options select.

    Writes the files that the options name and, unless `dry_run`, those of the run's folder. other: the second recipe of
    a comparison. note: receives progress lines. entry: the place in the cache where a plan's texts are stored. The exit
    code is 0, or 4 where the recipe does not fit its devices. Raises `Mistakes` (exit 5) before planning where a file
    cannot be written.
    """
    tell = note or (lambda _: None)
    folder = recipe.run.folder
    writes = {"fastest.yaml": options.search, "fits.yaml": options.fit, "pinned.yaml": options.pin}
    place = outputs.saved_in(options, folder)
    recipes = [place / name for name, on in writes.items() if on and not options.dry_run]
    files = outputs.files(options, folder) if options.plans and other is None else []
    for path in (*recipes, *(path for path, _ in files)):
        saved_plan.check_writable(path)
    if options.search:
        return _answer_search(recipe, options, tell, recipes)
    if options.passes:
        rows = pass_prices.rows(Setting.of(recipe, devices_of(recipe)))
        return answer(options.as_json, pass_prices.to_json(rows), pass_prices.text(rows))
    if options.stage is not None:
        return _answer_stage(recipe, options, other)
    variants = Variants(fork=True)
    planned = planner.planned(recipe, options.source or recipe.name, options.what, accuracy(), variants)
    report = planned.report
    if options.fit or options.pin:
        return _changed_recipe(planned, recipe, options, tell, recipes, variants)
    if options.explain is not None:
        explanation = _answer_explain(planned, options.explain)
        return answer(options.as_json, {"name": options.explain, "lines": explanation.splitlines()}, explanation)
    if options.net:
        network = placements.net(planned, recipe, variants)
        return answer(options.as_json, network.to_json(), placements.text(network))
    if options.skew is not None:
        report.skew = skews.skew(planned.pricing, Setting.of(recipe, devices_of(recipe)), options.skew)
    if not report.fits:
        report.edits = edits.edits(report, recipe, variants=variants)
    elif options.suggest:
        faster = suggest.suggest(report, recipe, tell, variants, planned.pricing)
        report.suggestions, report.searched, report.search_summary = faster.edits, faster.to_json(), faster.words
    elif options.what == "train":
        report.suggestions = suggest.promising(report, recipe, variants=variants)
    saved = "" if options.dry_run else saved_plan.dumps(planned, recipe)
    if entry is not None:
        forms = {"report": report_file.dumps(report)}
        if outputs.draws(options):
            forms["drawing"] = report_file.dumps(planned.drawing)
        entry.write(forms if options.dry_run else {**forms, "saved": saved})
    return outputs.deliver(options, folder, report, lambda: planned.drawing, saved, tell)


def _changed_recipe(
    planned: Planned, recipe: Recipe, options: PlanOptions, tell: Callable[[str], None], to_write: Sequence[Path],
    variants: Variants,
) -> CommandResult:  # fmt: skip
    """The answer of `--fit` and `--pin`: a changed recipe that begins with a comment on the changes."""
    report = planned.report
    if options.fit:
        fitted = None if report.fits else fitting.fit(report, recipe, variants)
        recipe_text = fitting.text(fitted, report, recipe)
        shown: dict[str, object] = {"edits": [] if fitted is None else fitted.changes, "recipe": recipe_text}
        if fitted is not None:
            shown |= {"harms": [harm.name.lower() for harm in fitted.harms], **asdict(fitted.price)}
    else:
        pinned = pinning.pin(planned, recipe)
        recipe_text = pinning.text(pinned, report.job.name)
        shown = {
            "pins": pinned.pins,
            "left": pinned.unpinned,
            "programs": dict(pinned.fingerprints),
            "recipe": recipe_text,
        }
    _save(recipe_text, to_write, tell)
    return answer(options.as_json, shown, recipe_text)


def _save(recipe: str, to_write: Sequence[Path], tell: Callable[[str], None]) -> None:
    for path in to_write:
        saved_plan.write(path, recipe)
        tell(f"saved {path}; next: tpshard plan {path}, tpshard train {path}")


def _answer_search(
    recipe: Recipe, options: PlanOptions, tell: Callable[[str], None], to_write: Sequence[Path]
) -> CommandResult:
    result = search.search(recipe, tell, processes=os.cpu_count() or 1)
    winner = search_result.winner(result, recipe)
    if winner:
        _save(winner, to_write, tell)
    shown = {
        "candidates": [{**(row := asdict(c)), "found": row.pop("price")} for c in result.candidates],
        "refused": result.refused, "untried": result.untried,
        "as_written": result.as_written and asdict(result.as_written), "recipe": winner or None,
    }  # fmt: skip
    return answer(options.as_json, shown, search_result.text(result, recipe), Exit.DONE if winner else Exit.FIT)


def _answer_stage(recipe: Recipe, options: PlanOptions, other: Recipe | None) -> CommandResult:
    """The answer of `--stage`: its text, or the difference from another recipe's or from a text that was kept."""
    name, of = options.stage or "", options.of
    parts = stage_texts.stage(recipe, options.what, name, of)
    text, kept = stage_texts.text(parts), options.against
    if other is not None:
        kept = stage_texts.text(stage_texts.stage(other, options.what, name, of))
    if kept is None:
        return answer(options.as_json, stage_texts.to_json(name, of, parts), text)
    return answer(options.as_json, *stage_texts.comparison(text, kept, options.compared))


def _answer_explain(planned: Planned, name: str) -> str:
    """The answer of `--explain`: why a value has its sharding. Raises `Mistakes` (exit 2) for an unknown name."""
    try:
        return describe.explain(planned.program, name)
    except KeyError as error:
        raise Mistakes.one(str(error.args[0]), exit=Exit.USAGE, fix="`plan --verbose` lists the names") from error


def accuracy() -> str:
    """The planner's mean errors, as `benchmarks/plan_accuracy.py` last wrote them; empty if it never ran."""
    file = resources.files("tpshard.plan").joinpath("accuracy.txt")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
