"""What is asked of a plan, and where what it says goes: stdout, the files that were named, the run's folder.

Imports no torch: a plan that was made before is delivered without it (see `plan_cache`).
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
"""File of the run's folder -> kind of text."""


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
    """Search for what would make it faster."""
    fit: bool = False
    pin: bool = False
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


def kinds(asked: Asked) -> list[str]:
    """Kinds of text that a plan is to say: for stdout first."""
    found = ["json" if asked.as_json else "verbose" if asked.verbose else "screen"]
    files = {"page": asked.html, "trace": asked.trace, "svg": asked.svg}
    found += [kind for kind, path in files.items() if path is not None]
    return list(dict.fromkeys([*found, *([] if asked.dry_run else SAVED.values())]))


def deliver(asked: Asked, folder: Path, texts: Mapping[str, str], tell: Callable[[str], None]) -> str:
    """Writes the files; what is for stdout. `folder` is the run's."""
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
    """The plan as it was made before; None where it was not. Raises `Mistakes` (exit 5) for what cannot be written."""
    texts = kept.read([*kinds(asked), "exit"])
    if texts is None:
        return None
    folder = Path(recipe.run.dir)
    for path in (asked.html, asked.trace, asked.svg, *(() if asked.dry_run else (folder / name for name in SAVED))):
        if path is not None:
            save.check_writable(path)
    return Done(deliver(asked, folder, texts, tell), Exit(int(texts["exit"])))
