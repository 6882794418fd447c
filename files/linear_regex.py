"""Regular expressions of foreign artefacts, matched in linear time."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1 << 16)
def matches_start(expression: str, text: str) -> bool:
    """Whether a regular expression matches the start of a text, in time linear in both: by RE2, since Python's engine
    may backtrack for ever. ValueError where it is none, or needs what RE2 lacks (backreferences, lookaround)."""
    import pyarrow.compute as arrow

    return bool(arrow.match_substring_regex(text, f"^(?:{expression})").as_py())


def fits(expression: str, text: str) -> bool:
    """Whether a regular expression matches a whole text, as Python reads it.

    By RE2 where that knows it, else (lookaround, backreferences) with Python's engine. ValueError where it is none, and
    where only Python's engine knows it and it repeats a group: that may backtrack for ever.
    """
    if set(expression) & set("*+?{"):
        try:
            return matches_start(f"(?:{expression})$", text)
        except ValueError:  # lookaround, or none at all
            pass
    try:
        known = re.compile(expression)
    except re.error as error:
        raise ValueError(f"`{expression}` is no regular expression: {error}") from None
    if re.search(r"(?<!\\)\)[*+{]", expression):
        raise ValueError(f"`{expression}` repeats a group beside lookaround, which may never end")
    return known.fullmatch(text) is not None
