"""The programs of a training run: one micro-batch, one optimizer update, one evaluation batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tpshard.models import counts
from tpshard.parallelism.passes.run import Passed
from tpshard.parallelism.program import Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs import staged
from tpshard.programs.checks import check_reshards, traceable
from tpshard.programs.passes import apply
from tpshard.programs.setting import Setting
from tpshard.programs.staged import StagedPrograms
from tpshard.programs.step_programs import (
    MicroMaker,
    evaluate_program,
    gather_program,
    micro_program,
    reduce_program,
    update_program,
)


@dataclass
class TrainingPrograms:
    """What a run executes, step after step.

    `micro`: parameters, gradient sums, batch, and a seed where the model draws random numbers -> loss sum, token count,
    new gradient sums (donated), and what the model counted, where it counts something.
    `update`: parameters, gradient sums, both moments, loss sum, count, lr, number of the update -> new parameters and
    moments (donated), gradient norm, whether all was finite. `evaluate`: parameters, batch -> loss sum, token count.
    """

    setting: Setting
    micro: Program
    update: Program
    """In a pipeline that of its first device."""
    storage: dict[str, Layout]
    """Per parameter how it, its summed gradient and its moments lie at rest."""
    gather: Program | None = None
    """`accumulate.gather: step`: stored parameters -> used ones, which then are what `micro` takes."""
    reduce: Program | None = None
    """`accumulate.reduce: last`: the sums, unsharded and unreduced, as `micro` leaves them -> stored sums."""
    pipeline: StagedPrograms | None = None
    """What runs in place of all these where the model is cut into stages; `micro` then is what they are cut out of."""

    @cached_property
    def evaluate(self) -> Program:
        """Made when it is first asked for: a plan of the training step does without."""
        return apply(self.setting, evaluate_program(self.setting, self.storage))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of everything that a run executes: equal on all ranks, or they would wait for each other for ever."""
        if self.pipeline is not None:
            return self.pipeline.fingerprints
        made = {"a micro-batch": self.micro, "an update": self.update, "an evaluation": self.evaluate}
        return {f"program of {what}": program.fingerprint for what, program in made.items()}

    @cached_property
    def counted(self) -> dict[str, int]:
        """What the model counts, in the order of the last output of `micro`, and how many numbers each is."""
        return counts.declared(self.setting.model)

    @property
    def names(self) -> list[str]:
        """Parameters, in the order of the programs' inputs."""
        return [p.name for p in self.micro.inputs if p.kind == "parameter"]


def build(
    setting: Setting, watch: Callable[[TrainingPrograms, Passed], None] | None = None,
    make: MicroMaker | None = None, update: Callable[[Setting, Mapping[str, Layout]], Program] | None = None,
) -> TrainingPrograms:  # fmt: skip
    """Captures, propagates and partitions all programs of a training recipe. Raises Mistakes for what does not fit.

    `watch` sees the programs with the micro-batch's as each pass leaves it. `make` and `update` make programs otherwise
    than `micro_program` and `update_program`, where the model is not in stages.
    """
    make = make or micro_program
    if setting.recipe.pipeline is not None:
        return of_stages(setting, *staged.build(setting))
    with traceable(setting):
        micro = make(setting)
    storage = {p.name: p.layout for p in micro.inputs if p.kind == "parameter"}
    updating = (update or update_program)(setting, storage)
    accumulate = setting.recipe.fsdp.accumulate
    several = setting.batch.micro_batches > 1
    gather = reduce = None
    if several and accumulate.gather == "step":
        gather = apply(setting, gather_program(setting, micro, storage))
    if several and accumulate.reduce == "last":
        reduce = apply(setting, reduce_program(setting, micro, storage))
    if gather is not None or reduce is not None:
        micro = make(setting, micro, gathered=gather is not None, unreduced=reduce is not None)
    check_reshards(setting, (micro,))
    micro = replace(micro, warnings=[*micro.warnings, *setting.notes])

    def programs(micro: Program) -> TrainingPrograms:
        return TrainingPrograms(setting, micro, updating, storage, gather, reduce)

    if watch is None:
        return programs(apply(setting, micro))
    return programs(apply(setting, micro, lambda passed: watch(programs(passed.program), passed)))


def of_stages(setting: Setting, whole: Program, pipeline: StagedPrograms) -> TrainingPrograms:
    """The programs of a run whose model is cut into stages, out of `whole`."""
    return TrainingPrograms(setting, whole, pipeline.devices[0].update, dict(pipeline.storage), pipeline=pipeline)


__all__ = ["TrainingPrograms", "build"]
