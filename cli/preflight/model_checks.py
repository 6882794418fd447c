"""Checks of a recipe's model, and of what is named for it: its code, schedule, adapters and beginning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.cli.preflight.text_checks import token_errors
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.files.hub_folder import PREFIX
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import manifest_of, open_model, saved_model
from tpshard.programs.fit.fit import misfits
from tpshard.programs.fit.parameter_groups import idle_of
from tpshard.programs.fit.recipe_model import carried_instead, opened
from tpshard.programs.fit.trained_parts import TrainedParts, trained_parts
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.stores import is_url

if TYPE_CHECKING:
    from torch import nn
    from tpshard.recipes.keys.schema import Recipe


def model_errors(recipe: Recipe) -> list[Diagnostic]:
    """The errors of a valid recipe that depend on its model's numbers."""
    try:
        spec = _model(recipe)
    except Mistakes as mistakes:
        return [*mistakes.diagnostics, *misfits(recipe, None)]
    if spec is None:
        return misfits(recipe, None)
    return [
        *misfits(recipe, spec),
        *_positions(recipe, spec),
        *_weights(recipe, spec),
        *token_errors(recipe, spec.vocab),
    ]


def _model(recipe: Recipe) -> ModelSpec | None:
    """The recipe's model; None where it names none, which is told elsewhere, and where its folder's environment
    variable is not set, which validation does not need. Raises `Mistakes` where the hub's cannot be had."""
    try:
        return None if recipe.model.named_by is None else opened(recipe, weights=False)
    except Mistakes:
        if str(recipe.model.stored()[recipe.model.named_by or "preset"]).startswith(PREFIX):
            raise
        return None
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from None


def _positions(recipe: Recipe, spec: ModelSpec) -> list[Diagnostic]:
    """The diagnostic for sequences longer than the model's positions. Rotary ones go on beyond, which is a warning."""
    length, positions = recipe.model.seq_len, spec.positions
    if positions is None or length <= positions.most or (positions.end and positions.key):  # told by `programs.fit`
        return []
    fix = f"model.seq_len: {positions.most}" + (f", or {positions.key}: {length}" if positions.key else "")
    return [
        Diagnostic(
            f"sequences of {length:,} tokens, but the model has {positions.most:,} positions",
            exit=Exit.FIT, where=recipe.where("model.seq_len"), fix=fix,
            why="" if positions.end else "it was not made for the positions beyond",
            severity="error" if positions.end else "warning",
        )
    ]  # fmt: skip


def _weights(recipe: Recipe, spec: ModelSpec) -> list[Diagnostic]:
    """A warning where `train` would refuse an `hf` folder, since it has no weights."""
    on_hub = str(recipe.model.stored().get(spec.source.key)).startswith(PREFIX)
    if on_hub or not spec.refusal("train") or carried_instead(recipe) is not None:
        return []
    return [
        Diagnostic(
            f"{spec.source.name} has no weights", severity="warning", where=recipe.where(f"model.{spec.source.key}"),
            why="`train` starts from a folder's weights, and refuses without",
            fix="add its *.safetensors; or model.transformers, which starts from random values",
        )
    ]  # fmt: skip


def require_weights(recipe: Recipe) -> None:
    """Raises `Mistakes` (exit 3) where `train` would refuse a folder, or a model of the hub, since it has no weights;
    what it carries of a folder that is gone is not asked for them."""
    spec = _model(recipe)
    if spec is not None and carried_instead(recipe) is None and (why := spec.refusal("train")):
        raise wrong_model(recipe, ValueError(why))


def require_beginning(recipe: Recipe) -> None:
    """Raises `Mistakes` (exit 7) where a new run would begin from what is not on this machine."""
    named, run = recipe.train.stored()["init_from"], recipe.run
    if named is None or is_url(str(named)) or run.store is not None or (run.folder / "checkpoints").is_dir():
        return
    place, spec = str(recipe.train.init_from), _model(recipe)
    if spec is not None and not os.path.exists(place):
        from tpshard.train.run.initial_values import begin

        begin(recipe, place, spec)


