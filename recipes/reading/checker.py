"""Checks a merged recipe against the schema: returns the typed values, and a mistake for each wrong one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from tpshard.diagnostics.diagnostic import Diagnostic, Source, did_you_mean, join
from tpshard.models.families.family import DIMS
from tpshard.recipes.keys import schema
from tpshard.recipes.keys.constraints import ALONE, BYTES, PERCENT, Constraint, bytes_in, share_in
from tpshard.recipes.reading.hints import (
    alternatives,
    bases_of,
    below_key,
    hints,
    item_of,
    mapping_of,
    sections_of,
    walk,
)
from tpshard.recipes.text import other_tools
from tpshard.recipes.text.nodes import Node, Path, as_node, dotted, key_of, scalar, trap, written_at
from tpshard.recipes.text.section import Pending, Section, default_of, waits

if TYPE_CHECKING:
    from tpshard.recipes.reading.merge import Merged


BAD: Any = object()
"""Stands for a refused value, whose mistake is already recorded."""

KINDS = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null", dict: "a map",
    list: "a list",
}  # fmt: skip
"""The types of plain values, as text."""


def legal(hint: Any) -> str:
    """The values that a type allows, as text, limits included."""
    words = []
    for base, constraints in alternatives(hint):
        limits = [constraint.legal for constraint in constraints]
        words.append(limits[0] if constraints and constraints[0].whole else ", ".join([_words(base), *limits]))
    return join(dict.fromkeys(words))


@cache
def homes() -> dict[str, list[str]]:
    """The paths at which each key exists, to recognise a key in the wrong section."""
    paths: dict[str, list[str]] = {}
    for path, _, _ in walk(schema.Recipe):
        paths.setdefault(path[-1], []).append(dotted(path))
    return paths


class Checker:
    """Checks one merged recipe. `mistakes` collects all errors; `places` has the place of every written key.

    Values are plain data with their path in the recipe. where: the place of the interpolation that gave the value;
    None for a value that is written, whose place is in the merged recipe. weights: `Section._weights`.
    """

    def __init__(self, merged: Merged, *, weights: bool = True) -> None:
        self.weights = weights
        self.merged = merged
        self.mistakes: list[Diagnostic] = list(merged.mistakes)
        self.places = {dotted(path): (key.source, value.source) for path, (key, value) in merged.places.items()}
        """For each path, such as `data.sources.0.source`, the places of its key and its value."""
        self.bad: set[str] = set(merged.bad)
        """Paths whose value was refused."""
        self.reported: set[Path] = set()
        """Paths whose interpolation is already reported."""

    def wrong(self, path: Path, message: str, where: Source, why: str = "", fix: str = "") -> Any:
        """Records a mistake and marks the path as refused; returns BAD."""
        self.bad.add(key_of(path))
        self.mistakes.append(Diagnostic(message, where=where, why=why, fix=fix))
        return BAD

    def section(self, raw: Mapping[str, Any], cls: type[Section], path: Path, where: Source | None = None) -> Any:
        """Checks the values `raw` of a section of class `cls`; returns the section. A refused value is replaced by its
        default, so that the rest can be checked."""
        values: dict[str, Any] = {}
        written: dict[str, Any] = {}
        types = hints(cls)
        for key, item in raw.items():
            inside = (*path, key)
            if key not in types:
                self.unknown(inside, types, where)
                continue
            metadata = cls.__dataclass_fields__[key].metadata
            if not metadata.get("saved", True) and not (where or self.merged.place(inside)).line:
                written[key] = None
            value = BAD if "derived" in metadata and item is None else self.item(item, types[key], inside, where)
            if value is not BAD:
                values[key] = value
                if where is None and "${" in str(item) and not (isinstance(value, Section) and isinstance(item, dict)):
                    written[key] = item if isinstance(item, dict | list) else scalar(self.leaf(item, inside))
        for field in fields(cls):
            inside, interpolated = (*path, field.name), where is not None  # defaults of such a section are not derived
            underived = interpolated and "derived" in field.metadata and raw.get(field.name) is None
            if field.name in values or not (underived or default_of(field) is MISSING):
                continue
            self.bad.add(key_of(inside))
            if raw.keys() <= types.keys() if underived else field.name not in raw:
                fix = "`model: {preset: tiny}` is enough" if field.name == "model" else ""
                message = f"the key `{key_of(inside)}` is missing"
                self.wrong(inside, message, where or self.merged.place(path), fix=fix)
            if field.name != "model":
                return BAD
            values["model"] = schema.Model()
        checked = cls(**values)
        vars(checked)["_written"] = written
        if cls.folders:
            named = {key: self.merged.place((*path, key)) for key in cls.folders}
            vars(checked).update(_where=named, _weights=self.weights)
        if waits(values):
            vars(checked)["_config"] = self.merged.config
        return checked

    def leaf(self, raw: Any, path: Path, where: Source | None = None) -> Node:
        """The node of a scalar at a path: that of the file, or one for a default or for an interpolation's value."""
        if where is None and path in self.merged.places and (node := self.merged.places[path][1]).kind == "scalar":
            return node
        return as_node(raw, where or self.merged.place(path))

    def unknown(self, path: Path, keys: Iterable[str], where: Source | None) -> None:
        """Records an unknown key, with the likeliest key that was meant."""
        name, key = str(path[-1]), key_of(path)
        places = homes().get(name, [])
        elsewhere = f"known here: {', '.join(keys)}"
        slips = difflib.get_close_matches(name, [*keys], 1, 0.85)  # a letter too few: `train.step`
        if name.partition(":")[0] in keys:
            elsewhere = _spaced(name)
        elif slips:
            elsewhere = f"did you mean `{slips[0]}`?"
        elif lists := self._lists_with(name, path[:-1]):
            places, elsewhere = lists, f"it belongs to an entry of `{lists[0]}`"
        elif len(places) == 1:
            likely = _likely(written_at(self.merged.raw, path), reduce(below_key, places[0].split("."), schema.Recipe))
            elsewhere = f"it belongs to `{places[0]}`" + (f": {places[0]}={likely}" if likely else "")
        if path[0] == "sharding" and name in DIMS:
            fix = f"here it is `sharding.rules.{name}`"
        else:
            known = len(places) == 1 or ":" in name
            fix = other_tools.fix(key) or (elsewhere if known else did_you_mean(name, keys, elsewhere))
        self.wrong(path, f"unknown key `{key}`", where or self.merged.key_place(path), fix=fix)

    @staticmethod
    def _lists_with(name: str, path: Path) -> list[str]:
        """The lists of the section at a path whose entries have a key, such as `data.sources` for `data.split`."""
        sections = sections_of(reduce(below_key, map(str, path), schema.Recipe))
        lists = [(key, item_of(hint)) for cls in sections for key, hint in hints(cls).items()]
        return [key_of((*path, key)) for key, item in lists if any(name in hints(cls) for cls in sections_of(item))]

    def value(self, raw: Any, hint: Any, path: Path, where: Source | None = None) -> Any:
        """Checks a value against a type hint; returns it as that type, or BAD."""
        node, bases = self.leaf(raw, path, where), bases_of(hint)
        if isinstance(raw, dict):
            if sections := sections_of(hint):
                best = max(sections, key=lambda cls: len(raw.keys() & hints(cls).keys()))
                if len(sections) > 1 and not raw.keys() & hints(best).keys():
                    fix = join("{" + ", ".join(hints(cls)) + "}" for cls in sections)
                    message = f"`{key_of(path)}` does not match any of the allowed maps"
                    return self.wrong(path, message, node.source, fix=fix)
                return self.section(raw, best, path, where)
            pair = (str, Any) if Any in bases else mapping_of(hint)
            if pair is not None:
                return self.mapping(raw, pair, path, where)
        elif isinstance(raw, list):
            shapes = [get_args(base) for base in bases if get_origin(base) is tuple]
            if shapes or Any in bases:
                return self.sequence(raw, shapes[0] if shapes else (Any, Ellipsis), path, where)
        else:
            return self.scalar(raw, node, hint, path, final=where is not None)
        return self.refuse_type(raw, node, hint, path)

    def mapping(self, raw: dict[str, Any], pair: tuple[Any, Any], path: Path, where: Source | None) -> dict[str, Any]:
        """Checks a map with free keys, of which `pair` has the types of keys and values; returns what is right."""
        values: dict[str, Any] = {}
        for key, item in raw.items():
            inside = (*path, key)
            name = Node("scalar", where or self.merged.key_place(inside), key)
            if item is None and ":" in key and pair[1] is not Any:
                self.wrong(inside, f"`{key}` has no value", name.source, fix=_spaced(key))
            elif key_of(inside) not in self.bad and self.scalar(key, name, pair[0], inside, final=True) is not BAD:
                values[key] = self.item(item, pair[1], inside, where)
        return {key: value for key, value in values.items() if value is not BAD}

    def item(self, raw: Any, hint: Any, path: Path, where: Source | None) -> Any:
        """The checked value of a key of a map, or BAD."""
        if where is not None:
            self.places[key_of(path)] = where, where
        return BAD if key_of(path) in self.bad else self.value(raw, hint, path, where)

    def sequence(self, raw: list[Any], shape: tuple[Any, ...], path: Path, where: Source | None) -> Any:
        """Checks a list; returns a tuple of the checked items, or BAD. `shape` has the types of the items."""
        kinds = [shape[0]] * len(raw) if shape[1:] == (Ellipsis,) else list(shape)
        if len(kinds) != len(raw):
            message = f"`{key_of(path)}` has {len(raw)} values; {len(shape)} are expected"
            return self.wrong(path, message, where or self.merged.place(path), fix=f"write {len(shape)} values")
        values = [self.value(item, kind, (*path, i), where) for i, (item, kind) in enumerate(zip(raw, kinds))]
        return BAD if any(value is BAD for value in values) else tuple(values)

    def scalar(self, raw: Any, node: Node, hint: Any, path: Path, *, final: bool) -> Any:
        """Checks the scalar `raw`, written as `node`; returns its value or BAD. final: it is no interpolation."""
        key, options, bases = key_of(path), alternatives(hint), bases_of(hint)
        missing = raw == "???" and Any not in bases and not final
        if missing and not node.source.line:  # a default derived from a wrong key
            self.bad.add(key)
            return BAD
        if missing or ("${" in str(raw) and not final):
            return self.interpolated_value(node, hint, path)
        if (read_as := trap(node)) is not None:
            return self.refuse_ambiguous(node, read_as, [str] if Any in bases else bases, path)
        if Any in bases:
            return raw
        alone = next((base for base, constraints in options if ALONE in constraints), None)
        if alone is not None:
            if raw is None:
                return ()
            value = self.scalar(raw, node, get_args(alone)[0], path, final=final)
            return BAD if value is BAD else (value,)
        fits = [(value, c) for base, c in options if (value := _as(raw, base, c)) is not BAD]
        if not fits:
            return self.refuse_type(raw, node, hint, path)
        value, constraints = fits[0]
        if isinstance(value, float) and not math.isfinite(value):
            return self.wrong(path, f"`{key}: {node.text}` is not finite", node.source, f"must be {legal(hint)}")
        for constraint in constraints:
            if not constraint.holds(value):
                fix = did_you_mean(str(value), constraint.names)
                message = f"`{key}: {_short(node.text)}` is not allowed"
                return self.wrong(path, message, node.source, f"must be {constraint.legal}", fix)
        return value

    def interpolated_value(self, node: Node, hint: Any, path: Path) -> Any:
        """The value of an interpolation, checked as if written in its place.

        Text that depends on the environment is kept as written; anything else must be known now.
        """
        key = key_of(path)
        resolved = self.merged.resolved(path)
        value, bases = resolved.value, bases_of(hint)
        may_be_text = str in bases or Any in bases
        if resolved.error is not None:
            if resolved.unset and may_be_text:
                return Pending(node.text, path, node.source)
            at, mistake = self.merged.mistake_of(resolved, path)
            if at not in self.reported and dotted(at) not in self.bad:
                self.mistakes.append(mistake)
            self.reported.add(at)
            self.bad.add(key)
            return BAD
        source = replace(node.source, origins=self.merged.origins(resolved, path))
        if key in self.places:
            self.places[key] = (self.places[key][0], source)
        if set(bases) <= {str, type(None)} and type(value) in (int, float):
            value = str(value)
        if isinstance(value, str) and not may_be_text:  # a number in the environment is text
            number = replace(as_node(value, source), plain=True)
            return self.scalar(scalar(number), number, hint, path, final=True)
        checked = self.value(value, hint, path, source)
        return Pending(node.text, path, source) if isinstance(checked, str) and resolved.read else checked

    def refuse_ambiguous(self, node: Node, read_as: str, bases: list[Any], path: Path) -> Any:
        """Records a scalar that YAML 1.1 and 1.2 read differently; `read_as` is the reading of 1.1."""
        digits = node.text.lstrip("+-0").isdigit()
        if bool in bases:
            fix = "write true or false"
        elif (int in bases or float in bases) and digits:
            fix = f"write {node.text.lstrip('+-0')}, or {read_as}, whichever is meant"
        elif str in bases:
            fix = f'write "{node.text}" with quotes'
        else:
            fix = "write " + join(dict.fromkeys(map(_words, bases)))
        message = f"unquoted `{node.text}` is read as {read_as} by YAML 1.1"
        return self.wrong(path, message, node.source, f"`{key_of(path)}`", fix)

    def refuse_type(self, raw: Any, node: Node, hint: Any, path: Path) -> Any:
        """Records a value of the wrong type, with the likeliest fix."""
        key, bases, why = key_of(path), bases_of(hint), f"must be {legal(hint)}"
        if isinstance(raw, dict | list):
            return self.wrong(path, f"`{key}` is {KINDS[type(raw)]}", node.source, why=why)
        choices = [str(c) for base in bases if get_origin(base) is Literal for c in get_args(base)]
        shown = _short(node.text) if node.text else "null"
        if isinstance(raw, str) and choices:
            message = f"`{key}: {shown}` is not one of the choices"
            fix = did_you_mean(raw, choices) or (f"{key}: {likely}" if (likely := _likely(raw, hint)) else "")
            return self.wrong(path, message, node.source, why, fix)
        fix, plain = "", scalar(replace(node, plain=True))
        if likely := _likely(raw, hint):
            fix = f"write a {'map' if likely[0] == '{' else 'list'}: {likely}"
        elif isinstance(raw, str) and type(plain) in (int, float) and (int in bases or float in bases):
            fix = f"remove the quotes: {node.text}"
        elif raw is not None and not isinstance(raw, str) and str in bases:
            fix = f'quote it if it is meant as text: "{shown}"'
        kind = "a number" if type(raw) is int else KINDS[type(raw)]
        return self.wrong(path, f"`{key}: {shown}` is {kind}", node.source, why, fix)


