"""The gated delta rule (Yang et al., 2024), the recurrence of Qwen3-Next's and Kimi Linear's layers, as one operation.

    tpshard::delta_rule(q, k [b,t,h,i], v [b,t,h,o], decay [b,t,h,i or 1], beta [b,t,h], state [b,h,i,o])
        -> (out [b,t,h,o], the state after the last token [b,h,i,o])
    tpshard::delta_rule_backward(dout, dstate, the same) -> the gradients of all six

With S the state, each token computes S <- exp(decay) S + k (beta (v - k^T exp(decay) S))^T and out = q^T S; `decay` is
not positive. A chunk of tokens is computed at once: what they write depends on what earlier ones of the chunk wrote,
which is a triangular system of the chunk's size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpshard.kernels.operation import operation

CHUNK = 64
"""Tokens that are computed at once."""
FEW = 16
"""Tokens up to which a GPU computes one after another, not in the products of a chunk. Not measured on a GPU yet."""


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs and the last state of the gated delta rule. Shapes as in the module; all of one dtype."""
    return torch.ops.tpshard.delta_rule(q, k, v, decay, beta, state)  # type: ignore[no-any-return]


def _forward(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for part in _chunks(q, k, v, decay, beta):
        chunk = _Chunk(*part)
        out, state = chunk.run(state)
        outputs.append(out)
    return torch.cat(outputs, 2).transpose(1, 2), state.contiguous()


def _chunks(*inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """The chunks of inputs [b,t,h,...], each [b,h,c,...]."""
    heads_first = [x.transpose(1, 2) for x in inputs]
    starts = range(0, inputs[0].shape[1], CHUNK)
    return [tuple(x[:, :, start : start + CHUNK] for x in heads_first) for start in starts]


class _Chunk:
    """A chunk of c tokens: q, k, v, decay [b,h,c,...], beta [b,h,c], and what does not depend on the state."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
        self.q, self.k, self.v, self.beta = q, k, v, beta.unsqueeze(3)
        since = decay.cumsum(2)  # of the chunk's begin
        last = since[:, :, -1:]
        self.since, self.until, self.whole = since.exp(), (last - since).exp(), last.exp().transpose(2, 3)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        self.between = (since.unsqueeze(3) - since.unsqueeze(2)).masked_fill(later[..., None], float("-inf")).exp()
        self.seen, self.written = self._pairs(q), self._pairs(k)
        self.system = (self.written * self.beta).tril(-1)
        """What a token's write takes back of each earlier one."""
        solved = self._solve(torch.cat([v, k * self.since], 3) * self.beta)
        self.values, self.reads = solved.split([v.shape[3], k.shape[3]], 3)

    def _pairs(self, x: Tensor) -> Tensor:
        """Products of each token's x with the keys up to it, decayed: [b,h,c,c]."""
        if self.between.shape[4] == 1:  # the same for all inputs of a head
            return x @ self.k.transpose(2, 3) * self.between.squeeze(4)
        return torch.einsum("bhci,bhei,bhcei->bhce", x, self.k, self.between)

    def _solve(self, wanted: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.system, wanted, upper=False, unitriangular=True)

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [b,h,c,o] from a state, and the state after the chunk."""
        new = self.values - self.reads @ state
        out = (self.q * self.since) @ state + self.seen @ new
        return out, state * self.whole + (self.k * self.until).transpose(2, 3) @ new

    def gradients(self, state: Tensor, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        """Of q, k, v, decay, beta and the state before, given those of the outputs and the state after."""
        q, k, since, until = self.q * self.since, self.k * self.since, self.since, self.until
        kept, new = self.k * until, self.values - self.reads @ state
        dnew = self.seen.transpose(2, 3) @ dout + kept @ dstate
        dq_since, dkept = dout @ state.transpose(2, 3), new @ dstate.transpose(2, 3)
        dwhole = (state * dstate).sum(3).unsqueeze(2)
        dsolved = torch.cat([dnew, -dnew @ state.transpose(2, 3)], 3)
        dbefore = q.transpose(2, 3) @ dout + self.whole * dstate - self.reads.transpose(2, 3) @ dnew
        dwanted = torch.linalg.solve_triangular(self.system.transpose(2, 3), dsolved, upper=True, unitriangular=True)
        dsystem = -(dwanted @ torch.cat([self.values, self.reads], 3).transpose(2, 3)).tril(-1)
        wanted = torch.cat([self.v, k], 3)
        dbeta = (dwanted * wanted).sum(3) + (dsystem * self.written).sum(3)
        dv, dk_since = (dwanted * self.beta).split([self.v.shape[3], k.shape[3]], 3)
        dq, dk_seen, dlog_seen = self._pair_gradients(self.q, (dout @ new.transpose(2, 3)).tril())
        dk, dk_written, dlog_written = self._pair_gradients(self.k, dsystem * self.beta)
        dq = dq + dq_since * since
        dk = dk + dk_written + dk_seen + dk_since * since + dkept * until
        # of the logarithm of each factor
        dlog = dlog_seen + dlog_written + dq_since * q + dk_since * k - dkept * kept
        dlog[:, :, -1:] += (dkept * kept).sum(2, keepdim=True) + dwhole * self.whole.transpose(2, 3)
        if self.between.shape[4] == 1:
            dlog = dlog.sum(3, keepdim=True)
        return dq, dk, dv, dlog.flip(2).cumsum(2).flip(2), dbeta, dbefore

    def _pair_gradients(self, x: Tensor, dpairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, the keys and the logarithms of decays in `_pairs(x)`, all [b,h,c,i]."""
        if self.between.shape[4] == 1:
            decayed = dpairs * self.between.squeeze(4)
            dx, dk = decayed @ self.k, decayed.transpose(2, 3) @ x
        else:
            dx = torch.einsum("bhce,bhei,bhcei->bhci", dpairs, self.k, self.between)
            dk = torch.einsum("bhce,bhci,bhcei->bhei", dpairs, x, self.between)
        return dx, dk, dx * x - dk * self.k


def _backward(dout: Tensor, dstate: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    *tokens, state = inputs
    chunks, states = [_Chunk(*part) for part in _chunks(*tokens)], [state]
    for chunk in chunks[:-1]:
        states.append(chunk.run(states[-1])[1])
    parts = []
    for chunk, before, (own,) in zip(reversed(chunks), reversed(states), reversed(_chunks(dout))):
        *gradients, dstate = chunk.gradients(before, own, dstate)
        parts.append(gradients)
    return *(torch.cat(own[::-1], 2).transpose(1, 2).contiguous() for own in zip(*parts)), dstate.contiguous()


def _cuda(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    if inputs[0].shape[1] > FEW:
        return _forward(*inputs)
    from tpshard.kernels.recurrences import triton_recurrences  # needs Triton, which CPU builds of torch lack

    with torch.cuda.device(inputs[0].device):
        return triton_recurrences.delta_rule(*inputs)


def _shapes(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    (b, t, h, i), o = q.shape, v.shape[3]
    if k.shape != q.shape or v.shape[:3] != (b, t, h) or beta.shape != (b, t, h) or state.shape != (b, h, i, o):
        raise ValueError(
            f"delta_rule: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, beta {list(beta.shape)} and the "
            f"state {list(state.shape)} do not match"
        )
    if decay.shape[:3] != (b, t, h) or decay.shape[3] not in (1, i):
        raise ValueError(f"delta_rule: decay {list(decay.shape)} must be {[b, t, h]} and 1 or {i}")
    return v.new_empty(b, h, t, o).transpose(1, 2), torch.empty_like(state, memory_format=torch.contiguous_format)


def _gradient_shapes(dout: Tensor, dstate: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _gradient(ctx: Any, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.tpshard.delta_rule_backward(dout, dstate, *ctx.saved_tensors)  # type: ignore[no-any-return]


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor state"
operation(f"delta_rule({_INPUTS}) -> (Tensor, Tensor)", _forward, _shapes, cuda=_cuda, gradient=_gradient)
operation(
    f"delta_rule_backward(Tensor dout, Tensor dstate, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _gradient_shapes,
)  # fmt: skip
