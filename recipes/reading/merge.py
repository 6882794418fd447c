"""Merges the layers of a recipe, and records where each value was written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import MISSING
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes, Notes, Source, did_you_mean
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.hints import below_key, item_of, mapping_of, section_of, walk
from tpshard.recipes.text.interpolation import FORMS, MAX_RESOLVED, Resolved, resolve_at, unreadable, unresolvable
from tpshard.recipes.text.nodes import Node, Path, as_node, dotted, key_of, scalar, written_at
from tpshard.recipes.text.section import Section, default_of
from tpshard.recipes.text.write import as_data

NO_FILES = ("sample", "c4", "latest", "bytes")
"""Values of keys that name files which are no files."""
MESHES = (("mesh",), ("serve", "mesh"))
"""The paths of meshes. Their axes take the order of the last layer that writes them: devices are numbered by it."""

_NAME = re.compile(r"\w+")
_COMPUTED = re.compile(r"\$\{[^}]*\$\{")
"""An interpolation whose key is made of other interpolations."""
_SHELL = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


class Merged:
    """The recipe merged from layers. `mistakes`: those in interpolations; `bad`: the keys of their values."""

    def __init__(self) -> None:
        self.raw: Any = {}
        """The values as plain data, with interpolations as written."""
        self.places: dict[Path, tuple[Node, Node]] = {}
        """For each path, the key and value nodes written there last; a map stays where it was written as a whole."""
        self.files: list[str] = []
        """The names of the layers, from the lowest up."""
        self.mistakes: list[Diagnostic] = []
        self.bad: set[str] = set()
        self.count = 0
        """Number of interpolations that were resolved."""

    @cached_property
    def config(self) -> DictConfig:
        """The values as OmegaConf's tree, which resolves interpolations.

        Making it takes longer than all else: of the top-level keys it has those with an interpolation or named in one.
        """
        texts = {key: " ".join(_interpolated(value)) for key, value in self.raw.items()}
        every = " ".join(texts.values())
        named = self.raw if _COMPUTED.search(every) else {*_NAME.findall(every), *filter(texts.get, texts)}
        return OmegaConf.create({key: value for key, value in self.raw.items() if key in named})

    def add(self, layer: Node) -> None:
        """Adds a layer on top: maps are merged where the schema has a map, everything else is replaced."""
        self.raw = _merged(self.raw, self._layer(layer, Recipe, ()))
        vars(self).pop("config", None)
        self.files.append(layer.source.file)
        self.places[()] = (layer, layer)

    def fill(self) -> None:
        """Adds the schema's defaults for missing keys."""
        for path, cls, _ in walk(Recipe):
            section, default = written_at(self.raw, path[:-1]), default_of(cls.__dataclass_fields__[path[-1]])
            if isinstance(section, dict) and path[-1] not in section and default is not MISSING:
                self.put(path, {} if isinstance(default, Section) else as_data(default))  # a section's keys follow

    def put(self, path: Path, value: Any) -> None:
        """Sets the value at a path to one that is in no file."""
        written_at(self.raw, path[:-1])[path[-1]] = value
        vars(self).pop("config", None)

    def drop(self, path: Path) -> None:
        """Sets the value at a path to null, and forgets its place."""
        self.put(path, None)
        self.places = {p: nodes for p, nodes in self.places.items() if p[: len(path)] != path}

    def place(self, path: Path) -> Source:
        """The place where the value at a path was written; a default's has no line."""
        if path in self.places:
            return self.places[path][1].source
        if path and isinstance(path[-1], int):
            return self.place(path[:-1])
        return Source(f"<default {dotted(path)}>", 0, 0, dotted(path))

    def level(self, path: Path) -> int:
        """The number of the layer that wrote the value at a path, from 0; all overrides are one. -1: a default."""
        file = self.place(path).file
        return len(self.files) if file.startswith("<override") else self.files.index(file) if file in self.files else -1

    def key_place(self, path: Path) -> Source:
        """The place where the key of a path was written."""
        return self.places[path][0].source if path in self.places else self.place(path)

    def resolved(self, path: Path) -> Resolved:
        """The value at a path with interpolations resolved. Raises `Mistakes` for those that expand without end."""
        resolved = resolve_at(self.config, path)
        self.count += resolved.count
        if self.count > MAX_RESOLVED:
            message = f"`{dotted(path)}` expands to too many interpolations"
            why = f"more than {MAX_RESOLVED:,} interpolations after expansion"
            fix = "write the values themselves, or use `extends`"
            raise Mistakes.one(message, where=self.place(path), why=why, fix=fix)
        return resolved

    def origins(self, resolved: Resolved, path: Path) -> Notes:
        """The places of the values that the one at `path` depends on, nearest first."""
        keys = [self._path(key) for _, key in sorted(resolved.keys, key=lambda pair: pair[0])]
        others = [key for key in dict.fromkeys(keys) if key != path and written_at(self.raw, key) is not None]
        return tuple((self.place(key), f"the value of `{dotted(key)}`") for key in others)

    def mistake_of(self, resolved: Resolved, path: Path) -> tuple[Path, Diagnostic]:
        """The mistake that prevents resolving the value at a path, and the path of the wrong text, which may be
        another."""
        chain = [self._path(key) for key in resolved.broken] or [path]
        *before, at = chain
        if at in before:
            return self._circle(list(dict.fromkeys(chain[chain.index(at) :])))
        text, missing = written_at(self.raw, at), None
        named = isinstance(text, str) and ("${" in text or (text == "???" and self.place(at).line > 0))
        if before and (not named or len(at) < len(resolved.broken[-1])):
            missing, at = at if text in (None, "???") else None, before.pop()
        also = tuple((self.place(p), "needed here") for p in before)
        where, text = self.place(at), written_at(self.raw, at)
        if text == "???" and not resolved.unset:
            message = f"`{dotted(at)}` must be given"
            fix = "give it in a recipe that extends this one, or as an override"
            return at, Diagnostic(message, where=where, why="`???` means no value", fix=fix, also=also)
        if missing is None or resolved.unset:
            return at, unresolvable(f"{dotted(at)}: {text}", resolved, where, also)
        message, others = f"`{dotted(at)}: {text}` refers to `{dotted(missing)}`", set(_all(self.raw)) - {at, missing}
        otherwise = f"name a key that has a value, or give `{dotted(missing)}` one"
        fix = did_you_mean(dotted(missing), sorted(map(dotted, others)), otherwise)
        return at, Diagnostic(message, where=where, why="that key has no value", fix=fix, also=also)

    def _circle(self, paths: list[Path]) -> tuple[Path, Diagnostic]:
        start = paths.index(min(paths, key=dotted))
        first, *rest = paths[start:] + paths[:start]
        words = " -> ".join(f"`{dotted(path)}`" for path in (first, *rest, first))
        also = tuple((self.place(path), "and here") for path in rest)
        fix = "give one of them a value of its own" if rest else "give it a value"
        return first, Diagnostic(f"circular interpolation: {words}", where=self.place(first), fix=fix, also=also)

    def _path(self, key: Path) -> Path:
        """The path of an interpolated key, cut at text, which may itself be an interpolation."""
        path: Path = ()
        for part in key:
            inside = written_at(self.raw, path)
            if isinstance(inside, str):
                break
            path = (*path, int(part) if isinstance(inside, list) and str(part).isdigit() else part)
        return path

    def _layer(self, over: Node, hint: Any, path: Path) -> Any:
        """A layer's value at a path as plain data.

        Removes what the layer replaces as a whole, writes out an interpolated map that it changes, and records the
        places of its keys and values, and text that OmegaConf cannot parse.
        """
        inner, below = section_of(hint), written_at(self.raw, path)
        mergeable = over.kind == "map" and (inner is not None or mapping_of(hint) is not None)
        if mergeable and isinstance(below, dict) and path in MESHES:
            order = _axis_order(list(below), [key.text for key, _ in over.entries if "${" not in key.text])
            self.put(path, {axis: below.get(axis) for axis in order})
        if mergeable and isinstance(below, str) and isinstance(value := self.resolved(path).value, dict):
            key_source, source = (node.source for node in self.places[path])
            for key, item in value.items():
                self.places[(*path, key)] = Node("scalar", key_source, key), as_node(item, source)
            self.put(path, value)
        elif below is not None and not (mergeable and isinstance(below, dict)):
            self.drop(path)
        if over.kind == "list":
            self.places |= {(*path, i): (item, item) for i, item in enumerate(over.items)}
            return [self._layer(item, item_of(hint), (*path, i)) for i, item in enumerate(over.items)]
        if over.kind == "scalar":
            return self._scalar(over, path)
        names = {key.text for key, _ in over.entries}
        for name in self._replaced(inner, path, names):
            self.drop((*path, name))
            if mapping_of(below_key(hint, name)) is not None:
                self.put((*path, name), {})
        values = {}
        for key_node, item_node in over.entries:
            inside = (*path, key_node.text)
            if "${" in key_node.text:
                message, fix = "a key cannot be interpolated", "write the key itself"
                self.mistakes.append(Diagnostic(message, where=key_node.source, fix=fix))
                continue
            self.bad.discard(key_of(inside))
            value = self._layer(item_node, below_key(hint, key_node.text), inside)
            named = key_node.text in getattr(inner, "paths", ())
            values[key_node.text] = _named(value, inside, item_node) if named else value
            changes_below = item_node.kind == "map" and item_node.source == key_node.source  # an override of one key
            if not changes_below or inside not in self.places:
                self.places[inside] = (key_node, item_node)
        return values

    def _replaced(self, section: type[Section] | None, path: Path, names: set[str]) -> list[str]:
        """The keys of a section that a layer with the keys `names` takes back: where it names by another key what the
        section describes, all others but those of `of_all`, and dimensions of the command line, whose order means
        nothing."""
        exclusive = set(getattr(section, "exclusive", ()))
        below = written_at(self.raw, path)
        written = [name for name, value in below.items() if value is not None] if isinstance(below, dict) else []
        if not exclusive & names or not exclusive.intersection(written) - names:
            return []
        typed = {name for name in written if self.place((*path, name)).file.startswith("<override ")}
        kept = {*names, *getattr(section, "of_all", ()), *(typed - exclusive)}
        return [name for name in written if name not in kept]

    def _scalar(self, node: Node, path: Path) -> Any:
        text = scalar(node)
        if isinstance(text, str) and "${" in text and (why := unreadable(text)):
            message = f"`{key_of(path)}: {node.text}` is not a valid interpolation"
            self.mistakes.append(Diagnostic(message, where=node.source, why=why, fix=FORMS))
            self.bad.add(key_of(path))
            text = "???"
        return text


