"""Constraints between the keys of one recipe. Each law is a function that yields mistakes; `check` runs those whose
keys are valid, so that a mistake is reported only once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from tpshard.models.family import DIMS
from tpshard.recipes.diagnostic import Diagnostic, Mistakes, suggestion
from tpshard.recipes.mesh_sizes import misfit
from tpshard.recipes.schema import Recipe
from tpshard.recipes.training_keys import Optimizer
from tpshard.recipes.value_types import AXES

Law = Callable[[Recipe], Iterator[Diagnostic]]


def check(recipe: Recipe, bad: Collection[str]) -> list[Diagnostic]:
    """All broken laws, without those that read a key in `bad`, which is already reported."""
    mistakes: list[Diagnostic] = []
    for law, keys in LAWS:
        if not touches(keys, bad):
            try:
                mistakes += law(recipe)
            except Mistakes as unset:  # it needs a value that the environment lacks
                mistakes += [d for d in unset.diagnostics if d not in mistakes]
    return mistakes


def touches(keys: tuple[str, ...], bad: Collection[str]) -> bool:
    """Whether one of the bad paths is a prefix of one of the keys, or below it."""
    return any(b == k or b.startswith(k + ".") or k.startswith(b + ".") for k in keys for b in bad)


def one_model(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires exactly one of preset, hf, transformers and module; args only for a module."""
    model = recipe.model
    named = [key for key in model.exclusive if model.stored()[key] is not None]
    if not named:
        fix = "preset: tiny, or hf: FOLDER, or transformers: FOLDER, or module: package:Class"
        yield Diagnostic("`model` names no model", where=recipe.where("model"), fix=fix)
    if len(named) > 1:
        yield Diagnostic(
            f"`model` names {len(named)} models",
            where=recipe.where(f"model.{named[1]}"),
            why="one too many",
            fix=f"keep one of {', '.join(named)}",
            also=((recipe.where(f"model.{named[0]}"), "the other"),),
        )
    if model.stored()["args"] and "module" not in named:
        yield Diagnostic("`model.args` are for `model.module`", where=recipe.where("model.args"), why="no module here")
    for key in model.overrides() if model.stored()["transformers"] is not None else ():
        yield Diagnostic(
            f"`model.{key}` changes a dimension, which only tpshard's own models allow",
            where=recipe.where(f"model.{key}"),
            why="a `transformers` model is defined by its config.json",
            fix="change config.json",
        )


def one_rest(recipe: Recipe) -> Iterator[Diagnostic]:
    """Allows at most one axis of size -1."""
    for path, mesh in (("mesh", recipe.mesh), ("serve.mesh", recipe.serve.mesh)):
        rest = [axis for axis, size in mesh.items() if size == -1]
        if len(rest) > 1:
            yield Diagnostic(
                f"{len(rest)} axes of `{path}` are -1",
                where=recipe.where(f"{path}.{rest[1]}"),
                why="only one axis can take the remaining devices",
                also=((recipe.where(f"{path}.{rest[0]}"), "the first"),),
            )


