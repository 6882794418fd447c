"""Constraints on the schema's values beyond their type, and the types of values that several sections share."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal


@dataclass(frozen=True, eq=False)
class Constraint:
    """A constraint on a value: a check, and what it allows as text and as JSON Schema."""

    legal: str
    """The legal values, as text after "must be"."""
    holds: Callable[[Any], bool]
    json: Mapping[str, Any]
    names: tuple[str, ...] = ()
    """Legal names, to suggest and to complete."""
    whole: bool = True
    """Whether `legal` describes the type as well."""


def limits(
    *, least: float | None = None, above: float | None = None, most: float | None = None, below: float | None = None
) -> Constraint:
    """The constraint that a number is between bounds; `least` and `most` are inclusive, `above` and `below` are not."""
    kinds: tuple[tuple[float | None, str, Callable[[Any, Any], bool], str], ...] = (
        (least, "at least", operator.ge, "minimum"), (above, "above", operator.gt, "exclusiveMinimum"),
        (most, "at most", operator.le, "maximum"), (below, "below", operator.lt, "exclusiveMaximum"),
    )  # fmt: skip
    bounds = [(bound, words, compare, name) for bound, words, compare, name in kinds if bound is not None]
    return Constraint(
        legal=" and ".join(f"{words} {_number(bound)}" for bound, words, _, _ in bounds),
        holds=lambda value: all(compare(value, bound) for bound, _, compare, _ in bounds),
        json={name: bound for bound, _, _, name in bounds},
        whole=False,
    )


def _number(bound: float) -> str:
    return f"{bound:,.12g}" if bound == 0 or 1e-3 <= abs(bound) < 1e9 else f"{bound:g}".replace("e+", "e")


def form(pattern: str, legal: str) -> Constraint:
    """The constraint that text matches a pattern; `legal` describes the text."""
    matching = re.compile(pattern)
    return Constraint(
        legal, lambda value: matching.fullmatch(value) is not None, {"pattern": f"^(?:{pattern})$"}, whole=False
    )


def name_or_file(names: tuple[str, ...], suffix: str) -> Constraint:
    """The constraint that text is a shipped name, or the path of a user's file."""
    return Constraint(
        f"{', '.join(names)}, or the path of a {suffix} file",
        lambda value: value in names or value.endswith(suffix),
        {"anyOf": [{"enum": list(names)}, {"pattern": rf"{re.escape(suffix)}$"}]},
        names,
    )


def _names_a_run(value: str) -> bool:
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        return False
    plain = value.isprintable() and not any(c in value for c in "/\\")
    return plain and value.strip() == value and value not in ("", ".", "..") and length <= 200


RUN_NAME = Constraint(
    "a name of at most 200 bytes without slashes and control characters",
    _names_a_run,
    {"pattern": r"^(?!\.{1,2}$)(?!\s)[^/\\\x00-\x1f\x7f]{1,200}(?<!\s)$"},
    whole=False,
)
"""The constraint on the name of a run, which names its folder."""

SIZE = Constraint(
    "at least 1, or -1 for the rest of the devices",
    lambda value: value == -1 or 1 <= value <= 2**20,
    {"anyOf": [{"minimum": 1, "maximum": 2**20}, {"const": -1}]},
)
"""The constraint on the size of a mesh axis."""

GROUP_SIZE = Constraint(
    "a positive multiple of 8, or -1 for the whole column",
    lambda value: value == -1 or (8 <= value <= 2**20 and value % 8 == 0),
    {"anyOf": [{"minimum": 8, "multipleOf": 8}, {"const": -1}]},
    whole=False,
)
"""The constraint on the number of rows that share a scale."""

ALONE = Constraint("a name, a list of names, or null", lambda value: True, {})
"""Marks a list that may be written without brackets if it has one item, and as null if it is empty."""

BYTES = Constraint("a number of bytes above 0, or text such as 70GiB", lambda value: value > 0, {"exclusiveMinimum": 0})
"""Marks a number of bytes, or text that `bytes_in` reads as one."""

PERCENT = Constraint(
    "a number from 0 to 1, or a percentage such as 0.1%", lambda value: 0 <= value <= 1, {"minimum": 0, "maximum": 1}
)
"""Marks a share, which may be written in percent."""


AXES = ("pp", "dp", "fsdp", "ep", "spatial", "tp")
"""Mesh axes that rules may name even if the mesh does not have them: they then have size 1."""

Count = Annotated[int, limits(least=1, most=10**12)]
CountOrZero = Annotated[int, limits(least=0, most=10**12)]
Positive = Annotated[float, limits(above=0, most=1e12)]
NonNegative = Annotated[float, limits(least=0, most=1e12)]
Share = Annotated[float, PERCENT]
Dtype = Literal["fp32", "bf16", "fp16"]
Computed = Literal["fp32", "bf16", "fp16", "fp8"]
AxisName = Annotated[str, form(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores")]
AxisSize = Annotated[int, SIZE]
Axes = Annotated[tuple[AxisName, ...], ALONE]


def share_in(text: str) -> float | None:
    """The share that a text such as 0.1% names; None for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", text.strip())
    return None if match is None else float(match[1]) / 100


def bytes_in(text: str) -> int | None:
    """The number of bytes in a text such as 70GiB or 64 GB; None for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?)b|b?)", text.strip().lower())
    if match is None:
        return None
    number, prefix, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** ("kmgt".index(prefix) + 1 if prefix else 0))
