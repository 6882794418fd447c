"""The passes that turn a partitioned step into the one that runs, in the paper's order (SimpleFSDP, section 4).

A pass is one file in `parallelism/passes`, and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from tpshard.parallelism.passes.accumulate import accumulate
from tpshard.parallelism.passes.bucket import bucket
from tpshard.parallelism.passes.gather_late import gather_late
from tpshard.parallelism.passes.hoist_gradients import hoist_gradients
from tpshard.parallelism.passes.offload import offload_saved
from tpshard.parallelism.passes.overlap_exchanges import overlap_exchanges
from tpshard.parallelism.passes.prefetch import prefetch
from tpshard.parallelism.passes.recompute import recompute
from tpshard.parallelism.passes.reduce_early import reduce_early
from tpshard.parallelism.passes.run import Pass, Watch, run
from tpshard.parallelism.passes.simplify import simplify
from tpshard.parallelism.passes.sink_waits import sink_waits
from tpshard.parallelism.passes.wait_late import wait_late
from tpshard.parallelism.program import Program
from tpshard.programs.parts.pass_choices import Choices, Chooser, choose, keep_of
from tpshard.programs.setting.setting import Setting

FEWER: tuple[Pass, ...] = (simplify, accumulate)
"""The passes without settings, which remove operations."""


def passes(setting: Setting, chosen: Choices) -> list[Pass]:
    """The passes of a recipe, with the choices that it leaves open."""
    return [*saving(setting, chosen.reshard_after_forward), *FEWER, *scheduling(setting, chosen)]


def saving(setting: Setting, reshard_after_forward: bool) -> list[Pass]:
    """The passes that decide what the backward pass finds saved, and where."""
    where = setting.recipe.offload
    first = None if isinstance(where, str) else where.first
    moved = [partial(offload_saved, first=first)] if where != "none" else []
    return [remat(setting, reshard_after_forward), *moved]


def remat(setting: Setting, reshard_after_forward: bool) -> Pass:
    return partial(
        recompute, keep=keep_of(setting), reshard_after_forward=reshard_after_forward, cut=setting.recipe.staged
    )


def scheduling(setting: Setting, chosen: Choices) -> list[Pass]:
    """The passes that move communication, for a step or for each part of a step in stages."""
    return [
        partial(bucket, groups=chosen.buckets),
        hoist_gradients,
        *([overlap_exchanges] if setting.recipe.sharding.overlap else []),
        wait_late,
        gather_late,
        partial(prefetch, units=setting.recipe.fsdp.prefetch),
        reduce_early,
        sink_waits,
    ]


def apply(
    setting: Setting, program: Program, watch: Watch | None = None, fork: bool = False,
    stored: Mapping[str, int] | None = None,
) -> Program:  # fmt: skip
    """Applies all passes to a partitioned program; returns the one that runs. watch: sees the result of each pass.
    fork, stored: as for `Chooser`."""

    @cache
    def with_remat(reshard_after_forward: bool) -> Program:
        return run([*saving(setting, reshard_after_forward), *FEWER], program)

    @cache
    def program_with(chosen: Choices) -> Program:
        return run(scheduling(setting, chosen), with_remat(chosen.reshard_after_forward))

    chosen = choose(Chooser(setting, fork, stored), with_remat, program_with)
    return program_with(chosen) if watch is None else run(passes(setting, chosen), program, watch)
