"""Numbers for people (bytes, seconds, counts) and for JSON, and the version of the plan's format."""

from __future__ import annotations

from typing import Any

SCHEMA = 1
"""The version of a plan's JSON."""


def round_figure(value: float) -> float:
    """The value with nine significant digits, so that every machine prints the same text."""
    return float(f"{value:.9g}")


def round_figures(data: Any) -> Any:
    """Plain data with all its fractions rounded as by `round_figure`."""
    if isinstance(data, dict):
        return {key: round_figures(value) for key, value in data.items()}
    return round_figure(data) if isinstance(data, float) else data


def gib(n: float) -> str:
    """Bytes as text: GiB with two decimals, or TiB, MiB or KiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(n) >= size or (unit == "GiB" and abs(n) >= 0.1 * size):
            return f"{n / size:.2f} {unit}" if abs(n) / size < 100 else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


def memory_text(needed: int, peak: int | None) -> str:
    """The memory of a variant as text: what it needs, or the peak of a step for which the recipe has a limit."""
    return gib(needed) if peak is None else f"{gib(peak)} at the peak"


def bytes_axis(top: float) -> tuple[float, str]:
    """The unit, as its bytes and name, for the labels of an axis that ends at `top` bytes."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    return next((unit for unit in units if top >= unit[0]), units[-1])


def seconds_axis(top: float) -> tuple[float, str]:
    """The unit, as its seconds and name, for the labels of an axis that ends at `top` seconds."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    return next((unit for unit in units if top >= unit[0]), units[-1])


def seconds(s: float) -> str:
    """A duration as text, in the unit that suits it: `3.2 ms`."""
    if s == 0:
        return "0"
    if s < 1e-3:
        return f"{s * 1e6:.0f} us"
    return f"{s * 1e3:.3g} ms" if s < 1 else f"{s:.2f} s" if s < 100 else f"{s:.0f} s"


def count(n: float) -> str:
    """A number as text with a suffix: `8.03 B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f}"


FORMS = {
    "step_s": seconds, "exposed_comm_s": seconds, "peak_memory_bytes": gib, "needed_bytes": gib, "sent_bytes": gib,
}  # fmt: skip
"""The form of the figures that are times or amounts of memory, by name."""
