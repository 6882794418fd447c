"""The dim names of a model's parameters, and notes for the user on how the model is treated."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, plural
from tpshard.diagnostics.patterns import matches, nearest
from tpshard.kernels.dtypes import dtype_name
from tpshard.models.dims import STAGE, Naming
from tpshard.models.model_spec import ModelSpec
from tpshard.recipes.keys.schema import Recipe

_SHOWN = 4


def dim_names(recipe: Recipe, model: nn.Module, spec: ModelSpec) -> dict[str, Naming]:
    """The dim names of parameters: the model's own, overridden by the recipe's `model.dims`. Parameters without names
    are left to propagation.

    Raises Mistakes (exit 3) for a pattern that matches no parameter or has another number of dims.
    """
    namings = spec.dims(model)
    parameters = dict(model.named_parameters())
    mistakes: list[Diagnostic] = []
    for pattern, dims in recipe.model.dims.items():
        path = f"model.dims.{pattern}"
        matching = [name for name in parameters if matches(pattern, name)]
        if not matching:
            close = nearest(pattern, parameters, modules=False)
            mistakes.append(
                Diagnostic(
                    f"`{pattern}` matches no parameter of {type(model).__name__}",
                    exit=Exit.RECIPE,
                    where=recipe.where(path),
                    why="the names would have no effect",
                    fix=f"did you mean {close}?" if close else f"its parameters are {_some(_patterns(parameters))}",
                )
            )
        wrong = next((name for name in matching if parameters[name].dim() != len(dims)), None)
        if wrong is not None:
            mistakes.append(
                Diagnostic(
                    f"`{pattern}` names {plural(len(dims), 'dim')}, and `{wrong}` has "
                    f"{parameters[wrong].dim()}: {list(parameters[wrong].shape)}",
                    exit=Exit.RECIPE,
                    where=recipe.where(path),
                    fix=f"one name for each of its {parameters[wrong].dim()} dims, or null for one left to propagation",
                )
            )
        namings |= {name: Naming(tuple(d or "" for d in dims), f"a dim by {recipe.where(path)}") for name in matching}
    if mistakes:
        raise Mistakes(mistakes)
    return namings


def notes(spec: ModelSpec, model: nn.Module, named: Mapping[str, Naming]) -> list[str]:
    """Notes: the class that computes, differences from its original training, and the parameters left to
    propagation."""
    name = type(model).__name__
    sentences = [f"{spec.instead}: transformers' {name} computes it"] if spec.instead else []
    sentences += spec.notes(model)
    unnamed = {"", STAGE}
    free = _patterns([n for n, _ in model.named_parameters() if unnamed.issuperset(named.get(n, Naming((), "")).dims)])
    if free:
        sentences.append(
            f"nothing names the dims of {_some(free)} of {name}: their shardings are inferred (model.dims)"
        )
    return sentences


def dtype_notes(own: Mapping[str, torch.dtype], dtype: torch.dtype, model: str) -> list[str]:
    """A note for each dtype of parameters that are used in another one than the model's `dtype`."""
    return [
        f"{model} keeps {_some(_patterns([n for n, one in own.items() if one == kind]))} in {dtype_name(kind)}: "
        f"they are not used in {dtype_name(dtype)}"
        for kind in dict.fromkeys(own.values())
    ]


def untrained_notes(model: nn.Module, trained: Collection[str]) -> list[str]:
    """A note on the parameters that require a gradient and get none, if there are any. trained: those that get one."""
    left = _patterns([n for n, p in model.named_parameters() if p.requires_grad and n not in trained])
    return [f"no gradient reaches {_some(left)}: they stay as they are, without decay"] if left else []


def _patterns(names: Sequence[str] | Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
