"""Names of the dims of parameters and activations, by which sharding rules refer to them.

A module names its parameters' dims (`module.dims = {"weight": ("mlp", "embed")}`); activations pass through `name`, an
identity. The model itself knows nothing of devices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define("named(Tensor(a) x, str name, str[] dims) -> Tensor(a)")

STAGE = "stage"
"""The dim that `torch.vmap` puts before the others: the stages of a vectorized pipeline."""


def _view(x: Tensor, name: str, dims: list[str]) -> Tensor:
    return x.view_as(x)


class _Name(torch.autograd.Function):
    """An identity whose gradient has the same name: an annotation of a value also applies to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dims: list[str]) -> Tensor:
        ctx.name, ctx.dims = name, dims
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tpshard.named(x, name, dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return torch.ops.tpshard.named(grad, ctx.name, ctx.dims), None, None


def _autograd(x: Tensor, name: str, dims: list[str]) -> Tensor:
    return _Name.apply(x, name, dims)


_library.impl("named", _view, "CompositeExplicitAutograd")
_library.impl("named", _autograd, "Autograd")


@torch.library.register_vmap("tpshard::named", lib=_library)
def _vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, name: str, dims: list[str]) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return torch.ops.tpshard.named(x.movedim(in_dims[0], 0), name, [STAGE, *dims]), 0


def name(x: Tensor, label: str, *dims: str) -> Tensor:
    """`x` unchanged, with a label and a name for each dim, both visible in a trace."""
    assert x.dim() == len(dims), f"{label} has {x.dim()} dims, {len(dims)} are named: {dims}"
    return torch.ops.tpshard.named(x, label, list(dims))


def declared(model: nn.Module, attribute: str, remove_duplicate: bool = True) -> dict[str, Any]:
    """What the modules of a model declare in an attribute, such as `{"weight": ...}`, by path and name.

    Without `remove_duplicate` a module in several places is listed for each of them.
    """
    return {
        f"{path}.{local}" if path else local: value
        for path, module in model.named_modules(remove_duplicate=remove_duplicate)
        for local, value in getattr(module, attribute, {}).items()
    }


def declared_by_parameter(model: nn.Module, attribute: str) -> dict[str, Any]:
    """What modules declare of parameters, by name in `model.named_parameters()`: tied parameters by their first name.
    What names no parameter is left out."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = declared(model, attribute, remove_duplicate=False)
    return {first[id(parameters[label])]: value for label, value in named.items() if label in parameters}


class Naming(NamedTuple):
    """The dim names of a parameter ("" for none), and where they come from."""

    dims: tuple[str, ...]
    by: str


def param_dims(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The dims of the parameters that the model's modules name, by name in `model.named_parameters()`; tied parameters
    once, by their first name.

    ValueError lists the dims that name no parameter, or another number of dims than it has.
    """
    named = {label: tuple(dims) for label, dims in declared(model, "dims", remove_duplicate=False).items()}
    # None: left out by its module, as by `bias=False`
    parameters: dict[str, nn.Parameter | None] = declared(model, "_parameters", remove_duplicate=False)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    dims_of: dict[str, tuple[str, ...]] = {}
    wrong: list[str] = []
    for label, dims in named.items():
        parameter = parameters.get(label)
        if label not in parameters:
            wrong.append(f"`{label}` has named dims and is no parameter")
        elif parameter is not None and len(dims) != parameter.dim():
            wrong.append(f"`{label}` has {parameter.dim()} dims, {dims} are named")
        elif parameter is not None:
            dims_of.setdefault(first[id(parameter)], dims)
    if wrong:
        raise ValueError(
            "; ".join(wrong) + '. A module names dims by `dims`, such as self.dims = {"weight": ("mlp", "embed")}'
        )
    return {name: dims_of[name] for name in first.values() if name in dims_of}
