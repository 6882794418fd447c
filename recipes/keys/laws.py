"""Constraints between the keys of one recipe. Each law is a function that yields mistakes; `check` runs those whose
keys are valid, so that a mistake is reported only once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import reduce
from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes
from tpshard.recipes.keys.data_laws import columnless, columns_of_sources, form_of_rows, weights_of_sources
from tpshard.recipes.keys.mesh_laws import (
    PIPELINE,
    axis_once,
    known_axes,
    known_logical_axes,
    mesh_on_cluster,
    one_rest,
    pipeline_is_possible,
    priorities_of_rules,
    stages_have_their_axis,
    stages_keep_activations,
    used_axes,
    used_serving_axes,
)
from tpshard.recipes.keys.schedule_laws import schedule_in_run, stages_have_a_length
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.stores import is_url, without_secrets, wrong_store
from tpshard.recipes.keys.violation import Law, violation
from tpshard.recipes.text.section import Section, default_of
from tpshard.recipes.text.write import MASK, secrets_of


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


def one_model(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires exactly one of preset, hf, transformers and module; args only for a module."""
    model, stored = recipe.model, recipe.model.stored()
    named = [key for key in model.exclusive if stored[key] is not None]
    if not named:
        fix = "preset: tiny, or hf: FOLDER, or transformers: FOLDER, or module: package:Class"
        yield violation(recipe, "model", "`model` names no model", fix=fix)
    if len(named) > 1:
        message, fix = f"`model` names {len(named)} models", f"keep one of {', '.join(named)}"
        yield violation(recipe, f"model.{named[1]}", message, "one too many", fix, {f"model.{named[0]}": "the other"})
    if stored["args"] and "module" not in named:
        yield violation(recipe, "model.args", "`model.args` are for `model.module`", "no module here", "remove them")
    for key in {*model.overrides()} - {"vocab"} if stored["transformers"] is not None else ():
        message = f"`model.{key}` changes a dimension, which only tpshard's own models allow"
        why = "a `transformers` model is defined by its config.json"
        yield violation(recipe, f"model.{key}", message, why, "change config.json")


def arguments_are_whole(recipe: Recipe) -> Iterator[Diagnostic]:
    """Refuses the mask of a secret as an argument of the module, which a run's recipe.yaml has in its place."""
    for key, value in secrets_of(recipe.model):
        if value == MASK:
            message, why = f"`model.{key}: {MASK}` stands for a value that the recipe was written without", "a secret"
            fix = f"give it again, model.{key}=...; `${{oc.env:NAME}}` in the recipe would be kept"
            yield violation(recipe, f"model.{key}", message, why, fix)


