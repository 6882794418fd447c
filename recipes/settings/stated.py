"""The settings of another trainer's file, with their places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Source
from tpshard.recipes.text.nodes import Node, scalar
from tpshard.recipes.text.write import MASK, may_be_secret

TOKENS = (["pad"], ["bos"], ["eos"], ["unk"], ["eot"])
"""What comes before `token` in names that are no secrets."""


@dataclass(frozen=True)
class Unknown:
    """The value of a setting that only running the file would tell."""

    text: str
    """How it is written there."""


@dataclass(frozen=True)
class Stated:
    """One setting of a file."""

    key: str
    value: Any
    """Plain data, or `Unknown`. A flag without a value is True."""
    where: Source
    written: str = ""
    """Its name there, where a tool knows it by another key."""
    of_program: bool = False
    """Whether a program reads it, not the launcher whose file or flags these are."""

    @property
    def name(self) -> str:
        """What people know it by: as it is written there."""
        return self.written or self.key

    def named(self, key: str) -> Stated:
        """The same setting by another key."""
        return replace(self, key=key, written=self.name)

    def meaning(self, key: str, value: Any) -> Stated:
        """Another setting and its value, for which this one stands."""
        return replace(self.named(key), value=value)

    @property
    def shown(self) -> str:
        """Its value for people: masked where the key's last word suggests a secret."""
        last = re.split(r"[._-]", self.key)
        if may_be_secret(last[-1], self.value) and last[-2:-1] not in TOKENS:
            return MASK
        return self.value.text if isinstance(self.value, Unknown) else show(self.value)


@dataclass(frozen=True)
class StatedSettings:
    """What a file says."""

    said: Mapping[str, Stated]
    """By key; of a key that is set twice, the one that counts."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """What is wrong with the file as a whole, such as a lost line continuation: warnings."""
    lost: tuple[Stated, ...] = ()
    """Settings that stand in the file and do not reach the program."""


def show(value: Any) -> str:
    """Plain data as it may stand in a comment: one line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return " ".join(str(value).split())


def of_tree(tree: Node) -> Mapping[str, Stated]:
    """The settings of a YAML file: a leaf each, by its path with dots. Lists stay whole; null is no setting."""
    return {one.key: one for one in _below(tree, ())}


def _below(node: Node, path: tuple[str, ...]) -> Iterator[Stated]:
    for name, value in node.entries:
        here = (*path, name.text)
        if value.kind == "map" and value.entries:
            yield from _below(value, here)
        elif value.kind != "map" and (data := plain(value)) is not None:
            yield Stated(".".join(here), data, name.source)


def plain(node: Node) -> Any:
    """A tree as plain data."""
    if node.kind == "list":
        return [plain(item) for item in node.items]
    if node.kind == "map":
        return {name.text: plain(value) for name, value in node.entries}
    return scalar(node)


def by_key(settings: Iterable[Stated]) -> dict[str, Stated]:
    """Settings by key, the last of each."""
    return {one.key: one for one in settings}
