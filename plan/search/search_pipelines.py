"""Pipelines that the search and the suggestions try, within what a recipe leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tpshard.parallelism.pipeline.schedules import ROUNDS
from tpshard.plan.report.report import Report
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.keys.schema import Recipe

MOST_STAGES = 16
"""The maximal number of pipeline devices that are tried."""
ONCE = ("fsdp.accumulate.gather=step", "fsdp.accumulate.reduce=last")
"""The changes that gather parameters and reduce gradients once per step instead of once per micro-batch."""


def layers_of(recipe: Recipe) -> int:
    """The number of layers for stages; 0 without repeated layers."""
    return Setting.of(recipe, devices_of(recipe)).layers


def sizes(recipe: Recipe, layers: int, devices: int) -> list[int]:
    """Sizes of `mesh.pp` to try on devices shared with the data axes; only the recipe's if it fixes stages."""
    pipeline = recipe.pipeline
    if pipeline is not None and (pipeline.stages is not None or pipeline.split is not None):
        size = recipe.mesh.get("pp", 1)
        return [size] if devices % size == 0 else []
    return [n for n in (2, 4, 8, MOST_STAGES) if n <= layers and devices % n == 0]


def schedules(recipe: Recipe, layers: int, stages: int) -> Iterator[list[str]]:
    """Changes to other schedules than 1f1b, or than the recipe's, for this number of stages."""
    pipeline = recipe.pipeline
    if pipeline is not None and recipe.where("pipeline.schedule").line:
        names: Sequence[str] = [pipeline.schedule] if pipeline.schedule in ROUNDS else []
    else:
        names = ["circular"] if pipeline is not None and pipeline.vectorized else ["interleaved_1f1b", "zero_bubble"]
    fixed = pipeline.rounds if pipeline is not None else None
    for name in names:
        for rounds in [fixed] if fixed is not None else [2, 4, 8] if name in ROUNDS else [None]:
            if stages * (rounds or 1) <= layers:
                yield [f"pipeline.schedule={name}", *([f"pipeline.rounds={rounds}"] if rounds else [])]


def first(recipe: Recipe) -> list[str]:
    """The change to the schedule that is tried first, 1f1b; none if the recipe fixes its schedule."""
    if recipe.pipeline is None:
        return ["pipeline={schedule: 1f1b}"]
    pipeline = recipe.pipeline
    free = pipeline.rounds is None and not pipeline.vectorized and not recipe.where("pipeline.schedule").line
    return ["pipeline.schedule=1f1b"] if free else []


def faster(report: Report, recipe: Recipe) -> Iterator[list[str]]:
    """Edits of a pipeline that may make it faster, the most promising first."""
    priced, pipeline = report.pricing.pipeline, recipe.pipeline
    if priced is None or pipeline is None:
        return
    table, layers = priced.table, sum(stage.layers for stage in priced.stages)
    if pipeline.split is not None and priced.above_mean > 0.02:
        yield ["pipeline.split=null"]
    if priced.bubble > 0.1:
        yield from more_micro_batches(report, recipe)
        if table.schedule in ("1f1b", "gpipe") and 2 * table.devices <= layers and pipeline.split is None:
            yield ["pipeline.schedule=interleaved_1f1b"]
        if table.schedule == "1f1b":
            yield ["pipeline.schedule=zero_bubble"]
        if table.rounds > 1 and 2 * table.stages <= layers and pipeline.split is None:
            yield [f"pipeline.rounds={2 * table.rounds}"]
    if report.pricing.exposed_s > 0.1 * report.pricing.step_s and recipe.fsdp.accumulate.gather != "step":
        yield list(ONCE)


def smaller(report: Report, recipe: Recipe, mesh: Mapping[str, int]) -> Iterator[list[str]]:
    """Edits of a pipeline that reduce memory."""
    priced, fsdp = report.pricing.pipeline, mesh.get("fsdp", 1)
    if priced is None:
        return
    if priced.table.schedule in ("gpipe", "circular"):
        yield ["pipeline.schedule=" + ("1f1b" if priced.table.schedule == "gpipe" else "interleaved_1f1b")]
    yield from more_micro_batches(report, recipe)
    if recipe.pipeline is not None and recipe.pipeline.split is None and fsdp % 2 == 0:
        yield [f"mesh.pp={2 * priced.table.devices}", f"mesh.fsdp={fsdp // 2}"]


def more_micro_batches(report: Report, recipe: Recipe) -> Iterator[list[str]]:
    """The edit to twice as many micro-batches of half the sequences."""
    if report.job.per_device % 2 == 0:
        if recipe.batch.per_device is not None and recipe.pipeline is not None and not recipe.pipeline.micro_batches:
            yield [f"batch.per_device={report.job.per_device // 2}"]
        else:
            yield [f"pipeline.micro_batches={2 * report.job.micro_batches}"]
