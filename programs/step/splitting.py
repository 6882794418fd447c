"""Chooses the number of layers of each pipeline stage: as the recipe says, or so that stages take equally long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.passes.recompute import layer_of
from tpshard.parallelism.pipeline.balance import balance
from tpshard.parallelism.pipeline.stages import Stage, blocks_of
from tpshard.parallelism.pricing.timeline import price
from tpshard.programs.fit.layer_split import fair_split, split_misfit
from tpshard.programs.parts.pass_choices import Chooser
from tpshard.programs.setting.setting import Setting

ALIKE = 0.02
"""Layers whose compute times differ by less than this share count as equal: each gets the mean of their times."""
TRIES = 4
"""The maximal number of splits that are built."""


def layers_of(setting: Setting, count: int, stages: int) -> list[int]:
    """The layers of each stage of a model with `count` layers: `pipeline.split`, else an even split.

    Raises Mistakes (exit 4) with possible splits.
    """
    recipe = setting.recipe
    section = recipe.pipeline
    assert section is not None
    if count < 2:
        raise Mistakes.one(
            "a pipeline needs a model with repeated layers, and this one has none" if not count else
            "a pipeline needs several layers, and this model has one",
            exit=Exit.FIT, where=recipe.where("pipeline"),
            why="stages are cut between modules of a list, as `layers.0`, `layers.1`, ...",
            fix="leave `pipeline` out, or put the model's layers into an nn.ModuleList",
        )  # fmt: skip
    wrong = split_misfit(recipe, count, stages)
    if wrong is not None:
        raise Mistakes([wrong])
    return list(section.split) if section.split is not None else fair_split(count, stages)


def balance_stages(
    setting: Setting, even: Sequence[int], devices: int, cut: Callable[[Sequence[int]], tuple[Stage, ...]]
) -> tuple[list[int], tuple[Stage, ...]]:
    """Chooses the number of layers of each stage: the recipe's split, else the one whose slowest device is fastest.

    Returns it with the stages that `cut` makes of it. Layer times are estimated on the split `even`, then on the best
    split by these times, until a split repeats or `TRIES` are built.
    """
    section = setting.recipe.pipeline
    if section is not None and section.split is not None:
        return list(even), cut(even)
    chooser, rounds = Chooser(setting), len(even) // devices
    tried: dict[tuple[int, ...], tuple[float, tuple[Stage, ...]]] = {}
    times_of: dict[int, _StageTimes] = {}  # by the stage's forward program, which `tried` keeps
    split = tuple(even)
    while split not in tried and len(tried) < TRIES:
        stages = cut(split)
        different = {id(stage.forward): stage for stage in stages}
        times_of |= {key: _seconds(stage, chooser) for key, stage in different.items() if key not in times_of}
        times = [times_of[id(stage.forward)] for stage in stages]
        tried[split] = max(sum(t.all for t in times[device::devices]) for device in range(devices)), stages
        layers, before, after = _layer_seconds(times)
        split = tuple(balance(layers, before, after, devices, rounds))
    best = min(tried, key=lambda split: tried[split][0])
    return list(best), tried[best][1]


@dataclass
class _StageTimes:
    """The seconds of a stage on one micro-batch, in its layers and outside of them."""

    layers: list[float]
    computing: list[float]
    """Seconds of each layer's computation alone, without waiting for collectives."""
    outside: float

    @property
    def all(self) -> float:
        return sum(self.layers) + self.outside


def _seconds(stage: Stage, chooser: Chooser) -> _StageTimes:
    own = blocks_of(stage.forward)[-len(stage.blocks) :]  # what comes before them is received
    places = {block: i for i, block in enumerate(own)}
    times = _StageTimes([0.0] * len(stage.blocks), [0.0] * len(stage.blocks), 0.0)
    for program in stage.programs:
        priced = price(program, chooser.device, chooser.per_host, compiled=chooser.compiled)
        counted = 0.0  # the end of the last node that computed; the wait after it counts for the next one
        for kernel, task, at in zip(priced.kernels, priced.tasks, (timeline := priced.run()).at):
            if task.kind != "compute" or task.seconds == 0.0:
                continue
            place = places.get(str(layer_of(kernel.node)))
            if place is not None:
                times.layers[place] += at - counted
                times.computing[place] += task.seconds
            else:
                times.outside += at - counted
            counted = at
        times.outside += timeline.at[-1] - counted if timeline.at else 0.0
    return times


def _layer_seconds(stage_times: Sequence[_StageTimes]) -> tuple[list[float], float, float]:
    """Seconds of (every layer, the work before the first, the work after the last)."""
    seconds = [value for t in stage_times for value in t.layers]
    kinds: list[tuple[float, list[int]]] = []
    for i, computing in enumerate(value for t in stage_times for value in t.computing):
        for like, members in kinds:
            if abs(like - computing) <= ALIKE * like:
                members.append(i)
                break
        else:
            kinds.append((computing, [i]))
    for _, members in kinds:
        mean = sum(seconds[i] for i in members) / len(members)
        for i in members:
            seconds[i] = mean
    return seconds, stage_times[0].outside, stage_times[-1].outside
