"""How a law between keys of a recipe says that it is violated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from tpshard.diagnostics.diagnostic import Diagnostic
from tpshard.recipes.keys.schema import Recipe

Law = Callable[[Recipe], Iterator[Diagnostic]]


def violation(
    recipe: Recipe, key: str, message: str, why: str = "", fix: str = "", also: Mapping[str, str] | None = None,
    severity: Literal["error", "warning"] = "error",
) -> Diagnostic:  # fmt: skip
    """A diagnostic that points at `key` in the recipe. `also`: further keys to show, each with a note."""
    others = tuple((recipe.where(other), note) for other, note in (also or {}).items())
    return Diagnostic(message, where=recipe.where(key), why=why, fix=fix, severity=severity, also=others)
