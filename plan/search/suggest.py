"""`plan --suggest`: searches for changes that make a recipe faster; every variant is planned completely.

Changes must not affect the model, the sequences of a step, or a dtype. First every change is tried alone; then the
fastest one is combined with others that helped, as long as that gains. Variants that by their bounds (`search_bounds`)
cannot fit are not planned, nor are those that alone cannot gain enough.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from tpshard.diagnostics.diagnostic import Mistakes, plural
from tpshard.models.folders.hf_folder import DTYPES
from tpshard.plan.report.report import Edit, Report
from tpshard.plan.search import search_pipelines
from tpshard.plan.search.search import price_changes
from tpshard.plan.search.search_bounds import Bounds, least_seconds
from tpshard.plan.search.search_result import Changes, VariantPrice, as_edit, as_text
from tpshard.plan.step.pricing import Pricing
from tpshard.plan.step.units import seconds
from tpshard.programs.fit.recipe_model import model_of
from tpshard.programs.parts.ahead import ahead
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import with_changes

GAIN = 0.98
"""A change helps if a step with it takes less than this share of the recipe's step time."""
MOST = 60
"""The maximal number of variants that are planned."""
LARGE = 20_000
"""Operations of a program above which a plan tries one change instead of two: each takes half as long as the plan."""


@dataclass
class Suggested:
    """The variants faster than a recipe that a search met, and the numbers of those that it left out."""

    edits: list[Edit] = field(default_factory=list)
    """Edits that make a step at least 2% faster, the fastest first."""
    planned: int = 0
    unfit: int = 0
    """The number of planned variants that exceed the memory."""
    unstorable: int = 0
    """The number of variants not planned, because the least that they hold exceeds the memory."""
    bounded: int = 0
    """The number of variants not planned, because hiding all communication would not make a step 2% faster."""
    refused: int = 0
    """The number of variants that contradict themselves (divisibility)."""

    @property
    def words(self) -> str:
        outcome = f"{len(self.edits)} faster by 2% or more" if self.edits else "nothing helps, none is 2% faster"
        others = [(self.unfit, "too large for a device"), (self.unstorable, "not planned, as they cannot fit")]
        others += [
            (self.bounded, "not planned, as they cannot gain 2%"),
            (self.refused, "not planned, as they do not divide"),
        ]
        left = "".join(f", {number} {words}" for number, words in others if number)
        return f"{plural(self.planned, 'variant')} planned whole: {outcome}{left}"

    def to_json(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if name != "edits"}


def suggest(
    report: Report, recipe: Recipe, tell: Callable[[str], None] | None = None, variants: Variants | None = None,
    pricing: Pricing | None = None,
) -> Suggested:  # fmt: skip
    """Searches for faster variants of a training recipe that fits. `variants` has the recipe's own programs, and
    `pricing` is their price, by which some variants are ruled out."""
    search = _Search(report, recipe, tell or (lambda _: None), variants)
    search.pricing = pricing
    return search.run()


def promising(report: Report, recipe: Recipe, variants: Variants | None = None) -> list[Edit]:
    """Up to two suggestions without a search: the changes that the plan's figures favour, tried one by one."""
    search = _Search(report, recipe, lambda _: None, variants)
    changes = search.likely_changes()[: 2 if report.pricing.parts[0].size < LARGE else 1]
    price = partial(price_changes, recipe, variants=search.variants)
    with contextlib.ExitStack() as stack:
        later = [stack.enter_context(ahead(partial(price, change), search.variants.fork)) for change in changes[1:]]
        prices = dict(zip(changes, [*map(price, changes[:1]), *(result() for result in later)]))
    edits = [as_edit(change, price) for change, price in prices.items() if price and price.beats(GAIN * search.base)]
    return sorted(edits, key=lambda edit: (edit.step_s, edit.change))


