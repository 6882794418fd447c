"""Initial values computed by block: any rank can compute its part of a parameter, and every mesh gets the same whole.

A value depends only on the seed, the parameter's name and the element's linear index in the global tensor. It is
computed in integers with one final rounding, so that neither the block's shape nor vector instructions change it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from tpshard.kernels.splitmix64 import FIRST, GAMMA, SECOND, to_signed
from tpshard.models.dims import declared_by_parameter

_CHUNK = 1 << 18
"""Elements computed at a time, so that the 64-bit intermediates stay in cache."""


@dataclass(frozen=True)
class Initial:
    """The initial distribution of a parameter, of a mean and a standard deviation."""

    shape: tuple[int, ...]
    mean: float
    std: float
    law: Literal["bell", "normal", "uniform"] = "bell"
    """bell: the sum of four uniforms, cut at 3.46 std."""
    fixed: tuple[tuple[int, int, float], ...] = ()
    """Values of the elements with linear indices from one to below another, such as the row of padding."""


InitPlan = Mapping[str, Initial]
BlockReader = Callable[[str, Sequence[int], Sequence[int], torch.dtype], Tensor]
"""Reads elements [starts, starts + sizes) of a parameter by name, in a dtype."""


def init_plan(model: nn.Module) -> dict[str, Initial]:
    """The initial distribution of every parameter of `model`, by name.

    Vectors named `bias` are 0, other vectors (norms) 1. Matrices [.., outputs, inputs] have std 1 / sqrt(inputs), which
    keeps the scale of activations; those that write to the residual stream are divided by sqrt(2 * layers) (GPT-2's
    rule). A module overrides this by `initial_std = {"weight": 0.1}`.
    """
    writers = 2 * getattr(getattr(model, "config", None), "layers", 1)
    stds, plan = declared_by_parameter(model, "initial_std"), {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name in stds:
            plan[name] = Initial(shape, 0.0, float(stds[name]))
        elif parameter.dim() < 2:
            plan[name] = Initial(shape, 0.0 if name.endswith("bias") else 1.0, 0.0)
        else:
            adds = name.endswith((".wo.weight", ".down.weight"))
            plan[name] = Initial(shape, 0.0, (shape[-1] * (writers if adds else 1)) ** -0.5)
    return plan


def initial_block(
    model_or_plan: nn.Module | InitPlan,
    name: str,
    starts: Sequence[int],
    sizes: Sequence[int],
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Elements [starts, starts + sizes) of the initial value of parameter `name`, on the CPU.

    ValueError if the parameter is unknown or the block is not inside it.
    """
    plan = init_plan(model_or_plan) if isinstance(model_or_plan, nn.Module) else model_or_plan
    if name not in plan:
        raise ValueError(f"the model has no parameter `{name}`")
    initial = plan[name]
    inside = len(starts) == len(sizes) == len(initial.shape) and all(
        min(a, n) >= 0 and a + n <= whole for a, n, whole in zip(starts, sizes, initial.shape)
    )
    if not inside:
        raise ValueError(f"block {list(starts)} + {list(sizes)} is not inside `{name}` {list(initial.shape)}")
    block = torch.full(tuple(sizes), initial.mean, dtype=dtype)
    if initial.std and block.numel():
        _add_noise(block, initial, starts, key_of(seed, name))
    for first, stop, value in initial.fixed:
        index = _linear_index(initial.shape, starts, sizes)
        block = block.masked_fill((index >= first) & (index < stop), value)
    return block


def initialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Sets every parameter of `model` (on `meta` or not) to its initial value on `device`, in place."""
    plan = init_plan(model)
    return fill(model, lambda name, starts, sizes, dtype: initial_block(plan, name, starts, sizes, seed, dtype), device)


def fill(model: nn.Module, block: BlockReader, device: torch.device | str) -> nn.Module:
    """Gives every parameter of `model` (on `meta` or not) the values that `block` reads, on `device`, in place."""
    owners: dict[nn.Parameter | None, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            owners.setdefault(parameter, []).append((module, leaf))
    for name, parameter in list(model.named_parameters()):
        value = block(name, (0,) * parameter.dim(), tuple(parameter.shape), parameter.dtype)
        fresh = nn.Parameter(value.to(device), requires_grad=parameter.requires_grad)
        for module, leaf in owners[parameter]:
            module._parameters[leaf] = fresh
    return model.to(device)


def key_of(seed: int, name: str) -> int:
    """The seed of a parameter's own random numbers."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _add_noise(block: Tensor, initial: Initial, starts: Sequence[int], key: int) -> None:
    shape, noise = initial.shape, {"bell": _bell, "normal": _normal, "uniform": _uniform}[initial.law]
    row = torch.arange(starts[-1], starts[-1] + block.shape[-1], dtype=torch.int64)
    rows = block.view(-1, block.shape[-1])
    outer = _linear_index(shape, (*starts[:-1], 0), (*block.shape[:-1], 1)).reshape(-1, 1)
    step = max(1, _CHUNK // block.shape[-1])
    for first in range(0, rows.shape[0], step):
        bits = _mix((outer[first : first + step] + row).add_(1).mul_(to_signed(GAMMA)).add_(key))
        rows[first : first + step] += noise(bits).mul_(initial.std).to(block.dtype)


def _linear_index(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The index of each element of a block in its flattened tensor, int64 [*sizes]."""
    index = torch.zeros((), dtype=torch.int64)
    for dim, (start, size) in enumerate(zip(starts, sizes)):
        stride = math.prod(shape[dim + 1 :])
        index = index.unsqueeze(-1) + torch.arange(start, start + size, dtype=torch.int64) * stride
    return index


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts the bits of x right and fills with zeros (a logical shift)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The output function of SplitMix64 on int64 words, which wrap around; in place."""
    x ^= _shift_right(x, 30)
    x *= to_signed(FIRST)
    x ^= _shift_right(x, 27)
    x *= to_signed(SECOND)
    x ^= _shift_right(x, 31)
    return x


def _bell(bits: Tensor) -> Tensor:
    """The sum of four 16-bit uniforms, scaled to mean 0 and variance 1 in float64, exact but for the last rounding."""
    low = bits & 0x0000FFFF0000FFFF
    pairs = low + (_shift_right(bits, 16) & 0x0000FFFF0000FFFF)
    total = (pairs & 0xFFFFFFFF) + _shift_right(pairs, 32)
    return (total - 2 * 65535).double().mul_(math.sqrt(3.0) / 65536)


def _normal(bits: Tensor) -> Tensor:
    """The normal number of mean 0 and variance 1 at the quantile that the upper 53 bits are, in float64.

    `ndtri` computes element by element, so that a block's shape does not change a value.
    """
    return torch.special.ndtri(_shift_right(bits, 11).double().add_(0.5).mul_(2.0**-53))


def _uniform(bits: Tensor) -> Tensor:
    """The uniform number of mean 0 and variance 1 that the upper 53 bits are, in float64."""
    return _shift_right(bits, 11).double().add_(0.5).mul_(2.0**-52).sub_(1.0).mul_(math.sqrt(3.0))
