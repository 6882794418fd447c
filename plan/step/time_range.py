"""The range of a step's time on a device of which only the data sheet is known."""

from __future__ import annotations

from functools import cache

from tpshard.devices.read import device
from tpshard.parallelism.pricing.cost import Device, Efficiency
from tpshard.plan.step.figures import StepFigures
from tpshard.recipes.keys.schema import DEVICES

_SHARES = {"matmul": ("matmul",), "attention": ("attention", "attention_backward"), "stream": ("streaming",)}
"""Kind of work -> the shares of `Efficiency` that bound it."""


@cache
def reached() -> tuple[Efficiency, ...]:
    """What the shipped GPUs reach of their data sheets, of those that were measured or fitted on runs."""
    return tuple(one.efficiency for one in map(device, DEVICES) if one.kind == "gpu" and one.fitted)


def is_of_data_sheet(of: Device) -> bool:
    """Whether nothing of a device but its data sheet is known."""
    return of.kind == "gpu" and not of.fitted


def time_range(figures: StepFigures) -> tuple[float, float] | None:
    """The shortest and the longest step, in seconds, with the shares that other devices reach; None for a device of
    which more is known."""
    if not is_of_data_sheet(figures.device):
        return None
    least = most = figures.step_s
    for kind, names in _SHARES.items():
        ratios = [
            getattr(figures.device.efficiency, name) / getattr(other, name) for other in reached() for name in names
        ]
        least += figures.work_s[kind] * (min(ratios) - 1)
        most += figures.work_s[kind] * (max(ratios) - 1)
    return max(least, 0.0), most
