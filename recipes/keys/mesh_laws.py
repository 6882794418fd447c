"""Constraints on the mesh, and on what rules, pins and pipelines do with its axes."""

from __future__ import annotations

from collections.abc import Iterator

from tpshard.diagnostics.diagnostic import Diagnostic, did_you_mean
from tpshard.models.families.family import DIMS
from tpshard.recipes.keys.constraints import AXES
from tpshard.recipes.keys.mesh_sizes import misfit
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.violation import violation


def one_rest(recipe: Recipe) -> Iterator[Diagnostic]:
    """Allows at most one axis of size -1."""
    for path, mesh in (("mesh", recipe.mesh), ("serve.mesh", recipe.serve.mesh)):
        rest = [axis for axis, size in mesh.items() if size == -1]
        if len(rest) > 1:
            message, why = f"{len(rest)} axes of `{path}` are -1", "only one axis can take the remaining devices"
            also = {f"{path}.{rest[0]}": "the first"}
            yield violation(recipe, f"{path}.{rest[1]}", message, why, "give one of them a size", also)


def mesh_on_cluster(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the mesh uses all devices of the cluster."""
    if recipe.cluster is not None and list(recipe.mesh.values()).count(-1) <= 1:
        nodes, each = recipe.cluster.nodes, recipe.cluster.devices_per_node
        also = (*recipe.changes("mesh"), (recipe.where("cluster"), f"{nodes} x {each} devices"))
        yield from misfit(recipe.mesh, nodes * each, recipe.where("mesh"), also)


def _uses(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The mesh axes that each rule, each pin and `fsdp.axis` names, by key."""
    rules, pins = recipe.sharding.rules, recipe.sharding.pin
    uses = {f"sharding.rules.{name}": axes for name, axes in rules.items()}
    uses |= {f"sharding.pin.{name}": tuple(a for dim in dims for a in dim) for name, dims in pins.items()}
    return uses | {"fsdp.axis": recipe.fsdp.axes}


def known_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that rules, pins and fsdp.axis name axes of the mesh."""
    for path, axes in _uses(recipe).items():
        for axis in dict.fromkeys(axes):
            if axis not in recipe.mesh and axis not in AXES:
                message = f"`{path}` uses the mesh axis `{axis}`, which does not exist"
                why = f"the mesh has {', '.join(recipe.mesh)}"
                fix = did_you_mean(axis, recipe.mesh, f"add it: mesh: {{..., {axis}: 2}}")
                yield violation(recipe, path, message, why, fix, {"mesh": "the mesh"})


def used_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that every axis of several devices is used; an unused one would waste them."""
    used = {axis for axes in _uses(recipe).values() for axis in axes}
    used |= {"pp"} if recipe.pipeline is not None else set()
    if not used <= {*recipe.mesh, *AXES}:
        return  # a misspelt axis would be reported twice
    for axis, size in recipe.mesh.items():
        if axis not in used and size != 1:
            fix = f"name it in sharding.rules, sharding.pin or fsdp.axis, as in rules: {{batch: [dp, fsdp, {axis}]}}"
            if axis == "pp":
                fix = "add pipeline: {schedule: 1f1b}"
            message = f"nothing uses the mesh axis `{axis}`"
            yield violation(recipe, f"mesh.{axis}", message, "its devices would all compute the same", fix)


def used_serving_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Warns of an axis of several devices of `serve.mesh` over which no rule shards what a server holds."""
    unused = ("sharding.rules.batch", "fsdp.axis")
    used = {axis for key, axes in _uses(recipe).items() for axis in axes if key not in unused}
    for axis, size in recipe.serve.mesh.items():
        if axis not in used and size != 1 and recipe.where(f"serve.mesh.{axis}").line:
            message, why = f"nothing of a server is sharded over `{axis}`", "`tpshard serve` will refuse it"
            fix = "name an axis to which sharding.rules maps heads, mlp or vocab, as in serve.mesh: {tp: 2}"
            yield violation(recipe, f"serve.mesh.{axis}", message, why, fix, severity="warning")


def known_logical_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that rules name dims that exist; a recipe's own names come from annotations or its own module."""
    if recipe.model.stored()["module"] is not None:
        return
    named = (*recipe.sharding.annotate.values(), *recipe.model.dims.values())
    annotated = {name for names in named for name in names if name}
    for name in recipe.sharding.rules:
        if name not in DIMS and name not in annotated:
            message, why = f"no tensor has a dim called `{name}`", "the rule would have no effect"
            fix = did_you_mean(name, [*DIMS, *annotated], f"dims are {', '.join(DIMS)}, or those in annotate")
            yield violation(recipe, f"sharding.rules.{name}", message, why, fix)
    for pattern, names in recipe.sharding.annotate.items():
        for name in filter(None, names):
            if name not in DIMS and name not in recipe.sharding.rules:
                message = f"the dim name `{name}` has no rule and is not a dim of the model"
                fix = did_you_mean(name, [*DIMS, *recipe.sharding.rules], f"add a rule: {name}: tp")
                why = "the annotation would have no effect"
                yield violation(recipe, f"sharding.annotate.{pattern}", message, why, fix)


def priorities_of_rules(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that every dim with a priority has a rule."""
    for name in recipe.sharding.priority:
        if name not in recipe.sharding.rules:
            message, why = f"the dim `{name}` has a priority but no rule", "the priority would have no effect"
            fix = did_you_mean(name, recipe.sharding.rules, f"add a rule: {name}: tp")
            yield violation(recipe, f"sharding.priority.{name}", message, why, fix)


def axis_once(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that a mesh axis shards a tensor only once: in a rule, in a pin, in `fsdp.axis`, and in the rules of an
    annotation."""
    rules = recipe.sharding.rules
    for name, axes in rules.items():
        for axis in sorted({a for a in axes if axes.count(a) > 1}):
            message = f"`{axis}` occurs twice in the rule for `{name}`"
            yield violation(recipe, f"sharding.rules.{name}", message, fix="name it once")
    for axis in sorted({a for a in recipe.fsdp.axes if recipe.fsdp.axes.count(a) > 1}):
        yield violation(recipe, "fsdp.axis", f"`{axis}` occurs twice in `fsdp.axis`", fix="name it once")
    for pattern, dims in recipe.sharding.pin.items():
        flat = [axis for dim in dims for axis in dim]
        for axis in sorted({a for a in flat if flat.count(a) > 1}):
            message, why = f"`{axis}` occurs twice in the pin of `{pattern}`", "an axis shards only one dim of a tensor"
            yield violation(recipe, f"sharding.pin.{pattern}", message, why, "name it once")
    for pattern, names in recipe.sharding.annotate.items():
        name_of: dict[str, str] = {}
        for name in filter(None, names):
            for axis in dict.fromkeys(rules.get(name, ())):
                if axis not in name_of:
                    name_of[axis] = name
                    continue
                first = name_of[axis]
                pair = dict.fromkeys((first, name))
                twice = f"`{first}` twice, sharded" if first == name else f"`{first}` and `{name}` are both sharded"
                message, why = f"`{pattern}` would be sharded over `{axis}` twice", f"{twice} over {axis}"
                fix = "give one of its dims another rule, or null here"
                also = {f"sharding.rules.{n}": f"{n} -> {', '.join(rules[n])}" for n in pair}
                yield violation(recipe, f"sharding.annotate.{pattern}", message, why, fix, also)


def pipeline_is_possible(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of a pipeline that the size of `mesh.pp` is its number of stages, that its schedule has its rounds, and
    that its schedule and split suit its form."""
    section, size = recipe.pipeline, recipe.mesh.get("pp", 1)
    if section is None:
        return
    stages = section.stages
    if size == 1:
        why = "the mesh has " + ", ".join(f"{axis} {n}" for axis, n in recipe.mesh.items())
        fix = f"mesh: {{pp: {stages or 2}, ...}}; or pipeline: null"
        yield violation(recipe, "pipeline", "`pipeline` needs a mesh axis `pp` for its stages", why, fix)
    elif stages is not None and size != -1 and stages != size:
        message = f"`pipeline.stages: {stages}` must be the size of `mesh.pp`"
        why, fix = f"stages are along the axis, which has {size} devices", f"pipeline.stages: {size}, or leave it out"
        yield violation(recipe, "pipeline.stages", message, why, fix, {"mesh": "the mesh"})
    schedule = section.schedule
    if section.rounds is not None and section.rounds > 1 and schedule not in ("circular", "interleaved_1f1b"):
        message = f"`pipeline.rounds: {section.rounds}` does not suit {schedule}, whose devices have one stage each"
        yield violation(recipe, "pipeline.rounds", message, fix="schedule: interleaved_1f1b or circular")
    if section.vectorized and schedule not in ("gpipe", "circular"):
        message = f"`pipeline.form: vectorized` does not suit {schedule}"
        why = "its backward pass is that of all steps together, after their forward pass"
        fix, also = "schedule: gpipe or circular, or form: staged", {"pipeline.schedule": "the schedule"}
        yield violation(recipe, "pipeline.form", message, why, fix, also)
    if section.vectorized and section.split is not None:
        message = "`pipeline.split` does not suit `form: vectorized`, whose stages have equally many layers"
        fix, also = "leave pipeline.split out, or form: staged", {"pipeline.form": "the form"}
        yield violation(recipe, "pipeline.split", message, fix=fix, also=also)


def stages_keep_activations(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the stages of a pipeline keep their activations."""
    if recipe.pipeline is not None and recipe.offload != "none":
        why = "what a stage saves passes from its forward to its backward program on the device"
        also = {"pipeline": "the pipeline"}
        yield violation(recipe, "offload", "`offload` does not suit a pipeline", why, "offload: none", also)


def stages_have_their_axis(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that `pp` shards the stages of a pipeline and nothing else."""
    section, also = recipe.pipeline, {"pipeline": "the pipeline"}
    if section is None:
        return
    stage = recipe.sharding.rules.get("stage", ())
    if section.vectorized and stage != ("pp",):
        message = "`sharding.rules.stage` must be `pp`, the axis of the pipeline's stages"
        yield violation(recipe, "sharding.rules.stage", message, fix="leave sharding.rules.stage out", also=also)
    for pattern, dims in recipe.sharding.annotate.items():
        if "stage" in dims and "pp" in stage and not section.vectorized:
            message = f"`sharding.annotate.{pattern}` names the dim `stage`, which only stacked layers have"
            why = "in a staged pipeline a parameter is only on the devices of its stage"
            fix = "leave it out, or pipeline.form: vectorized"
            yield violation(recipe, f"sharding.annotate.{pattern}", message, why, fix, also)
    outside = ["sharding.rules.stage", *["sharding.rules.vocab"] * section.vectorized]
    for path, axes in _uses(recipe).items():
        if "pp" in axes and path not in outside:
            others = [axis for axis in axes if axis != "pp"]
            message = f"`{path}` shards over `pp`, the axis of the pipeline's stages"
            why = "a parameter is only on the devices of its stage, and every stage reads the whole micro-batch"
            fix = f"{path}: [{', '.join(others)}]" if len(axes) > 1 else "another axis"
            yield violation(recipe, path, message, why, fix, also)


PIPELINE = ("pipeline", "mesh", "sharding.rules", "sharding.pin", "fsdp.axis")
