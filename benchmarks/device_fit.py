"""Fits the constants of devices on the step times of published runs; `plan_accuracy.py --fit` prints them.

A step is the sum of its kernels' times, which follow from a device's shares (`parallelism.pricing.cost.operation`), and
of the rest (the host, exposed communication), which is held as it is. So each row is planned once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.fusion import kernels, seconds
from tpshard.plan.step.step_price import training_parts
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.setting import cluster
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training_step import TrainingPrograms

from published_rows import STREAMING, PublishedRun

SHARES = ("matmul", "attention", "attention_backward", "streaming")
"""The constants of a device that rows fit."""
PRIOR = 0.05
"""How much a step's error, as a logarithm, weighs against a constant's distance from the mean of its device's."""


@dataclass(frozen=True)
class StepSums:
    """What a step's kernels compute and move, in seconds at the data sheet's rates."""

    device: str
    stack: str
    """That of the run."""
    measured_s: float
    products: np.ndarray
    """[products, 2]: seconds of computing and of moving."""
    attention_s: float
    backward_s: float
    streamed_s: float
    rest_s: float
    """Seconds of the step that are no kernel's."""

    def step_s(self, of: Callable[[str], float]) -> float:
        """The step's seconds. of: a constant by its name."""
        matmul, attention, backward, streaming = (of(f"{self.device}.{name}") for name in SHARES)
        streaming *= of(f"{self.stack}.streaming") if self.stack else 1.0
        each = np.maximum(self.products[:, 0] / matmul, self.products[:, 1] / streaming)
        others = self.attention_s / attention + self.backward_s / backward + self.streamed_s / streaming
        return float(each.sum() + others + self.rest_s)


def at_rates(device: Device, streaming: float, attention: float = 1.0) -> Device:
    """A device whose pointwise operations and attention reach so many times the rates that they reach on this one."""
    of = device.efficiency
    rates = replace(
        of, streaming=of.streaming * streaming, attention=of.attention * attention,
        attention_backward=of.attention_backward * attention,
    )  # fmt: skip
    return replace(device, efficiency=rates)


def step_sums(run: PublishedRun, programs: TrainingPrograms, step_s: float) -> StepSums:
    """The sums of a run without a pipeline. step_s: its planned step."""
    device = at_rates(cluster.device_of(run.recipe)[0], STREAMING[run.stack])
    total, products, sums = 0.0, [(0.0, 0.0)], dict.fromkeys(SHARES, 0.0)
    for part in training_parts(programs, run.compiled or compiled_by(run.recipe)):
        for kernel in kernels(part.program, compiled=part.compiled):
            one = seconds(kernel, device)
            moved = part.times * kernel.moved / device.memory_bandwidth
            computed = part.times * kernel.flops / device.rate(kernel.dtype)
            if kernel.work == "matmul":
                products.append((computed, moved))
            elif kernel.work == "stream":
                sums["streaming"] += moved
            elif kernel.work != "free":
                sums[kernel.work] += computed
            total += part.times * one
    return StepSums(
        run.device,
        run.stack,
        run.step_s or 1.0,
        np.array(products),
        sums["attention"],
        sums["attention_backward"],
        sums["streaming"],
        max(0.0, step_s - total),
    )


def fit(
    runs: Sequence[PublishedRun], build: Callable[[Setting], TrainingPrograms],
    planned_s: Callable[[PublishedRun, TrainingPrograms], float],
) -> tuple[dict[str, float], float]:  # fmt: skip
    """The constants, by `DEVICE.NAME` and `STACK.streaming`, with which plans fit the step times of runs best, and the
    mean error that remains, by Gauss-Newton on logarithms.

    Each constant is drawn to move with the mean of its device's, so that those that the runs do not tell apart keep
    their ratios. Where runs of a stack with a streaming of its own are among a device's, the device's stays.
    """
    built = [(run, build(Setting.of(run.recipe))) for run in runs]
    sums = [step_sums(run, programs, planned_s(run, programs)) for run, programs in built]
    stacks = [f"{stack}.streaming" for stack in dict.fromkeys(run.stack for run in runs if run.stack)]
    start, free = {name: STREAMING[name.partition(".")[0]] for name in stacks}, list[str]()
    groups: list[list[str]] = []
    for name in dict.fromkeys(run.device for run in runs):
        efficiency = cluster.device_of(next(run for run in runs if run.device == name).recipe)[0].efficiency
        start |= {f"{name}.{share}": getattr(efficiency, share) for share in SHARES}
        fixed = any(one.stack for one in sums if one.device == name)
        groups.append([f"{name}.{share}" for share in SHARES if not (fixed and share == "streaming")])
        free += groups[-1]
    free += stacks
    drawn = np.zeros((len(free), len(free)))
    for group in groups:
        places = [free.index(name) for name in group]
        drawn[np.ix_(places, places)] = np.eye(len(places)) - 1 / len(places)

    def errors(logs: np.ndarray) -> np.ndarray:
        held = start | dict(zip(free, np.exp(logs).tolist()))
        return np.array([math.log(one.step_s(held.__getitem__) / one.measured_s) for one in sums])

    begun = logs = np.log([start[name] for name in free])
    for _ in range(20):
        now = errors(logs)
        slopes = np.stack([errors(logs + 1e-4 * one) - now for one in np.eye(len(free))], axis=1) / 1e-4
        system = np.concatenate([slopes, PRIOR * drawn])
        step = np.linalg.lstsq(system, np.concatenate([now, PRIOR * drawn @ (logs - begun)]), rcond=None)[0]
        logs = np.clip(logs - np.clip(step, -0.3, 0.3), math.log(0.05), math.log(0.95))
    return dict(zip(free, np.exp(logs).tolist())), float(np.abs(np.expm1(errors(logs))).mean())
