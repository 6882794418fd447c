"""Cutting the micro-batch's program of a training step into pipeline stages, each with its passes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.passes.run import Pass, run
from tpshard.parallelism.pipeline.schedules import Table, make, plain
from tpshard.parallelism.pipeline.stages import Stage, cut
from tpshard.parallelism.program import Program
from tpshard.programs.fit.batching import check_micro_batches
from tpshard.programs.parts.pass_choices import Choices, choose
from tpshard.programs.parts.passes import FEWER, remat, scheduling
from tpshard.programs.setting.setting import Setting

if TYPE_CHECKING:
    from tpshard.programs.step.training_step import TrainingPrograms


def table_of(setting: Setting) -> Table:
    """The schedule of a recipe. Raises Mistakes (exit 4) where it does not support the number of micro-batches."""
    section, micro_batches = setting.recipe.pipeline, setting.batch.micro_batches
    if section is None or not setting.recipe.staged:
        return plain(micro_batches)
    check_micro_batches(setting.recipe, setting.batch, setting.stage_axis.size)
    return make(section.schedule, setting.stage_axis.size, micro_batches, section.stages_per_device)


def recompute_uncut(setting: Setting, micro: Program) -> Program:
    """The micro-batch's program before it is cut into stages, with the recipe's recomputation."""
    return run([remat(setting, setting.recipe.fsdp.reshard_after_forward is not False)], micro)


def finished_stages(
    setting: Setting, again: Program, table: Table, layers: Sequence[int], only: Collection[int] | None = None
) -> tuple[Stage, ...]:
    """Cuts a program with recomputation into stages and applies their passes. only: the indices to return, if not all.

    Raises Mistakes where it cannot be cut.
    """
    try:
        cuts = cut(again, setting.stage_axis, layers, split_backward=table.splits_backward)
    except ValueError as error:
        raise Mistakes.one(
            f"the model cannot be cut into stages: {error}", exit=Exit.FIT, where=setting.recipe.where("pipeline"),
            fix="leave `pipeline` out, or another model",
        ) from error  # fmt: skip
    return tuple(finish(setting, stage) for stage in cuts if only is None or stage.index in only)


def finish(setting: Setting, stage: Stage) -> Stage:
    """Merges the collectives of a stage's programs into buckets and schedules them: backward programs by the buckets of
    the forward one, which reads all parameters.
    """
    stage = _run_passes(stage, FEWER)
    return _run_passes(stage, scheduling(setting, _choices_of(setting, stage)))


def _choices_of(setting: Setting, stage: Stage) -> Choices:
    @cache
    def program_with(chosen: Choices) -> Program:
        return run(scheduling(setting, chosen), stage.forward)

    chosen = choose(setting, lambda _: stage.forward, program_with)
    in_buckets = {name for group in chosen.buckets for name in group}
    alone = tuple((name,) for name in stage.parameters if name not in in_buckets)
    return chosen._replace(buckets=(*chosen.buckets, *alone))


def _run_passes(stage: Stage, passes: Sequence[Pass]) -> Stage:
    backward = tuple(run(passes, program) for program in stage.backward)
    return replace(stage, forward=run(passes, stage.forward), backward=backward)


class PassedStages(NamedTuple):
    """A step with stages after one pass."""

    name: str
    """The name of the pass."""
    seconds: float
    """Seconds that the pass took on all stages."""
    programs: TrainingPrograms


def between_passes(programs: TrainingPrograms) -> Iterator[PassedStages]:
    """Yields the step with its stages as they are cut, then after each pass."""
    setting = programs.setting
    stages = cut(programs.micro, setting.stage_axis, programs.layers, split_backward=programs.table.splits_backward)
    chosen = [_choices_of(setting, _run_passes(stage, FEWER)) for stage in stages]
    lists = [[*FEWER, *scheduling(setting, each)] for each in chosen]
    yield PassedStages("recompute", 0.0, replace(programs, cuts=stages))
    for each in zip(*lists):
        started = time.perf_counter()
        stages = tuple(_run_passes(stage, [one]) for stage, one in zip(stages, each))
        first = each[0].func if isinstance(each[0], partial) else each[0]
        yield PassedStages(first.__name__, time.perf_counter() - started, replace(programs, cuts=stages))
