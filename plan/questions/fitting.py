"""`plan --fit`: the smallest edits that make a recipe fit its devices, as a recipe.

No edit changes the result of a run: neither the model, nor the sequences of a step, nor a dtype. Edits are applied in
the order of `Harm`; then unneeded ones are reverted, the most harmful first. So no edit of the result can be left out
or be milder.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan.report.report import Report
from tpshard.plan.search.edits import CHUNKS, edits, loss_may_be_chunked
from tpshard.plan.search.search import price_changes
from tpshard.plan.search.search_result import Changes, VariantPrice, as_text
from tpshard.plan.step.units import gib, seconds
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import with_changes

Settings = Mapping[str, str | int]
"""Keys of the recipe with values. Of the mesh only `mesh.dp` and `mesh.tp`: fsdp gets the remaining devices."""


class Harm(enum.IntEnum):
    """The kinds of cost that an edit has, the least harmful first."""

    WHEN = 0
    SLOWER = 1
    BATCH = 2

    @property
    def words(self) -> str:
        """The cost of a change, as a sentence for the user."""
        return (
            "the same operations, at other times or in other sizes",
            "slower: more is computed, or sent",
            "slower: fewer sequences at once; a step takes as many",
        )[self]


@dataclass(frozen=True)
class Knob:
    """One setting that can be reduced, from its mildest value to its strongest."""

    harm: Harm
    levels: tuple[Settings, ...]


@dataclass
class Fitted:
    """The smallest edits that make a recipe fit, with its memory and time after them."""

    changes: Changes
    harms: list[Harm]
    """The harm of each change."""
    price: VariantPrice
    recipe: str
    """The recipe as YAML."""


def fit(report: Report, recipe: Recipe, variants: Variants | None = None) -> Fitted:
    """The smallest edits for a training recipe that does not fit; `variants` has the recipe's own programs.

    Raises `Mistakes` (exit 4) if there are none.
    """
    search = _KnobSearch(report, recipe, variants or Variants())
    smallest = search.smallest()
    if smallest is None:
        prices = [price for price in search.tried.values() if price is not None]
        smallest_price = min(prices, key=lambda price: price.counted_bytes, default=None)
        least = f"with all of them it needs {smallest_price.memory}" if smallest_price else "none is possible"
        others = [edit.change for edit in edits(report, recipe, variants=search.variants) if edit.fits]
        raise Mistakes.one(
            f"`{report.job.name}` does not fit, even with every edit that keeps its results", exit=Exit.FIT,
            why=f"{least}, and {_most(report)}",
            fix="; or ".join(others) if others else "more devices, a larger one, or a smaller model",
        )  # fmt: skip
    levels, price = smallest
    every, changed = search.changes(levels), {i: search.changes({i: level}) for i, level in levels.items()}
    harms = [max(search.knobs[i].harm for i, own in changed.items() if one in own) for one in every]
    return Fitted(every, harms, price, with_changes(recipe, every).to_yaml())


@dataclass
class _KnobSearch:
    """The search for the smallest edits; keeps the price of every combination that it has tried."""

    report: Report
    recipe: Recipe
    variants: Variants
    tried: dict[Changes, VariantPrice | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.knobs = sorted(knobs(self.report, self.recipe), key=lambda knob: knob.harm)

    def smallest(self) -> tuple[dict[int, int], VariantPrice] | None:
        """The lowest levels of the knobs at which the recipe fits, with their price; None where nothing fits."""
        levels: dict[int, int] = {}
        for harm in Harm:
            for i, knob in enumerate(self.knobs):
                if knob.harm == harm:  # its strongest level that is compatible with the others
                    possible = (n for n in reversed(range(len(knob.levels))) if self.quick(levels | {i: n}))
                    if (strongest := next(possible, None)) is not None:
                        levels[i] = strongest
            if self.fits(levels):
                break
        else:
            return None
        for i in sorted(levels, reverse=True):  # the most harmful first, as the knobs are sorted
            strongest = levels.pop(i)
            if self.fits(levels):
                continue
            levels[i] = next((n for n in range(strongest) if self.fits(levels | {i: n})), strongest)
        price = self.quick(levels)
        assert price is not None, "the levels fit"
        return dict(sorted(levels.items())), price

    def fits(self, levels: Mapping[int, int]) -> bool:
        price = self.quick(levels)
        return price is not None and price.fits

    def quick(self, levels: Mapping[int, int]) -> VariantPrice | None:
        """The price of the recipe with its knobs at these levels; None where the levels contradict each other."""
        changes = self.changes(levels)
        if changes not in self.tried:
            self.tried[changes] = price_changes(self.recipe, changes, self.variants)
        return self.tried[changes]

    def changes(self, levels: Mapping[int, int]) -> Changes:
        """The levels as changes of the recipe; fsdp gets the devices that dp and tp leave."""
        settings: dict[str, str | int] = {}
        for i, level in sorted(levels.items()):
            settings |= self.knobs[i].levels[level]
        if any(key.startswith("mesh.") for key in settings):
            sizes = self.report.job.mesh
            ranks = sizes.get("dp", 1) * sizes.get("fsdp", 1) * sizes.get("tp", 1)
            dp, tp = (int(settings.get(f"mesh.{axis}", sizes.get(axis, 1))) for axis in ("dp", "tp"))
            settings["mesh.fsdp"] = ranks // (dp * tp)
        return tuple(f"{key}={value}" for key, value in settings.items())


def knobs(report: Report, recipe: Recipe) -> Iterator[Knob]:
    """The settings of a recipe that can be reduced."""
    fsdp, job = recipe.fsdp, report.job
    if recipe.compile == "eager" and report.pricing.device.kind == "gpu":
        yield Knob(Harm.WHEN, ({"compile": "blocks"}, {"compile": "inductor"}))
    if fsdp.reshard_after_forward is not True:
        yield Knob(Harm.WHEN, ({"fsdp.reshard_after_forward": "true"},))
    if fsdp.accumulate.gather == "step":
        yield Knob(Harm.WHEN, ({"fsdp.accumulate.gather": "microbatch"},))
    if fsdp.accumulate.reduce == "last":
        yield Knob(Harm.WHEN, ({"fsdp.accumulate.reduce": "each"},))
    if fsdp.prefetch > 0:
        yield Knob(Harm.WHEN, tuple({"fsdp.prefetch": n} for n in (1, 0) if n < fsdp.prefetch))
    if fsdp.bucket != "none":
        yield Knob(Harm.WHEN, tuple({"fsdp.bucket": how} for how in ("wrap", "none") if how != fsdp.bucket))
    if loss_may_be_chunked(recipe):
        yield Knob(Harm.WHEN, ({"loss.chunks": CHUNKS},))
    dp, tp = job.mesh.get("dp", 1), job.mesh.get("tp", 1)
    if dp > 1 and "fsdp" in job.mesh:
        yield Knob(Harm.WHEN, tuple({"mesh.dp": n} for n in _divisors(dp)))
    kinds = ("none", "selective", "full")
    milder = kinds.index(recipe.remat) if recipe.remat in kinds else 1
    if kinds[milder + 1 :]:
        yield Knob(Harm.SLOWER, tuple({"remat": kind} for kind in kinds[milder + 1 :]))
    wider = [tp * n for n in (2, 4, 8) if tp * n <= job.devices_per_node and job.mesh.get("fsdp", 1) % n == 0]
    if wider and recipe.cluster is not None:
        yield Knob(Harm.SLOWER, tuple({"mesh.tp": n} for n in wider))
    if job.per_device > 1:
        yield Knob(Harm.BATCH, tuple({"batch.per_device": n} for n in _divisors(job.per_device)))


def _divisors(n: int) -> list[int]:
    """The divisors of `n` below it, the largest first."""
    return [d for d in range(n - 1, 0, -1) if n % d == 0]


def text(fitted: Fitted | None, report: Report, recipe: Recipe) -> str:
    """The recipe with a comment that lists the changes; the unchanged recipe if there are none."""
    pricing = report.pricing
    has = f"{gib(pricing.device.memory_bytes)} of each {pricing.device.name}"
    if pricing.limit is not None:
        has = f"{gib(pricing.limit)} of `fsdp.memory_limit`"
    given = gib(pricing.counted_bytes)
    if fitted is None:
        head = [f"`{report.job.name}` fits as it is: {given} of the {has}"]
        return _with_comment(head, recipe.to_yaml())
    head = [
        f"`{report.job.name}`, made to fit: {gib(fitted.price.counted_bytes)} of the {has}, as given {given}",
        *(f"  {as_text([change])}   ({harm.words})" for change, harm in zip(fitted.changes, fitted.harms)),
        f"step {seconds(fitted.price.step_s)}, as given {seconds(report.pricing.step_s)} if it fitted",
    ]
    return _with_comment(head, fitted.recipe)


def _most(report: Report) -> str:
    """What a step may hold, in words."""
    pricing = report.pricing
    if pricing.limit is not None:
        return f"`fsdp.memory_limit` is {gib(pricing.limit)}"
    return f"a device has {gib(pricing.device.memory_bytes)}"


def _with_comment(head: Sequence[str], recipe: str) -> str:
    return "".join(f"# {line}\n" for line in head) + recipe
