"""Builds the programs of a training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tpshard.parallelism.passes.run import PassResult
from tpshard.parallelism.pipeline.stages import Stage, blocks_of
from tpshard.programs.parts.checks import traceable
from tpshard.programs.parts.held import stored_bytes
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.passes import apply
from tpshard.programs.parts.step_programs import MicroMaker, counters_of, trained_by
from tpshard.programs.setting.cluster import check_fp8
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.device_programs import held_by_devices
from tpshard.programs.step.few_layers import micro_program, noted_micro, programs_of_devices
from tpshard.programs.step.splitting import balance_stages, layers_of
from tpshard.programs.step.staged import finished_stages, recompute_uncut, table_of
from tpshard.programs.step.training_step import TrainingPrograms


def build(
    setting: Setting, watch: Callable[[TrainingPrograms, PassResult], None] | None = None,
    make: MicroMaker | None = None, memo: Memo | None = None, fork: bool = False,
) -> TrainingPrograms:  # fmt: skip
    """Captures, propagates and partitions all programs of a training recipe. Raises Mistakes for what does not fit.

    watch: called after each pass on the micro-batch's program of a step without stages, with all programs and that
    pass's result. make: builds the micro-batch's program, by default `few_layers.micro_program`. memo: keeps what other
    settings may share. fork: whether a second process may price some choices of passes.
    """
    check_fp8(setting.recipe)
    memo = memo or Memo()
    make = make or partial(micro_program, memo=memo)
    table = table_of(setting)
    with traceable(setting):
        base = make(setting, None)
    storage = {p.name: p.layout for p in base.inputs if p.kind == "parameter"}
    layers: Sequence[int] = layers_of(setting, len(blocks_of(base)), table.stages) if setting.recipe.staged else ()
    micro = noted_micro(setting, base, make)
    stages: tuple[Stage, ...] = ()
    if layers:
        again = micro = recompute_uncut(setting, micro)
        layers, stages = balance_stages(
            setting, layers, table.devices, lambda split: finished_stages(setting, again, table, split, storage=storage)
        )
    held = held_by_devices(table, [stage.parameters for stage in stages] or [list(storage)], list(storage))
    trained, counters = trained_by(base), counters_of(base)
    devices = programs_of_devices(setting, storage, base, held, trained, counters, memo)
    step = TrainingPrograms(setting, micro, table, devices, storage, tuple(layers), stages)
    if stages:
        return step
    seen = None if watch is None else lambda passed: watch(replace(step, micro=passed.program), passed)
    stored = stored_bytes(setting, storage, storage, trained, micro.inputs)
    return replace(step, micro=apply(setting, micro, seen, fork, stored))
