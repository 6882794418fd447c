"""The programs of a training run: one micro-batch, one optimizer update, one evaluation batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tpshard.models import counts
from tpshard.parallelism.passes.run import PassResult
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs.parts.checks import check_remat, check_reshards, traceable
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.passes import apply
from tpshard.programs.parts.step_programs import (
    MicroMaker,
    evaluate_program,
    gather_program,
    reduce_program,
    stored_ports,
    trained_by,
    update_program,
)
from tpshard.programs.setting.cluster import check_fp8
from tpshard.programs.setting.naming import untrained_notes
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import alike, staged
from tpshard.programs.step.staged import StagedPrograms


@dataclass
class TrainingPrograms:
    """The programs of a run.

    `micro`: (parameters, gradient sums, batch, a seed if the model draws random numbers) -> (loss sum, token count, new
    gradient sums (donated), counters if any). `update`: (trained parameters, gradient sums, moments, loss sum, count,
    lr, number of the update) -> (new parameters and moments (donated), gradient norm, whether all is finite).
    `evaluate`: (parameters, batch) -> (loss sum, token count). Gradient sums and moments are those of trained
    parameters.
    """

    setting: Setting
    micro: Program
    update: Program
    """In a pipeline, the update of its first device."""
    storage: dict[str, Layout]
    """The stored layout of each parameter, its summed gradient and its moments."""
    gather: Program | None = None
    """`accumulate.gather: step`: stored parameters -> gathered ones, which are then the inputs of `micro`."""
    reduce: Program | None = None
    """`accumulate.reduce: last`: the unreduced sums that `micro` leaves -> stored sums."""
    pipeline: StagedPrograms | None = None
    """The programs that run instead where the model is in stages; `micro` is then the program they are cut from."""

    @cached_property
    def evaluate(self) -> Program:
        """The evaluation program, built on first use, because a plan of the training step does not need it."""
        return apply(self.setting, evaluate_program(self.setting, self.storage))

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of all that a run executes. They must be equal on all ranks, or ranks would wait forever."""
        storage = hashlib.sha256(repr(sorted(self.storage.items())).encode()).hexdigest()
        stored = {"layouts of what is stored": storage}
        if self.pipeline is not None:
            return self.pipeline.fingerprints | stored
        programs = {"a micro-batch": self.micro, "an update": self.update, "an evaluation": self.evaluate,
                    "gathering": self.gather, "reducing": self.reduce}  # fmt: skip
        built = {role: program for role, program in programs.items() if program is not None}
        return {f"program of {role}": program.fingerprint for role, program in built.items()} | stored

    @cached_property
    def counted(self) -> dict[str, int]:
        """The model's counters in the order of the last output of `micro`, with their number of values."""
        return counts.declared_counters(self.setting.model)

    @property
    def names(self) -> list[str]:
        """The parameters in the order of the programs' inputs."""
        return list(self.storage)

    @property
    def trained(self) -> list[str]:
        """The parameters that steps change, in the order of the programs' inputs: only they have a gradient and
        moments."""
        return trained_by(self.micro)

    @cached_property
    def stored(self) -> list[Port]:
        """The stored parameters, trained or not."""
        return stored_ports(self.setting, self.storage, self.names)


def build(
    setting: Setting, watch: Callable[[TrainingPrograms, PassResult], None] | None = None,
    make: MicroMaker | None = None, memo: Memo | None = None,
) -> TrainingPrograms:  # fmt: skip
    """Captures, propagates and partitions all programs of a training recipe. Raises Mistakes for what does not fit.

    watch: called after each pass on the micro-batch's program, with all programs and that pass's result. make: builds
    the micro-batch's program, by default `alike.micro`. memo: keeps what other settings may share.
    """
    check_fp8(setting.recipe)
    memo = memo or Memo()
    make = make or partial(alike.micro, memo=memo)
    if setting.recipe.staged:
        return of_stages(setting, *staged.build(setting, make, memo))
    with traceable(setting):
        micro = make(setting, None)
    storage = {p.name: p.layout for p in micro.inputs if p.kind == "parameter"}
    trained = trained_by(micro)
    updating = update_program(setting, storage, trained, memo)
    gather = reduce = None
    if setting.batch.micro_batches > 1 and (setting.gathers_once or setting.reduces_once):
        if setting.gathers_once:
            gather = gather_program(setting, micro, storage, memo=memo)
        if setting.reduces_once:
            reduce = reduce_program(setting, micro, storage, trained, memo)
        micro = make(setting, micro)
    notes = [*setting.notes, *untrained_notes(setting.model, trained)]
    check_remat(setting, micro)
    micro = replace(micro, warnings=[*notes, *micro.warnings, *check_reshards(setting, micro)])

    def programs(micro: Program) -> TrainingPrograms:
        return TrainingPrograms(setting, micro, updating, storage, gather, reduce)

    if watch is None:
        return programs(apply(setting, micro))
    return programs(apply(setting, micro, lambda passed: watch(programs(passed.program), passed)))


def of_stages(setting: Setting, whole: Program, pipeline: StagedPrograms) -> TrainingPrograms:
    """The programs of a run in stages. whole: the micro-batch's program that the stages were cut from."""
    return TrainingPrograms(setting, whole, pipeline.devices[0].update, dict(pipeline.storage), pipeline=pipeline)
