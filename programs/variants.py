"""Building the programs of a recipe's variants quickly and exactly: equal layers and equal parts are built once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tpshard.parallelism.program import Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs import staged_alike, step_programs, training
from tpshard.programs.alike import micro
from tpshard.programs.setting import Setting


class Variants:
    """Builds the programs of one variant after another, and keeps the last program of each kind for reuse."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, Program]] = {}

    def build(self, setting: Setting) -> training.TrainingPrograms:
        """The programs of `training.build`. Raises Mistakes for what does not fit."""
        recipe = setting.recipe
        passed = replace(recipe.fsdp, bucket="none", prefetch=1, reshard_after_forward=True, memory_limit=None)
        same = (recipe.model, setting.mesh.axes, setting.config)
        whole = repr((*same, recipe.sharding, passed, setting.batch.per_device, setting.batch.data_ranks))

        if setting.stacking is not None:
            return training.build(setting)
        if recipe.staged:
            staged = staged_alike.build(setting)
            return training.build(setting) if staged is None else training.of_stages(setting, *staged)

        def make(
            setting: Setting, base: Program | None = None, *, gathered: bool = False, unreduced: bool = False
        ) -> Program:
            if base is None:
                return self._made("micro", whole, lambda: micro(setting))
            kind = f"micro, gathered {gathered}, unreduced {unreduced}"
            return self._made(kind, whole, lambda: micro(setting, base, gathered=gathered, unreduced=unreduced))

        def update(of: Setting, storage: Mapping[str, Layout]) -> Program:
            key = repr((*same, recipe.optimizer, recipe.train.clip_grad_norm, passed, storage))
            return self._made("update", key, lambda: step_programs.update_program(of, storage))

        return training.build(setting, make=make, update=update)

    def _made(self, kind: str, key: str, make: Callable[[], Program]) -> Program:
        last_key, program = self._last.pop(kind, ("", None))
        if program is None or last_key != key:
            program = make()
        self._last[kind] = (key, program)
        return program


__all__ = ["Variants"]
