"""Merging the layers of a recipe by OmegaConf, while recording where each value was written."""

from __future__ import annotations

import os
import re
from dataclasses import MISSING
from functools import cached_property, reduce
from typing import Any

from omegaconf import OmegaConf
from tpshard.recipes.diagnostic import Diagnostic, Mistakes, Notes, Source
from tpshard.recipes.hints import hints, mapping_of, section_of, walk
from tpshard.recipes.interpolation import FORMS, MAX_RESOLVED, Resolved, or_none, path_in, resolve_at, unreadable
from tpshard.recipes.nodes import Node, Path, as_node, dotted, key_of, scalar
from tpshard.recipes.schema import Recipe
from tpshard.recipes.section import Section, default_of
from tpshard.recipes.write import as_data

_SHELL = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


class Merged:
    """The recipe merged from layers. `mistakes` are those of single texts; `bad` has their keys."""

    def __init__(self) -> None:
        self.config = OmegaConf.create()
        self.places: dict[Path, tuple[Node, Node]] = {}
        """For each path, the key and value nodes written there last."""
        self.mistakes: list[Diagnostic] = []
        self.bad: set[str] = set()
        self.count = 0
        """Number of interpolations that were resolved."""

    @cached_property
    def raw(self) -> Any:
        """The values as plain data, with interpolations as written."""
        return OmegaConf.to_container(self.config, resolve=False)

    def add(self, layer: Node) -> None:
        """Adds a layer on top: maps are merged where the schema has a map, everything else is replaced."""
        self.places[()] = (layer, layer)
        missing: list[Path] = []
        self.config.merge_with(self._values(layer, Recipe, (), self.raw, missing))
        del self.raw
        for path in missing:  # OmegaConf's merge lets a missing value replace nothing
            self.put(path, "???")

    def fill(self) -> None:
        """Adds the schema's defaults for missing keys."""
        for path, cls, _ in walk(Recipe):
            section, default = or_none(self.raw, path[:-1]), default_of(cls.__dataclass_fields__[path[-1]])
            if isinstance(section, dict) and path[-1] not in section and default is not MISSING:
                self.put(path, {} if isinstance(default, Section) else as_data(default))  # a section's keys follow

    def put(self, path: Path, value: Any) -> None:
        """Sets a value that is in no file."""
        parent: Any = reduce(lambda inside, key: inside[key], path[:-1], self.config)
        parent[path[-1]] = value
        or_none(self.raw, path[:-1])[path[-1]] = value

    def drop(self, path: Path) -> None:
        """Removes a value."""
        self.put(path, None)
        self.places = {p: nodes for p, nodes in self.places.items() if p[: len(path)] != path}

    def place(self, path: Path) -> Source:
        """The place where the value at a path was written; a default's has no line."""
        if path in self.places:
            return self.places[path][1].source
        if path and isinstance(path[-1], int):
            return self.place(path[:-1])
        return Source(f"<default {dotted(path)}>", 0, 0, dotted(path))

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
        keys = [path_in(self.raw, key) for _, key in sorted(resolved.keys, key=lambda pair: pair[0])]
        others = [key for key in dict.fromkeys(keys) if key != path and or_none(self.raw, key) is not None]
        return tuple((self.place(key), f"the value of `{dotted(key)}`") for key in others)

    def _values(self, node: Node, hint: Any, path: Path, below: Any, missing: list[Path]) -> Any:
        """The layer as plain data, after removing what it replaces of `below`, the value at its path so far; records
        the places of keys and values, and text that OmegaConf cannot parse."""
        below = self._kept(node, hint, path, below)
        if node.kind == "list":
            self.places |= {(*path, i): (item, item) for i, item in enumerate(node.items)}
            return [self._values(item, None, (*path, i), None, missing) for i, item in enumerate(node.items)]
        if node.kind == "map":
            inner, pair = section_of(hint), mapping_of(hint)
            values = {}
            for key, value in node.entries:
                if "${" in key.text:
                    message, fix = "a key cannot be interpolated", "write the key itself"
                    self.mistakes.append(Diagnostic(message, where=key.source, fix=fix))
                    continue
                inside = (*path, key.text)
                of = hints(inner).get(key.text) if inner is not None else pair[1] if pair is not None else None
                self.bad.discard(key_of(inside))
                values[key.text] = self._values(value, of, inside, below.get(key.text), missing)
                self.places[inside] = (key, value)
            return values
        text = scalar(node)
        if isinstance(text, str) and "${" in text and (why := unreadable(text)):
            message = f"`{key_of(path)}: {node.text}` is not a valid interpolation"
            self.mistakes.append(Diagnostic(message, where=node.source, why=why, fix=FORMS))
            self.bad.add(key_of(path))
            text = "???"
        if text == "???":
            missing.append(path)
        return text

    def _kept(self, over: Node, hint: Any, path: Path, below: Any) -> dict[str, Any]:
        """The map below that the layer's node changes, written out if it is interpolated. What the node replaces as a
        whole is removed."""
        mergeable = over.kind == "map" and (section_of(hint) or mapping_of(hint)) is not None
        if mergeable and isinstance(below, str) and isinstance(value := self.resolved(path).value, dict):
            key_source, source = (node.source for node in self.places[path])
            for key, item in value.items():
                self.places[(*path, key)] = Node("scalar", key_source, key), as_node(item, source)
            self.put(path, value)
            below = value
        if not mergeable or not isinstance(below, dict):
            if below is not None:
                self.drop(path)
            return {}
        names = {key.text for key, _ in over.entries}
        exclusive = getattr(section_of(hint), "exclusive", ())
        for name in exclusive:
            if names & set(exclusive) and name in below.keys() - names:
                self.drop((*path, name))
        return below


def shell_paths(merged: Merged) -> None:
    """Turns `~` and `$NAME` in keys that name files into interpolations of the environment."""
    for path, cls, _ in walk(Recipe):
        value = or_none(merged.raw, path)
        if path[-1] in cls.paths and isinstance(value, str):
            home = "${oc.env:HOME}" if "HOME" in os.environ and re.match("~(/|$)", value) else os.path.expanduser("~")
            text = home + value[1:] if re.match("~(/|$)", value) else os.path.expanduser(value)
            if (text := _SHELL.sub(r"${oc.env:\1}", text)) != value:
                merged.put(path, text)
