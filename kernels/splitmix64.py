"""The constants of SplitMix64 (Steele, Lea and Flood, 2014), whose unsigned words are stored as int64."""

from __future__ import annotations

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The increment of the state, and the two multipliers of the output function."""


def to_signed(word: int) -> int:
    """An unsigned 64-bit integer as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
