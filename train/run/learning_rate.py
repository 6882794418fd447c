"""The learning rate schedule, and what a resumed run's recipe changes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.training_keys import Schedule


def learning_rate(step: int, schedule: Schedule, *, peak: float, steps: int) -> float:
    """The learning rate of `step`, counted from 1 to `steps`.

    It rises linearly over `warmup_steps` to `peak`, then falls along half a cosine to `min_lr_ratio` of the peak at
    `decay_steps` (by default the last step), where it stays; with `constant` it stays at the peak.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, (schedule.decay_steps or steps) - warmup))
    low = schedule.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))


def described(recipe: Recipe) -> dict[str, Any]:
    """Everything from which a run's learning rates follow, as JSON values for a checkpoint."""
    return {"schedule": asdict(recipe.schedule), "peak": recipe.optimizer.lr, "steps": recipe.train.steps}


def change(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a recipe changes of the learning rate of `step`, with both schedules, as text; "" if nothing. before, now:
    `described` when the run was saved, and now."""
    rates = [learning_rate(step, Schedule(**one["schedule"]), peak=one["peak"], steps=one["steps"])
             for one in (before, now)]  # fmt: skip
    if math.isclose(*rates, rel_tol=1e-9, abs_tol=1e-12):
        return ""
    texts = [f"{rate:.3g} ({_text(one)})" for rate, one in zip(rates, (before, now))]
    return f"the learning rate of step {step} was to be {texts[0]}, and is now {texts[1]}"


def _text(one: Mapping[str, Any]) -> str:
    schedule, peak = one["schedule"], one["peak"]
    warmup = f"warm-up of {schedule['warmup_steps']} steps to {peak:g}"
    if schedule["name"] == "constant":
        return f"constant, {warmup}"
    return f"cosine, {warmup}, {schedule['min_lr_ratio'] * peak:.3g} from step {schedule['decay_steps']} on"