class _Search:
    """The changes tried so far on a recipe that fits, and their prices."""

    def __init__(self, report: Report, recipe: Recipe, tell: Callable[[str], None], variants: Variants | None = None):
        self.report, self.recipe, self.tell = report, recipe, tell
        self.base = report.pricing.step_s
        self.variants = variants or Variants()
        self.tried: dict[frozenset[str], VariantPrice | None] = {}
        self.result = Suggested()
        self.pricing: Pricing | None = None
        self.bounds = Bounds(recipe, self.variants.memo)

    def run(self) -> Suggested:
        free = self.free()
        ruled_out = {change for change in free if self._is_ruled_out(change)}
        alone = {change: price for change in free if change not in ruled_out and (price := self.quick(change))}
        useful = sorted((c for c, q in alone.items() if q.beats(self.base)), key=lambda c: alone[c].step_s)
        # those that did not fit, or gained nothing alone
        slow = {c for c, q in alone.items() if q.step_s > 1.05 * self.base}
        others = [c for c in free if c in ruled_out or (c in alone and c not in useful and c not in slow)]
        best: Changes = ()
        limit = self.base
        for change in (*useful, *others):
            merged = combine(best, change)
            if merged is None or merged in ruled_out or self._cannot_fit(merged):
                continue
            price = self.quick(merged)
            if price is not None and price.beats(0.995 * limit):
                best, limit = merged, price.step_s
        gains = {change: q for change, q in self.tried.items() if q is not None and q.beats(GAIN * self.base)}
        needed = {  # changes of which no part could be left out
            change: q for change, q in gains.items()
            if not any(subset < change and other.step_s <= q.step_s for subset, other in gains.items())
        }  # fmt: skip
        edits = [as_edit(sorted(change, key=_order), price) for change, price in needed.items()]
        self.result.edits = sorted(edits, key=lambda edit: (edit.step_s, edit.change))
        return self.result

    def _is_ruled_out(self, change: Changes) -> bool:
        """Whether a change is not tried alone: it cannot fit, or cannot gain enough."""
        if self._cannot_fit(change):
            self.result.unstorable += 1
        elif self.pricing is not None and least_seconds(self.pricing, change) >= GAIN * self.base:
            self.result.bounded += 1
        else:
            return False
        return True

    def _cannot_fit(self, change: Changes) -> bool:
        """Whether the least that a variant holds exceeds the memory."""
        try:
            variant = with_changes(self.recipe, change)
            mesh = dict(Setting.of(variant, devices_of(variant)).mesh.axes)
            return self.bounds.needed(variant, mesh) > self.report.pricing.device.memory_bytes
        except Mistakes:
            return False  # pricing says that it is refused

    def quick(self, change: Changes) -> VariantPrice | None:
        """The price of the recipe with a change; None where it contradicts the recipe, or enough was planned."""
        key = frozenset(change)
        if key not in self.tried and self.result.planned < MOST:
            price = self.tried[key] = price_changes(self.recipe, change, self.variants)
            if price is None:
                self.result.refused += 1
            else:
                self.result.planned += 1
                self.result.unfit += not price.fits
                self.tell(f"{as_text(change)}: {seconds(price.step_s)}{'' if price.fits else ', does not fit'}")
        return self.tried.get(key)

    # ---- changes to try ----------------------------------------------------------------------------------------------
    def free(self) -> list[Changes]:
        """All single changes that may be tried, the cheapest to plan first: they keep the partitioned program."""
        return [
            *self._schedule_changes(), *self._pipelines(), *self._micro_batches(), *self._sequence(),
            *self._fsdp_groups(), *self._tensor_parallel(),
        ]  # fmt: skip

    def likely_changes(self) -> list[Changes]:
        """Changes that the report's figures favour: better pipelines and compiling, then the others by the seconds that
        they may save, the most first."""
        changes = self._pipelines()
        if self.recipe.compile == "eager" and self.report.pricing.device.kind == "gpu":
            changes.append(("compile=inductor",))
        estimates = sorted(self._estimates(), key=lambda one: -one[0])
        return [*changes, *(change for saved, change in estimates if saved > (1 - GAIN) * self.base)]

    def _estimates(self) -> Iterator[tuple[float, Changes]]:
        """Yields changes for which there may be memory, each with a rough estimate of the seconds of a step that it
        saves: shares of what is exposed, or what is computed again, which is the most that saving it can gain."""
        report, recipe, fsdp = self.report, self.recipe, self.recipe.fsdp
        job, held, spare = report.job, report.pricing.worst.at_peak, report.spare_bytes
        activations = held.get("activations", 0)
        gathers = self._exposed("parameter")
        across = self._exposed("parameter", "across") + self._exposed("gradient", "across")
        inside = self._exposed("activation")
        if self._gathered_bytes() <= spare:
            if job.micro_batches > 1 and fsdp.accumulate.gather != "step":
                yield gathers * (1 - 1 / job.micro_batches), ("fsdp.accumulate.gather=step",)
            elif fsdp.reshard_after_forward is True:
                yield gathers / 2, ("fsdp.reshard_after_forward=false",)
        if fsdp.prefetch < 4:
            yield gathers / 4, ("fsdp.prefetch=4",)
        for change in islice(self._tensor_parallel(), 1):
            halved = change[-1] == f"mesh.tp={job.mesh.get('tp', 1) // 2}"
            if not halved:
                yield across / 4, change
            elif activations / 2 <= spare:  # what is whole over tp does not grow
                yield (across + inside) / 2, change
        if activations <= spare and job.micro_batches % 2 == 0:
            yield (gathers + self._exposed("gradient")) / 2, (f"batch.per_device={job.per_device * 2}",)
        if across and spare > sum(report.pricing.static_bytes.values()):
            yield from ((across / 4, change) for change in list(self._fsdp_groups(smaller=True))[-1:])
        for change in self._sequence():
            if any(one.endswith("=null") for one in change) and activations <= spare:
                yield inside / 5, change
        again = report.pricing.recomputed_s
        if recipe.remat == "full" and activations <= spare:
            yield 4 / 5 * again, ("remat=selective",)
        if recipe.remat != "none" and activations / 2 <= spare:
            yield again, ("remat=none",)

    def _exposed(self, of: str, wire: str = "") -> float:
        """The seconds of a step that wait for collectives of a kind of value, over one kind of link or any."""
        return sum(line.exposed_s for line in self.report.lines if line.of == of and wire in ("", line.wire))

    def _gathered_bytes(self) -> float:
        """The bytes of a device's parameters once they are gathered over FSDP's axes."""
        fsdp, sizes = self.recipe.fsdp, self.report.job.mesh
        shards = math.prod(sizes.get(axis, 1) for axis in fsdp.axes)
        times = shards * DTYPES[fsdp.param_dtype].itemsize / DTYPES[fsdp.master_dtype].itemsize
        return self.report.pricing.static_bytes.get("parameters", 0) * times

    def _pipelines(self) -> list[Changes]:
        return [tuple(changes) for changes in search_pipelines.faster(self.report, self.recipe)]

    def _schedule_changes(self) -> Iterator[Changes]:
        fsdp, several = self.recipe.fsdp, self.report.job.micro_batches > 1
        if self.report.job.compiled != "inductor" and self.report.pricing.device.kind == "gpu":
            yield ("compile=inductor",)
        if any(self.report.job.mesh.get(axis, 1) > 1 for axis in fsdp.axes):
            for whether in ("false", "true"):
                if str(fsdp.reshard_after_forward).lower() not in (whether, "auto"):
                    yield (f"fsdp.reshard_after_forward={whether}",)
            for units in (0, 2, 4):
                if units != fsdp.prefetch:
                    yield (f"fsdp.prefetch={units}",)
            for how in ("wrap", "greedy"):
                if how != fsdp.bucket:
                    yield (f"fsdp.bucket={how}",)
        for remat in ("none", "selective", "{every: 2}", "full"):
            if remat != self.recipe.remat:
                yield (f"remat={remat}",)
        if several and fsdp.accumulate.gather != "step":
            yield ("fsdp.accumulate.gather=step",)
        if several and fsdp.accumulate.reduce != "last":
            yield ("fsdp.accumulate.reduce=last",)

    def _micro_batches(self) -> Iterator[Changes]:
        job = self.report.job
        share = job.per_device * job.micro_batches
        for size in (job.per_device * 2, job.per_device * 4, job.per_device // 2):
            if size and share % size == 0:
                yield (f"batch.per_device={size}",)

    def _sequence(self) -> Iterator[Changes]:
        """Yields the change that shards norms and residuals over the sequence between tensor-parallel blocks.

        If the recipe does that already, yields the change that makes them whole.
        """
        annotate, rules = self.recipe.sharding.annotate, self.recipe.sharding.rules
        named = {d for dims in annotate.values() for d in dims if d is not None and d.startswith("seq_")}
        cut = sorted(d for d in named if rules.get(d))
        sizes = self.report.job.mesh
        if cut and all(sizes.get(axis, 1) == 1 for d in cut for axis in rules[d]):
            return  # whole in any case
        if cut:
            whole = {name: [None if d in cut else d for d in dims] for name, dims in annotate.items()}
            yield (*(f"sharding.rules.{d}=null" for d in cut), f"sharding.annotate={json.dumps(whole)}")
        elif self.report.job.mesh.get("tp", 1) > 1 and not named and self._names_residuals():
            dims = ["batch", "seq_sp", "embed"]
            annotations = json.dumps({"layers.*.residual": dims, "embedded": dims})
            yield ("sharding.rules.seq_sp=tp", f"sharding.annotate={annotations}")

    def _names_residuals(self) -> bool:
        return "layers.0.residual" in model_of(self.recipe, weights=False).activations

    def _fsdp_groups(self, smaller: bool = False) -> Iterator[Changes]:
        """Yields FSDP groups of other sizes; with `smaller` only smaller ones."""
        sizes = self.report.job.mesh
        dp, fsdp = sizes.get("dp", 1), sizes.get("fsdp", 1)
        if "fsdp" not in sizes or self.recipe.pipeline is not None:
            return
        ranks = dp * fsdp
        groups = [2**n for n in range(int(math.log2(ranks)) + 1) if ranks % 2**n == 0 and 2**n != fsdp]
        for group in sorted(groups, key=lambda group: abs(math.log2(group / fsdp)))[:8]:
            if not (smaller and group > fsdp) and self._stores(fsdp / group):
                yield (f"mesh.dp={ranks // group}", f"mesh.fsdp={group}")

    def _tensor_parallel(self) -> Iterator[Changes]:
        job = self.report.job
        tp, fsdp = job.mesh.get("tp", 1), job.mesh.get("fsdp", 1)
        if "fsdp" not in job.mesh or self.recipe.pipeline is not None:
            return
        if tp % 2 == 0:
            yield (f"mesh.fsdp={fsdp * 2}", f"mesh.tp={tp // 2}")
        if fsdp % 2 == 0 and tp * 2 <= job.devices_per_node:
            yield (f"mesh.fsdp={fsdp // 2}", f"mesh.tp={tp * 2}")

    def _stores(self, times: float) -> bool:
        """Whether a device can hold `times` its present parameters, gradients and moments."""
        fits = times * sum(self.report.pricing.static_bytes.values()) < self.report.pricing.device.memory_bytes
        self.result.unstorable += not fits
        return fits


def combine(one: Changes, other: Changes) -> Changes | None:
    """Combines two changes; None if both change the same key, or both the mesh."""
    return (*one, *other) if {*map(_changed, one)}.isdisjoint(map(_changed, other)) else None


def _changed(change: str) -> str:
    """The key of a change; `mesh` for all axes."""
    return "mesh" if change.startswith("mesh.") else change.partition("=")[0]


def _order(change: str) -> tuple[bool, str]:
    return not change.startswith("mesh."), change
