"""The selective scan of Mamba (Gu and Dao, 2023) as one operation.

    tpshard::selective_scan(x, step [b,t,d], a [d,n], inward, outward [b,t,n], state [b,d,n])
        -> (out [b,t,d], the state after the last token [b,d,n])
    tpshard::selective_scan_backward(dout, dstate, the same) -> the gradients of all six

With h the state, each token computes h <- exp(step a) h + step inward x and out = sum over n of outward h. A chunk of
tokens is scanned by doubling: after each of log2(tokens) passes, a token's state contains twice as many tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.operation import operation

CHUNK = 64
"""Tokens that are scanned at once."""


def selective_scan(
    x: Tensor, step: Tensor, a: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state of the selective scan. Shapes as in the module; all of one dtype."""
    return torch.ops.tpshard.selective_scan(x, step, a, inward, outward, state)  # type: ignore[no-any-return]


def _scan(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """The states h_t = decay_t h_(t-1) + added_t after each of c tokens: [b,c,d,n], from the state [b,d,n] before."""
    reach = 1
    while reach < decay.shape[1]:
        added = torch.cat([added[:, :reach], added[:, reach:] + decay[:, reach:] * added[:, :-reach]], 1)
        decay = torch.cat([decay[:, :reach], decay[:, reach:] * decay[:, :-reach]], 1)
        reach *= 2
    return added + decay * state.unsqueeze(1)


def _forward(
    x: Tensor, step: Tensor, a: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for inputs in _chunks(x, step, inward, outward):
        x, step, inward, outward = inputs
        states = _states(x, step, inward, a, state)
        outputs.append((states * outward.unsqueeze(2)).sum(3))
        state = states[:, -1]
    return torch.cat(outputs, 1), state.contiguous()


def _chunks(*inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """The chunks of inputs [b,t,...]."""
    return [tuple(x[:, i : i + CHUNK] for x in inputs) for i in range(0, inputs[0].shape[1], CHUNK)]


def _states(x: Tensor, step: Tensor, inward: Tensor, a: Tensor, state: Tensor) -> Tensor:
    """The states after each token of a chunk: [b,c,d,n]."""
    return _scan((step.unsqueeze(3) * a).exp(), (step * x).unsqueeze(3) * inward.unsqueeze(2), state)


def _backward(
    dout: Tensor, dstate: Tensor, x: Tensor, step: Tensor, a: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    chunks, before = _chunks(x, step, inward, outward, dout), [state]
    for x, step, inward, *_ in chunks[:-1]:
        before.append(_states(x, step, inward, a, before[-1])[:, -1])
    da, parts = torch.zeros_like(a, memory_format=torch.contiguous_format), []
    for (x, step, inward, outward, dout), first in zip(reversed(chunks), reversed(before)):
        kept = (step.unsqueeze(3) * a).exp()
        states = _states(x, step, inward, a, first)
        earlier = torch.cat([first.unsqueeze(1), states[:, :-1]], 1)
        # a state reaches the outputs of its own and, through what is kept of it, of later tokens
        passed = torch.cat([kept[:, 1:], torch.ones_like(kept[:, :1])], 1).flip(1)
        dstates = _scan(passed, (dout.unsqueeze(3) * outward.unsqueeze(2)).flip(1), dstate).flip(1)
        dstate = dstates[:, 0] * kept[:, 0]
        dlog = dstates * earlier * kept
        da = da + (dlog * step.unsqueeze(3)).sum((0, 1))
        reached = (dstates * inward.unsqueeze(2)).sum(3)
        parts.append((
            reached * step, (dlog * a).sum(3) + reached * x, (dstates * (step * x).unsqueeze(3)).sum(2),
            (states * dout.unsqueeze(3)).sum(2),
        ))  # fmt: skip
    dx, dstep, dinward, doutward = (torch.cat(own[::-1], 1) for own in zip(*parts))
    return dx, dstep, da, dinward, doutward, dstate.contiguous()


def _cuda(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    from tpshard.kernels.recurrences import triton_recurrences  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(inputs[0].device):
        return triton_recurrences.selective_scan(*inputs)


def _shapes(
    x: Tensor, step: Tensor, a: Tensor, inward: Tensor, outward: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    (b, t, d), n = x.shape, a.shape[1]
    shapes = [tuple(each.shape) for each in (step, a, inward, outward, state)]
    if shapes != [(b, t, d), (d, n), (b, t, n), (b, t, n), (b, d, n)]:
        raise ValueError(f"selective_scan: x {[b, t, d]} and the other shapes {shapes} do not match")
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _gradient_shapes(dout: Tensor, dstate: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


def _gradient(ctx: Any, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.tpshard.selective_scan_backward(dout, dstate, *ctx.saved_tensors)  # type: ignore[no-any-return]


_INPUTS = "Tensor x, Tensor step, Tensor a, Tensor inward, Tensor outward, Tensor state"
operation(f"selective_scan({_INPUTS}) -> (Tensor, Tensor)", _forward, _shapes, cuda=_cuda, gradient=_gradient)
operation(
    f"selective_scan_backward(Tensor dout, Tensor dstate, {_INPUTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _gradient_shapes,
)  # fmt: skip
