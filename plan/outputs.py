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
class Done:
    text: str
    """The text for stdout."""
    exit: Exit


def kinds(asked: Asked) -> list[str]:
    """The kinds of text that the options request, that for stdout first."""
    found = ["json" if asked.as_json else "verbose" if asked.verbose else "screen"]
    files = {"page": asked.html, "trace": asked.trace, "svg": asked.svg}
    found += [kind for kind, path in files.items() if path is not None]
    return list(dict.fromkeys([*found, *([] if asked.dry_run else SAVED.values())]))


def deliver(asked: Asked, folder: Path, texts: Mapping[str, str], tell: Callable[[str], None]) -> str:
    """Writes the files, and returns the text for stdout. `folder` is the run's."""
    files = [(asked.html, "page"), (asked.trace, "trace"), (asked.svg, "svg")]
    if not asked.dry_run:
        files += [(folder / name, kind) for name, kind in SAVED.items()]
    for path, kind in files:
        if path is not None:
            save.write(path, texts[kind])
    if not asked.dry_run:
        tell(f"saved {folder}/{', '.join(SAVED)}")
    return texts[kinds(asked)[0]]


def entry(recipe: Recipe, asked: Asked) -> PlanEntry | None:
    """Where the plan of a recipe is kept; None where it is not: it says something else than a plan does, or no hash can
    know all that it depends on."""
    modes = asked.search or asked.passes or asked.net or asked.fit or asked.pin or asked.explain is not None
    if modes:
        return None
    return entry_of(recipe, asked.source, asked.what, asked.suggest, asked.run, asked.skew)


def known(recipe: Recipe, asked: Asked, kept: PlanEntry, tell: Callable[[str], None]) -> Done | None:
    """The cached plan; None if there is none. Raises `Mistakes` (exit 5) for files that cannot be written."""
    texts = kept.read([*kinds(asked), "exit"])
    if texts is None:
        return None
    folder = Path(recipe.run.dir)
    for path in (asked.html, asked.trace, asked.svg, *(() if asked.dry_run else (folder / name for name in SAVED))):
        if path is not None:
            save.check_writable(path)
    return Done(deliver(asked, folder, texts, tell), Exit(int(texts["exit"])))
