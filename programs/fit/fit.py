"""Checks whether a recipe fits its model and its mesh: patterns, ranks and divisibility, before anything is built.

Needs only the model's configuration, not torch. A user's module has none; then only `laws` are checked, and building it
reveals the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Source, did_you_mean, join
from tpshard.diagnostics.patterns import covers, matches, nearest
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.family import DIMS, INPUTS
from tpshard.models.model_spec import ModelSpec
from tpshard.programs.fit.batching import batch_misfit, derive
from tpshard.programs.fit.fp8_fit import fp8_misfits
from tpshard.programs.fit.layer_split import split_misfit
from tpshard.programs.fit.parameter_groups import idle_of
from tpshard.recipes.keys.constraints import AXES
from tpshard.recipes.keys.laws import without_effect
from tpshard.recipes.keys.parallel_keys import RematEvery
from tpshard.recipes.keys.schema import Recipe

SAVED_OPERATIONS = frozenset({
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward", "addmm",
    "attention", "attention_backward", "attention_part", "baddbmm", "bmm", "contract", "convolution", "delta_rule",
    "delta_rule_backward", "dot", "expert_linear", "expert_outer", "experts", "experts_backward", "fp8_product", "mm",
    "mv", "paged_attention", "paged_attention_lse", "paged_select_keys", "paged_selected_attention", "selective_scan",
    "selective_scan_backward",
})  # fmt: skip
"""The operations whose results a list of `remat` can name, in some model: those that their rules call saved."""


def nothing_saved(recipe: Recipe, name: str, choices: Iterable[str]) -> Diagnostic:
    """The mistake of a name in a list of `remat` that selects nothing, and would have no effect."""
    return Diagnostic(
        f"`remat` names `{name}`, which no saved value of the model has",
        where=recipe.where("remat"), why="a list names the products and attentions that are not recomputed",
        fix=did_you_mean(name, sorted(choices), "name one of them"),
    )  # fmt: skip


def devices(recipe: Recipe) -> int | None:
    """The number of devices that the recipe names; None where the machine decides."""
    if recipe.cluster is not None:
        return recipe.cluster.nodes * recipe.cluster.devices_per_node
    return None if -1 in recipe.mesh.values() else math.prod(recipe.mesh.values())


def misfits(recipe: Recipe, spec: ModelSpec | None) -> list[Diagnostic]:
    """All ways in which recipe, model and mesh do not fit each other.

    `spec` is None where the model is unknown, as on a machine without its folder. Where the machine decides the
    number of devices, axes of size -1 count as fitting.
    """
    world = devices(recipe)
    mesh = {axis: size for axis, size in recipe.mesh.items() if size != -1}
    fixed = math.prod(mesh.values())
    whole = world is None or (world % fixed == 0 if len(mesh) < len(recipe.mesh) else world == fixed)
    if world is not None and whole:
        mesh = recipe.mesh_on(world)
    mesh = dict.fromkeys(set(AXES) - set(recipe.mesh), 1) | mesh
    # a mesh that does not fit the cluster will change, and with it the number of data ranks
    mistakes = list(_batch(recipe, mesh)) if whole else []
    if spec is not None:
        mistakes += fp8_misfits(recipe, spec.outline, mesh)
    if spec is not None and spec.outline is not None:
        fit = _Fit(recipe, spec.source.name, spec.outline, mesh, world)
        mistakes += [*fit.names(), *fit.axes_once(), *fit.uneven(), *fit.positions(), *fit.stages()]
        mistakes += idle_of(recipe, spec)
        mistakes += [*fit.layers(), *without_effect(recipe, fit.unread())]
    return mistakes


def _batch(recipe: Recipe, mesh: Mapping[str, int]) -> Iterator[Diagnostic]:
    """Checks that a step's sequences divide among the data ranks into whole micro-batches."""
    axes = recipe.sharding.rules.get("batch", ())
    if any(axis not in mesh for axis in axes):
        return
    ranks = math.prod(mesh[axis] for axis in axes)
    if recipe.batch.global_sequences % ranks and recipe.sharding.on_uneven == "pad":
        return
    if misfit := batch_misfit(recipe, ranks):
        sizes = " x ".join(f"{axis} {mesh[axis]}" for axis in axes if axis in recipe.mesh)
        yield replace(misfit, also=((recipe.where("mesh"), sizes),))
    elif not recipe.staged and (recipe.pipeline is not None or derive(recipe, ranks).micro_batches == 1):
        why = "a step is one micro-batch" if recipe.pipeline is None else "a vectorized pipeline is one program"
        yield from without_effect(recipe, ((f"fsdp.accumulate.{key}", why) for key in ("gather", "reduce")))