def mesh_on_cluster(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the mesh uses all devices of the cluster."""
    if recipe.cluster is not None and sum(size == -1 for size in recipe.mesh.values()) <= 1:
        nodes, each = recipe.cluster.nodes, recipe.cluster.devices_per_node
        also = ((recipe.where("cluster"), f"{nodes} x {each} devices"),)
        wrong = misfit(recipe.mesh, nodes * each, recipe.where("mesh"), also)
        if wrong is not None:
            yield wrong


def _uses(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The mesh axes that each rule, each pin and `fsdp.axis` names, by key."""
    uses = {f"sharding.rules.{name}": axes for name, axes in recipe.sharding.rules.items()}
    uses |= {
        f"sharding.pin.{name}": tuple(a for dim in dims for a in dim) for name, dims in recipe.sharding.pin.items()
    }
    return uses | {"fsdp.axis": (recipe.fsdp.axis,)}


def known_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that rules, pins and fsdp.axis name axes of the mesh."""
    for path, axes in _uses(recipe).items():
        for axis in dict.fromkeys(axes):
            if axis not in recipe.mesh and axis not in AXES:
                close = suggestion(axis, recipe.mesh)
                yield Diagnostic(
                    f"`{path}` uses the mesh axis `{axis}`, which does not exist",
                    where=recipe.where(path),
                    why=f"the mesh has {', '.join(recipe.mesh)}",
                    fix=f"did you mean {close}?" if close else f"add it: mesh: {{..., {axis}: 2}}",
                    also=((recipe.where("mesh"), "the mesh"),),
                )


def used_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that every axis is used; an unused one would waste its devices."""
    used = {axis for axes in _uses(recipe).values() for axis in axes}
    used |= {"pp"} if recipe.pipeline is not None else set()
    if not used <= {*recipe.mesh, *AXES}:
        return  # a misspelt axis would be reported twice
    for axis, size in recipe.mesh.items():
        if axis not in used and not (axis in ("pp", "dp", "fsdp", "tp") and size == 1):
            yield Diagnostic(
                f"nothing uses the mesh axis `{axis}`",
                where=recipe.where(f"mesh.{axis}"),
                why="its devices would all compute the same",
                fix="add pipeline: {schedule: 1f1b}" if axis == "pp" else
                f"name it in sharding.rules, sharding.pin or fsdp.axis, as in rules: {{batch: [dp, fsdp, {axis}]}}",
            )  # fmt: skip


def known_logical_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that rules name dims that exist; a recipe's own names come from annotations or its own module."""
    if recipe.model.stored()["module"] is not None:
        return
    annotated = {name for names in recipe.sharding.annotate.values() for name in names if name}
    annotated |= {name for names in recipe.model.dims.values() for name in names if name}
    for name in recipe.sharding.rules:
        if name not in DIMS and name not in annotated:
            close = suggestion(name, [*DIMS, *annotated])
            yield Diagnostic(
                f"no tensor has a dim called `{name}`",
                where=recipe.where(f"sharding.rules.{name}"),
                why="the rule would have no effect",
                fix=f"did you mean {close}?" if close else f"dims are {', '.join(DIMS)}, or those in annotate",
            )
    for pattern, names in recipe.sharding.annotate.items():
        for name in filter(None, names):
            if name not in DIMS and name not in recipe.sharding.rules:
                close = suggestion(name, [*DIMS, *recipe.sharding.rules])
                yield Diagnostic(
                    f"the dim name `{name}` has no rule and is not a dim of the model",
                    where=recipe.where(f"sharding.annotate.{pattern}"),
                    why="the annotation would have no effect",
                    fix=f"did you mean {close}?" if close else f"add a rule: {name}: tp",
                )


def priorities_of_rules(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that every dim with a priority has a rule."""
    for name in recipe.sharding.priority:
        if name not in recipe.sharding.rules:
            close = suggestion(name, [*recipe.sharding.rules])
            yield Diagnostic(
                f"the dim `{name}` has a priority but no rule",
                where=recipe.where(f"sharding.priority.{name}"),
                why="the priority would have no effect",
                fix=f"did you mean {close}?" if close else f"add a rule: {name}: tp",
            )


def axis_once(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that a mesh axis shards a tensor only once: in a rule, in a pin, and in the rules of an annotation."""
    rules = recipe.sharding.rules
    for name, axes in rules.items():
        for axis in sorted({a for a in axes if axes.count(a) > 1}):
            yield Diagnostic(
                f"`{axis}` occurs twice in the rule for `{name}`", where=recipe.where(f"sharding.rules.{name}")
            )
    for pattern, dims in recipe.sharding.pin.items():
        flat = [axis for dim in dims for axis in dim]
        for axis in sorted({a for a in flat if flat.count(a) > 1}):
            yield Diagnostic(
                f"`{axis}` occurs twice in the pin of `{pattern}`",
                where=recipe.where(f"sharding.pin.{pattern}"),
                why="an axis shards only one dim of a tensor",
            )
    for pattern, names in recipe.sharding.annotate.items():
        name_of: dict[str, str] = {}
        for name in filter(None, names):
            for axis in dict.fromkeys(rules.get(name, ())):
                if axis in name_of:
                    first = name_of[axis]
                    twice = f"`{first}` twice" if first == name else f"`{first}` and `{name}`"
                    yield Diagnostic(
                        f"`{pattern}` would be sharded over `{axis}` twice",
                        where=recipe.where(f"sharding.annotate.{pattern}"),
                        why=f"{twice} are both sharded over {axis}"
                        if first != name
                        else f"{twice}, sharded over {axis}",
                        fix="give one of its dims another rule, or null here",
                        also=tuple(
                            (recipe.where(f"sharding.rules.{n}"), f"{n} -> {', '.join(rules[n])}")
                            for n in dict.fromkeys((first, name))
                        ),
                    )
                else:
                    name_of[axis] = name


def steps_hold_warmup(recipe: Recipe) -> Iterator[Diagnostic]:
    if recipe.schedule.warmup_steps > recipe.train.steps:
        yield Diagnostic(
            f"{recipe.schedule.warmup_steps:,} steps of warm-up in a run of {recipe.train.steps:,}",
            where=recipe.where("schedule.warmup_steps"),
            why="the peak is never reached",
            severity="warning",
        )


def optimizer_reads(recipe: Recipe) -> Iterator[Diagnostic]:
    """Warns of settings that belong to another optimizer."""
    unread = {"adamw": ("momentum",), "lion": ("eps", "momentum"), "muon": ()}
    for key in unread[recipe.optimizer.name]:
        if getattr(recipe.optimizer, key) != getattr(Optimizer, key):
            yield Diagnostic(
                f"`optimizer.{key}` has no effect", where=recipe.where(f"optimizer.{key}"),
                why=f"{recipe.optimizer.name} does not use it", severity="warning",
            )  # fmt: skip


def pipeline_has_stages(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires a mesh axis `pp` for a pipeline's stages, which shards nothing else."""
    section, size = recipe.pipeline, recipe.mesh.get("pp", 1)
    if section is None:
        return
    stages = section.stages
    if size == 1:
        yield Diagnostic(
            "`pipeline` needs a mesh axis `pp` for its stages",
            where=recipe.where("pipeline"),
            why="the mesh has " + ", ".join(f"{axis} {n}" for axis, n in recipe.mesh.items()),
            fix=f"mesh: {{pp: {stages or 2}, ...}}",
        )
    elif stages is not None and size != -1 and stages != size:
        yield Diagnostic(
            f"`pipeline.stages: {stages}` must be the size of `mesh.pp`",
            where=recipe.where("pipeline.stages"),
            why=f"stages are along the axis, which has {size} devices",
            fix=f"pipeline.stages: {size}, or leave it out",
            also=((recipe.where("mesh"), "the mesh"),),
        )
    if section.rounds is not None and section.rounds > 1 and section.schedule not in ("circular", "interleaved_1f1b"):
        yield Diagnostic(
            f"`pipeline.rounds: {section.rounds}` does not suit {section.schedule}, whose devices have one stage each",
            where=recipe.where("pipeline.rounds"),
            fix="schedule: interleaved_1f1b or circular",
        )
    if section.vectorized and section.schedule not in ("gpipe", "circular"):
        yield Diagnostic(
            f"`pipeline.form: vectorized` does not suit {section.schedule}",
            where=recipe.where("pipeline.form"),
            why="its backward pass is that of all steps together, after their forward pass",
            fix="schedule: gpipe or circular, or form: staged",
            also=((recipe.where("pipeline.schedule"), "the schedule"),),
        )
    if section.vectorized and section.split is not None:
        yield Diagnostic(
            "`pipeline.split` does not suit `form: vectorized`, whose stages have equally many layers",
            where=recipe.where("pipeline.split"),
            fix="leave pipeline.split out, or form: staged",
            also=((recipe.where("pipeline.form"), "the form"),),
        )
    if section.vectorized and recipe.sharding.rules.get("stage") != ("pp",):
        yield Diagnostic(
            "`sharding.rules.stage` must be `pp`, the axis of the pipeline's stages",
            where=recipe.where("sharding.rules.stage"),
            fix="leave sharding.rules.stage out",
            also=((recipe.where("pipeline"), "the pipeline"),),
        )
    if not section.vectorized and "pp" in recipe.sharding.rules.get("stage", ()):
        for pattern, dims in recipe.sharding.annotate.items():
            if "stage" in dims:
                yield Diagnostic(
                    f"`sharding.annotate.{pattern}` names the dim `stage`, which only stacked layers have",
                    where=recipe.where(f"sharding.annotate.{pattern}"),
                    why="in a staged pipeline a parameter is only on the devices of its stage",
                    fix="leave it out, or pipeline.form: vectorized",
                    also=((recipe.where("pipeline"), "the pipeline"),),
                )
    outside = ["sharding.rules.stage", *["sharding.rules.vocab"] * section.vectorized]
    for path, axes in _uses(recipe).items():
        if "pp" in axes and path not in outside:
            yield Diagnostic(
                f"`{path}` shards over `pp`, the axis of the pipeline's stages",
                where=recipe.where(path),
                why="a parameter is only on the devices of its stage, and every stage reads the whole micro-batch",
                fix=f"{path}: [{', '.join(axis for axis in axes if axis != 'pp')}]"
                if len(axes) > 1
                else "another axis",
                also=((recipe.where("pipeline"), "the pipeline"),),
            )


LAWS: tuple[tuple[Law, tuple[str, ...]], ...] = (
    (one_model, ("model",)),
    (one_rest, ("mesh", "serve.mesh")),
    (mesh_on_cluster, ("mesh", "cluster")),
    (known_axes, ("mesh", "sharding.rules", "sharding.pin", "fsdp.axis")),
    (used_axes, ("mesh", "sharding.rules", "sharding.pin", "fsdp.axis", "pipeline")),
    (known_logical_axes, ("sharding.rules", "sharding.annotate", "model.module")),
    (priorities_of_rules, ("sharding.rules", "sharding.priority")),
    (axis_once, ("sharding",)),
    (steps_hold_warmup, ("schedule.warmup_steps", "train.steps")),
    (optimizer_reads, ("optimizer",)),
    (pipeline_has_stages, ("pipeline", "mesh", "sharding.rules", "sharding.pin", "fsdp.axis")),
)
