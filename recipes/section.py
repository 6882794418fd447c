"""What all parts of a recipe share: derived defaults, and text that the environment completes when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, dataclass_transform

from tpshard.recipes.diagnostic import Mistakes, Source
from tpshard.recipes.nodes import Path


def derived(*, default: str, saved: bool = True) -> Any:
    """A default that the loader works out from other keys, told in words. Not `saved`: it is left to be worked out
    again when a saved recipe is loaded with changes."""
    return field(default=None, metadata={"derived": default, "saved": saved})


def default_of(item: Field[Any]) -> Any:
    """The default of a field of a section; `MISSING` where there is none."""
    return item.default if not callable(item.default_factory) else item.default_factory()


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field, derived))
def section(cls: type[T]) -> type[T]:
    """A frozen dataclass of keywords that leaves repr and equality to `Section`."""
    return dataclass(frozen=True, kw_only=True, repr=False, eq=False)(cls)


def field_names(cls: type[Section]) -> tuple[str, ...]:
    """The keys of a section, in the order of the schema."""
    return tuple(item.name for item in fields(cls))  # type: ignore[arg-type]


class Pending(str):
    """Text as written, which the environment completes each time it is read. `path` is where it stands in the merged
    recipe."""

    path: Path
    source: Source

    def __new__(cls, text: str, path: Path, source: Source) -> Pending:
        made = super().__new__(cls, text)
        made.path, made.source = path, source
        return made

    def __getnewargs__(self) -> tuple[str, Path, Source]:  # type: ignore[override]
        return str(self), self.path, self.source


class Section:
    """A part of a recipe: a frozen dataclass whose values may be interpolated.

    Text that the environment completes is kept as written and completed each time the attribute is read, so that a
    command which does not need the value does not need the environment either. Reading it raises `Mistakes` when the
    variable is not set.
    """

    paths: ClassVar[tuple[str, ...]] = ()
    """Keys that name files or folders: `~` and `$NAME` in them are what a shell makes of them."""
    _config: ClassVar[Any] = None
    """The merged recipe, where a value waits for the environment."""
    _written: ClassVar[Mapping[str, Any]] = {}
    """Values with interpolations, as plain data as they were written."""
    _unsaved: ClassVar[frozenset[str]] = frozenset()
    """Derived values that a saved recipe leaves out."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name[0] != "_":
            config = object.__getattribute__(self, "__dict__").get("_config")
            if config is not None and waits(value):
                return completed(value, config)
        return value

    def stored(self) -> dict[str, Any]:
        """Field to value as written, nothing interpolated."""
        return {name: self._written.get(name, self.__dict__[name]) for name in field_names(type(self))}

    # as written: a repr ends up in logs and equality in caches, and the environment's values must not
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.stored().items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Section) and self.stored() == other.stored()


def waits(value: Any) -> bool:
    """Whether the environment completes text anywhere in a value."""
    if isinstance(value, Mapping):
        return any(map(waits, value.values()))
    return any(map(waits, value)) if isinstance(value, tuple) else isinstance(value, Pending)


def completed(value: Any, config: Any) -> Any:
    """`value` with the environment's values put in. Raises `Mistakes` when a variable without default is not set."""
    if isinstance(value, Mapping):
        return {key: completed(item, config) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(completed(item, config) for item in value)
    if not isinstance(value, Pending):
        return value
    from tpshard.recipes import interpolation

    with interpolation.only_allowed() as environment:
        try:
            text = interpolation.value_at(config, value.path)
        except interpolation.ERRORS as error:
            if environment.unset:
                raise Mistakes([interpolation.unset(environment.unset[0], value.source)]) from None
            why = str(error).partition("\n")[0]
            raise Mistakes.one(f"`{value}` cannot be completed", where=value.source, why=why) from None
    return None if text is None else str(text)
