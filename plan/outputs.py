"""The options of `tpshard plan`, and its outputs: stdout, named files, and the run's folder.

Does not import torch, so that a cached plan (see `plan_cache`) is printed without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tpshard.diagnostics.diagnostic import Exit, Mistakes, printable
from tpshard.plan import saved_plan
from tpshard.plan.plan_cache import PlanEntry, entry_of, remember
from tpshard.plan.report import report_file, screen, screen_words
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report
from tpshard.plan.saved_plan import SavedPlan
from tpshard.plan.step.forecast import Conditions
from tpshard.plan.views import page, pictures, trace
from tpshard.recipes.keys.schema import Recipe

DRAWN: dict[str, Callable[[Report, Drawing], str]] = {"page": page.page, "trace": trace.trace, "svg": pictures.svg}
"""The forms of a plan that need its drawing, which is made for them alone."""
SAVED = {"plan.json": "saved", "plan.html": "page", "plan.trace.json": "trace"}
"""For each file of the run's folder, the kind of its text."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line."""

    source: str = ""
    what: str = "train"
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False
    width: int = screen_words.WIDTH
    """Columns of the screen."""
    html: Path | None = None
    trace: Path | None = None
    svg: Path | None = None
    explain: str | None = None
    stage: str | None = None
    of: str = ""
    """The modules and values to which a stage is limited."""
    against: str | None = None
    """The text that a stage is compared with."""
    search: bool = False
    passes: bool = False
    net: bool = False
    suggest: bool = False
    """Whether to search for faster variants."""
    fit: bool = False
    pin: bool = False
    run: Conditions | None = None
    """The conditions of the whole run; None where no option asks for its forecast."""
    skew: float | None = None
    """Tokens of the busiest expert over the mean; None if not requested."""
    compared: tuple[str, str] = ("", "")
    """The names of the two recipes of a comparison; "" for their own names."""
    cached: bool = True
    """Whether the cache of plans is read and written."""

    @property
    def plans(self) -> bool:
        """Whether the output is a plan, as far as these options say."""
        asked = self.search, self.passes, self.net, self.fit, self.pin
        return not any(asked) and self.explain is None and self.stage is None


@dataclass(frozen=True)
class CommandResult:
    """The text that the command prints, and its exit code."""

    text: str
    """The text for stdout."""
    exit: Exit


def files(options: PlanOptions, folder: Path) -> list[tuple[Path, str]]:
    """The files of a plan with the kinds of their texts: those that the options name and, unless `dry_run`, those that
    `saved_in` places."""
    named = [(options.html, "page"), (options.trace, "trace"), (options.svg, "svg")]
    saved = [] if options.dry_run else [(saved_in(options, folder) / name, kind) for name, kind in SAVED.items()]
    return [*((path, kind) for path, kind in named if path is not None), *saved]


def saved_in(options: PlanOptions, folder: Path) -> Path:
    """Where a plan is saved: the run's `folder`, or below it once the run has begun, whose own plan stays as it is."""
    records = ("lock.json", "metrics.jsonl")  # the lock's file is there from the start of a run on
    begun = any((folder / name).exists() for name in records) or any((folder / "checkpoints").glob("step-*"))
    return folder / "plans" / options.what if begun else folder


def answer(as_json: bool, data: object, text: str, exit: Exit = Exit.DONE) -> CommandResult:
    """An answer that is printed as JSON or as text."""
    return CommandResult(dumps(data) if as_json else text, exit)


def dumps(data: object) -> str:
    """The JSON that the command prints."""
    return json.dumps(data, indent=1) + "\n"


def text(kind: str, report: Report, drawing: Callable[[], Drawing], width: int = screen_words.WIDTH) -> str:
    """A plan in one form: json, screen or verbose, or one of `DRAWN`, which needs the drawing too."""
    if kind in DRAWN:
        return DRAWN[kind](report, drawing())
    if kind == "json":
        return dumps(report.to_json())
    return screen.screen(
        report, verbose=kind == "verbose", width=min(max(width, screen_words.NARROW), screen_words.WIDTH)
    )


def draws(options: PlanOptions) -> bool:
    """Whether the options ask for a form that needs the drawing."""
    return any(kind in DRAWN for _, kind in files(options, Path()))


def deliver(
    options: PlanOptions, folder: Path, report: Report, drawing: Callable[[], Drawing], saved: str,
    tell: Callable[[str], None],
) -> CommandResult:  # fmt: skip
    """Writes a plan's texts to its `files`. Returns the text for stdout; the exit code says whether the plan fits.
    saved: the text of plan.json."""
    if options.run is not None:
        report = replace(report, forecast=report.forecast_under(options.run))
    for path, kind in files(options, folder):
        saved_plan.write(path, saved if kind == "saved" else text(kind, report, drawing))
        if kind == "saved":
            remember(saved)
    if not options.dry_run:
        tell(f"saved {saved_in(options, folder)}/{', '.join(SAVED)}")
    shown = "json" if options.as_json else "verbose" if options.verbose else "screen"
    return CommandResult(text(shown, report, drawing, options.width), Exit.DONE if report.fits else Exit.FIT)


def entry(recipe: Recipe, options: PlanOptions) -> PlanEntry | None:
    """The cache entry of a recipe's plan; None for options whose output is no plan, or a recipe that has no entry."""
    if not options.plans or not options.cached:
        return None
    return entry_of(recipe, options.source, options.what, options.suggest, options.skew)


def deliver_saved(saved: SavedPlan, options: PlanOptions) -> CommandResult:
    """The text for stdout of a plan that was saved; what its texts say does not control the terminal."""
    done = deliver(replace(options, dry_run=True), Path(), report_in(saved), _undrawn, "", lambda _: None)
    return replace(done, text="\n".join(map(printable, done.text.split("\n"))))


def _undrawn() -> Drawing:
    raise AssertionError("a saved plan is not drawn")


def report_in(saved: SavedPlan) -> Report:
    """The report in a saved plan. Raises `Mistakes` (exit 3) where it cannot be shown: the file may say anything."""
    try:
        if saved.report is not None and [text(kind, saved.report, _undrawn) for kind in ("json", "verbose")]:
            return saved.report
        why = "another version of tpshard wrote it"
    except saved_plan.UNREADABLE as error:
        why = str(error) or type(error).__name__
    raise Mistakes.one(f"the report in {saved.path} cannot be read", why=why, fix="plan its recipe again")


def cached_result(
    recipe: Recipe, options: PlanOptions, entry: PlanEntry, tell: Callable[[str], None]
) -> CommandResult | None:
    """The answer from the cache, with its files written; None if the entry lacks a text.

    Raises `Mistakes` (exit 5) for files that cannot be written.
    """
    drawn = draws(options)
    texts = entry.read(["report", *["drawing"] * drawn, *["saved"] * (not options.dry_run)])
    if texts is None:
        return None
    report = report_file.loads(texts["report"], Report)
    drawing = report_file.loads(texts["drawing"], Drawing) if drawn else None
    if report is None or (drawn and drawing is None):
        return None
    folder = recipe.run.folder
    for path, _ in files(options, folder):
        saved_plan.check_writable(path)
    return deliver(options, folder, report, lambda: cast(Drawing, drawing), texts.get("saved", ""), tell)
