"""Reading the schema's type annotations: the types of a value with their constraints, and nested sections and maps."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tpshard.recipes.constraints import Constraint
from tpshard.recipes.diagnostic import join
from tpshard.recipes.section import Section


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


def section_of(hint: Any) -> type[Section] | None:
    """The only section class that a type hint allows for a map; None without one, or with several."""
    sections = [base for base, _ in alternatives(hint) if isinstance(base, type) and issubclass(base, Section)]
    return sections[0] if len(sections) == 1 else None


def wholly_section(hint: Any) -> type[Section] | None:
    """The section class of a type hint that allows nothing else but null; None for other hints."""
    bases = [base for base, _ in alternatives(hint) if base is not type(None)]
    return section_of(hint) if len(bases) == 1 else None


def legal(hint: Any) -> str:
    """The values that a type allows, as text, limits included."""
    texts = []
    for base, constraints in alternatives(hint):
        limits = [constraint.legal for constraint in constraints]
        texts.append(limits[0] if constraints and constraints[0].whole else ", ".join([words(base), *limits]))
    return join(dict.fromkeys(texts))


def words(base: Any) -> str:
    """A type as text."""
    if get_origin(base) is Literal:
        return join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in get_args(base))
    if isinstance(base, type) and issubclass(base, Section):
        return "a map of " + ", ".join(hints(base))
    if get_origin(base) is tuple:
        inner = get_args(base)
        return "a list of lists" if get_origin(inner[0]) is tuple else "a list"
    if get_origin(base) in (Mapping, dict):
        return "a map"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(base, "a value")


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
    for base, _ in alternatives(hint):
        if get_origin(base) in (Mapping, dict):
            return get_args(base)
    return None
