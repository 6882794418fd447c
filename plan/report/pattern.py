"""Names of layers with a `*` for their numbers."""

from __future__ import annotations


def pattern(name: str) -> str:
    """Replaces the numbers in a name by `*`: `layers.3.mlp.up.weight` -> `layers.*.mlp.up.weight`."""
    first, *rest = name.split(".")
    return ".".join([first, *("*" if part.isdigit() else part for part in rest)])
