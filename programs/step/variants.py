"""Builds the programs of a recipe's variants quickly and exactly: equal layers and equal parts are built once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from tpshard.programs.parts.memo import Memo
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import few_layers, training
from tpshard.programs.step.training_step import TrainingPrograms

GARBAGE, MOST_GARBAGE = 50_000, 250_000
"""How many graph nodes of dropped programs may wait for garbage collection: up to the first number always, up to the
second while more than half of the machine's memory is available. A graph's nodes refer to each other, so that only the
garbage collector frees them, which planning turns off and which takes as long as making them. The first number of nodes
takes about half a gigabyte."""


@contextmanager
def without_older() -> Iterator[None]:
    """A context in which garbage collection skips the objects that exist when the context begins.

    Collection must be off in it, or the next allocation would walk over all that was made since.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _half_is_available() -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available > memory.total / 2)


class Variants:
    """Builds the programs of one variant after another, and keeps what later ones may share."""

    def __init__(self, fork: bool = False) -> None:
        """fork: whether a second process may price what decides about them (`ahead`)."""
        self.fork = fork
        self.memo = Memo()
        self._dropped = 0

    def for_prices(self, setting: Setting) -> TrainingPrograms:
        """Builds the programs of a setting for pricing only: equal stages of a pipeline share one program."""
        if self._dropped > GARBAGE and (self._dropped > MOST_GARBAGE or not _half_is_available()):
            gc.collect()
            self._dropped = 0
        staged = few_layers.priced_stages(setting, self.memo) if setting.recipe.staged else None
        built = self.build(setting) if staged is None else staged
        programs = [built.micro, *(program for stage in built.stages for program in stage.programs)]
        self._dropped += sum(len(graph.nodes) for graph in {program.graph for program in programs})
        return built

    def build(self, setting: Setting) -> TrainingPrograms:
        """Builds the programs of a setting as `training.build` does, but reuses those of earlier variants. Raises
        Mistakes for what does not fit.
        """
        return training.build(setting, memo=self.memo, fork=self.fork)
