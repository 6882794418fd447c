"""Programs of variants of a recipe, made fast and exactly: what is alike in layers and in variants is found out once.

Made for prices alone: records and explanations of such a program are those of a model of few layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tpshard.parallelism.program import Program
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.stretch import FEW, stretched
from tpshard.programs import step_programs, training
from tpshard.programs.setting import Setting

STACK = "layers"
"""What every family calls its layers."""


class Variants:
    """Builds the programs of one variant after another; of each kind the last program is kept for the next."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, Program]] = {}

    def build(self, setting: Setting) -> training.TrainingPrograms:
        """The programs of `training.build`. Raises Mistakes for what does not fit."""
        recipe = setting.recipe
        if recipe.pipeline is not None:  # its stages are cut from the records of the whole program
            return training.build(setting)
        passed = replace(recipe.fsdp, bucket="none", prefetch=1, reshard_after_forward=True, memory_limit=None)
        same = (recipe.model, setting.mesh.axes, setting.config)
        whole = repr((*same, recipe.sharding, passed, setting.batch))

        def update(of: Setting, storage: Mapping[str, Layout]) -> Program:
            key = repr((*same, recipe.optimizer, recipe.train.clip_grad_norm, passed, storage))
            return self._made("update", key, lambda: step_programs.update_program(of, storage))

        return training.build(setting, micro=self._made("micro", whole, lambda: micro(setting)), update=update)

    def _made(self, kind: str, key: str, make: Callable[[], Program]) -> Program:
        known, program = self._last.pop(kind, ("", None))
        if program is None or known != key:
            program = make()
        self._last[kind] = (key, program)
        return program


def micro(setting: Setting) -> Program:
    """The micro-batch's program before any pass: where layers are alike from that of a model with few of them."""
    config = setting.config
    with training.traceable(setting):
        if config is not None and config.layers > FEW + 1 and not config.full_layers and not _names_layers(setting):
            shallow = replace(setting, config=replace(config, layers=FEW))
            deep = stretched(step_programs.micro_program(shallow), STACK, config.layers)
            if deep is not None:
                return deep
        return step_programs.micro_program(setting)


def _names_layers(setting: Setting) -> bool:
    """Whether the recipe speaks of single layers; or has programs of its own for gathering and reducing, which are made
    from the records of the whole one."""
    sharding, accumulate = setting.recipe.sharding, setting.recipe.fsdp.accumulate
    told = any(part.isdigit() for name in (*sharding.annotate, *sharding.pin) for part in name.split("."))
    return told or accumulate.gather == "step" or accumulate.reduce == "last"


__all__ = ["Variants", "micro"]
