"""The learning rate schedule."""

from __future__ import annotations

import math

from tpshard.recipes.training_keys import Schedule


def learning_rate(step: int, schedule: Schedule, *, peak: float, steps: int) -> float:
    """The learning rate of `step`, counted from 1 to `steps`.

    It rises linearly over `warmup_steps` to `peak`, then falls along half a cosine to `min_lr_ratio` of the peak at the
    last step; with `constant` it stays at the peak.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    low = schedule.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))
