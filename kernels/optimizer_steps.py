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
from tpshard.kernels.operation import operation

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


def _square_sum_cuda(x: Tensor, scale: Tensor) -> Tensor:
    return (torch.linalg.vector_norm(x, dtype=wide_dtype(x)) * scale).square()


# ---- the operations --------------------------------------------------------------------------------------------------
def _step(name: str, moments: Sequence[str], settings: str, cpu: Callable[..., None]) -> Any:
    """Defines an optimizer's step in place, `{name}_`, and the step that returns new tensors, which it returns."""
    count, tensors = len(moments), ["param", *moments]
    written = [f"Tensor({mark}!) {tensor}" for mark, tensor in zip("abc", tensors)]

    def cuda(param: Tensor, *rest: Any) -> None:
        from tpshard.kernels import triton_launch  # needs Triton, which CPU builds of torch lack

        with torch.cuda.device(param.device):
            getattr(triton_launch, f"{name}_")(param, *rest)

    def arguments(param: str, *moments: str) -> str:
        return ", ".join([param, "Tensor grad", *moments, settings])

    in_place = operation(f"{name}_({arguments(*written)}) -> ()", cpu, cuda=cuda)

    def new(param: Tensor, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        results = [x.clone(memory_format=torch.contiguous_format) for x in (param, *rest[:count])]
        in_place(results[0], grad, *results[1:], *rest[count:])
        return tuple(results)

    def shapes(param: Tensor, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (param, *rest[:count]))

    new_arguments, returns = (
        arguments(*(f"Tensor {tensor}" for tensor in tensors)),
        ", ".join(["Tensor"] * len(tensors)),
    )
    return operation(f"{name}({new_arguments}) -> ({returns})", new, shapes)


def _square_sum_shape(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((), dtype=wide_dtype(x))


_SETTINGS = "Tensor finite, Tensor scale, Tensor lr"
adamw_step = _step(
    "adamw_step", ("exp_avg", "exp_avg_sq"),
    f"{_SETTINGS}, Tensor update, float beta1, float beta2, float eps, float decay", _adamw_cpu,
)  # fmt: skip
lion_step = _step("lion_step", ("exp_avg",), f"{_SETTINGS}, float beta1, float beta2, float decay", _lion_cpu)
square_sum = operation(
    "square_sum(Tensor x, Tensor scale) -> Tensor", _square_sum_cpu, _square_sum_shape, cuda=_square_sum_cuda
)

FORMULAS: dict[Any, Callable[..., Any]] = {
    adamw_step: adamw_formula, lion_step: lion_formula, square_sum: square_sum_formula
}  # fmt: skip
"""The formula of each operation, which a compiler gets in its place and fuses."""
