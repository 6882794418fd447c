"""Divides a step's sequences among data ranks, and each rank's among micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, join, plural
from tpshard.recipes.keys.parallel_keys import Pipeline
from tpshard.recipes.keys.schema import Recipe

MOST_BY_DEFAULT = 8
FILLING = 4
"""Default micro-batches per device of a pipeline; the bubble is then less than a fifth of the step."""


@dataclass(frozen=True)
class BatchPlan:
    """The division of a step's sequences: `global_sequences` = `data_ranks` x `micro_batches` x `per_device`."""

    global_sequences: int
    data_ranks: int
    per_device: int

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes per step, over which gradients are summed."""
        return self.global_sequences // (self.data_ranks * self.per_device)

    @property
    def sequences_each(self) -> int:
        """Sequences per step of one data rank."""
        return self.global_sequences // self.data_ranks

    def at_once(self) -> BatchPlan:
        """The plan in which a data rank computes all its sequences of a step in one forward and backward pass."""
        return replace(self, per_device=self.sequences_each)

    def rows(self, data_rank: int) -> range:
        """The rows of each global step that this data rank reads: contiguous, to open the fewest files."""
        return range(data_rank * self.sequences_each, (data_rank + 1) * self.sequences_each)

    def __str__(self) -> str:
        sequences, ranks = plural(self.global_sequences, "sequence"), plural(self.data_ranks, "data rank")
        return f"{sequences} a step = {ranks} x {plural(self.micro_batches, 'micro-batch')} of {self.per_device}"


def derive(recipe: Recipe, data_ranks: int, stages: int = 1) -> BatchPlan:
    """Divides a step's sequences among data ranks and micro-batches. stages: devices of the pipeline.

    Without `batch.per_device` a micro-batch is the largest divisor of a data rank's sequences up to 8. In a pipeline
    there are `pipeline.micro_batches` of them, or as few as give at least four per device.

    Raises:
        Mistakes: exit 4; the sequences are not divisible.
    """
    if misfit := batch_misfit(recipe, data_ranks):
        raise Mistakes([misfit])
    total, per_device = recipe.batch.global_sequences, recipe.batch.per_device
    each = total // data_ranks
    if recipe.pipeline is not None and (recipe.pipeline.micro_batches is not None or per_device is None):
        return _in_pipeline(recipe, BatchPlan(total, data_ranks, each), stages)
    if per_device is None:
        return BatchPlan(total, data_ranks, max(n for n in _divisors(each) if n <= MOST_BY_DEFAULT))
    return BatchPlan(total, data_ranks, per_device)


def batch_misfit(recipe: Recipe, data_ranks: int) -> Diagnostic | None:
    """The mistake (exit 4) where a step's sequences do not divide among data ranks into whole micro-batches."""
    total, per_device = recipe.batch.global_sequences, recipe.batch.per_device
    each, left = divmod(total, data_ranks)
    if left:
        below = each * data_ranks
        return Diagnostic(
            f"{total} sequences per step do not divide evenly among {data_ranks} data ranks",
            exit=Exit.FIT,
            where=recipe.where("batch.global_sequences"),
            why=f"{total} = {each} x {data_ranks} + {left}",
            fix=f"batch.global_sequences: {join(str(n) for n in (below, below + data_ranks) if n)}",
        )
    if per_device is not None and each % per_device:
        legal = sorted(_divisors(each), key=lambda n: abs(n - per_device))
        return Diagnostic(
            f"{each} sequences per step and device are not divisible into micro-batches of {per_device}",
            exit=Exit.FIT,
            where=recipe.where("batch.per_device"),
            why=f"{total} / {data_ranks} data ranks = {each}",
            fix=f"batch.per_device: {join(map(str, sorted(legal[:4])))}",
        )
    return None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _in_pipeline(recipe: Recipe, whole: BatchPlan, devices: int) -> BatchPlan:
    """Divides each data rank's sequences of `whole` into as many micro-batches as the recipe or the pipeline needs."""
    pipeline, each = recipe.pipeline, whole.sequences_each
    assert pipeline is not None
    micros, per_device = pipeline.micro_batches, recipe.batch.per_device
    if micros is None:
        few = [n for n in _divisors(each) if n <= MOST_BY_DEFAULT]
        fits = [n for n in few if not pipeline_refusal(pipeline, devices, each // n)]
        full = [n for n in fits if each // n >= FILLING * devices]
        return replace(whole, per_device=max(full) if full else fits[0] if fits else 1)
    if each % micros or (per_device is not None and per_device * micros != each):
        near = ", ".join(map(str, sorted(_divisors(each), key=lambda n: (abs(n - micros), n))[:3]))
        limit_text = f" of `batch.per_device: {per_device}`" if per_device is not None else ""
        raise Mistakes.one(
            f"`pipeline.micro_batches: {micros}`{limit_text} do not divide the {each} sequences of a data rank",
            exit=Exit.FIT,
            where=recipe.where("pipeline.micro_batches"),
            why=f"{plural(whole.global_sequences, 'sequence')} over {plural(whole.data_ranks, 'data rank')}",
            fix=f"micro_batches {near}" + (", and leave batch.per_device out" if per_device is not None else ""),
        )
    return replace(whole, per_device=each // micros)


def pipeline_refusal(pipeline: Pipeline, devices: int, micro_batches: int) -> str:
    """Why a recipe's pipeline does not support a number of micro-batches; "" if it does."""
    from tpshard.parallelism.pipeline.schedules import refusal  # which most recipes need not

    return refusal(pipeline.schedule, devices, micro_batches, pipeline.stages_per_device, pipeline.vectorized)


def check_micro_batches(recipe: Recipe, plan: BatchPlan, devices: int) -> None:
    """Raises Mistakes (exit 4) where the pipeline's schedule does not support the number of micro-batches."""
    pipeline, each = recipe.pipeline, plan.sequences_each
    assert pipeline is not None
    if why := pipeline_refusal(pipeline, devices, plan.micro_batches):
        key = "pipeline.micro_batches" if pipeline.micro_batches is not None else "batch"
        fits = [n for n in _divisors(each) if not pipeline_refusal(pipeline, devices, n)]
        smallest_fits = ", ".join(map(str, fits[:4]))
        raise Mistakes.one(
            why, exit=Exit.FIT, where=recipe.where(key),
            why=f"{plural(each, 'sequence')} of a data rank are "
            f"{plural(plan.micro_batches, 'micro-batch')} of {plan.per_device}",
            fix=f"pipeline.micro_batches: {smallest_fits}" if fits else "more batch.global_sequences, or fewer stages",
        )  # fmt: skip
