"""How many layers each stage of a pipeline gets."""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.programs.setting import Setting
from tpshard.recipes.diagnostic import Exit, Mistakes


def layers_of(setting: Setting, blocks: Sequence[str], stages: int) -> list[int]:
    """Layers of each stage: alike, or as `pipeline.split` says. Raises Mistakes (exit 4) with what would fit."""
    recipe, count = setting.recipe, len(blocks)
    asked = recipe.pipeline
    assert asked is not None
    if count < 2:
        raise Mistakes.one(
            "a pipeline needs a model with repeated layers, and this one has none" if not count else
            "a pipeline needs several layers, and this model has one",
            exit=Exit.FIT, where=recipe.where("pipeline"),
            why="stages are cut between modules of a list, as `layers.0`, `layers.1`, ...",
            fix="leave `pipeline` out, or put the model's layers into an nn.ModuleList",
        )  # fmt: skip
    fair = ", ".join(map(str, _fair(count, stages)))
    if asked.split is not None:
        if len(asked.split) == stages and sum(asked.split) == count:
            return list(asked.split)
        raise Mistakes.one(
            f"`pipeline.split` gives {len(asked.split)} stages {sum(asked.split)} layers",
            exit=Exit.FIT, where=recipe.where("pipeline.split"),
            why=f"the model has {count} layers for {stages} stages",
            fix=f"pipeline.split: [{fair}]" if count >= stages else f"at most {count} stages",
        )  # fmt: skip
    if count % stages:
        fits = [str(n) for n in range(2, count + 1) if count % n == 0]
        split = f"; or pipeline.split: [{fair}]" if count > stages else ""
        raise Mistakes.one(
            f"{stages} stages do not divide the {count} layers of the model",
            exit=Exit.FIT, where=recipe.where("pipeline"),
            why=f"{count} = {stages} x {count // stages} + {count % stages}",
            fix=f"{', '.join(fits)} stages (mesh.pp x pipeline.rounds){split}",
        )  # fmt: skip
    return [count // stages] * stages


def _fair(layers: int, stages: int) -> list[int]:
    """As even as can be, the first and the last stage with fewer: they have the embedding and the head as well."""
    each, more = divmod(layers, stages)
    inner = sorted(range(stages), key=lambda i: (i in (0, stages - 1), i))
    return [each + (i in inner[:more]) for i in range(stages)]
