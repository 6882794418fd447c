"""The options of `tpshard plan`, and its outputs: stdout, named files, and the run's folder.

Does not import torch, so that a cached plan (see `plan_cache`) is printed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpshard.plan import save
from tpshard.plan.forecast import Conditions
from tpshard.plan.plan_cache import PlanEntry, entry_of
from tpshard.recipes.diagnostic import Exit
from tpshard.recipes.schema import Recipe

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
    html: Path | None = None
    trace: Path | None = None
    svg: Path | None = None
    explain: str | None = None
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


@dataclass(frozen=True)
class CommandResult:
    """The text that the command prints, and its exit code."""

    text: str
    """The text for stdout."""
    exit: Exit


def kinds(options: PlanOptions) -> list[str]:
    """The kinds of text that the options request, that for stdout first."""
    requested = ["json" if options.as_json else "verbose" if options.verbose else "screen"]
    files = {"page": options.html, "trace": options.trace, "svg": options.svg}
    requested += [kind for kind, path in files.items() if path is not None]
    return list(dict.fromkeys([*requested, *([] if options.dry_run else SAVED.values())]))


def deliver(options: PlanOptions, folder: Path, texts: Mapping[str, str], tell: Callable[[str], None]) -> str:
    """Writes a plan's texts to the files that the options name and, unless `dry_run`, to the run's `folder`.

    Returns the text for stdout.
    """
    files = [(options.html, "page"), (options.trace, "trace"), (options.svg, "svg")]
    if not options.dry_run:
        files += [(folder / name, kind) for name, kind in SAVED.items()]
    for path, kind in files:
        if path is not None:
            save.write(path, texts[kind])
    if not options.dry_run:
        tell(f"saved {folder}/{', '.join(SAVED)}")
    return texts[kinds(options)[0]]


def entry(recipe: Recipe, options: PlanOptions) -> PlanEntry | None:
    """The cache entry of a recipe's plan; None for options whose output is no plan, or a recipe that has no entry."""
    modes = options.search or options.passes or options.net or options.fit or options.pin or options.explain is not None
    if modes:
        return None
    return entry_of(recipe, options.source, options.what, options.suggest, options.run, options.skew)


def cached_result(
    recipe: Recipe, options: PlanOptions, entry: PlanEntry, tell: Callable[[str], None]
) -> CommandResult | None:
    """The answer from the cache, with its files written; None if the entry lacks a text.

    Raises `Mistakes` (exit 5) for files that cannot be written.
    """
    texts = entry.read([*kinds(options), "exit"])
    if texts is None:
        return None
    folder = Path(recipe.run.dir)
    for path in (
        options.html,
        options.trace,
        options.svg,
        *(() if options.dry_run else (folder / name for name in SAVED)),
    ):
        if path is not None:
            save.check_writable(path)
    return CommandResult(deliver(options, folder, texts, tell), Exit(int(texts["exit"])))
