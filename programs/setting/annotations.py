"""Turns a recipe's sharding section into annotations on the values of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, did_you_mean, suggestion
from tpshard.diagnostics.patterns import matches
from tpshard.models.families.family import DIMS
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.mesh import Axes, Axis, merge, size_of
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.storage import used_values
from tpshard.parallelism.rules.control_flow import every_graph
from tpshard.parallelism.sharding import Layout, Sharding, replicated
from tpshard.parallelism.why import SourcePlace
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.keys.parallel_keys import ShardingSection
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.text.section import default_of

if TYPE_CHECKING:
    from tpshard.programs.server.serve_setting import ServeSetting

BATCH_DIMS = ("batch", "seq")


def annotate(
    setting: Setting | ServeSetting, graph: Graph, batch: Iterable[Value] = (), *,
    used: Mapping[str, Sequence[Value]] | None = None, serving: bool = False, by: Mapping[str, str] | None = None,
    fields: Mapping[str, Sequence[str]] | None = None,
) -> dict[Value, Annotation]:  # fmt: skip
    """Returns the annotations of a graph's values: those of `sharding.rules`, replaced by `annotate`, then by `pin`.

    A dim whose name has a rule is closed: propagation may not shard it further. used: the values of each parameter to
    which rules apply, by default those at its boundaries. by: who named a parameter's dims. fields: names of the
    batch's dims. serving: a dim that its axes do not divide stays whole, and a pattern may match nothing.

    Raises Mistakes (exit 4) for a dim that its axes do not divide unless the recipe pads, (exit 3) for a pin or pattern
    of another rank.
    """
    reader = _Reader(setting, serving)
    annotations: dict[Value, Annotation] = {}
    used = used_values(graph) if used is None else used
    for name, values in used.items():
        for value in values:
            reader.rules(annotations, value, name, setting.dims.get(name, ()), (by or {}).get(name, ""))
    for value in batch:
        reader.rules(annotations, value, value.name, (fields or {}).get(value.name, BATCH_DIMS[: value.rank]))
    for value in (value for each in every_graph(graph) for value in each.values()):
        # the inputs of experts are sharded like the experts, and what stages compute like their layers
        own = [d if d in ("expert", "stage") else "" for d in value.dims]
        if value.label and any(own):
            reader.rules(annotations, value, value.label, own)
    sharding = setting.recipe.sharding
    reader.dims({dim for v in graph.values() for dim in v.dims} | {d for dims in (fields or {}).values() for d in dims})
    for pattern, names in sharding.annotate.items():
        axes = [sharding.rules.get(name or "", ()) for name in names]
        for value in reader.require(_matching_values(graph, used, pattern), pattern, f"sharding.annotate.{pattern}"):
            reader.close(annotations, value, pattern, f"sharding.annotate.{pattern}", names, axes)
    for pattern, pinned in sharding.pin.items():
        for value in reader.require(_matching_values(graph, used, pattern), pattern, f"sharding.pin.{pattern}"):
            reader.close(annotations, value, pattern, f"sharding.pin.{pattern}", (None,) * len(pinned), pinned)
    if reader.mistakes:
        raise Mistakes(reader.mistakes)
    return annotations


def dim_notes(setting: Setting, graph: Graph, fields: Mapping[str, Sequence[str]]) -> list[str]:
    """Warnings on dims of a model that does not name them all: rules of the recipe's own for dims that no tensor has,
    and names that are almost those of a rule."""
    if setting.spec.names_dims:
        return []
    sharding, default = setting.recipe.sharding, default_of(ShardingSection.__dataclass_fields__["rules"])
    lists = (*setting.dims.values(), *fields.values(), *sharding.annotate.values(), *(v.dims for v in graph.values()))
    own = {dim for dims in lists for dim in dims if dim}
    name = setting.spec.source.name or "the model"
    idle = [dim for dim, axes in sharding.rules.items() if dim not in own and dim in DIMS and dim != "stage"
            and axes != ("ep",) and axes != default.get(dim)]  # fmt: skip
    notes = [f"`sharding.rules.{dim}` has no effect: no tensor of {name} has this dim" for dim in idle]
    unruled = {dim: suggestion(dim, sharding.rules) for dim in sorted(own) if dim not in DIMS}
    return notes + [
        f"no rule shards the dim `{dim}` of {name}: is it `{close}`?"
        for dim, close in unruled.items() if close and dim not in sharding.rules
    ]  # fmt: skip


def name_dims(
    graph: Graph, dims: Mapping[str, Sequence[str]], batch: Iterable[Value],
    *, used: Mapping[str, Sequence[Value]] | None = None, fields: Mapping[str, Sequence[str]] | None = None,
) -> None:  # fmt: skip
    """Records the dim names of parameters, gradients and batch on the values of a graph that nothing shares yet, for
    people who read a plan. dims: those of the parameters; used and fields: as for `annotate`."""
    used, fields = used_values(graph) if used is None else used, fields or {}
    named: list[tuple[Value, Sequence[str]]] = []
    named += [(value, dims.get(name, ())) for name, values in used.items() for value in values]
    named += [(value, dims.get(value.name, ())) for value in graph.inputs]
    named += [(value, fields.get(value.name, BATCH_DIMS[: value.rank])) for value in batch]
    for value, names in named:
        if len(names) == value.rank and not value.dims:
            value.dims = tuple(names)


def _matching_values(graph: Graph, parameters: Mapping[str, Sequence[Value]], pattern: str) -> list[Value]:
    """The values that a pattern matches: parameters (used, and their gradients), inputs, activations and gradients."""
    used = {id(v): name for name, values in parameters.items() for v in values}
    matching = []
    for value in graph.values():
        label = used.get(id(value)) or value.label or (value.name if value.producer is None else "")
        if label in parameters and id(value) not in used:
            continue  # a stored parameter gets its sharding from the used one
        if label and matches(pattern, label):
            matching.append(value)
    return matching


class _Reader:
    """Turns the keys of a recipe's `sharding` into annotations of values, and collects the mistakes in them."""

    def __init__(self, setting: Setting | ServeSetting, serving: bool):
        self.setting, self.recipe, self.mesh, self.serving = setting, setting.recipe, setting.mesh, serving
        self.mistakes: list[Diagnostic] = []
        self.reported: set[str] = set()

    def require(self, values: list[Value], pattern: str, path: str) -> list[Value]:
        """Returns `values`, the matches of a pattern; none is a mistake, but in serving, whose graph has fewer."""
        if not values and not self.serving:
            parameters = ", ".join(list(self.setting.dims)[:6])
            self.mistakes.append(
                Diagnostic(
                    f"`{pattern}` matches nothing in `{self.setting.spec.source.name or 'the model'}`",
                    exit=Exit.RECIPE,
                    where=self.recipe.where(path),
                    why="the annotation would have no effect",
                    fix=f"its parameters are {parameters}, ...; activations are those that it names",
                )
            )
        return values

    def dims(self, of_values: Collection[str]) -> None:
        """Requires that rules name dims of tensors, unless the model names all of its dims (see `recipes.laws`)."""
        if self.serving or self.setting.spec.names_dims:
            return
        own = {dim for dims in (*self.setting.dims.values(), of_values) for dim in dims if dim}
        known = {dim for dims in self.recipe.sharding.annotate.values() for dim in dims if dim} | own | {*DIMS}
        rules = self.recipe.sharding.rules
        self.mistakes += [
            Diagnostic(
                f"the dim name `{dim}` has no rule and is not a dim of {self.setting.spec.source.name or 'the model'}",
                exit=Exit.RECIPE,
                where=self.recipe.where(f"sharding.annotate.{pattern}"),
                why="the annotation would have no effect",
                fix=did_you_mean(dim, sorted({*own, *rules, *DIMS}), f"add a rule: {dim}: tp"),
            )
            for pattern, dims in self.recipe.sharding.annotate.items()
            for dim in dims
            if dim and dim not in own and dim not in rules and dim not in DIMS
        ]
        self.mistakes += [
            Diagnostic(
                f"no tensor of {self.setting.spec.source.name or 'the model'} has a dim called `{dim}`",
                exit=Exit.RECIPE,
                where=self.recipe.where(f"sharding.rules.{dim}"),
                why="the rule would have no effect",
                fix=did_you_mean(dim, sorted(known), f"its dims are {', '.join(sorted(known))}"),
            )
            for dim in rules
            if dim not in known
        ]

    def axes(self, names: Sequence[str]) -> Axes:
        return merge(self.mesh.axis(name) for name in names if self.mesh.axes.get(name, 1) > 1)

    def rules(
        self, annotations: dict[Value, Annotation], value: Value, name: str, dims: Sequence[str], by: str = ""
    ) -> None:
        rules = self.recipe.sharding.rules
        ruled = [d for d in dims if d in rules]
        if not ruled:
            return
        axes = [self.axes(names) for names in self.recipe.sharding.cuts(dims)]
        opened = tuple(d not in rules for d in dims)
        by = f", {by}" if by else ""
        sources = tuple(source_of(self.recipe, f"sharding.rules.{d}", f"{d}: {_show(rules[d])}{by}") for d in ruled)
        axes = [self.fits(value, i, a, name, f"sharding.rules.{dims[i]}") for i, a in enumerate(axes)]
        annotations[value] = Annotation(Sharding(tuple(axes), opened, priority=self.priority(dims, 0)), sources)

    def priority(self, names: Sequence[str | None], default: int) -> tuple[int, ...] | None:
        """The priority of each dim, by its name; None if all are 0."""
        numbers = tuple(self.recipe.sharding.priority.get(name or "", default) for name in names)
        return numbers if any(numbers) else None

    def close(
        self, annotations: dict[Value, Annotation], value: Value, pattern: str, path: str, names: Sequence[str | None],
        axes: Sequence[Sequence[str]],
    ) -> None:  # fmt: skip
        """Annotates a value that a pattern matches with these axes, and closes all its dims; their names decide
        priorities. The stage dim of a vectorized pipeline comes before the dims that a pattern describes.

        An activation's annotation is by default applied after the parameters': it uses the axes that they leave.
        """
        pipeline = self.recipe.pipeline
        if pipeline is not None and pipeline.vectorized and value.rank == len(axes) + 1:
            names, axes = ["stage", *names], [self.recipe.sharding.rules.get("stage", ()), *axes]
        if self.ranks_differ(value, len(axes), path):
            return
        fitting = tuple(self.fits(value, i, self.axes(own), pattern, path) for i, own in enumerate(axes))
        priority = self.priority(names, int(value.producer is not None and bool(value.label)))
        sharding = Sharding(fitting, (False,) * value.rank, priority=priority)
        annotations[value] = Annotation(sharding, (source_of(self.recipe, path, pattern),))

    def ranks_differ(self, value: Value, entries: int, path: str) -> bool:
        if entries == value.rank:
            return False
        if path not in self.reported:
            self.reported.add(path)
            self.mistakes.append(
                Diagnostic(
                    f"`{path}` has {entries} entries for {value.rank} dims: the shape is {list(value.shape)}",
                    exit=Exit.RECIPE,
                    where=self.recipe.where(path),
                    fix=f"give {value.rank} entries" + (f", for {', '.join(value.dims)}" if value.dims else ""),
                )
            )
        return True

    def fits(self, value: Value, dim: int, axes: Axes, name: str, path: str) -> Axes:
        """The axes over which a dim is sharded: `axes`, or none in a server's step if they do not divide it.

        In training, axes that do not divide the dim are a mistake unless `sharding.on_uneven` is `pad`.
        """
        size = value.shape[dim]
        if size % size_of(axes) == 0:
            return axes
        if self.serving:
            return ()
        if self.recipe.sharding.on_uneven == "pad":
            return axes
        if path not in self.reported:
            self.reported.add(path)
            names = ", ".join(f"{a.name} {a.size}" for a in axes)
            divisors = [str(n) for n in range(1, size + 1) if size % n == 0 and n <= 4 * size_of(axes)]
            self.mistakes.append(
                Diagnostic(
                    f"{size_of(axes)} devices ({names}) do not divide dim {dim} of `{name}`, whose size is {size}",
                    exit=Exit.FIT,
                    where=self.recipe.where(path),
                    why=f"{size} = {size_of(axes)} x {size // size_of(axes)} + {size % size_of(axes)}",
                    fix=f"sizes that divide it: {', '.join(divisors[-6:])}; or sharding.on_uneven: pad",
                )
            )
        return axes


def fixed(layout: Layout, why: str) -> Annotation:
    """The annotation that gives a value exactly this layout; `why` stands in a plan as its source."""
    sharding = Sharding(layout.dims, (False,) * len(layout.dims), unreduced=layout.partial)
    return Annotation(sharding, (SourcePlace(why),))


def summed(value: Value, axis: Axis) -> Annotation:
    """The annotation of an input that is summed over the devices along an axis."""
    return fixed(replicated(value.rank).as_sum((axis,)), f"the sum over {axis.name}")


def source_of(recipe: Recipe, path: str, says: str) -> SourcePlace:
    """The source of an annotation: the place of the recipe's key `path`, with its value as text (`says`)."""
    where = recipe.where(path)
    return SourcePlace(where.file, where.line, where.col, says, default=not where.line)


def _show(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else "[" + ", ".join(axes) + "]"
