"""The type of every error in a user's input, and its rendering as text, in colour and as JSON."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpshard.diagnostics.exits import Exit


@dataclass(frozen=True)
class Source:
    """A place in a recipe or in an override. Lines and columns count from 1, columns in characters."""

    file: str
    line: int
    col: int
    text: str
    """The whole line, without its line end."""
    width: int = 1
    """Number of characters that the caret underlines."""
    origins: Notes = ()
    """The places of the values that an interpolation here refers to, each with a note."""

    def __str__(self) -> str:
        """`file:line:col`, or only `file` for a default (line 0)."""
        return f"{self.file}:{self.line}:{self.col}" if self.line else self.file


Notes = tuple[tuple[Source, str], ...]
"""Places in a recipe, each with a note about it."""


@dataclass(frozen=True)
class Diagnostic:
    """One mistake: what is wrong, where, why, and how to fix it."""

    message: str
    exit: Exit = Exit.RECIPE
    where: Source | None = None
    why: str = ""
    """A note beside the caret."""
    fix: str = ""
    severity: Literal["error", "warning"] = "error"
    also: Notes = ()
    """Further places of the mistake."""


def looked_for(name: str, where: Source | None) -> str:
    """Where a file or folder that is not there was looked for: beside the recipe's file, and in the working directory.

    Empty for an absolute name, and for one of the hub's.
    """
    if os.path.isabs(name) or os.path.exists(name) or name.startswith(("hf:", "hub:")):
        return ""
    folders = [os.path.dirname(where.file)] if where is not None and where.line else []
    places = dict.fromkeys(os.path.abspath(os.path.join(folder, name)) for folder in (*folders, ""))
    return "there is " + " and ".join(f"no {place}" for place in places)


class Mistakes(Exception):
    """All mistakes of an input, reported together. The command line prints them to stderr and exits with `exit`."""

    def __init__(self, diagnostics: Iterable[Diagnostic]):
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__(self.diagnostics)

    @classmethod
    def one(
        cls,
        message: str,
        *,
        exit: Exit = Exit.RECIPE,
        where: Source | None = None,
        why: str = "",
        fix: str = "",
        also: Notes = (),
    ) -> Mistakes:
        """An exception with a single mistake."""
        return cls([Diagnostic(message, exit, where, why, fix, "error", also)])

    @property
    def exit(self) -> Exit:
        """The lowest exit code of 2 to 5 among the errors; without one of these, the lowest of all."""
        codes = [d.exit for d in self.diagnostics if d.severity == "error"]
        static = [code for code in codes if Exit.USAGE <= code <= Exit.MACHINE]
        return min(static or codes, default=Exit.BUG)

    def __str__(self) -> str:
        return as_text(self.diagnostics)


_COLORS = {"error": "1;31", "warning": "1;33", "place": "36", "fix": "32"}


def as_text(diagnostics: Sequence[Diagnostic], *, color: bool = False, width: int = 0) -> str:
    """The diagnostics as text, one block each, like a compiler's. `width` shortens source lines; 0 does not."""
    return "\n".join(_block(d, color, width) for d in diagnostics)


def as_json(diagnostics: Sequence[Diagnostic]) -> list[dict[str, Any]]:
    """The diagnostics as JSON values: positions from 1, `end_col` exclusive, null without a place."""
    return [
        {
            "severity": d.severity,
            "exit": int(d.exit),
            "message": d.message,
            **_place(d.where),
            "why": d.why,
            "fix": d.fix,
            "also": [{**_place(source), "why": words} for source, words in _other_places(d)],
        }
        for d in diagnostics
    ]


def dumps(diagnostics: Sequence[Diagnostic], **more: Any) -> str:
    """`as_json` as one document, with a flag for errors, and with what a command adds."""
    return json.dumps(
        {
            "schema": 1,
            "ok": all(d.severity != "error" for d in diagnostics),
            "exit": int(Mistakes(diagnostics).exit) if any(d.severity == "error" for d in diagnostics) else 0,
            "diagnostics": as_json(diagnostics),
            **more,
        },
        indent=2,
    )


