"""Laws of a learning rate schedule: what it says has a place within the run."""

from __future__ import annotations

from collections.abc import Iterator

from tpshard.diagnostics.diagnostic import Diagnostic
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.violation import violation


def stages_have_a_length(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires of each stage of a schedule that one key says its length."""
    for i, stage in enumerate(recipe.schedule.stages):
        if (stage.stored()["steps"] is None) == (stage.tokens is None):
            message = f"a stage of the schedule has {'no' if stage.tokens is None else 'both'} `steps` and `tokens`"
            yield violation(recipe, f"schedule.stages.{i}", message, "they say how long it is", "one of them")


def schedule_in_run(recipe: Recipe) -> Iterator[Diagnostic]:
    """Warns of what a schedule says of steps that the run does not have. Those of epochs are counted first."""
    if recipe.data.epochs is None:
        yield from schedule_beyond(recipe)


def schedule_beyond(recipe: Recipe) -> Iterator[Diagnostic]:
    """`schedule_in_run` for a run of `train.steps`, however they came about."""
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    if warmup > steps:
        message, why = f"{warmup:,} steps of warm-up in a run of {steps:,}", "the peak is never reached"
        fix = f"schedule.warmup_steps: {steps // 10}"
        yield violation(recipe, "schedule.warmup_steps", message, why, fix, severity="warning")
    elif recipe.schedule.stages:
        yield from _stages(recipe)
    elif recipe.schedule.name in ("cosine", "linear", "wsd"):
        yield from _decay(recipe)


def _stages(recipe: Recipe) -> Iterator[Diagnostic]:
    stages, steps, end = recipe.schedule.stages, recipe.train.steps, recipe.schedule.warmup_steps
    for i, stage in enumerate(stages):
        begin, end = end, end + (stage.steps or 0)
        if end > steps:
            beyond = f"begins after step {begin:,}" if begin >= steps else f"ends at step {end:,}"
            message, why = f"the stage {beyond}", f"the run ends at step {steps:,}"
            fix = "shorter stages, or a longer run"
            yield violation(recipe, f"schedule.stages.{i}", message, why, fix, severity="warning")
    if end < steps and not stages[-1].to:
        message, why = f"the rate is 0 from step {end:,} of {steps:,} on", "no step changes the model after it"
        fix = "longer stages, a rate above 0, or a shorter run"
        yield violation(recipe, f"schedule.stages.{len(stages) - 1}", message, why, fix, severity="warning")


def _decay(recipe: Recipe) -> Iterator[Diagnostic]:
    schedule, steps = recipe.schedule, recipe.train.steps
    warmup, end, fall, key = schedule.warmup_steps, schedule.decay_steps, schedule.decay_over, "schedule.decay_steps"
    if end <= warmup and end < steps:
        message = f"the rate is to be at its lowest at step {end:,}, and rises until step {warmup:,}"
        why, fix = "it jumps down after the warm-up", f"above {warmup}, or a shorter warm-up"
        yield violation(recipe, key, message, why, fix, severity="warning")
    elif end > steps:
        message, why = f"the rate is at its lowest at step {end:,}", f"the run ends at step {steps:,}"
        yield violation(recipe, key, message, why, f"{key}: {steps}, or a longer run", severity="warning")
    elif end < steps and not schedule.min_lr_ratio:
        message, why = f"the rate is 0 from step {end:,} of {steps:,} on", "no step changes the model after it"
        yield violation(recipe, key, message, why, f"{key}: {steps}, or a rate above 0", severity="warning")
    if schedule.name == "wsd" and recipe.where("schedule.decay_over").line and fall > end - warmup > 0:
        message = f"a fall of {fall:,} steps that ends at step {end:,}, of which {warmup:,} are warm-up"
        why, fix = "it begins after the warm-up, and is shorter", f"at most {end - warmup}"
        yield violation(recipe, "schedule.decay_over", message, why, fix, severity="warning")
