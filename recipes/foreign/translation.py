"""A tool as a table of rows: its settings with their defaults, and the keys of a recipe that say the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, Source
from tpshard.recipes.keys.model_keys import Model
from tpshard.recipes.settings.stated import Stated, StatedSettings, Unknown, show


@dataclass(frozen=True)
class Maybe:
    """A setting without a default, of a type."""

    kind: type


class Omit:
    """A row's value where the recipe needs no key."""


def stated(value: Any) -> Any:
    """The value of a row that leaves its key out where the file does."""
    return Omit if value is None else value


@dataclass(frozen=True)
class Unsaid:
    """What a recipe cannot say of a row's settings, and the value that it gets instead."""

    why: str
    instead: Any = Omit
    keys: tuple[str, ...] = ()
    """Those of the row's settings that are not said; empty: all."""
    of_each: Mapping[str, str] = field(default_factory=dict)
    """Why each setting of several is not said, a default of the tool too; empty: `why`, of those that the file has."""


@dataclass(frozen=True)
class Conflict:
    """Settings of a row that contradict each other."""

    message: str
    value: Any = Omit
    """What the tool makes of it. Omit with `exit`: no recipe says it."""
    fix: str = ""
    keys: tuple[str, ...] = ()
    """Those of the row's settings that are at fault; empty: all."""
    exit: Exit | None = None
    """The exit code where there is no recipe; None: a warning."""


@dataclass(frozen=True)
class KeyRow:
    """Keys of a recipe that follow from settings of a tool."""

    ours: str | tuple[str, ...]
    """The key, or several whose values are a map's; (): the row only checks."""
    theirs: Mapping[str, Any]
    """The tool's settings, each with its default: plain data, or `Maybe` for one without."""
    value: Callable[..., Any] = lambda value: value
    """Makes the value, or an `Unsaid`, a `Conflict` or Omit, from those of `theirs`, in their order."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The recipe's keys."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Tool:
    """A trainer whose configurations are read."""

    name: str
    version: str
    """The version whose defaults the rows have."""
    read: Callable[[bytes, str], StatedSettings]
    """Reads a file, whose name is for messages. Raises `Mistakes`."""
    rows: tuple[KeyRow, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of settings, as of older versions."""
    unsaid: Mapping[str, str] = field(default_factory=dict)
    """Why a recipe cannot say a setting, by a regular expression of its key."""
    aside: str = "(?!)"
    """A regular expression of the keys that change neither what is computed nor what it costs."""
    program: str = ""
    """Whose defaults they are, where the tool has none of its own."""


@dataclass(frozen=True)
class RecipeLine:
    """One key of the recipe, with what it follows from."""

    key: str
    value: Any
    said: tuple[Stated, ...]
    """The settings of the file that it follows from."""
    defaults: Mapping[str, Any]
    """The tool's defaults that it follows from."""
    note: str = ""


@dataclass(frozen=True)
class Left:
    """A setting that the recipe does not say."""

    key: str
    shown: str
    where: Source | None
    """None for a default of the tool."""
    why: str
    matters: bool = True
    """Whether it changes what is computed, or what that costs."""


@dataclass(frozen=True)
class Translation:
    """A file as a recipe."""

    lines: tuple[RecipeLine, ...]
    left: tuple[Left, ...]
    warnings: tuple[Diagnostic, ...]


def translate(tool: Tool, settings: StatedSettings, overrides: Mapping[str, Stated]) -> Translation:
    """The recipe of a file. overrides: keys of the recipe that the command line sets; they count.

    Raises `Mistakes` for values of another type, and for settings that contradict each other so that no recipe says
    them.
    """
    said = _named_now(tool, settings)
    said |= {f"recipe.{key}": replace(one, key=f"recipe.{key}") for key, one in overrides.items()}
    lines: dict[str, RecipeLine] = {}
    left: list[Left] = []
    wrong: list[Diagnostic] = []
    at_fault: set[Source] = set()
    read: set[str] = set()
    renamed = any(f"model.{key}" in overrides for key in Model.exclusive)
    for row in tool.rows:
        read.update(row.theirs)
        if row.ours and (all(key in overrides for key in row.keys) or (row.ours == "model" and renamed)):
            continue
        here = tuple(_as_switch(said[key], default, left) for key, default in row.theirs.items() if key in said)
        unknown = [one for one in here if isinstance(one.value, Unknown) and row.theirs[one.key] != Maybe(object)]
        left += [_left(one, "only running the script tells its value") for one in unknown]
        here = tuple(one for one in here if one not in unknown)
        mistyped = [found for one in here if (found := _type_mistake(one, row.theirs[one.key])) is not None]
        wrong += mistyped
        if mistyped:
            continue
        here = tuple(_as_typed(one, row.theirs[one.key]) for one in here)
        values = {key: None if isinstance(value, Maybe) else value for key, value in row.theirs.items()}
        defaults = {key: value for key, value in values.items() if value is not None}
        defaults = {key: value for key, value in defaults.items() if key not in {one.key for one in here}}
        try:
            result = row.value(*(values | {one.key: one.value for one in here}).values())
        except (ArithmeticError, ValueError):  # such as a micro-batch of 0 sequences
            result = Conflict("no recipe follows from these numbers", fix="correct them", exit=Exit.RECIPE)
        note = f"as if {', '.join(one.name for one in unknown)} were left out" if unknown else ""
        if isinstance(result, Conflict):
            wrong.append(_contradiction(result, here))
            at_fault |= {one.where for one in here if not result.keys or one.key in result.keys}
            result = result.value
        if isinstance(result, Unsaid):
            left += _unsaid(result, row, here, defaults)
            note = f"not said: {result.why}" if result.instead is not Omit else note
            result = result.instead
        for key, value in _results(row, result):
            lines.setdefault(key, RecipeLine(key, value, here, defaults, note))
    for one in said.values():
        if one.key not in read and not one.key.startswith("recipe."):
            left.append(_left(one, *_reason(tool, one.key)))
    named = at_fault | {one.where for line in lines.values() for one in line.said} | {one.where for one in left}
    left += [_left(one, "it is so here anyway, or has no effect", False) for key, one in said.items()
             if key in read and one.where not in named and not key.startswith("recipe.")]  # fmt: skip
    left += [_left(one, "it does not reach the program") for one in settings.lost]
    if any(mistake.severity == "error" for mistake in wrong):
        raise Mistakes(dict.fromkeys([*settings.diagnostics, *wrong]))
    for key, setting in overrides.items():
        if key.startswith("cluster.") and "cluster.device" not in overrides:
            continue  # they count devices; a recipe's cluster names one
        lines[key] = RecipeLine(key, setting.value, (setting,), {})
    unique = tuple(dict.fromkeys(left))
    return Translation(tuple(lines.values()), unique, tuple(dict.fromkeys([*settings.diagnostics, *wrong])))


