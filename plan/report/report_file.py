"""A report, or what its pictures show, as text that is read back without the programs it describes.

What is read may be another person's: a value is made of the types that its fields have, or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report

T = TypeVar("T")


def dumps(value: Report | Drawing) -> str:
    """The value as JSON, each dataclass as a list of its fields."""
    return json.dumps(_plain(value), separators=(",", ":"))


def loads(text: str, kind: type[T]) -> T | None:
    """The value of this kind, Report or Drawing, in a text of `dumps`; None for a text of another version."""
    try:
        value: T = _value(kind, json.loads(text))
        return value
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


_SCALARS = frozenset((str, int, float, bool, NoneType))


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if kind is list or kind is tuple:
        return [one if type(one) in _SCALARS else _plain(one) for one in value]
    if (names := _names(kind)) is not None:
        return [one if type(one) in _SCALARS else _plain(one) for one in (getattr(value, name) for name in names)]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


@cache
def _names(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for others."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


@cache
def _types(kind: Any) -> tuple[Any, ...] | None:
    """The types of the fields of a dataclass or a named tuple; None for others."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return tuple(hints[field.name] for field in fields(kind))
    names = getattr(kind, "_fields", None)
    return None if names is None else tuple(get_type_hints(kind)[name] for name in names)


def _value(kind: Any, data: Any) -> Any:
    """Plain data as a value of a type. ValueError, TypeError or LookupError where it is none."""
    if (types := _types(kind)) is not None:
        if len(types) != len(data):
            raise ValueError(f"{kind.__name__} has {len(types)} fields")
        return kind(*map(_value, types, data))
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if data is None else _value(next(one for one in args if one is not NoneType), data)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, of_value = args
        return {of_key(key): _value(of_value, one) for key, one in data.items()}
    if origin is tuple:
        of_each = args[:1] * len(data) if args[1:] == (...,) else args
        return tuple(map(_value, of_each, data))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [_value(args[0], one) for one in data]
    if kind is Any and isinstance(data, list):  # an axis, or the axes of a dim
        return tuple(_value(Any, one) for one in data)
    fits = (
        data in args if origin is Literal else kind is Any or type(data) is kind or (kind, type(data)) == (float, int)
    )
    if not fits:
        raise TypeError(f"{kind} expected, found {data!r}")
    return data
