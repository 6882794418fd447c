"""SwiGLU experts as one operation: each token is computed by its k experts, with no dropping and no padding.

    tpshard::experts(x [..., m], ids [..., k], weights [..., k], gate [e, h, m], up [e, h, m], down [e, m, h])
        -> out [..., m]
    tpshard::experts_backward(dout, x, ids, weights, gate, up, down) -> (dx, dweights, dgate, dup, ddown)

A token's result is the sum over its k choices of weight * down[id](silu(gate[id](x)) * up[id](x)). An id outside
0 .. e - 1 belongs to another device and adds nothing, so devices that hold some experts, or some columns of each,
return partial sums. With matrices [g, e, h, m] the tokens [g, ..., m] of each of g groups have experts of their own, to
which their ids refer; `used`, for prices alone, is the share of ids that name one where routing is even. Tokens are
sorted by expert, and each expert is three matrix products; on a GPU a product of all experts is one launch of a Triton
kernel, and its temporaries are those of all tokens. A token's choices are summed in fp32 in the order of the experts,
on a GPU of the choices, so that the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.dtypes import wide_dtype
from tpshard.kernels.linear import fixed_rows_linear
from tpshard.kernels.operation import operation


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, used: float = 1.0
) -> Tensor:
    """The sum over each token's experts: x [..., m], ids and weights [..., k] -> [..., m]. Shapes as in the module."""
    return torch.ops.tpshard.experts(x, ids, weights, gate, up, down, used)


