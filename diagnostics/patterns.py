"""Patterns of names, dot-separated; `*` matches within one segment. Those that shard (`annotate`, `pin`, `wrap`,
`bucket`, `remat`) begin where a name begins; those of what is trained (`freeze`, `groups`, `orthogonal`, `targets`) may
stand anywhere in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tpshard.diagnostics.diagnostic import suggestion


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name: `layers.*.residual` matches `layers.3.residual`, not
    `layers.3.mlp.residual`."""
    pattern_parts, name_parts = pattern.split("."), name.split(".")
    return len(pattern_parts) == len(name_parts) and all(fnmatchcase(h, w) for h, w in zip(name_parts, pattern_parts))


def covers(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name` or a module above it: `layers.*` covers `layers.3.mlp.up.weight`."""
    name_parts = name.split(".")
    depth = len(pattern.split("."))
    return depth <= len(name_parts) and matches(pattern, ".".join(name_parts[:depth]))


def picks(pattern: str, name: str) -> bool:
    """Whether `pattern` covers `name` from one of its segments on: `*norm` and `mlp.up` pick `layers.3.mlp_norm.weight`
    and `layers.3.mlp.up.weight`. With a dot before it a pattern begins where the name does: `.norm`."""
    if pattern.startswith("."):
        return covers(pattern[1:], name)
    parts = name.split(".")
    return any(covers(pattern, ".".join(parts[start:])) for start in range(len(parts)))


def ends(pattern: str, path: str) -> bool:
    """Whether `pattern` picks a layer itself, none above it: `mlp.*` and `up` do `layers.3.mlp.up`."""
    if pattern.startswith("."):
        return matches(pattern[1:], path)
    parts = path.split(".")
    return matches(pattern, ".".join(parts[-len(pattern.split(".")) :]))


def nearest_pick(pattern: str, names: Iterable[str]) -> str:
    """The pattern most similar to `pattern`, of as many segments, that picks some of `names`."""
    depth = len(pattern.strip(".").split("."))
    parts = [re.sub(r"\.\d+(?=\.|$)", ".*", name).split(".") for name in names]
    runs = {".".join(each[n : n + depth]) for each in parts for n in range(len(each) - depth + 1)}
    return suggestion(pattern, sorted(runs - {"*"}))


def nearest(pattern: str, names: Iterable[str], *, modules: bool) -> str:
    """The pattern most similar to `pattern` among `names`, or with `modules` among the modules that contain them."""
    patterns: dict[str, None] = {}
    for name in names:
        parts = re.sub(r"\.\d+(?=\.|$)", ".*", name).split(".")
        shortest = 1 if modules else len(parts)
        patterns.update(dict.fromkeys(".".join(parts[:n]) for n in range(len(parts), shortest - 1, -1)))
    return suggestion(pattern, patterns)


def unit_of(name: str, wrap: Iterable[str | tuple[str, ...]]) -> str:
    """The FSDP unit of a parameter: `layers.3`, or the patterns of a shared unit joined by `+`; "" for none."""
    for entry in wrap:
        if isinstance(entry, str):
            if covers(entry, name):
                return ".".join(name.split(".")[: len(entry.split("."))])
        elif any(covers(pattern, name) for pattern in entry):
            return "+".join(entry)
    return ""
