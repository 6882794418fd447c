"""Reads the schema's type annotations: the types of a value with their constraints, and nested sections and maps."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from tpshard.recipes.keys.constraints import Constraint
from tpshard.recipes.text.section import Section


def hints(cls: type[Section]) -> dict[str, Any]:
    """The type hint of each field of a section, with its constraints."""
    return _hints(typing.cast(Any, cls))


@cache
def _hints(cls: Any) -> dict[str, Any]:
    annotated = typing.get_type_hints(cls, include_extras=True)
    return {item.name: annotated[item.name] for item in fields(cls)}


def alternatives(hint: Any) -> list[tuple[Any, tuple[Constraint, ...]]]:
    """The alternative types of a value, each with its constraints."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return [option for part in get_args(hint) for option in alternatives(part)]
    if origin is Annotated:
        base, *constraints = get_args(hint)
        return [(inner, (*more, *constraints)) for inner, more in alternatives(base)]
    return [(hint, ())]


def bases_of(hint: Any) -> list[Any]:
    """The alternative types of a value without their constraints."""
    return [base for base, _ in alternatives(hint)]


def sections_of(hint: Any) -> list[type[Section]]:
    """The section classes that a type hint allows for a map."""
    return [base for base in bases_of(hint) if isinstance(base, type) and issubclass(base, Section)]


def section_of(hint: Any) -> type[Section] | None:
    """The only section class that a type hint allows for a map; None without one, or with several."""
    sections = sections_of(hint)
    return sections[0] if len(sections) == 1 else None


def wholly_section(hint: Any) -> type[Section] | None:
    """The section class of a type hint that allows nothing else but null; None for other hints."""
    return section_of(hint) if len({*bases_of(hint)} - {type(None)}) == 1 else None


def below_key(hint: Any, key: str) -> Any:
    """The type hint of a key's value in the section or map that a type hint allows; None if it allows no such key."""
    inner, pair = section_of(hint), mapping_of(hint)
    if inner is not None:
        return hints(inner).get(key)
    return pair[1] if pair is not None else None


def item_of(hint: Any) -> Any:
    """The type hint of the items of the list of any length that a type hint allows; None if it allows none."""
    lists = (get_args(base) for base in bases_of(hint) if get_origin(base) is tuple)
    return next((items[0] for items in lists if items[1:] == (Ellipsis,)), None)


def walk(
    cls: type[Section], below: Callable[[Any], type[Section] | None] = section_of, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Section], Any]]:
    """Every key of a section and of the sections that `below` finds in it: its path, its section and its type."""
    for name, hint in hints(cls).items():
        yield (*path, name), cls, hint
        if (inner := below(hint)) is not None:
            yield from walk(inner, below, (*path, name))


def mapping_of(hint: Any) -> tuple[Any, Any] | None:
    """The key and value types of the map with free keys that a type hint allows; None if it allows none."""
    return next((get_args(base) for base in bases_of(hint) if get_origin(base) is Mapping), None)
