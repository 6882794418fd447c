"""The matrices that Muon moves: those of a model's repeated layers, and what a recipe says of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.diagnostics.patterns import nearest_pick, picks
from tpshard.models.layer_stacks import repeated_layers
from tpshard.recipes.keys.schema import Recipe


def matrices_of_layers(
    model: nn.Module, recipe: Recipe, dims: Mapping[str, Sequence[str]], called: Mapping[str, Sequence[str]]
) -> frozenset[str]:
    """The matrices of repeated layers, and stacks of experts' matrices, that require a gradient, by name.

    A table of embeddings is none. `optimizer.orthogonal` of the recipe adds matrices and removes some. dims: the names
    of parameters' dims. called: the names that a recipe may use of them. Raises Mistakes (exit 3) for a pattern that
    matches no matrix, (exit 4) where nothing is left.
    """
    tables = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    matrices = [
        name for name, p in model.named_parameters()
        if p.requires_grad and (p.dim() == 2 or (p.dim() == 3 and "expert" in dims.get(name, ())))
    ]  # fmt: skip
    inside = tuple(f"{path}." for _, layers in repeated_layers(model) for path in layers)
    chosen = {name: name.startswith(inside) and name not in tables for name in matrices}
    mistakes = []
    for pattern, moved in recipe.optimizer.orthogonal.items():
        matching = [name for name in matrices if any(picks(pattern, one) for one in called.get(name, (name,)))]
        chosen |= dict.fromkeys(matching, moved)
        if not matching:
            close = nearest_pick(pattern, matrices)
            mistakes.append(
                Diagnostic(
                    f"`{pattern}` matches no matrix of {type(model).__name__} that is trained", exit=Exit.RECIPE,
                    where=recipe.where(f"optimizer.orthogonal.{pattern}"), why="it would have no effect",
                    fix=f"did you mean {close}?" if close else f"its matrices are {', '.join(matrices[:4])}, ...",
                )
            )  # fmt: skip
    if mistakes:
        raise Mistakes(mistakes)
    names = frozenset(name for name, moved in chosen.items() if moved)
    if not names:
        raise Mistakes.one(
            "`optimizer.name: muon` moves matrices of repeated layers; this model has none", exit=Exit.FIT,
            where=recipe.where("optimizer.name"), fix="adamw, or lion; or name matrices in optimizer.orthogonal",
        )  # fmt: skip
    return names
