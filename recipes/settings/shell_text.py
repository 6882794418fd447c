"""Texts of a shell script whose characters know their places in it, with parts that are not known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNKNOWN = "\0"
"""Stands in a text for a part that is not known; the way it is written follows, and the sign again."""


@dataclass(frozen=True)
class Text:
    """A text of which each character has an offset in the script."""

    chars: str
    places: tuple[int, ...]

    def __add__(self, other: Text) -> Text:
        return Text(self.chars + other.chars, self.places + other.places)

    def cut(self, start: int, end: int) -> Text:
        return Text(self.chars[start:end], self.places[start:end])


def unknown(written: str, places: Sequence[int]) -> Text:
    chars = f"{UNKNOWN}{written}{UNKNOWN}"
    return Text(chars, tuple(places[:1] or (0,)) * len(chars))


def under_a_condition(words: Iterable[Text]) -> list[Text]:
    """Words that may not be there, each flag with what follows it as one that is not known."""
    flags: list[list[Text]] = []
    for word in words:
        if not flags or word.chars.lstrip(UNKNOWN).startswith("-"):
            flags.append([])
        flags[-1].append(word)
    return [
        unknown(f"{' '.join(word.chars for word in one).replace(UNKNOWN, '')} (under a condition)", one[0].places[:1])
        for one in flags
    ]


def concatenated(values: Iterable[Text]) -> Text:
    whole = Text("", ())
    for value in values:
        whole = whole + value
    return whole


def divided(text: Text) -> list[Text]:
    """A text at its spaces; how an unknown part is written stays whole."""
    return [
        text.cut(*match.span())
        for match in re.finditer(rf"(?:{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}|[^\s{UNKNOWN}])+", text.chars)
    ]


def flags_apart(text: Text) -> list[Text]:
    """A word that holds whole flags, such as the text of `bash -c`, at its spaces."""
    return divided(text) if re.search(r"(^|\s)--?[A-Za-z].*\s|\s--", text.chars, re.DOTALL) else [text]
