"""The learning rate schedule, and what a resumed run's recipe changes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.assemble import import_object
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.training_keys import Schedule, ScheduleStage


class SchedulePoint(NamedTuple):
    """A step after the warm-up, of which a schedule says the rate."""

    step: int
    """The step, counted from 1."""
    warmup: int
    """Steps of the warm-up."""
    end: int
    """The step at which the lowest rate is reached."""
    low: float
    """The lowest rate, as a share of the peak."""
    fall: int
    """Steps of the fall of wsd."""
    way: str = "linear"
    """How wsd falls: a name of `WAYS`."""
    stages: Sequence[ScheduleStage] = ()
    """Those of a schedule of stages."""

    def share(self, begin: int) -> float:
        """The way from step `begin` to the end that is done, from 0 to 1."""
        return max(0.0, min(1.0, (self.step - begin) / max(1, self.end - begin)))


Shape = Callable[[SchedulePoint], float]
"""The rate of a step as a share of the peak."""

SHAPES: Mapping[str, Shape] = {
    "cosine": lambda at: at.low + (1 - at.low) * 0.5 * (1 + math.cos(math.pi * at.share(at.warmup))),
    "linear": lambda at: 1 - (1 - at.low) * at.share(at.warmup),
    "constant": lambda at: 1.0,
    "inverse_sqrt": lambda at: max(at.low, math.sqrt(max(1, at.warmup) / at.step)),
    "wsd": lambda at: 1 - (1 - at.low) * WAYS[at.way](at.share(max(at.warmup, at.end - at.fall))),
}
"""The schedules by name: cosine of Loshchilov and Hutter 2017, inverse_sqrt of Vaswani et al. 2017, and wsd of Hu et
al. 2024 (MiniCPM), whose fall is one of `WAYS`."""


WAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1 - math.cos(math.pi * done)),
    "sqrt": math.sqrt,
    "exponential": lambda done: 2 * (1 - 0.5**done),
}
"""How a stage goes from one rate to another: the part of the way after a part of its steps; sqrt of
Hägele et al. 2024."""


def staged(at: SchedulePoint) -> float:
    """The rate of a schedule of stages, as a share of the peak."""
    rate, begin = 1.0, at.warmup
    for stage in at.stages:
        done = (at.step - begin) / (stage.steps or 1)
        if done <= 1:
            return rate + (stage.to - rate) * shape_of(stage.name, WAYS, "schedule.stages.name")(done)
        rate, begin = stage.to, begin + (stage.steps or 1)
    return rate


def learning_rate(step: int, schedule: Schedule, *, peak: float, steps: int) -> float:
    """The learning rate of `step`, counted from 1 to `steps`: it rises linearly over `warmup_steps` to `peak`, and
    then follows the schedule's shape. ValueError for a user's function that cannot be imported or gives no number."""
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    end = schedule.decay_steps or steps
    fall = schedule.decay_over or max(1, end // 10)
    shape = staged if schedule.stages else shape_of(schedule.name)
    share = shape(SchedulePoint(step, warmup, end, schedule.min_lr_ratio, fall, schedule.fall, schedule.stages))
    if not isinstance(share, int | float) or not math.isfinite(share) or share < 0:
        raise ValueError(f"`schedule.{_named(schedule)}` gives {share!r} for step {step}, not a share of the peak")
    return peak * share


def require_schedule(recipe: Recipe) -> None:
    """Raises Mistakes (exit 3) for a user's schedule that cannot be called."""
    schedule, steps = recipe.schedule, recipe.train.steps
    place, name = "schedule.name", schedule.name
    ends = accumulate((stage.steps or 1 for stage in schedule.stages), initial=schedule.warmup_steps)
    try:
        for i, end in enumerate(ends):
            if i < len(schedule.stages):  # else the rate after the last
                place, name = f"schedule.stages.{i}.name", schedule.stages[i].name
            learning_rate(min(end + 1, steps), schedule, peak=recipe.optimizer.lr, steps=steps)
        learning_rate(steps, schedule, peak=recipe.optimizer.lr, steps=steps)
    except Exception as error:  # the function's own
        why = "" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        fix = "a function of one SchedulePoint that returns a number from 0 on"
        failed = f"`schedule.name: {name}` failed"
        if schedule.stages:
            fix = "a function of the part of the stage that is done, which returns the part of the way"
            failed = f"`schedule.stages.name: {name}` failed"
        message = failed if why else str(error)
        raise Mistakes.one(message, exit=Exit.RECIPE, where=recipe.where(place), why=why, fix=fix) from error


def shape_of(
    name: str, table: Mapping[str, Callable[..., float]] = SHAPES, key: str = "schedule.name"
) -> Callable[..., float]:
    """The shape of a named schedule or stage, or a user's function. ValueError for one that cannot be imported, which
    names the recipe's key."""
    return table[name] if name in table else _imported(key, name)


@cache
def _imported(key: str, name: str) -> Callable[..., float]:
    function: Callable[..., float] = import_object(key, name)
    return function


def _named(schedule: Schedule) -> str:
    return f"{len(schedule.stages)} stages" if schedule.stages else f"name: {schedule.name}"


def described(recipe: Recipe) -> dict[str, Any]:
    """Everything from which a run's learning rates follow, as JSON values for a checkpoint."""
    return {"schedule": asdict(recipe.schedule), "peak": recipe.optimizer.lr, "steps": recipe.train.steps}


def change(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a recipe changes of the learning rate of `step`, with both schedules, as text; "" if nothing. before, now:
    `described` when the run was saved, and now."""
    schedules = [{**one["schedule"], "stages": tuple(ScheduleStage(**s) for s in one["schedule"].get("stages", ()))}
                 for one in (before, now)]  # fmt: skip
    rates = [learning_rate(step, Schedule(**schedule), peak=one["peak"], steps=one["steps"])
             for schedule, one in zip(schedules, (before, now))]  # fmt: skip
    if math.isclose(*rates, rel_tol=1e-9, abs_tol=1e-12):
        return ""
    texts = [f"{rate:.3g} ({_text(one)})" for rate, one in zip(rates, (before, now))]
    return f"the learning rate of step {step} was to be {texts[0]}, and is now {texts[1]}"


def _text(one: Mapping[str, Any]) -> str:
    schedule, peak = one["schedule"], one["peak"]
    warmup = f"warm-up of {schedule['warmup_steps']} steps to {peak:g}"
    name = f"{len(schedule['stages'])} stages" if schedule.get("stages") else schedule["name"]
    if name not in ("cosine", "linear", "wsd"):
        return f"{name}, {warmup}"
    return f"{name}, {warmup}, {schedule['min_lr_ratio'] * peak:.3g} from step {schedule['decay_steps']} on"
