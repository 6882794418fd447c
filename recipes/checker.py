"""Checking a tree of nodes against the schema: returns the typed values, and a mistake for each wrong one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from tpshard.recipes import schema
from tpshard.recipes.constraints import Alone, Bytes, Constraint
from tpshard.recipes.diagnostic import Diagnostic, Source, join, suggestion
from tpshard.recipes.hints import alternatives, hints, mapping_of, section_of
from tpshard.recipes.nodes import Node, Path, as_node, data, dotted, scalar, trap
from tpshard.recipes.section import Pending, Section, default_of, waits

if TYPE_CHECKING:
    from tpshard.recipes.merge import Merged


class _Bad:
    """Stands for a refused value, whose mistake is already recorded."""


BAD = _Bad()


def expected(hint: Any) -> str:
    """The values allowed for a type, as text."""
    words = [_words(base, constraints) for base, constraints in alternatives(hint)]
    return join(dict.fromkeys(words))


@cache
def homes() -> dict[str, list[str]]:
    """The paths at which each key exists, to recognise a key in the wrong section."""
    found: dict[str, list[str]] = {}

    def visit(cls: type[Section], prefix: str) -> None:
        for name, hint in hints(cls).items():
            found.setdefault(name, []).append(prefix + name)
            inner = section_of(hint)
            if inner is not None:
                visit(inner, f"{prefix}{name}.")

    visit(schema.Recipe, "")
    return found


class Checker:
    """Checks one merged recipe. `mistakes` collects all errors; `places` has the place of every written key."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        self.mistakes: list[Diagnostic] = list(merged.mistakes)
        self.places: dict[str, tuple[Source, Source]] = {}
        """For each path, the places of its key and its value."""
        self.bad: set[str] = {dotted(path) for path in merged.bad}
        """Paths whose value was refused."""
        self.told: set[Path] = set()
        """Paths whose interpolation is already reported."""

    def wrong(self, path: str, message: str, where: Source, why: str = "", fix: str = "") -> _Bad:
        self.bad.add(path)
        self.mistakes.append(Diagnostic(message, where=where, why=why, fix=fix))
        return BAD

    def at(self, path: str) -> Any:
        """The checked value at the path of a key, or BAD."""
        hint: Any = schema.Recipe
        for key in path.split("."):
            inner = section_of(hint)
            assert inner is not None
            hint = hints(inner)[key]
        return self.value(self.merged.node(tuple(path.split("."))), hint, path)

    def section(self, node: Node, cls: type[Section], path: str) -> Any:
        """An instance of `cls`. A refused value is replaced by its default, so that the rest can be checked."""
        given: dict[str, Any] = {}
        written: dict[str, Any] = {}
        known = hints(cls)
        for key, value in node.entries:
            inside = f"{path}.{key.text}" if path else key.text
            if key.text not in known:
                self.unknown(key, inside, path, list(hints(cls)))
                continue
            self.note(inside, key, value)
            item = cls.__dataclass_fields__[key.text]  # type: ignore[attr-defined]
            if inside in self.bad or ("derived" in item.metadata and self.null(value)):
                continue
            found = self.value(value, known[key.text], inside)
            if found is not BAD:
                given[key.text] = found
                if self.interpolated(value) and not (isinstance(found, Section) and value.kind == "map"):
                    written[key.text] = data(value)
        for item in fields(cls):  # type: ignore[arg-type]
            if item.name not in given and default_of(item) is MISSING:
                if not any(key.text == item.name for key, _ in node.entries):
                    self.missing(node, item.name, path)
                if item.name != "model":
                    return BAD
                given["model"] = schema.Model()
        made = cls(**given)
        if written:
            object.__setattr__(made, "_written", written)
        unsaved = {key.text for key, value in node.entries if not value.source.line and not _saved(cls, key.text)}
        if unsaved:
            object.__setattr__(made, "_unsaved", frozenset(unsaved))
        if waits(given):
            object.__setattr__(made, "_config", self.merged.config)
        return made

    def note(self, path: str, key: Node, value: Node) -> None:
        if key.source.line:
            self.places[path] = (key.source, value.source)

    def null(self, node: Node) -> bool:
        return node.kind == "scalar" and scalar(node) is None and not self.interpolated(node)

    def raw(self, node: Node) -> Any:
        """The value of a scalar in the merged recipe, if it is there."""
        if node.path is None or node.kind != "scalar":
            return None
        return self.merged.written(node.path)

    def interpolated(self, node: Node) -> bool:
        """Whether any text below contains an interpolation."""
        below = (*node.items, *(value for _, value in node.entries))
        return "${" in str(self.raw(node)) or any(map(self.interpolated, below))

    def missing(self, node: Node, name: str, path: str) -> None:
        fix = "`model: {preset: tiny}` is enough" if name == "model" else ""
        self.wrong(
            f"{path}.{name}".strip("."), f"the key `{f'{path}.{name}'.strip('.')}` is missing", node.source, fix=fix
        )

    def unknown(self, key: Node, inside: str, path: str, known: list[str]) -> None:
        close = suggestion(key.text, known)
        if path == "" and key.text == "extends":
            known = [*known, "extends"]
        if close:
            fix = f"did you mean `{close}`?"
        elif len(places := homes().get(key.text, [])) == 1:
            fix = f"it belongs to `{places[0]}`"
        else:
            fix = f"known here: {', '.join(known)}"
        self.wrong(
            inside, f"unknown key `{inside}`", key.source, why="did you mean another?" if not fix else "", fix=fix
        )

    def value(self, node: Node, hint: Any, path: str) -> Any:
        if node.kind == "map":
            return self.map(node, hint, path)
        if node.kind == "list":
            return self.sequence(node, hint, path)
        return self.scalar(node, hint, path)

    def map(self, node: Node, hint: Any, path: str) -> Any:
        options = [base for base, _ in alternatives(hint)]
        sections = [base for base in options if isinstance(base, type) and issubclass(base, Section)]
        if sections:
            names = {key.text for key, _ in node.entries}
            best = max(sections, key=lambda cls: len(names & set(hints(cls))))
            if len(sections) > 1 and not names & set(hints(best)):
                legal = join("{" + ", ".join(hints(cls)) + "}" for cls in sections)
                return self.wrong(path, f"`{path}` does not match any of the allowed maps", node.source, fix=legal)
            return self.section(node, best, path)
        if (pair := mapping_of(hint)) is not None:
            return self.mapping(node, pair, path)
        if Any in options:
            return self.plain(node, path)
        return self.mistyped(node, hint, path)

    def mapping(self, node: Node, pair: tuple[Any, Any], path: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in node.entries:
            inside = f"{path}.{key.text}"
            self.note(inside, key, value)
            if inside in self.bad:
                continue
            if self.value(Node("scalar", key.source, key.text), pair[0], inside) is BAD:
                continue
            found = self.value(value, pair[1], inside)
            if found is not BAD:
                made[key.text] = found
        return made

    def sequence(self, node: Node, hint: Any, path: str) -> Any:
        options = [base for base, _ in alternatives(hint)]
        if Any in options:
            return self.plain(node, path)
        shapes = [get_args(base) for base in options if get_origin(base) is tuple]
        if not shapes:
            return self.mistyped(node, hint, path)
        shape = shapes[0]
        if len(shape) == 2 and shape[1] is Ellipsis:
            kinds = [shape[0]] * len(node.items)
        elif len(shape) != len(node.items):
            message = f"`{path}` has {len(node.items)} values; {len(shape)} are expected"
            return self.wrong(path, message, node.source)
        else:
            kinds = list(shape)
        found = [self.value(item, kind, path) for item, kind in zip(node.items, kinds, strict=True)]
        return BAD if any(value is BAD for value in found) else tuple(found)

    def plain(self, node: Node, path: str) -> Any:
        """Data without a schema, such as the arguments of a user's module; only ambiguous scalars are refused."""
        if node.kind == "map":
            return self.mapping(node, (str, Any), path)
        if node.kind == "list":
            found = [self.plain(item, path) for item in node.items]
            return BAD if any(value is BAD for value in found) else tuple(found)
        if "${" in str(self.raw(node)):
            return self.completed(node, Any, path)
        if (read_as := trap(node)) is not None:
            return self.trapped(node, read_as, [str], path)
        return scalar(node)

    def scalar(self, node: Node, hint: Any, path: str) -> Any:
        options = alternatives(hint)
        bases = [base for base, _ in options]
        if Any in bases:
            return self.plain(node, path)
        raw = self.raw(node)
        if "${" in str(raw):
            return self.completed(node, hint, path)
        if raw == "???":
            self.bad.add(path)
            if node.source.line and node.path not in self.told:  # otherwise a default derived from a wrong key
                from tpshard.recipes.interpolation import to_be_given

                self.told.add(node.path or ())
                self.mistakes.append(to_be_given(node.path or (), node.source))
            return BAD
        if (read_as := trap(node)) is not None:
            return self.trapped(node, read_as, bases, path)
        value = scalar(node)
        alone = next((base for base, constraints in options if any(isinstance(c, Alone) for c in constraints)), None)
        if alone is not None:
            if value is None:
                return ()
            found = self.value(node, get_args(alone)[0], path)
            return BAD if found is BAD else (found,)
        fits = [(v, c) for base, c in options if (v := _as(value, base, c)) is not BAD]
        if not fits:
            return self.mistyped(node, hint, path)
        made, constraints = fits[0]
        if isinstance(made, float) and not math.isfinite(made):
            return self.wrong(
                path, f"`{path}: {node.text}` is not finite", node.source, f"must be {self.legal(options)}"
            )
        for constraint in constraints:
            if made is not None and constraint.wrong(made):
                words = f"must be {constraint.legal()}"
                close = suggestion(str(made), getattr(constraint, "names", ()))
                fix = f"did you mean {close}?" if close else ""
                return self.wrong(path, f"`{path}: {_short(node.text)}` is not allowed", node.source, words, fix)
        return made

    def completed(self, node: Node, hint: Any, path: str) -> Any:
        """The value of an interpolation, checked as if written in its place.

        Text that depends on the environment is kept as written; anything else must be known now.
        """
        assert node.path is not None
        value, environment, error = self.merged.completed(node.path)
        bases = [base for base, _ in alternatives(hint)]
        texts = str in bases or Any in bases
        if error is not None:
            if environment.unset and texts:
                return Pending(node.text, node.path, node.source)
            self.bad.add(path)
            at, mistake = self.merged.why(node.path, environment)
            if at not in self.told and dotted(at) not in self.bad - {path}:
                self.mistakes.append(mistake)
            self.told.add(at)
            return BAD
        source = replace(node.source, origins=self.merged.origins(node.path))
        if path in self.places:
            self.places[path] = (self.places[path][0], source)
        if set(bases) <= {str, type(None)} and type(value) in (int, float):
            value = str(value)
        made = as_node(value, source)
        if isinstance(value, str) and not texts:
            made = replace(made, plain=True)
        found = self.value(made, hint, path)
        return Pending(node.text, node.path, source) if isinstance(found, str) and environment.read else found

    def trapped(self, node: Node, read_as: str, bases: list[Any], path: str) -> _Bad:
        digits = node.text.lstrip("+-0").isdigit()
        if bool in bases:
            fix = "write true or false"
        elif (int in bases or float in bases) and digits:
            fix = f"write {node.text.lstrip('+-0')}, or {read_as}, whichever is meant"
        elif str in bases:
            fix = f'write "{node.text}" with quotes'
        else:
            fix = "write " + join(dict.fromkeys(_words(base, ()) for base in bases))
        message = f"unquoted `{node.text}` is read as {read_as} by YAML 1.1"
        return self.wrong(path, message, node.source, f"`{path}`", fix)

    def mistyped(self, node: Node, hint: Any, path: str) -> _Bad:
        options = alternatives(hint)
        choices = [str(c) for base, _ in options if get_origin(base) is Literal for c in get_args(base)]
        if node.kind != "scalar":
            found = "a list" if node.kind == "list" else "a map"
            return self.wrong(path, f"`{path}` is {found}", node.source, why=f"must be {self.legal(options)}")
        value = scalar(node)
        shown = _short(node.text) if node.text else "null"
        if isinstance(value, str) and choices:
            close = suggestion(value, choices)
            message = f"`{path}: {shown}` is not one of the choices"
            fix = f"did you mean {close}?" if close else ""
            return self.wrong(path, message, node.source, f"must be {expected(hint)}", fix)
        fix = ""
        numbers = any(base in (int, float) for base, _ in options)
        if isinstance(value, str) and not node.plain and numbers and _as_number(node) is not None:
            fix = f"remove the quotes: {node.text}"
        elif value is not None and not isinstance(value, str) and any(base is str for base, _ in options):
            fix = f'quote it if it is meant as text: "{shown}"'
        message = f"`{path}: {shown}` is {_kind(value)}"
        return self.wrong(path, message, node.source, f"must be {self.legal(options)}", fix)

    def legal(self, options: list[tuple[Any, tuple[Constraint, ...]]]) -> str:
        words = []
        for base, constraints in options:
            limits = [c.legal() for c in constraints if not isinstance(c, Alone | Bytes)]
            words.append(", ".join([_words(base, constraints), *limits]))
        return join(dict.fromkeys(words))


def _saved(cls: type[Section], key: str) -> bool:
    item = cls.__dataclass_fields__.get(key)  # type: ignore[attr-defined]
    return item is None or bool(item.metadata.get("saved", True))


def _as(value: Any, base: Any, constraints: tuple[Constraint, ...]) -> Any:
    """`value` converted to type `base`, or BAD."""
    if get_origin(base) is Literal:
        same = [c for c in get_args(base) if c == value and type(c) is type(value)]
        return same[0] if same else BAD
    if base is type(None):
        return None if value is None else BAD
    if isinstance(value, bool) or base is bool:
        return value if base is bool and isinstance(value, bool) else BAD
    if base is int:
        if isinstance(value, str):
            sizes = [c.read(value) for c in constraints if isinstance(c, Bytes)]
            return sizes[0] if sizes and sizes[0] is not None else BAD
        if isinstance(value, float) and value.is_integer():
            return int(value)  # 1e5 steps
        if isinstance(value, float) and not math.isfinite(value):
            return value
        return value if isinstance(value, int) else BAD
    if base is float:
        return float(value) if isinstance(value, int | float) else BAD
    if base is str:
        return value if isinstance(value, str) else BAD
    return BAD


def _as_number(node: Node) -> float | None:
    value = scalar(Node("scalar", node.source, node.text, True))
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _words(base: Any, constraints: tuple[Constraint, ...]) -> str:
    if any(isinstance(c, Bytes) for c in constraints):
        return "a number of bytes such as 70GiB"
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


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return "text" if isinstance(value, str) else "a number"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
