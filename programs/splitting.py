"""The number of layers of each pipeline stage: as the recipe says, or so that the stages' times are balanced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpshard.parallelism.balance import balance
from tpshard.parallelism.passes.recompute import layer_of
from tpshard.parallelism.stages import Stage, blocks_of
from tpshard.parallelism.timeline import price
from tpshard.programs.choices import Chooser
from tpshard.programs.setting import Setting
from tpshard.recipes.diagnostic import Exit, Mistakes

ALIKE = 0.02
"""Layers whose times differ by less than this share count as equal, with their mean."""
TRIES = 4
"""The maximal number of splits that are built."""


def layers_of(setting: Setting, count: int, stages: int) -> list[int]:
    """The layers of each stage of a model with `count` layers: `pipeline.split`, else an even split.

    Raises Mistakes (exit 4) with possible splits.
    """
    recipe = setting.recipe
    asked = recipe.pipeline
    assert asked is not None
    if count < 2:
        raise Mistakes.one(
            "a pipeline needs a model with repeated layers, and this one has none" if not count else
            "a pipeline needs several layers, and this model has one",
            exit=Exit.FIT, where=recipe.where("pipeline"),
            why="stages are cut between modules of a list, as `layers.0`, `layers.1`, ...",
            fix="leave `pipeline` out, or put the model's layers into an nn.ModuleList",
        )  # fmt: skip
    if asked.split is not None:
        if len(asked.split) == stages and sum(asked.split) == count:
            return list(asked.split)
        fair = ", ".join(map(str, _fair(count, stages)))
        raise Mistakes.one(
            f"`pipeline.split` gives {len(asked.split)} stages {sum(asked.split)} layers",
            exit=Exit.FIT, where=recipe.where("pipeline.split"),
            why=f"the model has {count} layers for {stages} stages",
            fix=f"pipeline.split: [{fair}], or leave it out" if count >= stages else f"at most {count} stages",
        )  # fmt: skip
    if count < stages:
        raise Mistakes.one(
            f"{stages} stages are more than the {count} layers of the model",
            exit=Exit.FIT, where=recipe.where("pipeline"), why="every stage has at least one layer",
            fix=f"at most {count} stages (mesh.pp x pipeline.rounds)",
        )  # fmt: skip
    return _fair(count, stages)


def balanced(
    setting: Setting, even: Sequence[int], devices: int, cut: Callable[[Sequence[int]], tuple[Stage, ...]]
) -> tuple[list[int], tuple[Stage, ...]]:
    """The split that the recipe says, or else whose slowest device takes least, and its stages; `cut` makes those of a
    split, ready to run.

    Layer times are measured on an even split, then on the best split by these times, until a split repeats.
    """
    asked = setting.recipe.pipeline
    if asked is not None and asked.split is not None:
        return list(even), cut(even)
    chooser, rounds = Chooser(setting), len(even) // devices
    known: dict[tuple[int, ...], tuple[float, tuple[Stage, ...]]] = {}
    split = tuple(even)
    while split not in known and len(known) < TRIES:
        stages = cut(split)
        different = {id(stage.forward): stage for stage in stages}
        seen = {key: _seconds(stage, chooser) for key, stage in different.items()}
        taken = [seen[id(stage.forward)] for stage in stages]
        known[split] = max(sum(t.all for t in taken[device::devices]) for device in range(devices)), stages
        layers, before, after = _whole(taken)
        split = tuple(balance(layers, before, after, devices, rounds))
    best = min(known, key=lambda split: known[split][0])
    return list(best), known[best][1]


@dataclass
class _Taken:
    """The seconds of a stage on one micro-batch."""

    layers: list[float]
    computing: list[float]
    """Of those in layers, without waiting for collectives."""
    outside: float

    @property
    def all(self) -> float:
        return sum(self.layers) + self.outside


def _seconds(stage: Stage, chooser: Chooser) -> _Taken:
    own = blocks_of(stage.forward)[-len(stage.blocks) :]  # what comes before them is received
    places = {block: i for i, block in enumerate(own)}
    found = _Taken([0.0] * len(stage.blocks), [0.0] * len(stage.blocks), 0.0)
    for program in stage.programs:
        priced = price(program, chooser.device, chooser.per_host, compiled=chooser.compiled)
        counted = 0.0  # until the next node that computes: the wait counts for it
        for kernel, task, at in zip(priced.kernels, priced.tasks, (timeline := priced.run()).at):
            if task.kind != "compute" or task.seconds == 0.0:
                continue
            place = places.get(str(layer_of(kernel.node)))
            if place is not None:
                found.layers[place] += at - counted
                found.computing[place] += task.seconds
            else:
                found.outside += at - counted
            counted = at
        found.outside += timeline.at[-1] - counted if timeline.at else 0.0
    return found


def _whole(taken: Sequence[_Taken]) -> tuple[list[float], float, float]:
    """Seconds of (every layer, the work before the first, the work after the last)."""
    seconds = [value for t in taken for value in t.layers]
    kinds: list[tuple[float, list[int]]] = []
    for i, computing in enumerate(value for t in taken for value in t.computing):
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
    return seconds, taken[0].outside, taken[-1].outside


def _fair(layers: int, stages: int) -> list[int]:
    """An even split, with fewer layers in the first and last stage, which also have the embedding and the head."""
    each, more = divmod(layers, stages)
    inner = sorted(range(stages), key=lambda i: (i in (0, stages - 1), i))
    return [each + (i in inner[:more]) for i in range(stages)]
