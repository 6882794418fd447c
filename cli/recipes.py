"""`tpshard recipes`: lists, shows and copies the shipped recipes, reads other trainers' configurations, and prints keys
and schema."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tpshard.cli.foreign_recipe import print_recipe
from tpshard.cli.main import Command, columns, group
from tpshard.cli.shared.arguments import Json, Overrides, Overwrite, complete_shipped, recipe_argument
from tpshard.diagnostics.diagnostic import Exit, Mistakes, did_you_mean

if TYPE_CHECKING:
    from tpshard.recipes.keys.schema import Recipe

app = group("List, show and copy recipes, or translate other trainers' configurations; explain keys; print the schema.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A shipped recipe.", autocompletion=complete_shipped, show_default=False),
]
Shown = Annotated[str, recipe_argument(metavar="RECIPE", help="A shipped name, or a file.")]
To = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="The file to write. Default: NAME.yaml here.", show_default=False),
]
Prefix = Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only keys below, such as fsdp.", show_default=False)]
Resolved = Annotated[
    bool,
    typer.Option("--resolved", help="Every key, with defaults, extended recipes and interpolations filled in."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write into a file instead.", show_default=False)
]


@app.command(cls=Command)
def ls(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from tpshard.recipes.reading.extends import builtins
    from tpshard.recipes.reading.load import load

    rows = []
    for name, path in builtins().items():
        about = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").partition(":   ")[0]
        rows.append({"name": name, "about": about, **_facts(load(name)), "path": str(path)})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    wide = columns(sys.stdout) or 120
    widths = {key: max(len(row[key]) for row in rows) for key in ("name", "model", "devices")}
    below = wide - sum(widths.values()) < ABOUT
    for row in rows:
        cells = " ".join(row[key].ljust(width) for key, width in widths.items())
        indent = "  " if below else " " * (len(cells) + 1)
        parts = textwrap.wrap(row["about"], wide - len(indent)) or [""]
        lines = [cells, *(indent + part for part in parts)]
        for line in lines if below else [f"{cells} {parts[0]}", *lines[2:]]:
            print(line.rstrip() if len(line) <= wide else line[: wide - 3] + "...")


ABOUT = 40
"""Columns of a terminal left for what a recipe is about; with fewer that stands on a line of its own."""


def _facts(recipe: Recipe) -> dict[str, str]:
    key = recipe.model.named_by
    model = str(recipe.model.stored()[key]) if key is not None else ""
    cluster = recipe.cluster
    where = "this machine" if cluster is None else f"{cluster.nodes * cluster.devices_per_node} x {cluster.device}"
    return {"model": model, "devices": where}


@app.command(cls=Command)
def show(recipe: Shown, overrides: Overrides = None, resolved: Resolved = False) -> None:
    """Print a recipe as written; with --resolved or changes, all its keys."""
    from tpshard.recipes.reading.load import find, load

    if resolved or overrides:
        print(load(recipe, overrides or ()).to_yaml(resolved=resolved), end="")
    else:
        load(recipe)
        print(find(recipe).read_text(encoding="utf-8"), end="")


@app.command(cls=Command)
def cp(name: Name, to: To = None, overwrite: Overwrite = False) -> None:
    """Copy a shipped recipe into a file to edit."""
    from tpshard.cli.shared.files import write
    from tpshard.recipes.reading.extends import builtins

    if name not in builtins():
        fix = did_you_mean(name, builtins(), f"shipped: {', '.join(builtins())}")
        raise Mistakes.one(f"there is no shipped recipe `{name}`", exit=Exit.USAGE, fix=fix)
    path = to or Path(f"{name}.yaml")
    if path.is_dir():
        path = path / f"{name}.yaml"
    if not path.parent.is_dir() and not path.parent.resolve().is_relative_to(Path.cwd()):
        why = "folders are created only below the working directory"
        raise Mistakes.one(f"there is no folder {path.parent}", exit=Exit.USAGE, why=why, fix=f"mkdir -p {path.parent}")
    write(path, builtins()[name].read_text(encoding="utf-8"), overwrite=overwrite)
    print(path)
    print(f"next: edit it, then `tpshard validate {path}` and `tpshard plan {path}`", file=sys.stderr)


app.command("from", cls=Command)(print_recipe)


@app.command(cls=Command)
def keys(prefix: Prefix = "") -> None:
    """Print every key with its allowed values, its default, and its effect."""
    import textwrap

    from tpshard.recipes.reading.document import keys as documented

    listed = documented(prefix)
    if not listed:
        raise Mistakes.one(f"there is no key `{prefix}`", exit=Exit.USAGE, fix="`tpshard recipes keys` lists them all")
    wide = min(columns(sys.stdout) or 100, 120)
    for key in listed:
        print(key.path)
        for line in (key.text, f"{key.legal}; default {key.default}"):
            print(textwrap.fill(line, max(wide, 20), initial_indent="    ", subsequent_indent="    "))


@app.command(cls=Command)
def schema(out: Out = None, overwrite: Overwrite = False) -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them.

    An editor uses it for recipes whose first line is `# yaml-language-server: $schema=FILE`.
    """
    from tpshard.cli.shared.files import write
    from tpshard.recipes.reading.document import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        print(text, end="")
    else:
        write(out, text, overwrite=overwrite)
        print(out)