def code_errors(recipe: Recipe) -> list[Diagnostic]:
    """The mistakes in the module and the task that a recipe names, which are imported and built without values; and in
    the names of adapters and frozen parameters, where only the built module has them."""
    found: list[Diagnostic] = []
    try:
        spec = _model(recipe)
        if isinstance(spec, AdaptedModel) and spec.outline is None:
            spec.check()
        if spec is not None and spec.outline is None:
            found += idle_of(recipe, spec)
        if spec is not None and spec.reads_code:
            found += _forward_errors(recipe, spec.build())
    except Mistakes:
        pass  # told by `model_errors`
    except Exception as error:  # the user's code may raise anything
        found += wrong_model(recipe, error).diagnostics
    if ":" in recipe.task:
        from tpshard.models.assemble import import_object

        try:
            import_object("task", recipe.task)
        except Exception as error:
            found.append(Diagnostic(str(error), exit=Exit.RECIPE, where=recipe.where("task"), fix="correct the class"))
    return found


def schedule_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The mistakes in a user's functions of a schedule, which are imported and called at its borders."""
    if not any(":" in one.name for one in (recipe.schedule, *recipe.schedule.stages)):
        return ()
    from tpshard.train.run.learning_rate import require_schedule

    try:
        require_schedule(recipe)
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()


def trained_here(recipe: Recipe) -> TrainedParts | None:
    """What a sound recipe's patterns pick; None where it has none, or its model's folder is elsewhere."""
    spec = _model(recipe)
    return None if spec is None else trained_parts(recipe, spec)


def begin_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The errors in what a new run begins from, where it is on this machine; a run that goes on needs it no more."""
    named, spec = recipe.train.stored()["init_from"], _model(recipe)
    beside = Path(recipe.file).parent
    if named is None or spec is None or str(named).startswith(PREFIX) or is_url(str(named)):
        return ()
    try:
        place = str(recipe.train.init_from)
    except Mistakes:  # its environment variable is not set
        return ()
    if not os.path.exists(place) and (os.path.isabs(place) or (beside / "checkpoints").is_dir()):
        return ()
    from tpshard.train.run.initial_values import begin

    try:
        begin(recipe, place, spec)
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()


def adapter_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The errors in the adapters that the recipe's server holds, where these and the model are on this machine."""
    named, folders = str(recipe.serve.stored()["checkpoint"]), recipe.serve.stored()["adapters"].values()
    away = any(os.path.isabs(str(folder)) and not os.path.exists(str(folder)) for folder in folders)
    if not folders or away or named.startswith(PREFIX):
        return ()
    from tpshard.programs.server.adapter_slots import slots_of

    try:
        if named == "latest":
            spec = _model(recipe)
        elif (manifest := manifest_of(Path(named))) is not None:
            spec, _ = saved_model(manifest, recipe.model.module)
        else:
            spec = open_model(Path(named)) if (Path(named) / "config.json").is_file() else None
        if spec is not None:
            slots_of(recipe, spec.plain)
    except Mistakes as mistakes:
        return mistakes.diagnostics
    except (ValueError, OSError):  # of the model's folder, which `serve` tells
        return ()
    return ()


def _forward_errors(recipe: Recipe, module: nn.Module) -> tuple[Diagnostic, ...]:
    """The mistake that a module's forward pass writes to a buffer. What else fails on tensors without values is told
    when a step is captured."""
    import torch
    from tpshard.models.module_state import WrittenBuffer
    from tpshard.models.objectives.tasks import task_of
    from tpshard.programs.parts.checks import written_buffer

    try:
        task = task_of(recipe.task, recipe.model.seq_len)
        fields = task.fields.items()
        rows = {name: torch.empty(2, *field.shape, dtype=field.dtype, device="meta") for name, field in fields}
        module.to("meta")(*task.inputs(rows))
    except WrittenBuffer as error:
        return written_buffer(recipe, error).diagnostics
    except Exception:
        return ()
    return ()
