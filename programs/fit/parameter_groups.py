"""The groups of a recipe's optimizer: parameters with a learning rate or a weight decay of their own."""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.diagnostics.patterns import covers, nearest
from tpshard.recipes.keys.schema import Recipe


def groups_of(recipe: Recipe, names: Sequence[str], whole: bool = True) -> dict[str, tuple[float, float | None]]:
    """(factor of the learning rate, weight decay) of the parameters `names` that are in a group, the last that covers
    each. whole: whether these are all that is trained, so that a pattern that covers none is a mistake (exit 3)."""
    groups: dict[str, tuple[float, float | None]] = {}
    for group in recipe.optimizer.groups:
        rate = 1.0 if group.lr is None else group.lr / recipe.optimizer.lr
        covered = [name for name in names if any(covers(pattern, name) for pattern in group.match)]
        groups |= dict.fromkeys(covered, (rate, group.weight_decay))
    mistakes = idle_groups(recipe, names) if whole else []
    if mistakes:
        raise Mistakes(mistakes)
    return groups


def idle_groups(recipe: Recipe, names: Sequence[str]) -> list[Diagnostic]:
    """The mistakes of groups' patterns that cover no parameter that is trained. names: those that are."""
    mistakes = []
    for i, group in enumerate(recipe.optimizer.groups):
        for pattern in group.match:
            if not any(covers(pattern, name) for name in names):
                close = nearest(pattern, names, modules=True)
                fix = f"did you mean `{close}`?" if close else "`tpshard plan` lists the names of parameters"
                where, why = recipe.where(f"optimizer.groups.{i}.match"), "the group would have no effect"
                message = f"`{pattern}` matches no parameter that is trained"
                mistakes.append(Diagnostic(message, exit=Exit.RECIPE, where=where, why=why, fix=fix))
    return mistakes
