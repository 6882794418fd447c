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
    """Whether a regular expression matches a whole text, as Python reads it. By RE2 where that knows it, and with
    Python's engine where it has no repetition, or lookaround. ValueError where it is none."""
    if set(expression) & set("*+?{"):
        try:
            return matches_start(f"(?:{expression})$", text)
        except ValueError:  # lookaround, or none at all
            pass
    try:
        return re.fullmatch(expression, text) is not None
    except re.error as error:
        raise ValueError(f"`{expression}` is no regular expression: {error}") from None
