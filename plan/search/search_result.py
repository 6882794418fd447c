"""The results of a search: variants with their figures, as a table, and the fastest one as a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tpshard.plan.report.report import Edit
from tpshard.plan.search import search_bounds
from tpshard.plan.step.units import gib, memory_text, seconds
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import with_changes


@dataclass(frozen=True)
class VariantPrice:
    """The figures of a variant: reserved memory of a device, and the time of a step."""

    needed_bytes: int
    step_s: float
    exposed_s: float
    fits: bool
    comm_s: float = 0.0
    """Time in which a collective runs, exposed or not."""
    idle_s: float = 0.0
    """Time in which a stage waits for others."""
    peak_bytes: int | None = None
    """The peak of a step, where the recipe has a limit for it (`fsdp.memory_limit`)."""

    @property
    def counted_bytes(self) -> int:
        """The bytes that the limit is about: the recipe's, or the device's memory."""
        return self.needed_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def memory(self) -> str:
        return memory_text(self.needed_bytes, self.peak_bytes)

    def beats(self, step_s: float) -> bool:
        """Whether the variant fits, and a step takes less than this."""
        return self.fits and self.step_s < step_s

    @property
    def waits(self) -> str:
        """What a device waits for, in words."""
        collectives = f"{self.exposed_s / self.step_s:.0%} of a step for collectives"
        return f"{self.idle_s / self.step_s:.0%} for other stages and {collectives}" if self.idle_s else collectives


UNPRICED = VariantPrice(0, 0.0, 0.0, False)


@dataclass(frozen=True)
class Candidate:
    """One variant of the search: mesh, recomputation, micro-batch and price."""

    mesh: dict[str, int]
    remat: str
    per_device: int
    price: VariantPrice
    tokens_per_s_per_device: float
    pareto: bool = False
    more: tuple[str, ...] = ()
    """Changes of other keys: those of a pipeline."""

    @property
    def changes(self) -> list[str]:
        sizes = [f"mesh.{axis}={size}" for axis, size in self.mesh.items()]
        return [*sizes, *self.more, f"remat={self.remat}", f"batch.per_device={self.per_device}"]


Changes = tuple[str, ...]
"""The changes `key=value` that make a variant of a recipe."""


def as_text(changes: Iterable[str]) -> str:
    """Changes as text: `key: value, key: value`."""
    return ", ".join(change.replace("=", ": ", 1) for change in changes)


def as_edit(changes: Iterable[str], price: VariantPrice) -> Edit:
    """Changes of a recipe with their effect."""
    return Edit(as_text(changes), price.needed_bytes, price.step_s, price.fits, price.peak_bytes)


class VariantBound(NamedTuple):
    """The least memory and the layers of a variant, computed before the variant is built."""

    least_bytes: int
    limit_bytes: int
    """The memory of its device."""
    layers: int
    """The number of layers that are built for it."""


@dataclass
class VariantFigures:
    """The prices and bounds of variants by their changes; every process computes the same."""

    prices: dict[Changes, VariantPrice | None] = field(default_factory=dict)
    """None for variants that contradict themselves."""
    bounds: dict[Changes, VariantBound | None] = field(default_factory=dict)

    def update(self, other: VariantFigures) -> None:
        self.prices |= other.prices
        self.bounds |= other.bounds


@dataclass
class SearchResult:
    """The variants that fit, the fastest first, and counts and figures of the others."""

    candidates: list[Candidate] = field(default_factory=list)
    refused: int = 0
    """Variants that contradict themselves (divisibility) or exceed the memory."""
    closest: Candidate | None = None
    """The smallest of the variants that exceed the memory."""
    as_written: VariantPrice | None = None
    """The figures of the recipe without changes; None if it contradicts itself."""
    untried: list[str] = field(default_factory=list)
    """Variants that were not built, because the search had built `MOST_LAYERS` layers, or more stages were faster."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def mark_fastest(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sorts candidates, fastest first, and marks those that no other beats in both time and memory."""
    ordered = sorted(candidates, key=lambda c: (c.price.step_s, c.price.counted_bytes))
    least = math.inf
    out = []
    for c in ordered:
        better = c.price.counted_bytes < least
        least = min(least, c.price.counted_bytes)
        out.append(replace(c, pareto=better))
    return out


def text(result: SearchResult, recipe: Recipe, rows: int = 24) -> str:
    """The Pareto table, and the fastest variant as a recipe."""
    lines = [f"{len(result.candidates)} variants fit, {result.refused} do not; * no other is both faster and smaller"]
    lines.append(f"   {'mesh':<38} {'remat':<12} per_device     memory       step  tokens/s a device")
    for c in result.candidates[:rows]:
        lines.append(
            f" {'*' if c.pareto else ' '} {sizes(c.mesh):<38} {c.remat:<12} {c.per_device:>10} "
            f"{gib(c.price.counted_bytes):>10} {seconds(c.price.step_s):>10} {c.tokens_per_s_per_device:>12.0f}"
            f"{'  ' + ', '.join(pipeline_words(c.more, recipe)) if c.more else ''}"
        )
    if result.untried:
        why = (
            f"a search builds {search_bounds.MOST_LAYERS:,} layers at most, and no fewer stages than make a step slower"
        )
        lines.append(f"   not tried: {'; '.join(result.untried)} ({why})")
    if reason := _no_pipeline(result, recipe):
        lines.append(f"   {reason}")
    if result.as_written is not None:
        lines.append(f"   the recipe as written: {_compared(result.as_written, result.best)}")
    if result.best is not None:
        lines += ["", "# the fastest, as a recipe", winner(result, recipe).rstrip()]
    elif result.closest is not None:
        least = result.closest
        lines.append(f"   the smallest needs {gib(least.price.counted_bytes)} a device: {', '.join(least.changes)}")
    return "\n".join(lines) + "\n"


def _no_pipeline(result: SearchResult, recipe: Recipe) -> str:
    """Why the fastest variant has no pipeline, if pipelines were tried; else ""."""
    piped = next((c for c in result.candidates if pipeline_words(c.more, recipe)), None)
    if piped is None or result.best is None or piped is result.best:
        return ""
    best, price = result.best.price, piped.price
    return (
        f"no pipeline is faster: with {sizes(piped.mesh)} a step takes {price.step_s / best.step_s - 1:.1%} longer; a "
        f"device waits {price.waits}, without it {best.waits}"
    )


def winner(result: SearchResult, recipe: Recipe) -> str:
    """The fastest variant as a recipe in YAML; "" if none fits."""
    return with_changes(recipe, result.best.changes).to_yaml() if result.best is not None else ""


def _compared(written: VariantPrice, best: Candidate | None) -> str:
    figures = f"{written.memory}, {seconds(written.step_s)}{'' if written.fits else ', does not fit'}"
    if best is None:
        return figures
    return f"{figures}; the fastest takes {best.price.step_s / written.step_s:.0%} of that time"


def pipeline_words(more: Sequence[str], recipe: Recipe) -> list[str]:
    """The schedule of a variant's pipeline and its changes of other keys, for the table; [] without a pipeline."""
    changes = dict(change.split("=", 1) for change in more)
    whole = changes.pop("pipeline", None)
    if whole == "null" or (whole is None and recipe.pipeline is None):
        return []
    written = recipe.pipeline.schedule if recipe.pipeline is not None else ""
    schedule = changes.pop("pipeline.schedule", written if whole is None else whole[len("{schedule: ") : -1])
    return [schedule, *(f"{key.removeprefix('pipeline.')} {value}" for key, value in changes.items())]


def sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 device"
