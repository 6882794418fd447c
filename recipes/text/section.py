"""The base of all parts of a recipe: derived defaults, and text that is completed from the environment when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

from tpshard.diagnostics.diagnostic import Mistakes, Source
from tpshard.files.hub_folder import folder_of
from tpshard.recipes.text.nodes import Path


def derived(*, default: str, saved: bool = True) -> Any:
    """A default that the loader derives from other keys, described by `default`.

    With `saved` false a saved recipe omits it, so that it is derived again when that recipe is loaded with changes.
    """
    return field(default=None, metadata={"derived": default, "saved": saved})


def default_of(item: Field[Any]) -> Any:
    """The default of a section's field; `MISSING` if there is none."""
    return item.default if not callable(item.default_factory) else item.default_factory()


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with `change` applied to each item of its maps and lists, at any depth."""
    if isinstance(value, Mapping):
        return {key: changed(item, change) for key, item in value.items()}
    return tuple(changed(item, change) for item in value) if isinstance(value, tuple) else change(value)


@dataclass(frozen=True)
class Pending:
    """Text that is completed from the environment each time it is read."""

    text: str
    """As written."""
    path: Path
    """Its path in the merged recipe."""
    source: Source

    def complete(self, config: Any) -> str | None:
        """The text with its interpolations resolved now, from the merged recipe `config` and the environment.

        Raises `Mistakes` for an unset variable without default.
        """
        from tpshard.recipes.text.interpolation import resolve_at, unresolvable

        resolved = resolve_at(config, self.path)
        if resolved.error is not None:
            raise Mistakes([unresolvable(self.text, resolved, self.source)])
        return None if resolved.value is None else str(resolved.value)


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field, derived))
class Section:
    """The base of all parts of a recipe: each is a frozen, keyword-only dataclass, whose values may be interpolations.

    Text that depends on the environment is completed each time the attribute is read, so that a command that does not
    need the value does not need the environment. Reading it raises `Mistakes` when the variable is not set.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    paths: ClassVar[tuple[str, ...]] = ()
    """Keys that name files or folders, in which `~` and `$NAME` are expanded as by a shell."""
    folders: ClassVar[tuple[str, ...]] = ()
    """Those of `paths` that may name a model or tokenizer of the hub, hf:OWNER/NAME, which is fetched when read."""
    _where: ClassVar[Mapping[str, Source]] = {}
    """The places of `folders`."""
    _weights: ClassVar[bool] = True
    """Whether a model that is fetched from the hub comes with its weights, which a plan does not read."""
    _config: ClassVar[Any] = None
    """The merged recipe, if a value depends on the environment."""
    _written: ClassVar[Mapping[str, Any]] = {}
    """Values with interpolations, as written, as plain data; null for derived values that a saved recipe omits."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, repr=False, eq=False)(cls)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name[0] != "_":
            config = object.__getattribute__(self, "__dict__").get("_config")
            if config is not None and waits(value):
                value = changed(value, lambda item: item.complete(config) if isinstance(item, Pending) else item)
            if isinstance(value, str | Mapping) and name in type(self).folders:
                where, weights = self._where.get(name), self._weights
                return changed(
                    value, lambda item: folder_of(item, where, weights=weights) if isinstance(item, str) else item
                )
        return value

    def stored(self) -> dict[str, Any]:
        """The value of each field as written, without interpolation."""
        return {item.name: self._written.get(item.name, self.__dict__[item.name]) for item in fields(self)}

    # Reprs and equality use the values as written. Logs show reprs and caches compare by equality, and neither may hold
    # values of the environment. Maps in another order differ: a mesh's axes in order say which devices are neighbours.
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.stored().items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(self) == repr(other)


def waits(value: Any) -> bool:
    """Whether a value contains text that depends on the environment."""
    if isinstance(value, Mapping):
        return any(map(waits, value.values()))
    return any(map(waits, value)) if isinstance(value, tuple) else isinstance(value, Pending)
