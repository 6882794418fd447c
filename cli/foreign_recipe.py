"""`tpshard recipes from`: prints the recipe that says what another trainer's configuration says."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.cli.shared.arguments import Json, Overrides
from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source, as_json, did_you_mean
from tpshard.files.folder_json import read_regular

if TYPE_CHECKING:
    from tpshard.recipes.foreign.translation import Left, Tool, Translation
    from tpshard.recipes.settings.stated import Stated

LARGEST = 1 << 18
"""Bytes of a configuration; published ones have a tenth."""
SHOWN = 80
"""Characters of a value that are shown of a setting that is not said."""
Trainer = Annotated[
    str, typer.Argument(metavar="TOOL", help="torchtitan, megatron, axolotl or accelerate.", show_default=False)
]
File = Annotated[
    str, typer.Argument(metavar="FILE", help="Its TOML, script, YAML, or FILE.py:NAME.", show_default=False)
]


def print_recipe(tool: Trainer, file: File, overrides: Overrides = None, json_only: Json = False) -> int:
    """Print the recipe that says what another trainer's configuration says, each value with the line it came from.

    What a recipe cannot say is listed on stderr. A file that names no devices is for as many as its mesh needs, or as
    cluster.nodes=... and cluster.devices_per_node=... say. Nothing in the file is executed.
    """
    from tpshard.cli.main import report
    from tpshard.recipes.foreign import recipe_text
    from tpshard.recipes.foreign.tools import TOOLS
    from tpshard.recipes.foreign.translation import translate
    from tpshard.recipes.reading.load import loads

    if tool not in TOOLS:
        fix = did_you_mean(tool, TOOLS, f"one of {', '.join(TOOLS)}")
        raise Mistakes.one(f"there is no reader for `{tool}`", exit=Exit.USAGE, fix=fix)
    chosen = TOOLS[tool]
    path, colon, _ = file.partition(".py:")  # and a function in it
    try:
        data = read_regular(f"{path}.py" if colon else file, LARGEST)
    except (OSError, ValueError) as error:
        message, why = f"{file} cannot be read", getattr(error, "strerror", None) or str(error)
        raise Mistakes.one(message, exit=Exit.USAGE, why=why, fix="name the configuration's file") from None
    try:
        settings = chosen.read(data, file)
    except RecursionError:
        raise Mistakes.one(f"{file} is nested deeper than is read", fix="is this the right file?") from None
    translation = translate(chosen, settings, _given(overrides or ()))
    text = recipe_text.text_of(chosen, file, translation)
    if json_only:
        print(json.dumps(_document(chosen, file, text, translation), indent=2))
    else:
        print(text, end="")
        if translation.warnings:
            report(Mistakes(translation.warnings))
        for line in _listed(translation.left, file):
            print(line, file=sys.stderr)
    loads(text, file=f"the recipe from {file}")
    return Exit.DONE


def _given(overrides: Sequence[str]) -> dict[str, Stated]:
    """The keys that the command line sets."""
    from tpshard.recipes.settings.stated import Stated, plain
    from tpshard.recipes.text.nodes import compose

    given = {}
    for number, text in enumerate(overrides, 1):
        key, equals, value = text.partition("=")
        where = Source(f"<override {number}>", 1, 1, text, max(1, len(key)))
        if not equals or not key:
            message = f"the override `{text}` is not key.path=value"
            raise Mistakes.one(message, exit=Exit.USAGE, where=where, fix="for example cluster.nodes=2")
        given[key] = Stated(
            key, plain(compose(value, where.file, shown=text, offset=len(key) + 1, mapping=False)), where
        )
    return given


def _listed(left: Sequence[Left], file: str) -> list[str]:
    """What a recipe does not say, a line each; settings that do not matter together in one."""
    lines = [f"not said: {_named(one, file)}: {one.why}" for one in left if one.matters]
    aside = [_named(one, file) for one in left if not one.matters]
    if aside:
        lines.append(f"left aside, of no effect on what is computed or its cost, or so here anyway: {', '.join(aside)}")
    return lines


def _named(one: Left, file: str) -> str:
    from tpshard.recipes.foreign.recipe_text import place

    where = place(one.where, file) if one.where is not None else "default"
    value = one.shown if len(one.shown) <= SHOWN else f"{one.shown[:SHOWN]}..."
    return f"{one.key}{f' = {value}' if value and one.matters else ''} ({where})"


def _document(tool: Tool, file: str, text: str, translation: Translation) -> dict[str, Any]:
    return {
        "schema": 1,
        "tool": tool.name,
        "version": tool.version,
        "file": file,
        "recipe": text,
        "settings": [
            {
                "key": line.key,
                "value": line.value,
                "from": [{"key": one.key, "value": one.shown, "line": one.where.line} for one in line.said],
                "defaults": dict(line.defaults),
                "note": line.note,
            }
            for line in translation.lines
        ],
        "not_said": [
            {
                "key": one.key, "value": one.shown, "line": one.where.line if one.where else None,
                "col": one.where.col if one.where else None, "why": one.why, "matters": one.matters,
            }
            for one in translation.left
        ],
        "warnings": as_json(translation.warnings),
    }  # fmt: skip