def task_of_model(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires for frames and volumes a module; presets and folders read tokens."""
    if recipe.task in ("frames", "volumes") and recipe.model.named_by != "module":
        message = f"`task: {recipe.task}` has no tokens, which `model.{recipe.model.named_by}` reads"
        fix = "model.module: package:Class, such as tpshard.models.conformer:Conformer or tpshard.models.unet:UNet"
        also = {f"model.{recipe.model.named_by}": "the model"}
        yield violation(recipe, "task", message, fix=fix, also=also)


def chunks_of_loss(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the chunks of the loss divide a sequence, and that the task is one of text."""
    chunks, seq = recipe.loss.chunks, recipe.model.seq_len
    if chunks > 1 and recipe.task not in ("lm", "mlm"):
        message, why = f"`task: {recipe.task}` computes its loss from whole logits", "only lm and mlm have chunks"
        yield violation(recipe, "loss.chunks", message, why, "remove it", {"task": "the task"})
    elif seq % chunks:
        most = next(n for n in range(min(chunks, seq), 0, -1) if seq % n == 0)
        message = f"a sequence of {seq:,} tokens is not divided by {chunks:,} chunks"
        yield violation(recipe, "loss.chunks", message, "each has as many tokens", f"loss.chunks: {most}")


def terms_of_loss(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of terms of the loss a task of tpshard."""
    for key in ("label_smoothing", "z_loss"):
        if ":" in recipe.task and getattr(recipe.loss, key):
            message, why = f"`loss.{key}` is a term of tpshard's losses", f"`task: {recipe.task}` computes its own"
            yield violation(recipe, f"loss.{key}", message, why, "remove it", {"task": "the task"})


def one_end(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that one key says how long a run is, also where two say the same: a changed batch would part them."""
    written = {"train.steps": recipe.where("train.steps").line, "train.tokens": recipe.train.tokens}
    first, *others = [key for key, one in {**written, "data.epochs": recipe.data.epochs}.items() if one] or [""]
    for other in others:
        message = f"`{first}` and `{other}` both say how long a run is"
        yield violation(recipe, other, message, "one of them counts", "keep one", {first: "the other"})


def rotary_scaling(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the wavelengths which rope_scaling leaves are shorter than those which it scales."""
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        message = f"`low_freq_factor: {low:g}` must be below `high_freq_factor: {high:g}`"
        why = "wavelengths between the two are scaled in part"
        key = "model.rope_scaling"
        place = next((k for k in (f"{key}.low_freq_factor", f"{key}.high_freq_factor") if recipe.where(k).line), key)
        yield violation(recipe, place, message, why, "Llama 3 has 1 and 4")


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
            yield violation(recipe, key, f"`{key}` has no effect", why, "remove it", severity="warning")


def _unread(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The keys that another value makes meaningless, each with the reason."""
    of_others = {"adamw": ("momentum", "orthogonal"), "lion": ("eps", "momentum", "orthogonal"), "muon": ()}
    for key in of_others[recipe.optimizer.name]:
        yield f"optimizer.{key}", f"{recipe.optimizer.name} does not use it"
    schedule = recipe.schedule
    for key in ("name", "min_lr_ratio") if schedule.stages else ():
        yield f"schedule.{key}", "`schedule.stages` say the rates"
    if schedule.name == "constant":
        yield "schedule.min_lr_ratio", "a constant schedule stays at the peak"
    if schedule.name != "wsd" and schedule.decay_over != max(1, schedule.decay_steps // 10):
        yield "schedule.decay_over", "only wsd falls over the last steps"
    if schedule.name != "wsd" and schedule.fall != "linear":
        yield "schedule.fall", "only wsd falls over the last steps"
    endless = {"constant": "a constant schedule stays at the peak", "inverse_sqrt": "inverse_sqrt has no last step"}
    if why := "`schedule.stages` say the rates" if schedule.stages else endless.get(schedule.name):
        derived = recipe.schedule.decay_steps == recipe.train.steps  # a run's recipe.yaml has what follows
        if not derived and not _changed_alone(recipe, "train.steps", "schedule.decay_steps"):
            yield "schedule.decay_steps", why
    if recipe.checkpoint.every_steps == 0:
        for key in ("keep_last", "on_error"):
            yield f"checkpoint.{key}", "`checkpoint.every_steps: 0` saves none"
    if recipe.adapters.lora is not None:
        yield "train.freeze", "beside adapters the whole model is frozen"
    data = recipe.data
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
        for key in ("source", "column", "bos", "eos", "bad_rows", "epochs"):
            yield f"data.{key}", f"the task {recipe.task} generates its data"
    elif why := columnless([one for one in data.sources or [data] if one is data or not data.own_form(one)]):
        yield "data.column", why
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


def known_store(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of a run's place with a scheme that it names an object store."""
    written = re.sub(
        r"\$\{[^}]*\}", "x", str(recipe.run.stored()["dir"])
    )  # the environment is asked by those who need it
    if is_url(written) and (wrong := wrong_store(written)) is not None:
        where = recipe.where("run.dir")
        where = replace(where, text=without_secrets(where.text), width=min(where.width, len(where.text)))
        yield Diagnostic(f"`run.dir` names no object store: {wrong[0]}", where=where, fix=wrong[1])


def _places(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Each key that names a file or a folder, with what is written there."""
    parts: dict[str, Section] = {key: getattr(recipe, key) for key in ("data", "model", "serve", "train", "run")}
    parts |= {f"data.sources.{i}": one for i, one in enumerate(recipe.data.sources)}
    for section, part in parts.items():
        stored = part.stored()
        for key in part.paths:
            value = stored[key]
            named = value.items() if isinstance(value, Mapping) else [("", value)]
            yield from ((f"{section}.{key}.{name}".rstrip("."), one) for name, one in named)


def places_are_named(recipe: Recipe) -> Iterator[Diagnostic]:
    """Refuses empty names of files and folders, which would mean the folder in which a command runs."""
    for key, written in _places(recipe):
        if isinstance(written, str) and not written.strip():
            yield violation(recipe, key, f"`{key}` is empty", fix="name it; `.` is the folder of the command")


def files_on_this_host(recipe: Recipe) -> Iterator[Diagnostic]:
    """Refuses names of files and folders that are URLs: only a run and its checkpoints are in object stores."""
    for key, written in _places(recipe):
        if key in ("run.dir", "train.init_from") or not isinstance(written, str) or not is_url(written):
            continue
        wrong = wrong_store(re.sub(r"\$\{[^}]*\}", "x", written))
        if key == "serve.checkpoint" and wrong is None:
            continue
        where = recipe.where(key)
        where = replace(where, text=without_secrets(where.text), width=min(where.width, len(where.text)))
        yield Diagnostic(
            f"`{key}` is not on this machine", where=where,
            why="of object stores only runs and checkpoints are read" if wrong is None else wrong[0],
            fix="copy it to a folder with the store's own tool, and name that",
        )  # fmt: skip


def groups_have_a_rate(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of groups that they say something, and a rate of others to which theirs is in proportion."""
    for i, group in enumerate(recipe.optimizer.groups):
        if not group.match:
            message, fix = "a group of parameters has an empty `match`", "patterns of names, or leave the group out"
            yield violation(recipe, f"optimizer.groups.{i}.match", message, fix=fix)
        if group.lr is not None and not recipe.optimizer.lr:
            message, why = "a group has a learning rate, and `optimizer.lr` is 0", "groups follow it in proportion"
            yield violation(recipe, f"optimizer.groups.{i}.lr", message, why, "a rate above 0 in optimizer.lr")
        if group.lr is None and group.weight_decay is None:
            message = "a group of parameters has neither `lr` nor `weight_decay`"
            yield violation(recipe, f"optimizer.groups.{i}", message, fix="name one of them, or leave the group out")


def profiled_steps(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that the steps to profile are in order, and warns where the run ends before them."""
    if recipe.train.profile is None:
        return
    first, last = recipe.train.profile.steps
    if first > last:
        yield violation(
            recipe, "train.profile.steps", f"`train.profile.steps` ends before it begins: {first}, {last}",
            fix=f"[{last}, {first}]",
        )  # fmt: skip
    elif last > recipe.train.steps:
        message, why = f"nothing is profiled after step {recipe.train.steps:,}", "the run ends there"
        fix = "earlier train.profile.steps, or more train.steps"
        yield violation(recipe, "train.profile.steps", message, why, fix, severity="warning")


def adapters_have_room(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that adapters have other names than the model, and that there is room for all of them."""
    section = recipe.serve
    if section.adapters and recipe.name in section.adapters:  # a name may wait for its variable
        message, why = f"an adapter has the name `{recipe.name}`", "requests ask for the model itself by that name"
        yield violation(recipe, f"serve.adapters.{recipe.name}", message, why, "another name", {"name": "the model's"})
    if section.max_loras is not None and section.max_loras < len(section.adapters):
        message = f"`serve.max_loras` is below the {len(section.adapters)} of `serve.adapters`"
        yield violation(recipe, "serve.max_loras", message, fix=f"at least {len(section.adapters)}")


def packed_is_of_a_preset(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that what stands for a quantized folder is a preset, and has adapters."""
    if recipe.adapters.packed and (recipe.adapters.lora is None or recipe.model.preset is None):
        message, why = "`adapters.packed` is for adapters of a preset", "a quantized folder says it itself"
        yield violation(recipe, "adapters.packed", message, why, "adapters: {packed: true, lora: {}}, or leave it out")


READ = (
    "optimizer", "schedule", "checkpoint", "data", "task", "fsdp", "logging", "train.steps", "model.rope_scaling",
    "pipeline", "sharding.rules", "serve", "resume",
)  # fmt: skip
LAWS: tuple[tuple[Law, tuple[str, ...]], ...] = (
    (one_model, ("model",)),
    (arguments_are_whole, ("model",)),
    (task_of_model, ("task", "model")),
    (chunks_of_loss, ("loss", "task", "model.seq_len")),
    (terms_of_loss, ("loss", "task")),
    (one_rest, ("mesh", "serve.mesh")),
    (form_of_rows, ("data",)),
    (weights_of_sources, ("data",)),
    (columns_of_sources, ("data",)),
    (mesh_on_cluster, ("mesh", "cluster")),
    (known_axes, ("mesh", "sharding.rules", "sharding.pin", "fsdp.axis")),
    (used_serving_axes, ("serve.mesh", "sharding.rules", "sharding.pin", "fsdp.axis")),
    (used_axes, ("mesh", "sharding.rules", "sharding.pin", "fsdp.axis", "pipeline")),
    (known_logical_axes, ("sharding.rules", "sharding.annotate", "model.module")),
    (priorities_of_rules, ("sharding.rules", "sharding.priority")),
    (axis_once, ("sharding", "fsdp.axis")),
    (stages_have_a_length, ("schedule",)),
    (schedule_in_run, ("schedule", "train.steps")),
    (one_end, ("train.steps", "train.tokens", "data.epochs", "batch.global_sequences", "model.seq_len")),
    (rotary_scaling, ("model.rope_scaling",)),
    (settings_are_read, READ),
    (pipeline_is_possible, PIPELINE),
    (known_store, ("run.dir",)),
    (
        places_are_named,
        ("data", "model", "serve.checkpoint", "serve.adapters", "serve.adapter_root", "train.init_from", "run.dir"),
    ),
    (files_on_this_host, ("data", "model", "serve.checkpoint", "serve.adapters", "serve.adapter_root")),
    (groups_have_a_rate, ("optimizer",)),
    (adapters_have_room, ("name", "serve")),
    (packed_is_of_a_preset, ("adapters", "model")),
    (profiled_steps, ("train.profile", "train.steps")),
    (stages_have_their_axis, PIPELINE),
    (stages_keep_activations, ("pipeline", "offload")),
)
