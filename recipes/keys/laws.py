"""Constraints between the keys of one recipe. Each law is a function that yields mistakes; `check` runs those whose
keys are valid, so that a mistake is reported only once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import reduce
from typing import Any, Literal

from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes, did_you_mean
from tpshard.models.families.family import DIMS
from tpshard.recipes.keys.constraints import AXES
from tpshard.recipes.keys.mesh_sizes import misfit
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.stores import is_url, without_secrets, wrong_store
from tpshard.recipes.text.section import default_of

Law = Callable[[Recipe], Iterator[Diagnostic]]


def check(recipe: Recipe, bad: Collection[str]) -> list[Diagnostic]:
    """The mistakes of all constraints that the recipe violates, except those on keys in `bad`, which are already
    reported."""
    mistakes: list[Diagnostic] = []
    for law, keys in LAWS:
        if not touches(keys, bad):
            try:
                mistakes += law(recipe)
            except Mistakes as unset:  # it needs a value that the environment lacks
                mistakes += [d for d in unset.diagnostics if d not in mistakes]
    return mistakes


def touches(keys: tuple[str, ...], bad: Collection[str]) -> bool:
    """Whether one of the paths `bad` is one of the keys, or above or below it."""
    return any(b == k or b.startswith(k + ".") or k.startswith(b + ".") for k in keys for b in bad)


def _violation(
    recipe: Recipe, key: str, message: str, why: str = "", fix: str = "", also: Mapping[str, str] | None = None,
    severity: Literal["error", "warning"] = "error",
) -> Diagnostic:  # fmt: skip
    """A diagnostic that points at `key` in the recipe. `also`: further keys to show, each with a note."""
    others = tuple((recipe.where(other), note) for other, note in (also or {}).items())
    return Diagnostic(message, where=recipe.where(key), why=why, fix=fix, severity=severity, also=others)


def one_model(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires exactly one of preset, hf, transformers and module; args only for a module."""
    model, stored = recipe.model, recipe.model.stored()
    named = [key for key in model.exclusive if stored[key] is not None]
    if not named:
        fix = "preset: tiny, or hf: FOLDER, or transformers: FOLDER, or module: package:Class"
        yield _violation(recipe, "model", "`model` names no model", fix=fix)
    if len(named) > 1:
        message, fix = f"`model` names {len(named)} models", f"keep one of {', '.join(named)}"
        yield _violation(recipe, f"model.{named[1]}", message, "one too many", fix, {f"model.{named[0]}": "the other"})
    if stored["args"] and "module" not in named:
        yield _violation(recipe, "model.args", "`model.args` are for `model.module`", "no module here", "remove them")
    for key in model.overrides() if stored["transformers"] is not None else ():
        message = f"`model.{key}` changes a dimension, which only tpshard's own models allow"
        why = "a `transformers` model is defined by its config.json"
        yield _violation(recipe, f"model.{key}", message, why, "change config.json")


