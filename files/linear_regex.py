"""Regular expressions of foreign artefacts, matched in linear time."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1 << 16)
def matches_start(expression: str, text: str) -> bool:
    """Whether a regular expression matches the start of a text, in time linear in both: by RE2, since Python's engine
    may backtrack for ever. ValueError where it is none, or needs what RE2 lacks (backreferences, lookaround)."""
    import pyarrow.compute as arrow

    return bool(arrow.match_substring_regex(text, f"^(?:{expression})").as_py())
