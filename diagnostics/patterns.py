"""Name patterns of `annotate`, `pin`, `wrap` and `bucket`: dot-separated; `*` matches within one segment."""

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
