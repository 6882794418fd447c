"""The learning rate over the steps."""

from __future__ import annotations

import math

from tpshard.recipes.schema import Schedule


def learning_rate(step: int, schedule: Schedule, *, peak: float, steps: int) -> float:
    """The learning rate of `step`, counted from 1 to `steps`.

    It rises in a line over `warmup_steps`, reaches `peak` at the last of them, and then falls along half a cosine to
    `min_lr_ratio` of the peak at the last step (or stays, for `constant`).
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    low = schedule.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
