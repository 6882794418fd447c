"""Reading the schema's type annotations: the types of a value with their constraints, and nested sections and maps."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from tpshard.recipes.constraints import Constraint
from tpshard.recipes.section import Section, field_names


def hints(cls: type[Section]) -> dict[str, Any]:
    """The type hint of each field of a section, with its constraints."""
    return _hints(typing.cast(Any, cls))


@cache
def _hints(cls: Any) -> dict[str, Any]:
    annotated = typing.get_type_hints(cls, include_extras=True)
    return {name: annotated[name] for name in field_names(cls)}


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


def mapping_of(hint: Any) -> tuple[Any, Any] | None:
    """The key and value types of the map with free keys that a type hint allows; None if it allows none."""
    for base, _ in alternatives(hint):
        if get_origin(base) in (Mapping, dict):
            return get_args(base)
    return None
