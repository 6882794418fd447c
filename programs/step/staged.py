"""Cutting the micro-batch's program of a training step into pipeline stages, each with its passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.passes.run import Pass, run
from tpshard.parallelism.pipeline.schedules import Table, make, plain
from tpshard.parallelism.pipeline.stages import Stage, cut
from tpshard.parallelism.program import Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs.fit.batching import check_micro_batches
from tpshard.programs.parts.held import activations, beside, stored_bytes
from tpshard.programs.parts.pass_choices import Choices, Chooser, choose
from tpshard.programs.parts.passes import FEWER, remat, scheduling
from tpshard.programs.parts.step_programs import SUM
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
    setting: Setting, again: Program, table: Table, layers: Sequence[int], only: Collection[int] | None = None,
    storage: Mapping[str, Layout] | None = None,
) -> tuple[Stage, ...]:  # fmt: skip
    """Cuts a program with recomputation into stages and applies their passes. only: the indices to return, if not all.
    storage: the stored layout of each parameter, for a limit of memory.

    Raises Mistakes where it cannot be cut.
    """
    try:
        cuts = cut(again, setting.stage_axis, layers, split_backward=table.splits_backward)
    except ValueError as error:
        raise Mistakes.one(
            f"the model cannot be cut into stages: {error}", exit=Exit.FIT, where=setting.recipe.where("pipeline"),
            fix="leave `pipeline` out, or another model",
        ) from error  # fmt: skip
    stages = [_run_passes(stage, FEWER) for stage in cuts if only is None or stage.index in only]
    others = {} if storage is None else _beside_stages(setting, table, stages, storage)
    return tuple(_scheduled(setting, stage, _choices_of(setting, stage, others.get(stage.index))) for stage in stages)


def finish(setting: Setting, stage: Stage) -> Stage:
    """Merges the collectives of a stage's programs into buckets and schedules them: backward programs by the buckets of
    the forward one, which reads all parameters.
    """
    stage = _run_passes(stage, FEWER)
    return _scheduled(setting, stage, _choices_of(setting, stage))


def _scheduled(setting: Setting, stage: Stage, chosen: Choices) -> Stage:
    return _run_passes(stage, scheduling(setting, chosen))


Beside = Sequence[Mapping[str, int]]
"""The most bytes by category that a device holds beside each program of a stage."""


def _beside_stages(
    setting: Setting, table: Table, stages: Sequence[Stage], storage: Mapping[str, Layout]
) -> Mapping[int, Beside]:  # fmt: skip
    """What devices hold beside the programs of all stages, by stage; nothing without `fsdp.memory_limit`."""
    by_stage: dict[int, Beside] = {}
    for place in range(table.devices if setting.recipe.fsdp.memory_limit is not None else 0):
        own = [stages[i] for i in table.stages_of(place)]
        ports = {port.key: port for stage in own for program in stage.programs for port in program.inputs}
        names = [name for name in storage if ("parameter", name) in ports]
        trained = {n for n in names if ("gradient", n + SUM) in ports}
        stored = stored_bytes(setting, storage, names, trained, ports.values())
        most: dict[tuple[str, int], int] = {}
        for task, others, saved in activations(table, stages, place):
            most[task.kind, task.stage] = max(others + saved, most.get((task.kind, task.stage), 0))
        for stage in own:
            kinds = zip(table.kinds, stage.programs)
            by_stage[stage.index] = [beside(stored, program, most[kind, stage.index]) for kind, program in kinds]
    return by_stage


class _StageChooser(Chooser):
    """Prices variants of a stage's forward program, and counts what every program of the stage holds at its peak."""

    def __init__(self, setting: Setting, others: Beside, finished: Callable[[Program], Stage]):
        """finished: returns the stage of which a forward program is part."""
        super().__init__(setting)
        self.others, self.finished = others, finished

    def _peak_of(self, program: Program) -> int:
        return max(map(self.peak_beside, self.finished(program).programs, self.others))


def _choices_of(setting: Setting, stage: Stage, others: Beside | None = None) -> Choices:
    """The choices for a stage. others: if given, all of its programs keep the recipe's limit beside that."""
    finished = {stage.forward.graph: stage}

    @cache
    def program_with(chosen: Choices) -> Program:
        if others is None:
            return run(scheduling(setting, chosen), stage.forward)
        done = _scheduled(setting, stage, chosen)
        finished[done.forward.graph] = done
        return done.forward

    chooser = Chooser(setting) if others is None else _StageChooser(setting, others, lambda one: finished[one.graph])
    chosen = choose(chooser, lambda _: stage.forward, program_with)
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
    fewer = [_run_passes(stage, FEWER) for stage in stages]
    others = _beside_stages(setting, programs.table, fewer, programs.storage)
    chosen = [_choices_of(setting, stage, others.get(stage.index)) for stage in fewer]
    lists = [[*FEWER, *scheduling(setting, each)] for each in chosen]
    yield PassedStages("recompute", 0.0, replace(programs, cuts=stages))
    for each in zip(*lists):
        started = time.perf_counter()
        stages = tuple(_run_passes(stage, [one]) for stage, one in zip(stages, each))
        first = each[0].func if isinstance(each[0], partial) else each[0]
        yield PassedStages(first.__name__, time.perf_counter() - started, replace(programs, cuts=stages))
