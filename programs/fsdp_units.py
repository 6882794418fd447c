"""The FSDP unit of a parameter, by the patterns of `fsdp.wrap`."""

from __future__ import annotations

from collections.abc import Iterable

from tpshard.programs.patterns import covers


def unit_of(name: str, wrap: Iterable[str | tuple[str, ...]]) -> str:
    """The FSDP unit of a parameter: `layers.3`, or the patterns of a shared unit joined by `+`; "" for none."""
    for entry in wrap:
        if isinstance(entry, str):
            if covers(entry, name):
                return ".".join(name.split(".")[: len(entry.split("."))])
        elif any(covers(pattern, name) for pattern in entry):
            return "+".join(entry)
    return ""
