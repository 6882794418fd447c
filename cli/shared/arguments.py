"""Arguments that several commands share, and their shell completion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, Source
from tpshard.recipes.keys.stores import is_url

if TYPE_CHECKING:
    from tpshard.recipes.keys.schema import Recipe


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Completions of a recipe: shipped names, and YAML files and folders below the typed path."""
    from tpshard.recipes.reading.extends import builtins

    completions = [(name, "shipped") for name in builtins() if name.startswith(incomplete)]
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    prefix = incomplete[: incomplete.rfind("/") + 1]
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        entries = []
    for entry in entries:
        path = prefix + entry.name
        if path.startswith(incomplete) and not entry.name.startswith("."):
            if entry.suffix in (".yaml", ".yml"):
                completions.append((path, "file"))
            elif entry.is_dir():
                completions.append((path + "/", "folder"))
    return completions


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Completions of an override: the schema's keys, and after `=` the values that a key allows."""
    from tpshard.cli.shared.completion import completions

    return completions(incomplete)


def complete_shipped(incomplete: str) -> list[str]:
    """Completions of a shipped recipe's name."""
    from tpshard.recipes.reading.extends import builtins

    return [name for name in builtins() if name.startswith(incomplete)]


recipe_argument = partial(typer.Argument, autocompletion=complete_recipe, show_default=False)
RecipeArgument = Annotated[
    str, recipe_argument(metavar="RECIPE", help="A recipe: a file, a run's folder, or a shipped name.")
]
OptionalRecipe = Annotated[
    str | None,
    recipe_argument(
        metavar="[RECIPE]",
        help="A recipe: a file, a run's folder, or a shipped name. Default: ./recipe.yaml, else quickstart.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY.PATH=VALUE]...",
        help="Changes to the recipe, as key.path=value.",
        autocompletion=complete_override,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="KIND", help="Short for cluster.device=KIND: cpu, h200, ...", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


def on_device(overrides: Sequence[str] | None, device: str | None) -> list[str]:
    """The overrides of a command, with its option `--device` as the override `cluster.device`."""
    return [*(overrides or ()), *([] if device is None else [f"cluster.device={device}"])]


def refuse_unread(command: str, overrides: Sequence[str] | None, read: Sequence[str], why: str) -> None:
    """Raises `Mistakes` (exit 2) for overrides of keys that a command does not read.

    read: the keys and sections that it reads. why: where the command takes the others from.
    """
    unread = []
    for number, text in enumerate(overrides or (), 1):
        key = text.partition("=")[0]
        if "=" in text and not any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in read):
            where = Source(f"<override {number}>", 1, 1, text, len(key))
            message = f"`{command}` does not obey `{key}`"
            unread.append(Diagnostic(message, Exit.USAGE, where, why, f"leave it out; obeyed are {', '.join(read)}"))
    if unread:
        raise Mistakes(unread)


def carried_files(recipe: str, overrides: Sequence[str]) -> list[str]:
    """The override that names the tokenizer that a recipe's run carries, if there is one."""
    from tpshard.cli.preflight.preflight import on_this_host
    from tpshard.models.folders.folder_tokenizer import tokenizer_files
    from tpshard.programs.fit.recipe_model import carried_by
    from tpshard.recipes.reading.load import examine

    if names_tokenizer(overrides):
        return []
    try:
        loaded = examine(on_this_host(recipe), overrides, store=recipe if is_url(recipe) else None).recipe
        if not is_url(recipe) and loaded.run.store is not None:
            on_this_host(loaded.run.store)
        kept = carried_by(loaded).absolute()
    except Mistakes:  # `load` tells what is wrong
        return []
    return [f"data.tokenizer={kept}"] if tokenizer_files(kept) else []


def names_tokenizer(overrides: Sequence[str]) -> bool:
    """Whether one of the overrides of a command line sets `data.tokenizer`."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    return any(key == "data" or f"{key}.".startswith("data.tokenizer.") for key in keys)


def load(
    recipe: str | None, overrides: Sequence[str] | None = None, *, trained: bool = False, weights: bool = True
) -> Recipe:
    """The recipe that the command line names; by default ./recipe.yaml, else the quickstart. Warnings are shown.

    trained: for a command that reads what the recipe's run has written; the folders that it began from may be gone.
    weights: whether models that it names on the hub are fetched with their weights.
    Raises `Mistakes` when the recipe is wrong.
    """
    from tpshard.cli.main import report
    from tpshard.cli.preflight.preflight import load_checked

    changes = list(overrides or ())
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        changes = [recipe, *changes]
        recipe = None
    if recipe is None:
        recipe = "recipe.yaml" if Path("recipe.yaml").is_file() else "quickstart"
    carried = carried_files(recipe, changes) if trained else []
    loaded, warnings = load_checked(recipe, [*changes, *carried], weights=weights)
    if warnings:
        report(Mistakes(warnings))
    return loaded


def check_change(option: str, changes: Sequence[str], one: Recipe, other: Recipe) -> None:
    """Refuses to compare a recipe with itself: raises `Mistakes` (exit 2) if `changes` leave it as it is; axes of one
    device in a mesh divide nothing."""
    said = [{**each.stored(), "mesh": [axis for axis in each.mesh.items() if axis[1] != 1]} for each in (one, other)]
    if repr(said[0]) != repr(said[1]):
        return
    maps = any("={" in change.replace(" ", "") for change in changes)
    axis, size = next((each for each in one.mesh.items() if each[1] != 1), ("tp", 1))
    raise Mistakes.one(
        f"`{option} {' '.join(changes)}` changes nothing: both recipes are the same", exit=Exit.USAGE,
        why="a map is merged key by key: what it does not name stays as the recipe has it" if maps else "",
        fix=f"name each key that changes, such as {option} mesh.{axis}={1 if size != 1 else 2}",
    )  # fmt: skip
