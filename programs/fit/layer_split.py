"""Checks whether a pipeline's stages can have the layers that its recipe gives them. Does not import torch."""

from __future__ import annotations

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, plural
from tpshard.recipes.keys.schema import Recipe


def split_misfit(recipe: Recipe, count: int, stages: int) -> Diagnostic | None:
    """The mistake (exit 4) where `stages` stages do not fit `count` layers, or `pipeline.split` does not fit both."""
    assert recipe.pipeline is not None
    split, fit = recipe.pipeline.split, f"at most {count} stages (mesh.pp x pipeline.rounds)"
    if split is not None and (len(split) != stages or sum(split) != count):
        fair = ", ".join(map(str, fair_split(count, stages)))
        return Diagnostic(
            f"`pipeline.split` has {plural(sum(split), 'layer')} in "
            f"{plural(len(split), 'stage')}",
            exit=Exit.FIT, where=recipe.where("pipeline.split"),
            why=f"the model has {count} layers for {stages} stages",
            fix=f"pipeline.split: [{fair}], or leave it out" if count >= stages else fit,
        )  # fmt: skip
    if count < stages:
        return Diagnostic(
            f"{stages} stages are more than the {count} layers of the model",
            exit=Exit.FIT, where=recipe.where("pipeline"), why="every stage has at least one layer", fix=fit,
        )  # fmt: skip
    return None


def fair_split(layers: int, stages: int) -> list[int]:
    """An even split, with fewer layers in the first and last stage, which also have the embedding and the head."""
    each, more = divmod(layers, stages)
    inner = sorted(range(stages), key=lambda i: (i in (0, stages - 1), i))
    return [each + (i in inner[:more]) for i in range(stages)]
