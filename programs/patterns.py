"""Name patterns of `annotate`, `pin`, `wrap` and `bucket`: dot-separated; `*` matches within one segment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tpshard.recipes.diagnostic import suggestion


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name: `layers.*.residual` matches `layers.3.residual`, not
    `layers.3.mlp.residual`."""
    want, have = pattern.split("."), name.split(".")
    return len(want) == len(have) and all(fnmatchcase(h, w) for h, w in zip(have, want))


def covers(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name` or a module above it: `layers.*` covers `layers.3.mlp.up.weight`."""
    have = name.split(".")
    depth = len(pattern.split("."))
    return depth <= len(have) and matches(pattern, ".".join(have[:depth]))


def nearest(pattern: str, names: Iterable[str], *, modules: bool) -> str:
    """The pattern most similar to `pattern` among `names`, or with `modules` among the modules that contain them."""
    patterns: dict[str, None] = {}
    for name in names:
        parts = re.sub(r"\.\d+(?=\.|$)", ".*", name).split(".")
        shortest = 1 if modules else len(parts)
        patterns.update(dict.fromkeys(".".join(parts[:n]) for n in range(len(parts), shortest - 1, -1)))
    return suggestion(pattern, patterns)