def routed_sum(x: Tensor, ids: Tensor, weights: Tensor, count: int, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The sum over each token's experts, out of `count`: x [..., m], ids and weights [..., k] -> [..., m].

    compute: maps an expert and its tokens [n, m] to their results [n, m].
    """
    rows, shares = x.reshape(-1, x.shape[-1]), weights.reshape(-1, 1)
    out = torch.zeros(rows.shape, dtype=wide_dtype(x), device=x.device)
    for e, tokens, places in tokens_by_expert(ids, count):
        out.index_add_(0, tokens, compute(e, rows[tokens]).to(out.dtype) * shares[places])
    return out.to(x.dtype).view(x.shape)


def tokens_by_expert(ids: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (expert, rows of its tokens, indices of their choices in the flattened `ids`) for experts with tokens.

    Synchronizes the device.
    """
    flat = ids.reshape(-1)
    owner = torch.where((flat >= 0) & (flat < count), flat, count)
    order = torch.argsort(owner, stable=True)
    sizes = torch.bincount(owner, minlength=count + 1).tolist()
    for expert, places in enumerate(order.split(sizes)[:count]):
        if len(places):
            yield expert, places // ids.shape[-1], places


def _check(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
    *groups, e, h, m = gate.shape
    fit = up.shape == gate.shape and down.shape == (*groups, e, m, h) and ids.shape == weights.shape
    if not fit or x.shape[-1] != m or ids.shape[:-1] != x.shape[:-1] or groups not in ([], [x.shape[0]]):
        shapes = ", ".join(str(list(t.shape)) for t in (x, ids, weights, gate, up, down))
        raise ValueError(f"experts: the shapes of x, ids, weights, gate, up and down do not match: {shapes}")


def on_gpu(x: Tensor) -> bool:
    """Whether x is on a GPU and of a dtype that the Triton kernels multiply."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16, torch.float32)


def _in_one_group(ids: Tensor, *matrices: Tensor) -> list[Tensor]:
    """Ids of experts in groups as ids among all experts, and the matrices of all."""
    if matrices[0].dim() == 3:
        return [ids, *matrices]
    groups, count = matrices[0].shape[:2]
    first = torch.arange(groups, device=ids.device).view(-1, *[1] * (ids.dim() - 1)) * count
    return [torch.where((ids >= 0) & (ids < count), ids + first, -1), *(one.flatten(0, 1) for one in matrices)]


def _forward(
    x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, used: float = 1.0
) -> Tensor:
    ids, gate, up, down = _in_one_group(ids, gate, up, down)
    return _multiply(x, ids, weights, gate, up, down, fixed_rows=False)


def fixed_rows_experts(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`experts`, with the same bits for a token whatever the other tokens are (see `kernels.linear`)."""
    return _multiply(x, ids, weights, gate, up, down, fixed_rows=True)


def _multiply(
    x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, fixed_rows: bool
) -> Tensor:
    _check(x, ids, weights, gate, up, down)
    if on_gpu(x):
        from tpshard.kernels.experts import triton_experts  # needs Triton, which CPU builds of torch lack

        with torch.cuda.device(x.device):
            return triton_experts.experts(x, ids, weights, gate, up, down, fixed_rows)
    linear = fixed_rows_linear if fixed_rows else F.linear

    def compute(e: int, rows: Tensor) -> Tensor:
        return linear(F.silu(linear(rows, gate[e])) * linear(rows, up[e]), down[e])

    return routed_sum(x, ids, weights, gate.shape[0], compute)


def _backward(
    dout: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, used: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, ids, weights, gate, up, down)
    if gate.dim() > 3:
        ids, *matrices = _in_one_group(ids, gate, up, down)
        dx, dweights, dgate, dup, ddown = _backward(dout, x, ids, weights, *matrices)  # type: ignore[arg-type]
        return dx, dweights, dgate.view(gate.shape), dup.view(up.shape), ddown.view(down.shape)
    if on_gpu(x):
        from tpshard.kernels.experts import triton_experts

        with torch.cuda.device(x.device):
            return triton_experts.experts_backward(dout, x, ids, weights, gate, up, down)
    width = x.shape[-1]
    rows, grads, shares = x.reshape(-1, width), dout.reshape(-1, width), weights.reshape(-1, 1)
    dx = torch.zeros(rows.shape, dtype=wide_dtype(x), device=x.device)
    dshares = torch.zeros_like(shares)
    dgate, dup, ddown = (torch.zeros_like(weight) for weight in (gate, up, down))
    for e, tokens, places in tokens_by_expert(ids, gate.shape[0]):
        expert_rows, grad, share = rows[tokens], grads[tokens], shares[places].to(x.dtype)
        gated, linear = F.linear(expert_rows, gate[e]), F.linear(expert_rows, up[e])
        sigmoid = torch.sigmoid(gated)
        hidden = gated * sigmoid * linear
        dhidden = grad @ down[e]
        dshares[places] = (dhidden * hidden).sum(-1, keepdim=True, dtype=wide_dtype(x)).to(shares.dtype)
        ddown[e] = (grad * share).T @ hidden
        dhidden = dhidden * share
        dgated = dhidden * linear * sigmoid * (1 + gated * (1 - sigmoid))
        dlinear = dhidden * gated * sigmoid
        dgate[e], dup[e] = dgated.T @ expert_rows, dlinear.T @ expert_rows
        dx.index_add_(0, tokens, (dgated @ gate[e] + dlinear @ up[e]).to(dx.dtype))
    return dx.to(x.dtype).view(x.shape), dshares.view(weights.shape), dgate, dup, ddown


def _shape(
    x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, used: float = 1.0
) -> Tensor:
    _check(x, ids, weights, gate, up, down)
    return x.new_empty(x.shape)


def _backward_shapes(
    dout: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, used: float = 1.0
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, weights, gate, up, down))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.used = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweights, *dexperts = torch.ops.tpshard.experts_backward(dout, *ctx.saved_tensors, ctx.used)
    return dx, None, dweights, *dexperts, None


_INPUTS = "Tensor x, Tensor ids, Tensor weights, Tensor gate, Tensor up, Tensor down, float used=1.0"
operation(f"experts({_INPUTS}) -> Tensor", _forward, _shape, gradient=_gradient, keep=_keep)
operation(
    f"experts_backward(Tensor dout, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _backward, _backward_shapes
)
