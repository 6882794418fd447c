"""`tpshard validate`: reports every mistake in every recipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from tpshard.cli.shared.arguments import Json, recipe_argument
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, dumps

if TYPE_CHECKING:
    from tpshard.programs.fit.trained_parts import TrainedParts

TEXTS = (".jsonl", ".json.gz", ".parquet", ".txt")
"""Ends of names that are no recipe's, but a text's: those of a pattern that the shell has replaced."""
Files = Annotated[list[str], recipe_argument(metavar="RECIPE", help="Recipes to check.")]


def validate(files: Files, as_json: Json = False) -> int:
    """Check recipes and report every mistake: keys, types, limits, whether model, mesh and cluster fit, and whether the
    folders of model, text and tokenizer can be read here.

    An argument of the form key.path=value overrides that key in all of them.
    """
    from tpshard.cli.main import report
    from tpshard.cli.preflight.model_checks import trained_here
    from tpshard.cli.preflight.preflight import load_checked

    overrides = [name for name in files if "=" in name or name.endswith(TEXTS)]
    recipes = [name for name in files if name not in overrides]
    if not recipes:
        raise typer.BadParameter("no recipe among the arguments")
    diagnostics: dict[Diagnostic, None] = {}  # two recipes may extend the same base
    trained: dict[str, TrainedParts] = {}
    for name in recipes:
        try:
            recipe, warnings = load_checked(name, overrides, text=True, weights=False)
            diagnostics |= dict.fromkeys(warnings)
            if (parts := trained_here(recipe)) is not None:
                trained[name] = parts
            if not as_json:
                rows = [] if parts is None else parts.rows()
                print(f"{name}: fine", *(f"  {row}" for row in rows), sep="\n", file=sys.stderr)
        except Mistakes as mistakes:
            diagnostics |= dict.fromkeys(mistakes.diagnostics)
    if as_json:
        print(dumps(list(diagnostics), trained={name: parts.to_json() for name, parts in trained.items()}))
    elif diagnostics:
        report(Mistakes(diagnostics))
    return Mistakes(diagnostics).exit if any(d.severity == "error" for d in diagnostics) else Exit.DONE