def _merged(below: Any, over: Any) -> Any:
    """A layer's data on top of that of others: maps are merged, everything else is replaced."""
    if isinstance(below, dict) and isinstance(over, dict):
        return below | {key: _merged(below.get(key), value) for key, value in over.items()}
    return over


def _interpolated(raw: Any) -> Iterator[str]:
    if isinstance(raw, str):
        yield from [raw] if "${" in raw else []
    elif isinstance(raw, dict | list):
        for value in raw.values() if isinstance(raw, dict) else raw:
            yield from _interpolated(value)


def _all(raw: Any, path: Path = ()) -> Iterator[Path]:
    if not isinstance(raw, dict):
        yield path
    else:
        for key, value in raw.items():
            yield from _all(value, (*path, key))


def _beside(name: str, path: Path, source: Source) -> str:
    """The name of a file or folder that a recipe's file gives, from that file's folder if there is such a one there.

    Other names, those on the command line, and `run.dir` count from the working directory.
    """
    here = os.path.dirname(source.file)
    if not here or not source.line or path == ("run", "dir") or name in NO_FILES or "${" in name or os.path.isabs(name):
        return name
    start = re.split(r"[*?\[]", name)[0]
    there = os.path.join(here, start if start == name else os.path.dirname(start))
    return os.path.abspath(os.path.join(here, name)) if os.path.exists(there) and start else name


