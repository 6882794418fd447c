"""The groups of a recipe's optimizer: parameters with a learning rate or a weight decay of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.diagnostics.patterns import nearest_pick, picks
from tpshard.models.model_spec import ModelSpec
from tpshard.recipes.keys.schema import Recipe

Called = Mapping[str, Sequence[str]]
"""Parameters, each with the names that a recipe may use of it (`ModelSpec.called`)."""


def groups_of(recipe: Recipe, called: Called, whole: bool = True) -> dict[str, tuple[float, float | None]]:
    """(factor of the learning rate, weight decay) of the parameters that are in a group, the last that picks each.
    whole: whether these are all that is trained, so that a pattern that picks none is a mistake (exit 3)."""
    mistakes = idle_groups(recipe, called) if whole else []
    if mistakes:
        raise Mistakes(mistakes)
    groups = recipe.optimizer.groups
    rates = [1.0 if group.lr is None else group.lr / recipe.optimizer.lr for group in groups]
    return {name: (rates[i], groups[i].weight_decay) for name, i in members_of(recipe, called).items()}


def trained_of(recipe: Recipe, spec: ModelSpec) -> Called:
    """The parameters that are trained, of a recipe that has groups; else none."""
    named = spec.called().items() if recipe.optimizer.groups else ()
    return {name: each for name, each in named if name not in spec.frozen}


def members_of(recipe: Recipe, called: Called) -> dict[str, int]:
    """The number of the group of each parameter that is in one: the last that picks it."""
    members: dict[str, int] = {}
    for i, group in enumerate(recipe.optimizer.groups):
        members |= {name: i for pattern in group.match for name in _matching(pattern, called)}
    return members


def _matching(pattern: str, called: Called) -> list[str]:
    return [name for name, each in called.items() if any(picks(pattern, one) for one in each)]


def idle_of(recipe: Recipe, spec: ModelSpec) -> list[Diagnostic]:
    """`idle_groups` of a whole model."""
    named = spec.called() if recipe.optimizer.groups else {}
    trained = {name: each for name, each in named.items() if name not in spec.frozen}
    return idle_groups(recipe, trained, {name: each for name, each in named.items() if name in spec.frozen})


def idle_groups(recipe: Recipe, called: Called, frozen: Called = MappingProxyType({})) -> list[Diagnostic]:
    """The mistakes of groups' patterns that pick no parameter that is trained, and of groups whose parameters are all
    in later ones. called: those that are trained."""
    mistakes, members = [], set(members_of(recipe, called).values())
    for i, group in enumerate(recipe.optimizer.groups):
        idle = [pattern for pattern in group.match if not _matching(pattern, called)]
        for pattern in idle:
            close = nearest_pick(pattern, [one for each in called.values() for one in each])
            fix = f"did you mean `{close}`?" if close else "`tpshard plan` lists the names of parameters"
            where, why = recipe.where(f"optimizer.groups.{i}.match"), "the group would have no effect"
            if _matching(pattern, frozen):
                why = "it is frozen"
                fix = "leave it out of train.freeze, or leave the group out"
                if recipe.adapters.lora is not None:
                    why, fix = "it is frozen beside adapters", "adapters.lora.modules_to_save, or leave the group out"
            message = f"`{pattern}` matches no parameter that is trained"
            mistakes.append(Diagnostic(message, exit=Exit.RECIPE, where=where, why=why, fix=fix))
        if group.match and not idle and i not in members:
            message = f"every parameter of the group `{', '.join(group.match)}` is in a later group"
            where, why = recipe.where(f"optimizer.groups.{i}"), "the last group that matches counts"
            fix = "put it behind the others, or leave it out"
            mistakes.append(Diagnostic(message, exit=Exit.RECIPE, where=where, why=why, fix=fix))
    return mistakes
