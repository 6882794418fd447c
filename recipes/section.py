"""What all parts of a recipe share: derived defaults, and text that the environment completes when it is read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from tpshard.recipes.diagnostic import Exit, Mistakes, Source

INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")
_SHELL = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_ENVIRONMENT = re.compile(r"oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)


def derived(*, default: str, saved: bool = True) -> Any:
    """A default that the loader works out from other keys, told in words. Not `saved`: it is left to be worked out
    again when a saved recipe is loaded with changes."""
    return field(default=None, metadata={"derived": default, "saved": saved})


def reserved(*, default: None) -> Any:
    """A key that is refused: its name is kept for what is to come, and nothing lists or suggests it."""
    return field(default=default, metadata={"reserved": True})


def default_of(item: Field[Any]) -> Any:
    """The default of a field of a section; `MISSING` where there is none."""
    return item.default if not callable(item.default_factory) else item.default_factory()


T = TypeVar("T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field, derived, reserved)
)
def section(cls: type[T]) -> type[T]:
    """A frozen dataclass of keywords that leaves repr and equality to `Section`."""
    return dataclass(frozen=True, kw_only=True, repr=False, eq=False)(cls)


def field_names(cls: type[Section]) -> tuple[str, ...]:
    """The keys of a section, in the order of the schema."""
    return tuple(item.name for item in fields(cls))  # type: ignore[arg-type]


class Section:
    """A part of a recipe: a frozen dataclass whose text may hold `${oc.env:NAME,default}`.

    Such text is kept as written and completed each time the attribute is read, so that a command which does not need
    the value does not need the environment either. Reading it raises `Mistakes` when the variable is not set.
    """

    _lazy: Mapping[str, Source]
    paths: ClassVar[tuple[str, ...]] = ()
    """Keys that name files or folders: `~` and `$NAME` in them are what a shell makes of them."""
    _unsaved: ClassVar[frozenset[str]] = frozenset()
    """Derived values that a saved recipe leaves out."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name[0] != "_":
            lazy = object.__getattribute__(self, "__dict__").get("_lazy")
            if lazy and name in lazy:
                done = _expanded(value, lazy[name]) if name in type(self).paths else value
                return resolved(done, lazy[name])
        return value

    def stored(self) -> dict[str, Any]:
        """Field to value as written, nothing completed from the environment."""
        return {name: self.__dict__[name] for name in field_names(type(self))}

    # as written: a repr ends up in logs and equality in caches, and the environment's values must not
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.stored().items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Section) and self.stored() == other.stored()


def waits(section: type[Section], key: str, value: Any) -> bool:
    """Whether the environment completes the value of a key when it is read."""
    shell = key in section.paths and isinstance(value, str) and (value.startswith("~") or _SHELL.search(value))
    return bool(shell) or mentions(value)


def _expanded(path: Any, where: Source) -> Any:
    """A path with `~` and `$NAME` as a shell reads them, but that a variable which is not set is a mistake."""
    if not isinstance(path, str):
        return path
    return _SHELL.sub(lambda found: _environment(f"oc.env:{found[1]}", where), os.path.expanduser(path))


def mentions(value: Any) -> bool:
    """Whether text anywhere in a plain value holds an interpolation."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(map(mentions, value.values()))
    return isinstance(value, tuple | list) and any(map(mentions, value))


def resolved(value: Any, where: Source | None) -> Any:
    """`value` with the environment's values put in. Raises `Mistakes` when a variable without default is not set."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: _environment(found[1], where), value)
    if isinstance(value, Mapping):
        return {key: resolved(item, where) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(resolved(item, where) for item in value)
    return value


def malformed(text: str) -> str | None:
    """What is wrong with the interpolations in `text`, if anything."""
    rest = INTERPOLATION.sub("", text)
    if "${" in rest:
        return "`${` without its `}`, or one inside another"
    for inside in INTERPOLATION.findall(text):
        if _ENVIRONMENT.fullmatch(inside) is None:
            return f"`${{{inside}}}` is not `${{oc.env:NAME}}` or `${{oc.env:NAME,default}}`"
    return None


def _environment(inside: str, where: Source | None) -> str:
    found = _ENVIRONMENT.fullmatch(inside)
    if found is None:
        raise ValueError(f"unchecked interpolation ${{{inside}}}")
    value = os.environ.get(found[1], found[2])
    if value is None:
        raise Mistakes.one(
            f"the environment variable {found[1]} is not set",
            exit=Exit.RECIPE,
            where=where,
            why="needed now",
            fix=f"export {found[1]}=..., or give a default: ${{oc.env:{found[1]},default}}",
        )
    return value
