"""Prices variants of a recipe: those of the search over meshes.

Every variant is built completely and priced like its own plan; `programs.variants` makes that fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from typing import TypeVar

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.plan import planner
from tpshard.plan.search import search_bounds, search_pipelines
from tpshard.plan.search.search_bounds import Bounds
from tpshard.plan.search.search_processes import Helpers, share, variants_of_helper
from tpshard.plan.search.search_result import (
    UNPRICED,
    Candidate,
    Changes,
    SearchResult,
    VariantBound,
    VariantFigures,
    VariantPrice,
    mark_fastest,
    pipeline_words,
    sizes,
)
from tpshard.plan.server import server_steps
from tpshard.plan.step.step_price import price_training
from tpshard.plan.step.units import gib, seconds
from tpshard.programs.setting import cluster
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants, without_older
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import with_changes


def price_variant(recipe: Recipe, what: str = "train", variants: Variants | None = None) -> VariantPrice:
    """Prices a variant; `variants` reuses parts of earlier ones. Raises `Mistakes` where it contradicts itself."""
    with planner.without_gc():
        if what == "train":
            setting = Setting.of(recipe, devices_of(recipe))
            pricing = price_training((variants or Variants()).for_prices(setting))
        else:
            pricing = server_steps.planned(recipe, what, whole=False).pricing
    return VariantPrice(
        pricing.needed_bytes,
        pricing.step_s,
        pricing.exposed_s,
        pricing.fits,
        pricing.comm_s,
        pricing.idle_s,
        None if pricing.limit is None else pricing.peak_bytes,
    )


def price_changes(
    recipe: Recipe, changes: Sequence[str], variants: Variants, what: str = "train"
) -> VariantPrice | None:
    """Prices a recipe with changes; None where they contradict it."""
    try:
        return price_variant(with_changes(recipe, changes), what, variants)
    except Mistakes:
        return None


def search(recipe: Recipe, say: Callable[[str], None] | None = None, processes: int = 1) -> SearchResult:
    """Tries meshes, micro-batches and recomputation on the recipe's devices; returns those that fit, fastest first.

    Recomputation is increased only until the step fits, the micro-batch only while it fits. Variants that cannot fit,
    by their bound (`search_bounds`), are not built. Nor are those that `untried` lists. processes: how many price
    variants; the result is the same for any number. Raises `Mistakes` if an error in the recipe itself prevents
    pricing.
    """
    every = list(meshes(recipe))
    large = search_pipelines.layers_of(recipe) * len(every) >= LARGE
    with planner.without_gc(), without_older(), Helpers(processes - 1 if large else 0) as helpers:
        tried = _Search(recipe, say or (lambda _: None), helpers, search_bounds.MOST_LAYERS, Variants())
        tried.each(_Search.mesh, every)
        if recipe.pipeline is not None or (recipe.cluster is not None and recipe.cluster.nodes > 1):
            tried.pipelines()
        tried.some_layers()
    result = tried.result
    try:
        result.as_written = price_variant(recipe, variants=tried.variants)
    except Mistakes:
        if not result.candidates and result.closest is None:
            raise
    result.candidates = mark_fastest(result.candidates)
    return result


def _per_device(recipe: Recipe, mesh: Mapping[str, int]) -> list[int]:
    """Sizes of a micro-batch that a mesh can have."""
    ranks = mesh.get("dp", 1) * mesh.get("fsdp", 1)
    each = recipe.batch.global_sequences // ranks if recipe.batch.global_sequences % ranks == 0 else 0
    return [n for n in (1, 2, 4, 8) if each and each % n == 0]


FEWEST_TRIED = 5
"""How many numbers of recomputed layers are priced for a variant; two or three are enough where memory is a line."""
T = TypeVar("T")
LARGE = 200
"""The number of layers times meshes from which on a search starts helper processes, whose start takes seconds."""


class _Search:
    """A search in progress: the figures of the variants so far, and the layers that it may still build."""

    def __init__(
        self, recipe: Recipe, tell: Callable[[str], None], helpers: Helpers, layers: int, variants: Variants
    ):  # fmt: skip
        self.recipe, self.tell, self.variants, self.result = recipe, tell, variants, SearchResult()
        self.bounds, self.layers_left, self.helpers = Bounds(recipe), layers, helpers
        self.figures = VariantFigures()
        self.last: tuple[Changes, Recipe] = (), recipe
        self.tokens, self.devices = recipe.batch.global_sequences * recipe.model.seq_len, devices_of(recipe)
        self.first_fits: list[Candidate] = []
        """The pipelines that fit with the schedule tried first."""

    def each(self, method: Callable[[_Search, T], None], items: Sequence[T]) -> None:
        """Tries items one after another; with helpers all of them are priced before, at the same time.

        What is tried, and in which order, never depends on the helpers: an item that they did not price is priced then.
        """
        parts = share(items, self.helpers.count + 1)
        layers = self.layers_left // len(parts)
        if len(parts) > 1:
            others = [self.helpers.start(_price_ahead, self.recipe, method, part, layers) for part in parts[1:]]
            self.figures.update(_price_ahead(self.recipe, method, parts[0], layers, self.variants))
            for other in others:
                try:
                    self.figures.update(other.result())
                except BrokenExecutor:
                    self.tell("a process of the search was ended, by the system or by hand; its part is priced here")
        for item in items:
            method(self, item)

    def mesh(self, mesh: Mapping[str, int]) -> None:
        """Tries the sizes of micro-batches with a mesh, until one does not fit."""
        whole = [] if self.recipe.pipeline is None else ["pipeline=null"]
        for per_device in _per_device(self.recipe, mesh):
            if self.least_remat(mesh, per_device, whole) is None:
                break

    def stores(self, mesh: Mapping[str, int]) -> bool:
        """Whether a device could hold its share of parameters, gradients and moments, if all axes but dp divide it."""
        return self.bounds.state(dict(mesh)) <= cluster.device_of(self.recipe)[0].memory_bytes

    def least_remat(self, mesh: Mapping[str, int], per_device: int, more: Sequence[str] = ()) -> Candidate | None:
        """Finds the least recomputation with which a variant fits, and keeps it; None where none fits."""
        if not self.stores(mesh):
            self.result.refused += 1
            self.tell(f"{sizes(mesh)}: parameters, gradients and moments alone exceed the memory")
            return None
        for remat in ("none", "selective", "full"):
            candidate = self._try(Candidate(dict(mesh), remat, per_device, UNPRICED, 0.0, more=tuple(more)))
            if candidate is not None and candidate.price.fits:
                return candidate
        return None

    def _try(self, unpriced: Candidate) -> Candidate | None:
        """The candidate with its price, kept where it fits; None for one that is not built or contradicts itself."""
        mesh = [sizes(unpriced.mesh), *pipeline_words(unpriced.more, self.recipe)]
        words = " ".join([*mesh, f"remat {unpriced.remat} per_device {unpriced.per_device}"])
        if self._is_ruled_out(unpriced, words):
            return None
        candidate = self._price(unpriced)
        if candidate is None or not candidate.price.fits:
            self.tell(f"{words}: {'refused' if candidate is None else f'does not fit, {candidate.price.memory}'}")
            self.result.refused += 1
            self.result.closest = min(filter(None, (self.result.closest, candidate)), key=_counted_bytes, default=None)
            return candidate
        self.result.candidates.append(candidate)
        self.tell(f"{words}: {seconds(candidate.price.step_s)}")
        return candidate

    def some_layers(self) -> None:
        """With the fastest mesh, goes on from the variants that recompute all of every layer to the fewest layers."""
        candidates = [c for c in self.result.candidates if c.mesh.get("pp", 1) == 1]
        if candidates:
            mesh = min(candidates, key=lambda c: c.price.step_s).mesh
            for whole in [c for c in candidates if c.mesh == mesh and c.remat == "full"]:
                self.fewest_layers(whole)

    def fewest_layers(self, whole: Candidate) -> None:
        """Tries numbers of recomputed layers, each where the line through the memory of two others meets the limit."""
        layers = search_pipelines.layers_of(self.recipe)
        limit = self.recipe.fsdp.memory_limit or cluster.device_of(self.recipe)[0].memory_bytes
        none = replace(whole, remat="none")
        price, bound = self.figures.prices.get(tuple(none.changes)), self._bound(none)
        # layers and bytes of the nearest numbers that do not fit and that do
        below = 0, price.counted_bytes if price is not None else bound.least_bytes if bound is not None else 0
        above = layers, _counted_bytes(whole)
        for _ in range(FEWEST_TRIED):
            each = (below[1] - above[1]) / max(1, above[0] - below[0])
            count = above[0] - int((limit - above[1]) / each) if each > 0 else (below[0] + above[0]) // 2
            count = max(count, below[0] + 1)
            if count >= above[0]:
                return
            one = self._try(replace(whole, remat=f"{{first: {count}}}"))
            if one is None:
                return
            below, above = (
                (below, (count, _counted_bytes(one))) if one.price.fits else ((count, _counted_bytes(one)), above)
            )

    def _figure(self, figures: dict[Changes, T | None], one: Candidate, compute: Callable[[Recipe], T]) -> T | None:
        """A figure of a variant, computed once; None for a variant that contradicts itself.

        The last changed recipe is kept, because reading a recipe takes a while.
        """
        key = tuple(one.changes)
        if key not in figures:
            try:
                if self.last[0] != key:
                    self.last = key, with_changes(self.recipe, key)
                figures[key] = compute(self.last[1])
            except Mistakes:
                figures[key] = None
        return figures[key]

    def _price(self, one: Candidate) -> Candidate | None:
        """The candidate with its price."""
        price = self._figure(self.figures.prices, one, lambda recipe: price_variant(recipe, variants=self.variants))
        if price is None:
            return None
        return replace(one, price=price, tokens_per_s_per_device=self.tokens / price.step_s / self.devices)

    def _bound(self, one: Candidate) -> VariantBound | None:
        """The bound of a candidate's memory, and its layers to build."""

        def bound(recipe: Recipe) -> VariantBound:
            limit = cluster.device_of(recipe)[0].memory_bytes
            return VariantBound(self.bounds.needed(recipe, one.mesh), limit, self.bounds.layers_built(recipe))

        return self._figure(self.figures.bounds, one, bound)

    def _is_ruled_out(self, unpriced: Candidate, what: str) -> bool:
        """Whether a variant is not built: it exceeds the memory by its bound, or too many layers were built already.

        Where nothing fits yet, full recomputation is always built, so that the search ends with a figure.
        """
        bound = self._bound(unpriced)
        if bound is None:
            return False  # pricing says that it is refused
        if bound.least_bytes > bound.limit_bytes and (self.result.candidates or unpriced.remat != "full"):
            self.tell(f"{what}: does not fit, at least {gib(bound.least_bytes)}; not built")
            self.result.refused += 1
            return True
        if bound.layers > self.layers_left:
            self.tell(f"{what}: not tried")
            self.result.untried.append(what)
            return True
        self.layers_left -= bound.layers
        return False

    def pipelines(self) -> None:
        """Tries pipelines: numbers of stages in place of data ranks, for the two fastest sizes of tp.

        Many stages come first, because they have few layers and are built fast; fewer stages are left out once they
        make a step slower. The two fastest pipelines are tried with other schedules and larger micro-batches.
        """
        if not search_pipelines.layers_of(self.recipe):
            return
        ordered = sorted(self.result.candidates, key=lambda c: c.price.step_s)
        every = [mesh.get("tp", 1) for mesh in meshes(self.recipe)]
        widths = list(dict.fromkeys(c.mesh.get("tp", 1) for c in ordered)) or [every[-1]]
        self.each(_Search.stages, widths[:2])
        self.each(_Search.schedules, sorted(self.first_fits, key=lambda c: c.price.step_s)[:2])

    def stages(self, tp: int) -> None:
        """Tries numbers of stages with a size of tp, until fewer stages are slower."""
        recipe, layers = self.recipe, search_pipelines.layers_of(self.recipe)
        whole = next(mesh for mesh in meshes(recipe) if mesh.get("tp", 1) == tp and mesh.get("dp", 1) == 1)
        fixed = recipe.fsdp.accumulate.gather == "step" or bool(recipe.where("fsdp.accumulate").line)
        least_s, slower = math.inf, False
        for stages in reversed(search_pipelines.sizes(recipe, layers, whole["fsdp"])):
            mesh = {"pp": 1} | whole | {"pp": stages, "fsdp": whole["fsdp"] // stages}
            if slower:
                self.result.untried.append(sizes(mesh))
                continue
            for once in [()] if fixed else [search_pipelines.ONCE, ()]:
                if not _per_device(recipe, mesh):
                    continue
                candidate = self.least_remat(mesh, 1, [*search_pipelines.first(recipe), *once])
                if candidate is not None:
                    self.first_fits.append(candidate)
                    slower = candidate.price.step_s > least_s
                    least_s = min(least_s, candidate.price.step_s)
                    break

    def schedules(self, best: Candidate) -> None:
        """Tries other schedules and larger micro-batches with a pipeline's mesh."""
        layers = search_pipelines.layers_of(self.recipe)
        for other in search_pipelines.schedules(self.recipe, layers, best.mesh["pp"]):
            self.least_remat(best.mesh, best.per_device, [*best.more, *other])
        for per_device in (n for n in _per_device(self.recipe, best.mesh) if n == 2):
            self.least_remat(best.mesh, per_device, best.more)


def _price_ahead(
    recipe: Recipe, method: Callable[[_Search, T], None], items: Sequence[T], layers: int,
    variants: Variants | None = None,
) -> VariantFigures:  # fmt: skip
    """Tries some items as a search does, building at most `layers` layers, and returns their bounds and prices. A
    helper keeps its own variants."""
    tried = _Search(recipe, lambda _: None, Helpers(0), layers, variants or variants_of_helper())
    for item in items:
        method(tried, item)
    return tried.figures


def _counted_bytes(candidate: Candidate) -> int:
    return candidate.price.counted_bytes


def meshes(recipe: Recipe) -> Iterator[dict[str, int]]:
    """Yields meshes over the recipe's devices: tp within a host, dp over whole hosts or 1, pp 1, fsdp the rest.

    Other axes keep their sizes.
    """
    world = devices_of(recipe)
    per_host = recipe.cluster.devices_per_node if recipe.cluster is not None else world
    fixed = {axis: size for axis, size in recipe.mesh.items() if axis not in ("pp", "dp", "fsdp", "tp")}
    fixed = {"pp": 1, **fixed} if "pp" in recipe.mesh else fixed
    left = world // max(1, math.prod(fixed.values()))
    for tp in (n for n in range(1, per_host + 1) if left % n == 0 and n & (n - 1) == 0):
        for dp in dict.fromkeys((1, max(1, world // per_host))):
            if left % (tp * dp) == 0:
                yield {**fixed, "dp": dp, "fsdp": left // (tp * dp), "tp": tp}