def _named(value: Any, path: Path, node: Node) -> Any:
    """The name of a file or folder, or a map of such names, as `_as_shell` and `_beside` understand it."""
    if isinstance(value, dict):
        entries = [(key.text, item) for key, item in node.entries if key.text in value]
        return {key: _named(value[key], (*path, key), item) for key, item in entries}
    return _beside(_as_shell(value), path, node.source) if isinstance(value, str) else value


def _as_shell(value: str) -> str:
    """The name of a file with `~` and `$NAME` as interpolations of the environment."""
    text = "${oc.env:HOME}" + value[1:] if "HOME" in os.environ and re.match("~(/|$)", value) else value
    return _SHELL.sub(r"${oc.env:\1}", os.path.expanduser(text))


def _axis_order(lower: list[str], upper: list[str]) -> list[str]:
    """The order of a mesh's axes where a layer with the axes `upper` is put on one with the axes `lower`.

    Axes of both exchange their places to have the upper layer's order; a new one lies just outside of the next that
    the layer writes. A new `pp` lies outside of all others: stages send least.

    >>> _axis_order(["dp", "fsdp", "tp"], ["tp", "ep", "dp"])
    ["tp", "fsdp", "ep", "dp"]
    """
    both = iter([axis for axis in upper if axis in lower])
    order = [next(both) if axis in upper else axis for axis in lower]
    for i, axis in reversed(list(enumerate(upper))):
        if axis not in lower:
            following = upper[i + 1] if i + 1 < len(upper) else None
            place = 0 if axis == "pp" else len(order) if following is None else order.index(following)
            order.insert(place, axis)
    return order