def _spaced(key: str) -> str:
    """The fix of `{tp:2}`, which YAML reads as a key without a value."""
    return f"a space behind the colon: {{{key.replace(':', ': ', 1)}}}"


def _likely(raw: Any, hint: Any) -> str:
    """The list or map that a value without brackets means: `0.9,0.95` the list of both, `25MB` and 25 a map of mb; else
    ""."""
    counted = (
        key for cls in sections_of(hint) for key, inner in hints(cls).items() if {int, float} & {*bases_of(inner)}
    )
    if type(raw) in (int, float) and (key := next(counted, None)) is not None:
        return f"{{{key}: {raw}}}"
    if not isinstance(raw, str):
        return ""
    if "," in raw and any(get_origin(base) is tuple for base in bases_of(hint)):
        return f"[{', '.join(part.strip() for part in raw.strip('()').split(','))}]"
    in_mb = any("mb" in hints(cls) for cls in sections_of(hint))
    return f"{{mb: {size / 1e6:g}}}" if in_mb and (size := bytes_in(raw)) else ""


def _as(value: Any, base: Any, constraints: tuple[Constraint, ...]) -> Any:
    """`value` converted to type `base`, or BAD."""
    if get_origin(base) is Literal:
        return next((c for c in get_args(base) if c == value and type(c) is type(value)), BAD)
    reader = bytes_in if BYTES in constraints else share_in if PERCENT in constraints else None
    if reader is not None and isinstance(value, str):
        number = reader(value)
        return BAD if number is None else number
    if base is int and isinstance(value, float):  # 1e5 steps; what is not finite is refused as such
        return int(value) if value.is_integer() else BAD if math.isfinite(value) else value
    if base is float and type(value) is int:
        return float(str(value))  # which is infinite where float(value) overflows
    return value if type(value) is base else BAD


def _words(base: Any) -> str:
    if get_origin(base) is Literal:
        return join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in get_args(base))
    if isinstance(base, type) and issubclass(base, Section):
        return "a map of " + ", ".join(hints(base))
    if get_origin(base) is tuple:
        return "a list of lists" if get_origin(get_args(base)[0]) is tuple else "a list"
    return "a map" if get_origin(base) is Mapping else KINDS.get(base, "a value")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
