"""Optimizers' steps, each one operation that passes once over a parameter's tensors, and a tensor's sum of squares.

    tpshard::adamw_step(param, grad, exp_avg, exp_avg_sq, finite, scale, lr, update, beta1, beta2, eps, decay)
        -> (param, exp_avg, exp_avg_sq)
    tpshard::lion_step(param, grad, exp_avg, finite, scale, lr, beta1, beta2, decay) -> (param, exp_avg)
    tpshard::square_sum(x, scale) -> fp32 scalar, the sum of (x * scale)^2

Tensors of a step have one shape; finite, scale, lr and update are scalars: whether to do the step at all (else results
are the old values), what the gradient is multiplied by, the learning rate, and the number of this update from 1.
Everything is computed in fp32 (fp64 of fp64 parameters), and results keep their tensors' dtypes. `adamw_step_` and
`lion_step_` write the results over their operands. The `formula` of each says in torch's ops what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.dtypes import wide_dtype

_library = torch.library.Library("tpshard", "FRAGMENT")
_ADAMW = "Tensor finite, Tensor scale, Tensor lr, Tensor update, float beta1, float beta2, float eps, float decay"
_LION = "Tensor finite, Tensor scale, Tensor lr, float beta1, float beta2, float decay"
_library.define(
    f"adamw_step(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, {_ADAMW}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"adamw_step_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, {_ADAMW}) -> ()"
)
_library.define(f"lion_step(Tensor param, Tensor grad, Tensor exp_avg, {_LION}) -> (Tensor, Tensor)")
_library.define(f"lion_step_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, {_LION}) -> ()")
_library.define("square_sum(Tensor x, Tensor scale) -> Tensor")

adamw_step = torch.ops.tpshard.adamw_step.default
lion_step = torch.ops.tpshard.lion_step.default
square_sum = torch.ops.tpshard.square_sum.default

CHUNK = 1 << 16
"""Elements that a CPU computes at a time, so that values in between stay in its cache and take no memory."""


# ---- the formulas ---------------------------------------------------------------------------------------------------
def adamw_formula(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, finite: Tensor, scale: Tensor, lr: Tensor,
    update: Tensor, beta1: float, beta2: float, eps: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """AdamW (Loshchilov and Hutter 2019) in torch's ops: what `adamw_step` computes."""
    p, g, m, v = (x.to(wide_dtype(param)) for x in (param, grad, exp_avg, exp_avg_sq))
    g = g * scale
    m = m * beta1 + g * (1.0 - beta1)
    v = v * beta2 + g.square() * (1.0 - beta2)
    root = v.sqrt() / (1.0 - torch.pow(beta2, update)).sqrt()
    p = p * (1.0 - lr * decay) - lr / (1.0 - torch.pow(beta1, update)) * (m / (root + eps))
    return _where(finite, (p, param), (m, exp_avg), (v, exp_avg_sq))  # type: ignore[return-value]