def task_of_model(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires for frames and volumes a module; presets and folders read tokens."""
    if recipe.task in ("frames", "volumes") and recipe.model.named_by != "module":
        message = f"`task: {recipe.task}` has no tokens, which `model.{recipe.model.named_by}` reads"
        fix = "model.module: package:Class, such as tpshard.models.conformer:Conformer or tpshard.models.unet:UNet"
        also = {f"model.{recipe.model.named_by}": "the model"}
        yield _violation(recipe, "task", message, fix=fix, also=also)


def one_rest(recipe: Recipe) -> Iterator[Diagnostic]:
    """Allows at most one axis of size -1."""
    for path, mesh in (("mesh", recipe.mesh), ("serve.mesh", recipe.serve.mesh)):
        rest = [axis for axis, size in mesh.items() if size == -1]
        if len(rest) > 1:
            message, why = f"{len(rest)} axes of `{path}` are -1", "only one axis can take the remaining devices"
            also = {f"{path}.{rest[0]}": "the first"}
            yield _violation(recipe, f"{path}.{rest[1]}", message, why, "give one of them a size", also)


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
    return uses | {"fsdp.axis": (recipe.fsdp.axis,)}


def known_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that rules, pins and fsdp.axis name axes of the mesh."""
    for path, axes in _uses(recipe).items():
        for axis in dict.fromkeys(axes):
            if axis not in recipe.mesh and axis not in AXES:
                message = f"`{path}` uses the mesh axis `{axis}`, which does not exist"
                why = f"the mesh has {', '.join(recipe.mesh)}"
                fix = did_you_mean(axis, recipe.mesh, f"add it: mesh: {{..., {axis}: 2}}")
                yield _violation(recipe, path, message, why, fix, {"mesh": "the mesh"})


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
            yield _violation(recipe, f"mesh.{axis}", message, "its devices would all compute the same", fix)


def used_serving_axes(recipe: Recipe) -> Iterator[Diagnostic]:
    """Warns of an axis of several devices of `serve.mesh` over which no rule shards what a server holds."""
    unused = ("sharding.rules.batch", "fsdp.axis")
    used = {axis for key, axes in _uses(recipe).items() for axis in axes if key not in unused}
    for axis, size in recipe.serve.mesh.items():
        if axis not in used and size != 1 and recipe.where(f"serve.mesh.{axis}").line:
            message, why = f"nothing of a server is sharded over `{axis}`", "`tpshard serve` will refuse it"
            fix = "name an axis to which sharding.rules maps heads, mlp or vocab, as in serve.mesh: {tp: 2}"
            yield _violation(recipe, f"serve.mesh.{axis}", message, why, fix, severity="warning")


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
            yield _violation(recipe, f"sharding.rules.{name}", message, why, fix)
    for pattern, names in recipe.sharding.annotate.items():
        for name in filter(None, names):
            if name not in DIMS and name not in recipe.sharding.rules:
                message = f"the dim name `{name}` has no rule and is not a dim of the model"
                fix = did_you_mean(name, [*DIMS, *recipe.sharding.rules], f"add a rule: {name}: tp")
                why = "the annotation would have no effect"
                yield _violation(recipe, f"sharding.annotate.{pattern}", message, why, fix)


def priorities_of_rules(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that every dim with a priority has a rule."""
    for name in recipe.sharding.priority:
        if name not in recipe.sharding.rules:
            message, why = f"the dim `{name}` has a priority but no rule", "the priority would have no effect"
            fix = did_you_mean(name, recipe.sharding.rules, f"add a rule: {name}: tp")
            yield _violation(recipe, f"sharding.priority.{name}", message, why, fix)


def axis_once(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that a mesh axis shards a tensor only once: in a rule, in a pin, and in the rules of an annotation."""
    rules = recipe.sharding.rules
    for name, axes in rules.items():
        for axis in sorted({a for a in axes if axes.count(a) > 1}):
            message = f"`{axis}` occurs twice in the rule for `{name}`"
            yield _violation(recipe, f"sharding.rules.{name}", message, fix="name it once")
    for pattern, dims in recipe.sharding.pin.items():
        flat = [axis for dim in dims for axis in dim]
        for axis in sorted({a for a in flat if flat.count(a) > 1}):
            message, why = f"`{axis}` occurs twice in the pin of `{pattern}`", "an axis shards only one dim of a tensor"
            yield _violation(recipe, f"sharding.pin.{pattern}", message, why, "name it once")
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
                yield _violation(recipe, f"sharding.annotate.{pattern}", message, why, fix, also)


def steps_hold_warmup(recipe: Recipe) -> Iterator[Diagnostic]:
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    if warmup > steps:
        message, why = f"{warmup:,} steps of warm-up in a run of {steps:,}", "the peak is never reached"
        fix = f"schedule.warmup_steps: {steps // 10}"
        yield _violation(recipe, "schedule.warmup_steps", message, why, fix, severity="warning")


def one_end(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that `train.steps` and `train.tokens`, where one place has both, mean the same end."""
    tokens, steps = recipe.train.tokens, recipe.train.steps
    places = [recipe.where(key) for key in ("train.tokens", "train.steps")]
    if tokens is None or not all(place.line for place in places) or places[0].file != places[1].file:
        return
    a_step = recipe.batch.global_sequences * recipe.model.seq_len
    if steps != (asked := -(-tokens // a_step)):
        message = f"`train.tokens: {tokens}` and `train.steps: {steps}` end a run at different steps"
        why, also = f"{a_step:,} tokens a step make {asked:,} steps", {"train.steps": "the other"}
        yield _violation(recipe, "train.tokens", message, why, "keep one of them", also)


def rotary_scaling(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the wavelengths which rope_scaling leaves are shorter than those which it scales."""
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        message = f"`low_freq_factor: {low:g}` must be below `high_freq_factor: {high:g}`"
        why = "wavelengths between the two are scaled in part"
        key = "model.rope_scaling"
        place = next((k for k in (f"{key}.low_freq_factor", f"{key}.high_freq_factor") if recipe.where(k).line), key)
        yield _violation(recipe, place, message, why, "Llama 3 has 1 and 4")


def settings_are_read(recipe: Recipe) -> Iterator[Diagnostic]:
    """Warns of settings that the value of another makes meaningless."""
    yield from without_effect(recipe, _unread(recipe))


def without_effect(recipe: Recipe, reasons: Iterable[tuple[str, str]]) -> Iterator[Diagnostic]:
    """A warning for each of the keys, which come with a reason, that the recipe sets to another than its default."""
    for key, why in reasons:
        *sections, name = key.split(".")
        section: Any = reduce(getattr, sections, recipe)
        if isinstance(section, Mapping):
            is_set = bool(recipe.where(key).line and section.get(name))
        else:
            item = next(item for item in fields(section) if item.name == name)
            is_set = section.stored()[name] != default_of(item)
        if is_set:
            yield _violation(recipe, key, f"`{key}` has no effect", why, "remove it", severity="warning")


def _unread(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The keys that another value makes meaningless, each with the reason."""
    of_others = {"adamw": ("momentum", "orthogonal"), "lion": ("eps", "momentum", "orthogonal"), "muon": ()}
    for key in of_others[recipe.optimizer.name]:
        yield f"optimizer.{key}", f"{recipe.optimizer.name} does not use it"
    schedule = recipe.schedule
    if schedule.name == "constant":
        yield "schedule.min_lr_ratio", "a constant schedule stays at the peak"
    if schedule.name != "wsd" and schedule.decay_over != max(1, schedule.decay_steps // 10):
        yield "schedule.decay_over", "only wsd falls over the last steps"
    if schedule.name in ("constant", "inverse_sqrt"):
        why = {"constant": "a constant schedule stays at the peak", "inverse_sqrt": "inverse_sqrt has no last step"}
        derived = recipe.schedule.decay_steps == recipe.train.steps  # a run's recipe.yaml has what follows
        if not derived and not _changed_alone(recipe, "train.steps", "schedule.decay_steps"):
            yield "schedule.decay_steps", why[schedule.name]
    if recipe.checkpoint.every_steps == 0:
        for key in ("keep_last", "on_error"):
            yield f"checkpoint.{key}", "`checkpoint.every_steps: 0` saves none"
    data, source = recipe.data, str(recipe.data.stored()["source"])
    if data.sources:
        yield "data.source", "`data.sources` names the texts"
    else:
        yield "data.mix", "there is one source"
    forms = data.forms
    if not any("messages" in form or "completion" in form for form in forms):
        yield "data.too_long", "text goes on in the next sequence"
    if not any("messages" in form for form in forms):
        yield "data.chat_template", "no source has messages"
    if all("messages" in form for form in forms):
        for key in ("bos", "eos"):
            yield f"data.{key}", "a conversation begins and ends as its template writes it"
    if recipe.task in ("frames", "volumes"):
        for key in ("source", "column", "bos", "eos", "bad_rows"):
            yield f"data.{key}", f"the task {recipe.task} generates its data"
    elif source == "sample" or source.endswith(".txt"):
        yield "data.column", "plain text has no columns" if source != "sample" else "the sample has one column"
    fsdp = recipe.fsdp
    if fsdp.bucket not in ("greedy", "auto") and fsdp.reshard_after_forward != "auto":
        yield "fsdp.memory_limit", "neither `fsdp.bucket` nor `fsdp.reshard_after_forward` leaves a choice to it"
    if recipe.logging.wandb is not None and recipe.logging.wandb.mode == "disabled":
        for key in ("project", "entity"):
            yield f"logging.wandb.{key}", "`logging.wandb.mode` is disabled"
    if recipe.model.rope_scaling is not None and recipe.model.rope_scaling.factor == 1:
        for key in ("low_freq_factor", "high_freq_factor", "original_max_seq"):
            yield f"model.rope_scaling.{key}", "`model.rope_scaling.factor: 1` scales nothing"
    if recipe.pipeline is None or not recipe.pipeline.vectorized:
        yield "sharding.rules.stage", "only the layers of `pipeline.form: vectorized` are stacked along `stage`"
    if recipe.serve.stored()["checkpoint"] == "latest":
        yield "serve.layout", "a run's own checkpoint, `serve.checkpoint: latest`, is not quantized"
    both = recipe.where("resume").line and recipe.where("checkpoint.resume").line
    if both and recipe.resume != recipe.checkpoint.resume and not _changed_alone(recipe, "resume", "checkpoint.resume"):
        yield "checkpoint.resume", f"`resume: {recipe.resume}` is stronger"


def _changed_alone(recipe: Recipe, key: str, other: str) -> bool:
    """Whether `key` is an override of a file's recipe, such as a run's own, and `other` is not."""
    changed, stays = (recipe.where(k).file.startswith("<override") for k in (key, other))
    return changed and not stays


def pipeline_is_possible(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of a pipeline that the size of `mesh.pp` is its number of stages, that its schedule has its rounds, and
    that its schedule and split suit its form."""
    section, size = recipe.pipeline, recipe.mesh.get("pp", 1)
    if section is None:
        return
    stages = section.stages
    if size == 1:
        why = "the mesh has " + ", ".join(f"{axis} {n}" for axis, n in recipe.mesh.items())
        fix = f"mesh: {{pp: {stages or 2}, ...}}"
        yield _violation(recipe, "pipeline", "`pipeline` needs a mesh axis `pp` for its stages", why, fix)
    elif stages is not None and size != -1 and stages != size:
        message = f"`pipeline.stages: {stages}` must be the size of `mesh.pp`"
        why, fix = f"stages are along the axis, which has {size} devices", f"pipeline.stages: {size}, or leave it out"
        yield _violation(recipe, "pipeline.stages", message, why, fix, {"mesh": "the mesh"})
    schedule = section.schedule
    if section.rounds is not None and section.rounds > 1 and schedule not in ("circular", "interleaved_1f1b"):
        message = f"`pipeline.rounds: {section.rounds}` does not suit {schedule}, whose devices have one stage each"
        yield _violation(recipe, "pipeline.rounds", message, fix="schedule: interleaved_1f1b or circular")
    if section.vectorized and schedule not in ("gpipe", "circular"):
        message = f"`pipeline.form: vectorized` does not suit {schedule}"
        why = "its backward pass is that of all steps together, after their forward pass"
        fix, also = "schedule: gpipe or circular, or form: staged", {"pipeline.schedule": "the schedule"}
        yield _violation(recipe, "pipeline.form", message, why, fix, also)
    if section.vectorized and section.split is not None:
        message = "`pipeline.split` does not suit `form: vectorized`, whose stages have equally many layers"
        fix, also = "leave pipeline.split out, or form: staged", {"pipeline.form": "the form"}
        yield _violation(recipe, "pipeline.split", message, fix=fix, also=also)


def stages_have_their_axis(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that `pp` shards the stages of a pipeline and nothing else."""
    section, also = recipe.pipeline, {"pipeline": "the pipeline"}
    if section is None:
        return
    stage = recipe.sharding.rules.get("stage", ())
    if section.vectorized and stage != ("pp",):
        message = "`sharding.rules.stage` must be `pp`, the axis of the pipeline's stages"
        yield _violation(recipe, "sharding.rules.stage", message, fix="leave sharding.rules.stage out", also=also)
    for pattern, dims in recipe.sharding.annotate.items():
        if "stage" in dims and "pp" in stage and not section.vectorized:
            message = f"`sharding.annotate.{pattern}` names the dim `stage`, which only stacked layers have"
            why = "in a staged pipeline a parameter is only on the devices of its stage"
            fix = "leave it out, or pipeline.form: vectorized"
            yield _violation(recipe, f"sharding.annotate.{pattern}", message, why, fix, also)
    outside = ["sharding.rules.stage", *["sharding.rules.vocab"] * section.vectorized]
    for path, axes in _uses(recipe).items():
        if "pp" in axes and path not in outside:
            others = [axis for axis in axes if axis != "pp"]
            message = f"`{path}` shards over `pp`, the axis of the pipeline's stages"
            why = "a parameter is only on the devices of its stage, and every stage reads the whole micro-batch"
            fix = f"{path}: [{', '.join(others)}]" if len(axes) > 1 else "another axis"
            yield _violation(recipe, path, message, why, fix, also)


def known_store(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of a run's place with a scheme that it names an object store."""
    written = re.sub(
        r"\$\{[^}]*\}", "x", str(recipe.run.stored()["dir"])
    )  # the environment is asked by those who need it
    if is_url(written) and (wrong := wrong_store(written)) is not None:
        where = recipe.where("run.dir")
        where = replace(where, text=without_secrets(where.text), width=min(where.width, len(where.text)))
        yield Diagnostic(f"`run.dir` names no object store: {wrong[0]}", where=where, fix=wrong[1])


def files_on_this_host(recipe: Recipe) -> Iterator[Diagnostic]:
    """Refuses names of files and folders that are URLs: only a run and its checkpoints are in object stores."""
    for section in ("data", "model", "serve"):
        part = getattr(recipe, section)
        for key in part.paths:
            written = part.stored()[key]
            if not isinstance(written, str) or not is_url(written):
                continue
            wrong = wrong_store(re.sub(r"\$\{[^}]*\}", "x", written))
            if (section, key) == ("serve", "checkpoint") and wrong is None:
                continue
            where = recipe.where(f"{section}.{key}")
            where = replace(where, text=without_secrets(where.text), width=min(where.width, len(where.text)))
            yield Diagnostic(
                f"`{section}.{key}` is not on this machine", where=where,
                why="of object stores only runs and checkpoints are read" if wrong is None else wrong[0],
                fix="copy it to a folder with the store's own tool, and name that",
            )  # fmt: skip


def profiled_steps(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the steps to profile are in order, and warns where the run ends before them."""
    if recipe.train.profile is None:
        return
    first, last = recipe.train.profile.steps
    if first > last:
        yield _violation(
            recipe, "train.profile.steps", f"`train.profile.steps` ends before it begins: {first}, {last}",
            fix=f"[{last}, {first}]",
        )  # fmt: skip
    elif last > recipe.train.steps:
        message, why = f"nothing is profiled after step {recipe.train.steps:,}", "the run ends there"
        fix = "earlier train.profile.steps, or more train.steps"
        yield _violation(recipe, "train.profile.steps", message, why, fix, severity="warning")


PIPELINE = ("pipeline", "mesh", "sharding.rules", "sharding.pin", "fsdp.axis")


def form_of_rows(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that one form of rows is named for each source: text, conversations, or prompts with completions."""
    data = recipe.data
    named = [("data.sources." + str(i), one) for i, one in enumerate(data.sources)]
    for path, one in (("data", data), *named):
        messages, prompt, completion = one.messages, one.prompt, one.completion
        if (prompt is None) != (completion is None):
            key, other = ("prompt", "completion") if completion is None else ("completion", "prompt")
            message = f"`{path}.{key}` needs `{path}.{other}`: what follows a prompt is learned"
            yield _violation(recipe, f"{path}.{key}", message, fix=f"{other}: NAME_OF_ITS_COLUMN")
        forms = {"messages": messages, "completion": completion, "column": one.column if one is not data else None}
        both = [key for key, value in forms.items() if value is not None]
        if len(both) > 1:
            message = f"`{path}.{both[0]}` and `{path}.{both[1]}` name two forms of rows"
            also = {f"{path}.{both[1]}": "the other"}
            yield _violation(recipe, f"{path}.{both[0]}", message, "a source's rows have one form", "keep one", also)
    stored = data.stored()
    talks = any("messages" in form for form in data.forms)
    made = stored["tokenizer"] is not None and data.made_tokens is not None
    if talks and made and data.chat_template is None:
        message, why = "a tokenizer that tpshard makes has no chat template", "`messages` are rendered by one"
        yield _violation(recipe, "data.tokenizer", message, why, "data.chat_template: chatml")


def weights_of_sources(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the weights of a mixture have a sum, and names sources that are never read."""
    sources = recipe.data.sources
    if sources and not sum(one.weight for one in sources):
        message = "the weights of `data.sources` sum to nothing"
        yield _violation(recipe, "data.sources.0.weight", message, "no source would be read", "a weight above 0")
        return
    for number, one in enumerate(sources):
        if not one.weight:
            message, why = f"`{one.source}` is never read", "its weight is 0"
            key = f"data.sources.{number}.weight"
            yield _violation(recipe, key, message, why, "remove it, or a weight above 0", severity="warning")


READ = (
    "optimizer", "schedule", "checkpoint", "data", "task", "fsdp", "logging", "train.steps", "model.rope_scaling",
    "pipeline", "sharding.rules", "serve", "resume",
)  # fmt: skip
LAWS: tuple[tuple[Law, tuple[str, ...]], ...] = (
    (one_model, ("model",)),
    (task_of_model, ("task", "model")),
    (one_rest, ("mesh", "serve.mesh")),
    (form_of_rows, ("data",)),
    (weights_of_sources, ("data",)),
    (mesh_on_cluster, ("mesh", "cluster")),
    (known_axes, ("mesh", "sharding.rules", "sharding.pin", "fsdp.axis")),
    (used_serving_axes, ("serve.mesh", "sharding.rules", "sharding.pin", "fsdp.axis")),
    (used_axes, ("mesh", "sharding.rules", "sharding.pin", "fsdp.axis", "pipeline")),
    (known_logical_axes, ("sharding.rules", "sharding.annotate", "model.module")),
    (priorities_of_rules, ("sharding.rules", "sharding.priority")),
    (axis_once, ("sharding",)),
    (steps_hold_warmup, ("schedule.warmup_steps", "train.steps")),
    (one_end, ("train.steps", "train.tokens", "batch.global_sequences", "model.seq_len")),
    (rotary_scaling, ("model.rope_scaling",)),
    (settings_are_read, READ),
    (pipeline_is_possible, PIPELINE),
    (known_store, ("run.dir",)),
    (files_on_this_host, ("data", "model", "serve.checkpoint")),
    (profiled_steps, ("train.profile", "train.steps")),
    (stages_have_their_axis, PIPELINE),
)
