"""Each token's products with the matrices of its k experts, for experts with biases or another gate than SwiGLU.

    tpshard::expert_linear(x [..., c, i], ids [..., k], weight [e, o, i]) -> [..., k, o]
    tpshard::expert_outer(dout [..., k, o], x [..., c, i], ids [..., k], e) -> [e, o, i], the gradient of the weight

c is k, or 1 where all choices of a token multiply the same row. An id outside 0 .. e - 1 belongs to another device: its
product is 0. Tokens are sorted by expert, and each expert is one matrix product; on a GPU all of them are one launch of
a Triton kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.experts.experts import on_gpu, tokens_by_expert
from tpshard.kernels.linear import fixed_rows_linear
from tpshard.kernels.operation import operation


def expert_linear(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The products of rows with their experts' matrices: [..., k, o]. Shapes as in the module."""
    return torch.ops.tpshard.expert_linear(x, ids, weight)


def _check(x: Tensor, ids: Tensor, inputs: int) -> None:
    if x.shape[-1] != inputs or x.shape[:-2] != ids.shape[:-1] or x.shape[-2] not in (1, ids.shape[-1]):
        raise ValueError(
            f"expert_linear: x {list(x.shape)}, ids {list(ids.shape)} and matrices of {inputs} inputs do not match"
        )


def _forward(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return _multiply(x, ids, weight, fixed_rows=False)


def fixed_rows_expert_linear(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """`expert_linear`, with the same bits for a token whatever the other tokens are (see `kernels.linear`)."""
    return _multiply(x, ids, weight, fixed_rows=True)


def _multiply(x: Tensor, ids: Tensor, weight: Tensor, fixed_rows: bool) -> Tensor:
    _check(x, ids, weight.shape[2])
    rows = x.reshape(-1, x.shape[-1])
    if on_gpu(x):
        from tpshard.kernels.experts import triton_experts  # needs Triton, which CPU builds of torch lack

        with torch.cuda.device(x.device):
            chosen = triton_experts.chosen_by(ids, len(weight), weight.shape[1:], x.dtype, fixed_rows)
            return chosen.in_choices(chosen.linear(chosen.rows(rows), weight)).view(*ids.shape, weight.shape[1])
    linear, out = fixed_rows_linear if fixed_rows else F.linear, x.new_zeros(ids.numel(), weight.shape[1])
    for expert, tokens, places in tokens_by_expert(ids, weight.shape[0]):
        out[places] = linear(rows[tokens if x.shape[-2] == 1 else places], weight[expert])
    return out.view(*ids.shape, weight.shape[1])


def _outer(dout: Tensor, x: Tensor, ids: Tensor, experts: int) -> Tensor:
    _check(x, ids, x.shape[-1])
    rows, grads = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    if on_gpu(x):
        from tpshard.kernels.experts import triton_experts

        with torch.cuda.device(x.device):
            sizes = grads.shape[1], rows.shape[1]
            chosen = triton_experts.chosen_by(ids, experts, sizes, x.dtype, fixed=False)
            return chosen.outer(chosen.rows(grads), chosen.rows(rows))
    sums = x.new_zeros(experts, grads.shape[1], rows.shape[1])
    for expert, tokens, places in tokens_by_expert(ids, experts):
        torch.mm(grads[places].T, rows[tokens if x.shape[-2] == 1 else places], out=sums[expert])
    return sums


def _product_shape(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    _check(x, ids, weight.shape[2])
    return x.new_empty((*ids.shape, weight.shape[1]))


def _outer_shape(dout: Tensor, x: Tensor, ids: Tensor, experts: int) -> Tensor:
    return x.new_empty((experts, dout.shape[-1], x.shape[-1]))


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, ids, weight = ctx.saved_tensors
    dx = torch.ops.tpshard.expert_linear(dout, ids, weight.transpose(1, 2))
    dx = dx.sum(-2, keepdim=True) if x.shape[-2] < ids.shape[-1] else dx
    return dx, None, torch.ops.tpshard.expert_outer(dout, x, ids, weight.shape[0])


operation("expert_linear(Tensor x, Tensor ids, Tensor weight) -> Tensor", _forward, _product_shape, gradient=_gradient)
operation("expert_outer(Tensor dout, Tensor x, Tensor ids, int experts) -> Tensor", _outer, _outer_shape)
