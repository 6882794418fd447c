"""tpshard's operations for the recurrences of transformers' modules, which these write out token by token or in chunks.

A modeling file's functions are replaced while its model runs: a captured graph then has one operation for a recurrence,
whatever the length of the sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.kernels.recurrences.delta_rule import delta_rule
from tpshard.kernels.recurrences.selective_scan import selective_scan
from tpshard.models.transformers.patch_attention import Step


def gated_delta_rule(
    step: Step, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`.

    query, key: [batch, seq, key heads, size], value: [batch, seq, heads, size], g: [batch, seq, heads], or also per key
    dim, beta: [batch, seq, heads] -> the result like value, and the last state if asked for. chunk_size is the
    operation's own.
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k, v, decay, rate = (x.to(torch.float32) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if groups > 1:
        q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    if initial_state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    else:
        state = initial_state.to(v.dtype)
    decay = decay.unsqueeze(-1) if decay.dim() == 3 else decay
    out, last = delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, rate, state)
    return out.to(dtype), last if output_final_state else None


def scan_selectively(
    step: Step, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """transformers' `mamba_selective_scan`; in a server it continues from the state that the module has just read.

    hidden_states, dt, z: [batch, inner, seq], A: [inner, states], B, C: [batch, states, seq], D, delta_bias: [inner] ->
    the result like hidden_states, and the last state if asked for.
    """
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    steps = F.softplus(steps) if delta_softplus else steps
    x, steps, inward, outward = (each.transpose(1, 2).to(A.dtype) for each in (hidden_states, steps, B, C))
    before = None if step.cache is None else step.cache.latest
    state = x.new_zeros(x.shape[0], *A.shape) if before is None else before.to(x.dtype)
    out, last = selective_scan(x, steps, A, inward, outward, state)
    out = out.to(hidden_states.dtype).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, last.to(hidden_states.dtype)) if return_last_state else out


_OWN: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba_selective_scan": scan_selectively,
}
"""The replacements of a modeling file's functions, by name."""


@contextmanager
def replaced(model: nn.Module) -> Iterator[None]:
    """A context in which the modeling files of a model's modules have tpshard's recurrences."""
    with ExitStack() as stack:
        for path in {type(module).__module__ for module in model.modules()}:
            for name, own in _OWN.items():
                if hasattr(sys.modules[path], name):
                    replacement = partial(own, cast(Step, model.tpshard_step))
                    stack.enter_context(mock.patch.object(sys.modules[path], name, replacement))
        yield
