"""Writes a translated file as a recipe: each value with the line that it came from."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tpshard.diagnostics.diagnostic import Source, printable
from tpshard.recipes.foreign.translation import RecipeLine, Tool, Translation
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.settings.stated import show
from tpshard.recipes.text.nodes import Node, scalar, trap

WIDTH = 118


def text_of(tool: Tool, file: str, translation: Translation) -> str:
    """The recipe as YAML, in the order of a recipe's keys, a value a line."""
    tree: dict[str, Any] = {}
    comments = _comments(tool, file, translation.lines)
    for line in translation.lines:
        *above, name = line.key.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        if isinstance(line.value, Mapping) and isinstance(section.get(name), dict):
            section[name] |= line.value
        else:
            section[name] = dict(line.value) if isinstance(line.value, Mapping) else line.value
    order = [one.name for one in fields(Recipe)]
    rows = _lines({key: tree[key] for key in sorted(tree, key=order.index)}, comments)
    whose = tool.program or _whose(tool)
    head = f"# From {printable(file)}, a configuration of {tool.name}; defaults are those of {whose}."
    return "\n".join([head, "schema: 1", *(line for row, words in rows for line in _commented(row, words)), ""])


def _commented(row: str, words: str) -> Iterator[str]:
    """A line with its comment: behind it, or above it where it is long."""
    line = f"{row.ljust(44)}  # {words}" if words else row
    if len(line) <= WIDTH:
        yield line
        return
    indent = row[: len(row) - len(row.lstrip())]
    yield from textwrap.wrap(
        words, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_on_hyphens=False
    )
    yield row


def _comments(tool: Tool, file: str, lines: Sequence[RecipeLine]) -> dict[str, str]:
    """What each key follows from: `line 12: training.seq_len = 8192`. Another key's whole reason is named by that."""
    mesh = next((line for line in lines if line.key == "mesh"), None)
    first: dict[str, str] = {}
    comments: dict[str, str] = {}
    for line in lines:
        said, defaults, words = line.said, dict(line.defaults), list[str]()
        same = repr((said, defaults))
        if (said or defaults) and (other := first.setdefault(same, line.key)) != line.key:
            comments[line.key] = f"as {other}"
            continue
        if mesh is not None and line is not mesh and len(mesh.said) > 2 and all(one in said for one in mesh.said):
            said = tuple(one for one in said if one not in mesh.said)
            defaults = {key: value for key, value in defaults.items() if key not in mesh.defaults}
            words = ["mesh"]
        words += [f"{place(one.where, file)}: {one.name.removeprefix('recipe.')} = {one.shown}" for one in said]
        if defaults:
            shown = [f"{key} = {show(value)}" for key, value in defaults.items()]
            words.append(f"default: {', '.join(shown)}" if len(shown) < 5 else f"{len(shown)} defaults")
        words += [line.note] if line.note else []
        comments[line.key] = printable("; ".join(words or [f"{_whose(tool)} does so"]))
    return comments


def place(where: Source, file: str) -> str:
    """A setting's place for people, who read `file`."""
    if where.file.startswith("<"):
        return "command line"
    here = where.file == file or file.startswith(f"{where.file}:")
    return f"line {where.line}" if here else f"{os.path.basename(where.file)} line {where.line}"


def _whose(tool: Tool) -> str:
    return tool.program.partition(",")[0] or f"{tool.name} {tool.version}"


def _lines(
    tree: Mapping[str, Any], comments: Mapping[str, str], path: str = "", indent: str = ""
) -> Iterator[tuple[str, str]]:
    """Lines of YAML, each with its comment. A map goes on below its key where something below has its own comment."""
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        below = [other for other in comments if other.startswith(f"{here}.")]
        words = comments.get(here, "")
        sections = isinstance(value, Mapping) and value and (below or here in ("model", "schedule"))
        if sections:
            yield f"{indent}{key}:", words
            yield from _lines(value, comments, here, indent + "  ")
        else:
            yield f"{indent}{key}: {_flow(value)}", words


def _flow(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    plain = Node("scalar", Source("", 0, 0, ""), value, True)
    bare = value and not set(value) & set("*&!|>%@`#{}[],:'\"?\\\n\t $") and not value.startswith("-")
    return value if bare and isinstance(scalar(plain), str) and trap(plain) is None else json.dumps(value)