def lion_formula(
    param: Tensor, grad: Tensor, exp_avg: Tensor, finite: Tensor, scale: Tensor, lr: Tensor, beta1: float,
    beta2: float, decay: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Lion (Chen et al. 2023) in torch's ops: what `lion_step` computes."""
    p, g, m = (x.to(wide_dtype(param)) for x in (param, grad, exp_avg))
    g = g * scale
    p = p * (1.0 - lr * decay) - lr * torch.sign(m * beta1 + g * (1.0 - beta1))
    m = m * beta2 + g * (1.0 - beta2)
    return _where(finite, (p, param), (m, exp_avg))  # type: ignore[return-value]


def _where(finite: Tensor, *pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The new value of each pair (new, old) in the old one's dtype; the old ones unless `finite`."""
    return tuple(torch.where(finite, new.to(old.dtype), old) for new, old in pairs)


def square_sum_formula(x: Tensor, scale: Tensor) -> Tensor:
    """The sum of squares in torch's ops: what `square_sum` computes."""
    return (x.to(wide_dtype(x)) * scale).square().sum()


FORMULAS: dict[Any, Callable[..., Any]] = {
    adamw_step: adamw_formula, lion_step: lion_formula, square_sum: square_sum_formula
}  # fmt: skip
"""The formula of each operation, which a compiler gets in its place and fuses."""


# ---- on a CPU -------------------------------------------------------------------------------------------------------
def _adamw_cpu(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, finite: Tensor, scale: Tensor, lr: Tensor,
    update: Tensor, beta1: float, beta2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """AdamW on a CPU by torch's fused kernel, which is one pass over all tensors of one dtype."""
    rate = float(lr)

    def step(grad: Tensor, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        torch._fused_adamw_(
            [param], [grad * scale], [exp_avg], [exp_avg_sq], [], [update], lr=rate, beta1=beta1, beta2=beta2,
            weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    if finite:
        _in_chunks(step, grad, (param, exp_avg, exp_avg_sq))


def _lion_cpu(
    param: Tensor, grad: Tensor, exp_avg: Tensor, finite: Tensor, scale: Tensor, lr: Tensor, beta1: float,
    beta2: float, decay: float,
) -> None:  # fmt: skip
    rate = float(lr)

    def step(grad: Tensor, param: Tensor, exp_avg: Tensor) -> None:
        grad = grad * scale
        direction = (exp_avg * beta1).add_(grad, alpha=1.0 - beta1).sign_()
        param.mul_(1.0 - rate * decay).sub_(direction, alpha=rate)
        exp_avg.mul_(beta2).add_(grad, alpha=1.0 - beta2)

    if finite:
        _in_chunks(step, grad, (param, exp_avg))


def _in_chunks(step: Callable[..., None], grad: Tensor, written: Sequence[Tensor]) -> None:
    """Calls step(grad, *written) with a few elements of all tensors at a time, in the dtype that is computed in."""
    dtype = wide_dtype(written[0])
    flat = [x.reshape(-1) for x in written]
    for part, *parts in zip(*(x.split(CHUNK) for x in (grad.reshape(-1), *flat))):
        values = [x.to(dtype) for x in parts]
        step(part.to(dtype), *values)
        for x, value in zip(parts, values):
            if value is not x:
                x.copy_(value)
    for x, values_of_x in zip(written, flat):
        if not x.is_contiguous():  # then the flat tensor was a copy
            x.copy_(values_of_x.view(x.shape))


def _square_sum_cpu(x: Tensor, scale: Tensor) -> Tensor:
    sums = []
    for part in x.reshape(-1).split(CHUNK):
        scaled = part.to(wide_dtype(x)) * scale
        sums.append(scaled.mul_(scaled).sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


# ---- on a GPU -------------------------------------------------------------------------------------------------------
def _adamw_cuda(*arguments: Any) -> None:
    from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(arguments[0].device):
        triton_launch.adamw_step_(*arguments)


def _lion_cuda(*arguments: Any) -> None:
    from tpshard.kernels import triton_launch

    with torch.cuda.device(arguments[0].device):
        triton_launch.lion_step_(*arguments)


def _square_sum_cuda(x: Tensor, scale: Tensor) -> Tensor:
    return (torch.linalg.vector_norm(x, dtype=wide_dtype(x)) * scale).square()


# ---- new tensors in place of old ones -------------------------------------------------------------------------------
def _adamw_new(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    new = [x.clone(memory_format=torch.contiguous_format) for x in (param, exp_avg, exp_avg_sq)]
    torch.ops.tpshard.adamw_step_(new[0], grad, new[1], new[2], *rest)
    return tuple(new)


def _lion_new(param: Tensor, grad: Tensor, exp_avg: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    new = [x.clone(memory_format=torch.contiguous_format) for x in (param, exp_avg)]
    torch.ops.tpshard.lion_step_(new[0], grad, new[1], *rest)
    return tuple(new)


for _device, _adamw, _lion, _squares in (
    ("CPU", _adamw_cpu, _lion_cpu, _square_sum_cpu), ("CUDA", _adamw_cuda, _lion_cuda, _square_sum_cuda)
):  # fmt: skip
    _library.impl("adamw_step_", _adamw, _device)
    _library.impl("lion_step_", _lion, _device)
    _library.impl("square_sum", _squares, _device)
    _library.impl("adamw_step", _adamw_new, _device)
    _library.impl("lion_step", _lion_new, _device)


@torch.library.register_fake("tpshard::adamw_step", lib=_library)
def _(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (param, exp_avg, exp_avg_sq))


@torch.library.register_fake("tpshard::lion_step", lib=_library)
def _(param: Tensor, grad: Tensor, exp_avg: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (param, exp_avg))


@torch.library.register_fake("tpshard::square_sum", lib=_library)
def _(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((), dtype=wide_dtype(x))
