"""Builds the micro-batch's program of a deep model by repeating an equal block of the program of a shallow one."""

from __future__ import annotations

from tpshard.parallelism.partitioning.stretch import stretch_program
from tpshard.parallelism.program import Program
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.checks import traceable
from tpshard.programs.parts.memo import Memo
from tpshard.programs.setting.setting import Setting

FEWEST = 3
"""The smallest number of repetitions of a block (`Depth.copies`) for which a shallow model is built instead."""


def micro(setting: Setting, base: Program | None = None, memo: Memo | None = None) -> Program:
    """Builds the micro-batch's program: from that of a shallow model if its blocks are equal, else from all layers.

    base: as in `step_programs.micro_program`. memo: keeps the program; callers must not change it.
    """
    memo = memo or Memo()

    def make() -> Program:
        few, depth = few_layers(setting, base, memo), setting.depth
        if few is not None and depth is not None:
            deep = stretch_program(few, depth)
            if deep is not None:
                return deep
        return step_programs.micro_program(setting, base, memo=memo)

    return memo.of("micro-batch", setting, make, *_once(setting, base))


def few_layers(setting: Setting, base: Program | None = None, memo: Memo | None = None) -> Program | None:
    """The micro-batch's program of the same model with few layers; None if that saves nothing or layers may differ.

    memo: keeps the program; callers must not change it.
    """
    depth, pipeline = setting.depth, setting.recipe.pipeline
    if depth is None or depth.copies < FEWEST or _names_layers(setting):
        return None
    if pipeline is not None and pipeline.vectorized:  # its layers are stacked
        return None
    shallow = setting.keep(depth.stack, depth.kept)
    memo = memo or Memo()

    def make() -> Program:
        with traceable(setting):
            return step_programs.micro_program(shallow, base, memo=memo)

    return memo.of("micro-batch of few layers", shallow, make, *_once(shallow, base))


def _once(setting: Setting, base: Program | None) -> tuple[object, ...]:
    """What is done once for all micro-batches, with the layouts in `base` on which a program then depends."""
    if base is None:
        return ()
    names = [f"{name}.{form}" for form in ("used", "grad") for name, _ in setting.model.named_parameters()]
    layouts = [base.records[name].layout for name in names if name in base.records]
    return setting.gathers_once, setting.reduces_once, layouts


def _names_layers(setting: Setting) -> bool:
    """Whether the recipe names single layers, such as `layers.3`."""
    sharding = setting.recipe.sharding
    return any(part.isdigit() for name in (*sharding.annotate, *sharding.pin) for part in name.split("."))