def _named_now(tool: Tool, settings: StatedSettings) -> dict[str, Stated]:
    """The settings by the names of the tool's version."""
    return {name: one.named(name) for key, one in settings.said.items() for name in (tool.aliases.get(key, key),)}


def _as_switch(setting: Stated, default: Any, left: list[Left]) -> Stated:
    """A flag that takes no value, as True: words behind it are no setting of its own, and left."""
    if not (isinstance(default, bool) and setting.key.startswith("--")) or isinstance(setting.value, bool):
        return setting
    if isinstance(setting.value, Unknown) and setting.value.text == "(under a condition)":
        why = "only running the script tells whether it is given; here it is"
        left.append(Left(setting.key, "", setting.where, why))
        return replace(setting, value=True)
    left.append(Left(setting.shown, "", setting.where, f"it stands behind {setting.key}, which takes no value"))
    return replace(setting, value=True)


def _results(row: KeyRow, result: Any) -> Iterator[tuple[str, Any]]:
    if result is Omit:
        return
    if isinstance(row.ours, str):
        yield row.ours, result
    else:
        yield from ((key, result[key]) for key in row.ours if key in result)


def _type_mistake(setting: Stated, default: Any) -> Diagnostic | None:
    """The mistake of a value that is not of its default's type."""
    kind = default.kind if isinstance(default, Maybe) else type(default)
    value = setting.value
    fits = {
        bool: isinstance(value, bool) or value in (0, 1, "yes", "no", "true", "false"),
        int: type(value) is int or (isinstance(value, float) and value.is_integer()),
        float: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        str: not isinstance(value, list | dict),
        list: True,
        object: True,
        type(None): True,
    }
    if fits[kind]:
        return None
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return Diagnostic(
        f"`{setting.name}: {setting.shown}` must be {words[kind]}", where=setting.where, fix=f"write {words[kind]}"
    )


def _as_typed(setting: Stated, default: Any) -> Stated:
    """A setting with a value of its default's type: `1.0` as a whole number, a number as text. `auto` takes any."""
    kind, value = default.kind if isinstance(default, Maybe) else type(default), setting.value
    if kind is int and isinstance(value, float):
        return replace(setting, value=int(value))
    if kind is str and default != "auto" and isinstance(value, bool | int | float):
        return replace(setting, value=show(value))
    return setting


def _contradiction(conflict: Conflict, here: Sequence[Stated]) -> Diagnostic:
    placed = [one.where for one in here if not conflict.keys or one.key in conflict.keys]
    also = tuple((where, "") for where in placed[1:])
    where = placed[0] if placed else None
    if conflict.exit is None:
        return Diagnostic(conflict.message, where=where, fix=conflict.fix, also=also, severity="warning")
    return Diagnostic(conflict.message, conflict.exit, where, fix=conflict.fix, also=also)


def _unsaid(unsaid: Unsaid, row: KeyRow, here: Sequence[Stated], defaults: Mapping[str, Any]) -> Iterator[Left]:
    if unsaid.of_each:
        for key, why in unsaid.of_each.items():
            yield from _unsaid(Unsaid(why, keys=(key,)), row, here, defaults)
        return
    keys = unsaid.keys or tuple(row.theirs)
    named = [one for one in here if one.key in keys]
    for one in named:
        yield _left(one, unsaid.why)
    if not named:
        shown = {key: defaults[key] for key in keys if key in defaults}
        for key, value in shown.items():
            yield Left(key, show(value), None, unsaid.why)
        if not shown:
            yield from (Left(key, "", None, unsaid.why) for key in keys)


def _left(setting: Stated, why: str, matters: bool = True) -> Left:
    return Left(setting.name, setting.shown, setting.where, why, matters)


def _reason(tool: Tool, key: str) -> tuple[str, bool]:
    """Why no row reads a key, and whether it matters."""
    if key.startswith("$"):
        return "only running the script tells which flags it holds", True
    if re.fullmatch(tool.aside, key):
        return "it changes neither what is computed nor what it costs", False
    why = next(
        (why for pattern, why in tool.unsaid.items() if re.fullmatch(pattern, key)), "no key of a recipe says it"
    )
    return why, True