@dataclass(frozen=True)
class _Use:
    """A dim that mesh axes shard, with the recipe's key that shards it."""

    dim: str
    axes: tuple[str, ...]
    path: str
    tensor: str


class _Fit:
    """The checks that need the model's configuration."""

    def __init__(self, recipe: Recipe, name: str, c: ModelConfig, mesh: Mapping[str, int], world: int | None):
        self.recipe, self.c, self.mesh, self.world = recipe, c, mesh, world
        self.parameters = c.parameters
        self.tensors = {**self.parameters, **INPUTS, **c.activations}
        self.sizes = {"batch": recipe.batch.global_sequences, "seq": recipe.model.seq_len, **c.pieces}
        """The number of indivisible units of each dim: heads count as heads, not as columns."""
        self.model = name

    def names(self) -> Iterator[Diagnostic]:
        """Checks that patterns match something, and have as many entries as the matched tensors have dims."""
        sharding = self.recipe.sharding
        rules: list[tuple[str, str, Sequence[object]]] = []
        rules += [(f"sharding.annotate.{pattern}", pattern, dims) for pattern, dims in sharding.annotate.items()]
        rules += [(f"sharding.pin.{pattern}", pattern, dims) for pattern, dims in sharding.pin.items()]
        for path, pattern, dims in rules:
            matched = [name for name in self.tensors if matches(pattern, name)]
            if not matched:
                yield self.nothing(path, pattern, list(self.tensors), modules=False)
            wrong = [name for name in matched if len(self.tensors[name]) != len(dims)]
            if wrong:
                shape = self.tensors[wrong[0]]
                yield Diagnostic(
                    f"`{path}` has {len(dims)} entries for the {len(shape)} dims of `{wrong[0]}`",
                    where=self.recipe.where(path),
                    why=f"its dims are [{', '.join(shape)}]",
                    fix=f"give {len(shape)} entries" + (", or a narrower pattern" if len(wrong) < len(matched) else ""),
                )
        if self.recipe.model.dims:
            yield Diagnostic(
                f"`model.dims` has no effect on a model of tpshard's family {self.c.family}",
                where=self.recipe.where("model.dims"),
                why="the family names its dims itself",
                fix="sharding.annotate names the dims of any tensor; or model.transformers, or model.module",
            )
        yield from self.units()

    def units(self) -> Iterator[Diagnostic]:
        """Checks that patterns of `wrap` and `bucket` match something; the default may name missing modules."""
        lists = {"fsdp.wrap": self.recipe.fsdp.wrap, "fsdp.bucket": self.recipe.fsdp.bucket}
        for path, units in lists.items():
            if not isinstance(units, tuple) or not self.recipe.where(path).line:
                continue
            patterns = [p for unit in units for p in ((unit,) if isinstance(unit, str) else unit)]
            for pattern in patterns:
                tied = self.c.tie_embeddings and pattern in ("output", "output.weight")
                if not tied and not any(covers(pattern, name) for name in self.parameters):
                    yield self.nothing(path, pattern, list(self.parameters), modules=True)

    def nothing(self, path: str, pattern: str, names: list[str], *, modules: bool) -> Diagnostic:
        close = nearest(pattern, names, modules=modules)
        return Diagnostic(
            f"the pattern `{pattern}` matches nothing in {self.model}",
            where=self.recipe.where(path),
            fix=f"did you mean `{close}`?" if close else "`tpshard plan` lists the names of parameters and activations",
        )

    def axes_once(self) -> Iterator[Diagnostic]:
        """Checks that the rules shard no tensor twice over one axis."""
        reported: set[tuple[str, str, str]] = set()
        for name, dims in {**self.parameters, **INPUTS}.items():
            if any(matches(p, name) for p in (*self.recipe.sharding.pin, *self.recipe.sharding.annotate)):
                continue
            dim_of: dict[str, str] = {}
            for dim, axes in zip(dims, self.recipe.sharding.cuts(dims)):
                for axis in dict.fromkeys(axes):
                    first = dim_of.setdefault(axis, dim)
                    if first != dim and (axis, first, dim) not in reported and (axis, dim, first) not in reported:
                        reported.add((axis, first, dim))
                        yield Diagnostic(
                            f"`{name}` would be sharded over `{axis}` twice",
                            where=self.recipe.where(f"sharding.rules.{dim}"),
                            why=f"its dims are [{', '.join(dims)}]",
                            fix=f"use another axis for {first} or {dim}, or pin this tensor",
                            also=(
                                (self.recipe.where(f"sharding.rules.{first}"), f"{first} is sharded over {axis} too"),
                            ),
                        )

    def uses(self) -> Iterator[_Use]:
        """Yields every dim of a parameter or activation, except `batch`, that a rule, an annotation or a pin shards."""
        sharding = self.recipe.sharding
        ruled = {dim for dims in self.tensors.values() for dim in dims}
        for dim, axes in sharding.rules.items():
            if dim in ruled and dim not in ("batch", "kv_heads"):
                yield _Use(dim, axes, f"sharding.rules.{dim}", "")
        for pattern, names in sharding.annotate.items():
            for tensor in self.matching_tensors(pattern, len(names)):
                for dim, logical in zip(self.tensors[tensor], names):
                    if logical and logical not in DIMS and logical in sharding.rules:
                        yield _Use(dim, sharding.rules[logical], f"sharding.annotate.{pattern}", tensor)
        for pattern, pinned in sharding.pin.items():
            for tensor in self.matching_tensors(pattern, len(pinned)):
                for dim, axes in zip(self.tensors[tensor], pinned):
                    if axes and dim != "batch":
                        yield _Use(dim, axes, f"sharding.pin.{pattern}", tensor)

    def matching_tensors(self, pattern: str, rank: int) -> list[str]:
        return [name for name, dims in self.tensors.items() if matches(pattern, name) and len(dims) == rank]

    def uneven(self) -> Iterator[Diagnostic]:
        """Checks that axes divide the dims they shard. KV heads may be fewer than devices if they divide these."""
        if self.recipe.sharding.on_uneven == "pad":
            return
        checked: set[tuple[str, tuple[str, ...]]] = set()
        for use in self.uses():
            if (use.dim, use.axes) in checked or any(axis not in self.mesh for axis in use.axes):
                continue
            checked.add((use.dim, use.axes))
            ways = math.prod(self.mesh[axis] for axis in use.axes)
            if self.fits(use.dim, ways):
                continue
            cut = [axis for axis in use.axes if self.mesh[axis] > 1]
            axis = cut[-1]
            size = f"`mesh.{axis}: {ways}`" if len(cut) == 1 else " x ".join(f"{a} {self.mesh[a]}" for a in cut)
            verb = "does" if len(cut) == 1 else "do"
            numbers = f"{self.sizes[use.dim]:,} {DIMS.get(use.dim, use.dim)}"
            kv = f", {self.c.kv_heads} KV heads" if use.dim == "heads" and self.c.kv_heads != self.c.heads else ""
            legal = self.legal(axis)
            fix = f"{axis} {join(map(str, legal))}; or " if legal else ""
            yield Diagnostic(
                f"{size} {verb} not divide the {numbers} of {self.model}"
                + (f" evenly: {ways} x {self.sizes[use.dim] / ways:.4g}" if len(cut) > 1 else ""),
                exit=Exit.FIT,
                where=self.recipe.where(f"mesh.{axis}"),
                why=numbers + kv,
                fix=f"{fix}sharding.on_uneven: pad",
                also=_written_place(
                    self.recipe.where(use.path), f"cuts {use.tensor or use.dim} over {', '.join(use.axes)}"
                ),
            )
        yield from self.replicated()

    def fits(self, dim: str, ways: int) -> bool:
        return self.c.divides(dim, ways) if dim in self.c.pieces else self.sizes[dim] % ways == 0

    def legal(self, axis: str) -> list[int]:
        """The sizes of an axis with which everything fits, near the present one."""
        uses = [use for use in self.uses() if axis in use.axes and all(a in self.mesh for a in use.axes)]
        others = {use: math.prod(self.mesh[a] for a in use.axes if a != axis) for use in uses}
        free = -1 in self.recipe.mesh.values()
        fixed = math.prod(s for a, s in self.recipe.mesh.items() if a != axis and s != -1)
        fitting = []
        for size in range(1, max(self.world or 0, 64) + 1):
            held = self.world is None or not self.recipe.cluster or (free and self.world % (size * fixed) == 0)
            if (held or not free) and all(self.fits(use.dim, size * ways) for use, ways in others.items()):
                fitting.append(size)
        nearby = sorted(fitting, key=lambda size: abs(math.log(size / self.mesh[axis])))[:5]
        return sorted(nearby)

    def replicated(self) -> Iterator[Diagnostic]:
        axes = self.recipe.sharding.rules.get("heads", ())
        ways = math.prod(self.mesh.get(axis, 1) for axis in axes)
        if self.c.kv_heads < ways and self.c.divides("heads", ways):
            last = next(axis for axis in reversed(axes) if self.mesh.get(axis, 1) > 1)
            yield Diagnostic(
                f"each of the {self.c.kv_heads} KV heads is replicated on {ways // self.c.kv_heads} devices",
                where=self.recipe.where(f"mesh.{last}"),
                why=f"{ways} ways, {self.c.heads} heads, {self.c.kv_heads} KV heads",
                fix=f"mesh.{last}: {max(1, self.mesh[last] * self.c.kv_heads // ways)} keeps one copy of each",
                severity="warning",
            )

    def positions(self) -> Iterator[Diagnostic]:
        if self.c.family_entry.positions == "learned" and self.recipe.model.seq_len > self.c.max_seq:
            yield Diagnostic(
                f"sequences of {self.recipe.model.seq_len:,} tokens, but {self.model} has {self.c.max_seq:,} positions",
                exit=Exit.FIT,
                where=self.recipe.where("model.seq_len"),
                fix=f"model.seq_len: {self.c.max_seq}, or model.max_seq: {self.recipe.model.seq_len}",
            )

    def stages(self) -> Iterator[Diagnostic]:
        """Checks that a staged pipeline has as many layers as its stages need, or its split gives them."""
        pipeline, size = self.recipe.pipeline, self.mesh.get("pp", 1)
        if pipeline is None or pipeline.vectorized or size == 1 or self.c.layers < 2:
            return
        wrong = split_misfit(self.recipe, self.c.layers, size * pipeline.stages_per_device)
        if wrong is not None:
            yield wrong

    def layers(self) -> Iterator[Diagnostic]:
        """Checks numbers of layers: that `full_layers` exist, and that `remat.every` chooses some but the first."""
        full, most = [n for n in self.c.full_layers if n >= self.c.layers], self.c.layers - 1
        if full and self.recipe.model.full_layers is not None:
            yield Diagnostic(
                f"`model.full_layers` names the layer {full[0]} of {self.model}, whose layers are 0 to {most}",
                where=self.recipe.where("model.full_layers"), fix=f"layers up to {most}",
            )  # fmt: skip
        remat = self.recipe.remat
        if isinstance(remat, tuple):
            known = SAVED_OPERATIONS.union(*(name.split(".") for name in self.parameters))
            yield from (
                nothing_saved(self.recipe, name, known) for name in remat if "." not in name and name not in known
            )
        if isinstance(remat, RematEvery) and remat.every > self.c.layers:
            yield Diagnostic(
                f"`remat.every: {remat.every}` recomputes only the first of {self.c.layers} layers",
                where=self.recipe.where("remat.every"), severity="warning",
                fix=f"at most {self.c.layers}, or remat: none",
            )  # fmt: skip

    def unread(self) -> Iterator[tuple[str, str]]:
        """The keys that the model's numbers make meaningless, each with the reason."""
        c, recipe = self.c, self.recipe
        if c.experts is not None and c.experts == c.top_k:
            yield "model.balance", f"each token goes to all {c.experts} experts, whose load is always even"
        if c.experts is not None and (c.balance == "none" or c.experts == c.top_k):
            yield "model.balance_rate", "the load of the experts is not balanced"
        if c.experts is not None and c.experts == c.top_k and c.routing == "softmax":
            yield "model.norm_top_k", "the scores of all experts sum to 1"
        if c.experts is None or c.capacity is not None:
            for key in ("form", "slack"):
                yield f"sharding.dropless.{key}", "the model has no experts without a capacity"
        elif recipe.sharding.dropless.form == "gather":
            yield "sharding.dropless.slack", "a gather has no slots"
        if c.window is not None and c.window >= max(c.max_seq, recipe.model.seq_len):
            yield "model.window", f"no sequence is longer than {max(c.max_seq, recipe.model.seq_len):,} tokens"
        elif set(range(c.layers)) <= set(c.full_layers):
            yield "model.window", "`full_layers` names all layers"
        if recipe.serve.stored()["checkpoint"] != "latest":
            return  # which may be of another model
        known = {dim for dims in (*self.tensors.values(), *recipe.sharding.annotate.values()) for dim in dims}
        for dim, axes in recipe.sharding.rules.items():
            derived = dim == "expert" and axes == ("ep",)  # which a saved recipe has
            if dim in DIMS and dim not in {*known, "stage"} and not derived:  # `recipes.laws` tells of others
                yield f"sharding.rules.{dim}", f"no tensor of {self.model} has this dim"


def _written_place(source: Source, words: str) -> tuple[tuple[Source, str], ...]:
    return ((source, words),) if source.line else ()
