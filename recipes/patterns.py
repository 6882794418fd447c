"""Name patterns: what `annotate`, `pin`, `wrap` and `bucket` select by. Dot-separated; `*` stays inside its segment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tpshard.recipes.diagnostic import suggestion


def matches(pattern: str, name: str) -> bool:
    """`layers.*.residual` matches `layers.3.residual`, not `layers.3.mlp.residual`."""
    want, have = pattern.split("."), name.split(".")
    return len(want) == len(have) and all(fnmatchcase(h, w) for h, w in zip(have, want))


def covers(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name` or a module that it is in: `layers.*` covers `layers.3.mlp.up.weight`."""
    have = name.split(".")
    depth = len(pattern.split("."))
    return depth <= len(have) and matches(pattern, ".".join(have[:depth]))


def nearest(pattern: str, names: Iterable[str], *, modules: bool) -> str:
    """The pattern over `names`, or with `modules` over what they are in, that `pattern` was probably meant to be."""
    known: dict[str, None] = {}
    for name in names:
        parts = re.sub(r"\.\d+(?=\.|$)", ".*", name).split(".")
        shortest = 1 if modules else len(parts)
        known.update(dict.fromkeys(".".join(parts[:n]) for n in range(len(parts), shortest - 1, -1)))
    return suggestion(pattern, known)
