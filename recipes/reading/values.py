"""A recipe as dotted keys with plain values, to say in which keys two recipes differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.text.write import as_data


def values(recipe: Recipe, without: Collection[str] = ()) -> dict[str, Any]:
    """The dotted keys of a recipe with their values, except those below the sections `without`.

    An interpolation is kept as written with a hash of its value, so that the environment's values are not saved.
    """

    def below(path: str, written: Any, resolved: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(written, Mapping) and written:
            for key, item in written.items():
                yield from below(f"{path}.{key}", item, resolved.get(key) if isinstance(resolved, Mapping) else None)
        elif "${" in (text := json.dumps(written)):
            yield path, f"{text} ({hashed(resolved)})"
        else:
            yield path, written

    resolved = as_data(recipe, resolved=True)
    sections = [(key, value) for key, value in as_data(recipe).items() if key not in without]
    pairs = [pair for key, value in sections for pair in below(key, value, resolved.get(key))]
    return dict(json.loads(json.dumps(pairs)))


def hashed(value: Any) -> str:
    """A short hash of a plain value, by which two of them are compared without saving them."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def shorten(value: Any) -> str:
    """A plain value as text of at most 60 characters, for messages."""
    text = json.dumps(value).replace('"', "")
    return text if len(text) <= 60 else text[:57] + "..."
