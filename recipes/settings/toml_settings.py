"""Reads the settings of a TOML file, with their places."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from tpshard.diagnostics.diagnostic import Mistakes, Source
from tpshard.recipes.settings.stated import Stated, StatedSettings
from tpshard.recipes.text.nodes import decode

_KEY = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_TABLE = re.compile(rf"\s*\[\s*((?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*)\s*\]")
_ENTRY = re.compile(rf"\s*((?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*)\s*=")


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a TOML file, by their paths with dots. Raises `Mistakes`."""
    text = decode(data, file)
    lines = text.split("\n")
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # also a number of too many digits
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        row, col = (int(place[1]), int(place[2])) if place else (len(lines), 1)
        what = str(error).partition(" (at ")[0].lower() if place else "a number has too many digits"
        message = f"not TOML: {what}"
        fix = "check quotes and brackets before this place"
        raise Mistakes.one(message, where=Source(file, row, col, lines[row - 1]), fix=fix) from None
    places = dict(_places(lines, file))
    top = Source(file, 1, 1, lines[0])

    def below(value: Any, path: str) -> Iterator[Stated]:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield from below(inner, f"{path}.{name}" if path else name)
        else:
            parts = path.split(".")
            above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            yield Stated(path, value, next((places[name] for name in above if name in places), top))

    return StatedSettings({one.key: one for one in below(tree, "")})


def _places(lines: list[str], file: str) -> Iterator[tuple[str, Source]]:
    """The place of each key that begins a line. A line of a text or list that spans lines may look like one; its name
    is then no setting's."""
    table = ""
    for number, line in enumerate(lines, 1):
        if match := _TABLE.match(line):
            table = _dotted(match[1]) + "."
        elif match := _ENTRY.match(line):
            yield table + _dotted(match[1]), Source(file, number, match.start(1) + 1, line, len(match[1]))


def _dotted(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in re.findall(_KEY, key))
