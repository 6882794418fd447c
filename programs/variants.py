"""Building the programs of a recipe's variants quickly and exactly: equal layers and equal parts are built once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace

from tpshard.parallelism.program import Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs import staged_alike, step_programs, training
from tpshard.programs.alike import micro
from tpshard.programs.setting import Setting

GARBAGE = 50_000
"""Nodes of earlier variants' programs, up to which these stay in memory: a graph's nodes refer to each other, so that
only the garbage collector frees them, which planning turns off. They take about half a gigabyte."""


class Variants:
    """Builds the programs of one variant after another, and keeps the last two programs of each kind for reuse."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Program]] = {}
        self._dropped = 0

    def for_prices(self, setting: Setting) -> training.TrainingPrograms:
        """The programs of `build` as far as prices need them: equal stages of a pipeline share theirs."""
        if self._dropped > GARBAGE:
            gc.collect()
            self._dropped = 0
        staged = staged_alike.build(setting) if setting.recipe.staged else None
        built = self.build(setting) if staged is None else training.of_stages(setting, *staged)
        self._dropped += len(built.micro.graph.nodes)
        return built

    def build(self, setting: Setting) -> training.TrainingPrograms:
        """Builds the programs of a setting as `training.build` does, but reuses those of earlier variants. Raises
        Mistakes for what does not fit.
        """
        recipe = setting.recipe
        if setting.stacking is not None or recipe.staged:
            return training.build(setting)
        fsdp = replace(
            recipe.fsdp, bucket="none", wrap=(), prefetch=1, reshard_after_forward=True, memory_limit=None,
            accumulate=replace(recipe.fsdp.accumulate, gather="microbatch", reduce="each"),
        )  # fmt: skip
        same = (recipe.model, setting.mesh.axes, setting.config, fsdp)
        whole = repr((*same, recipe.sharding, setting.batch.per_device, setting.batch.data_ranks))

        def make(
            setting: Setting, base: Program | None = None, *, gathered: bool = False, unreduced: bool = False
        ) -> Program:
            if base is None:
                return self._program("micro", whole, lambda: micro(setting))
            kind = f"micro, gathered {gathered}, unreduced {unreduced}"
            return self._program(kind, whole, lambda: micro(setting, base, gathered=gathered, unreduced=unreduced))

        def update(of: Setting, storage: Mapping[str, Layout]) -> Program:
            key = repr((*same, recipe.optimizer, recipe.train.clip_grad_norm, storage))
            return self._program("update", key, lambda: step_programs.update_program(of, storage))

        return training.build(setting, make=make, update=update)

    def _program(self, kind: str, key: str, make: Callable[[], Program]) -> Program:
        """The program of a kind under a key, which is built unless it is one of the last two."""
        last = self._last.setdefault(kind, {})
        program = last.pop(key, None)
        if program is None:
            while len(last) > 1:  # before building: these are large
                del last[next(iter(last))]
            program = make()
        last[key] = program
        return program


__all__ = ["Variants"]