def printable(text: str) -> str:
    """`text` with control characters escaped, so that another person's recipe cannot control the terminal."""
    control = r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
    return re.sub(control, lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def _other_places(d: Diagnostic) -> list[tuple[Source, str]]:
    """All places of the mistake except the first, each once."""
    pairs = [*d.also, *(d.where.origins if d.where else ())]
    return [pair for i, pair in enumerate(pairs) if pair[0] not in [source for source, _ in pairs[:i]]]


def _place(source: Source | None) -> dict[str, Any]:
    keys = ("file", "line", "col", "end_col", "text")
    if source is None:
        return dict.fromkeys(keys)
    return dict(zip(keys, (source.file, source.line, source.col, source.col + source.width, source.text)))


def _block(d: Diagnostic, color: bool, width: int) -> str:
    def paint(text: str, kind: str) -> str:
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if color else text

    lines = [f"{paint(d.severity, d.severity)}: {printable(d.message)}"]
    places = [(d.where, d.why)] if d.where else []
    places += _other_places(d)
    gutter = max([len(str(source.line)) for source, _ in places], default=1)
    for number, (source, words) in enumerate(places):
        arrow = "-->" if number == 0 else ":::"
        lines.append(f"{' ' * (gutter + 1)}{paint(arrow, 'place')} {printable(str(source))}")
        if source.line:
            text, start = _window(source, width - gutter - 3 if width else 0)
            lines.append(f"{' ' * gutter} {paint('|', 'place')}")
            lines.append(f"{source.line:>{gutter}} {paint('|', 'place')} {printable(text)}")
            # tabs stay tabs, so that the caret is aligned at any tab width
            lead = re.sub(r"[^\t]", " ", printable(text[: source.col - 1 - start]))
            carets = "^" * max(1, min(source.width, len(text) - (source.col - 1 - start)))
            mark = paint(carets, d.severity) + (f" {printable(words)}" if words else "")
            lines.append(f"{' ' * gutter} {paint('|', 'place')} {lead}{mark}")
        elif words:
            lines.append(f"{' ' * gutter} {paint('=', 'place')} {printable(words)}")
    if d.where is None and d.why:
        lines.append(f"  why: {printable(d.why)}")
    if d.fix:
        lines.append(f"  {paint('fix', 'fix')}: {printable(d.fix)}")
    return "\n".join(lines) + "\n"


def _window(source: Source, width: int) -> tuple[str, int]:
    """The part of the line to show, and the index of its first character."""
    limit = max(width, 20) if width else 200
    if len(source.text) <= limit:
        return source.text, 0
    start = max(0, min(source.col - 1 - limit // 3, len(source.text) - limit))
    return source.text[start : start + limit], start


def plural(n: float, word: str) -> str:
    """A number with a noun in singular or plural: `1 host`, `2 hosts`, `2 micro-batches`, `2 epochs`."""
    number = f"{n:,}" if isinstance(n, int) else f"{n:g}"
    hisses = word.endswith(("ch", "sh")) and not word.endswith("epoch")
    return f"{number} {word}" if n == 1 else f"{number} {word}{'es' if hisses else 's'}"


def join(words: Iterable[str]) -> str:
    """Joins words as in `a, b or c`."""
    *most, last = list(words)
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """The fix for a word that is not one of `choices`: the most similar one, or else `otherwise`."""
    close = suggestion(word, choices)
    return f"did you mean `{close}`?" if close else otherwise


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The one of `choices` that is most similar to `word`; "" if none is similar."""
    names = list(choices)
    begun = [name for name in names if len(word) > 2 and name.startswith(word.lower())]
    close = begun or difflib.get_close_matches(word.lower(), names, 1, 0.6)
    return close[0] if close else ""
