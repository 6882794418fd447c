"""How a user's module says by which values its parameters begin: by functions (`init_functions`) or by `initial_std`.

Both are mappings on any module above a parameter, as `dims` is:

    self.init_functions = {"embed.weight": partial(nn.init.trunc_normal_, std=0.02)}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.models.construct import Unset
from tpshard.models.dims import declared, declared_by_parameter

Function = Callable[[Tensor], Any]
"""Fills a tensor in place, as those of `torch.nn.init` do, or returns the values."""


def functions(model: nn.Module) -> dict[str, Function]:
    """The functions that a model's modules name in `init_functions`, by parameter."""
    return declared_by_parameter(model, "init_functions")


def spreads(model: nn.Module) -> dict[str, float]:
    """The standard deviations that a model's modules name in `initial_std`, by parameter."""
    return declared_by_parameter(model, "initial_std")


def value(function: Function, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The values that a function gives a parameter, fp32, with random numbers from `seed`.

    Raises Unset if it sets only some of them, and ValueError if it makes another shape or values that are not finite.
    """
    empty = torch.full(tuple(shape), math.nan)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        values = _called(function, empty)
    missing = int(values.isnan().sum())
    if missing:
        raise Unset(f"`init_functions` sets {values.numel() - missing} of the {values.numel()} values of `{name}`")
    if not values.isfinite().all():
        raise Unset(f"`init_functions` gives `{name}` values that are not finite")
    return values


def check(model: nn.Module, path: str) -> None:
    """ValueError lists what in `init_functions` and `initial_std` names no parameter or is no function or spread.

    Functions are tried on tensors without storage, so that a wrong argument is found before anything runs.
    """
    wrong = []
    for module_path, module in model.named_modules():
        for attribute in ("init_functions", "initial_std"):
            named = getattr(module, attribute, None)
            if named is not None and not isinstance(named, Mapping):
                wrong.append(f"`{module_path + '.' if module_path else ''}{attribute}` is not a map of parameters")
    if wrong:
        raise ValueError(f"`module: {path}`: {'; '.join(wrong)}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    both = {
        attribute: declared(model, attribute, remove_duplicate=False) for attribute in ("init_functions", "initial_std")
    }
    for attribute, named in both.items():
        wrong += [f"`{name}` has {attribute} and is no parameter" for name in named if name not in parameters]
    wrong += [
        f"`{name}` has both init_functions and initial_std"
        for name in both["init_functions"].keys() & both["initial_std"].keys()
    ]
    for name, std in both["initial_std"].items():
        if isinstance(std, bool) or not isinstance(std, int | float) or not 0 <= std < math.inf:
            wrong.append(f"initial_std of `{name}` is not a number of at least 0: {std!r}")
    for name, function in both["init_functions"].items():
        if name in parameters and (why := _misfit(function, parameters[name])):
            wrong.append(f"the function of `{name}` in init_functions {why}")
    if wrong:
        raise ValueError(f"`module: {path}`: {'; '.join(wrong)}")


def _misfit(function: Any, parameter: Tensor) -> str:
    if not callable(function):
        return f"is no function of a tensor: {function!r}"
    try:
        with torch.no_grad():
            _called(function, torch.empty(parameter.shape, device="meta"))
    except NotImplementedError:  # it reads values, which a tensor without storage has not
        return ""
    except Exception as error:
        return f"fails: {' '.join(str(error).split()) or type(error).__name__}"
    return ""


def _called(function: Function, tensor: Tensor) -> Tensor:
    """What a function makes of a tensor. ValueError if that is of another shape."""
    returned = function(tensor)
    values = returned.detach() if isinstance(returned, Tensor) else tensor
    if values.shape != tensor.shape:
        raise ValueError(f"it makes {list(values.shape)} of {list(tensor.shape)}")
    return values.to(tensor.dtype)
