"""Constraints on the schema's values beyond their type: each checks a value, describes what is legal, and gives its
JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol


class Constraint(Protocol):
    def wrong(self, value: Any) -> bool: ...

    def legal(self) -> str:
        """The legal values, as text after "must be"."""

    def json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Range:
    """A number between bounds; `least` and `most` are inclusive, `above` and `below` are not."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def wrong(self, value: Any) -> bool:
        return (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
            or (self.below is not None and value >= self.below)
        )

    def legal(self) -> str:
        words = [
            f"{name} {_number(bound)}"
            for name, bound in (
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " and ".join(words)

    def json(self) -> dict[str, Any]:
        names = {"minimum": self.least, "exclusiveMinimum": self.above}
        names |= {"maximum": self.most, "exclusiveMaximum": self.below}
        return {name: bound for name, bound in names.items() if bound is not None}


def _number(bound: float) -> str:
    return f"{bound:,.12g}" if bound == 0 or 1e-3 <= abs(bound) < 1e9 else f"{bound:g}".replace("e+", "e")


@dataclass(frozen=True)
class Size:
    """The size of a mesh axis: at least 1, or -1 for the remaining devices."""

    def wrong(self, value: Any) -> bool:
        return value != -1 and not 1 <= value <= 2**20

    def legal(self) -> str:
        return "at least 1, or -1 for the rest of the devices"

    def json(self) -> dict[str, Any]:
        return {"anyOf": [{"minimum": 1, "maximum": 2**20}, {"const": -1}]}


@dataclass(frozen=True)
class GroupSize:
    """Rows that share a scale: a positive multiple of 8, or -1 for the whole column."""

    def wrong(self, value: Any) -> bool:
        return value != -1 and (value < 8 or value % 8 != 0 or value > 2**20)

    def legal(self) -> str:
        return "a positive multiple of 8, or -1 for the whole column"

    def json(self) -> dict[str, Any]:
        return {"anyOf": [{"minimum": 8, "multipleOf": 8}, {"const": -1}]}


@dataclass(frozen=True)
class Alone:
    """A list that may be written without brackets if it has one item, and as null if it is empty."""

    def wrong(self, value: Any) -> bool:
        return False

    def legal(self) -> str:
        return "a name, a list of names, or null"

    def json(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Form:
    """Text that matches a pattern; `said` describes it."""

    pattern: str
    said: str

    def wrong(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is None

    def legal(self) -> str:
        return self.said

    def json(self) -> dict[str, Any]:
        return {"pattern": rf"^(?:{self.pattern})$"}


@dataclass(frozen=True)
class NameOrFile:
    """A shipped name, or the path of a user's file."""

    names: tuple[str, ...]
    suffix: str

    def wrong(self, value: Any) -> bool:
        return value not in self.names and not value.endswith(self.suffix)

    def legal(self) -> str:
        return f"{', '.join(self.names)}, or the path of a {self.suffix} file"

    def json(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(self.names)}, {"pattern": rf"{re.escape(self.suffix)}$"}]}


_UNITS: Mapping[str, int] = MappingProxyType(
    {"": 1, "b": 1}
    | {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}
    | {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}
)


@dataclass(frozen=True)
class Bytes:
    """A number of bytes, or text such as 70GiB or 64 GB that is read as one."""

    def wrong(self, value: Any) -> bool:
        return value <= 0

    def legal(self) -> str:
        return "a number of bytes above 0, or text such as 70GiB"

    def json(self) -> dict[str, Any]:
        return {"exclusiveMinimum": 0}

    def read(self, text: str) -> int | None:
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
        if not found or found[2].lower() not in _UNITS:
            return None
        return round(float(found[1]) * _UNITS[found[2].lower()])
