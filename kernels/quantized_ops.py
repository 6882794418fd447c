"""Products with quantized weights as operations that can be traced, each by the fastest path of its device.

    tpshard::quantized_matmul(x [..., inputs], ...packed weight...) -> [..., columns]
    tpshard::quantized_gate_up(x [..., inputs], ...packed weight...) -> silu(x @ gate) * (x @ up)   [..., columns / 2]
    tpshard::rms_norm_permuted(x [..., width], weight [width], order [width] int32 | None, eps) -> [..., width]

`prepare` brings a `Quantized` linear into the form of a device; `matmul` and `gate_up` call the operations with it. On
CUDA the tile, or dequantize-and-multiply, is measured at first use (fp32 always dequantizes); on a CPU torch's int4
product takes up to 64 rows of bf16, beyond which dequantizing pays. With `invariant` a row's bits do not depend on the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels.packed import Packed, groups_of, pack, pack_cpu
from tpshard.kernels.quantized import Quantized, concatenate

_INT4_ROWS = 64
"""Rows up to which a CPU's int4 product is the faster one than dequantizing first."""

_WEIGHT = (
    "Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? row_group, Tensor? bias, Tensor? int4, "
    "Tensor? int4_scales, int[] form, bool invariant"
)
_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define(f"quantized_matmul({_WEIGHT}) -> Tensor")
_library.define(f"quantized_gate_up({_WEIGHT}) -> Tensor")
_library.define("rms_norm_permuted(Tensor x, Tensor weight, Tensor? order, float eps) -> Tensor")


def prepare(weight: Quantized | Sequence[Quantized], device: torch.device | str, dtype: torch.dtype) -> Packed:
    """The form in which `device` multiplies x of `dtype`. Several weights (gate, up) are put side by side.

    Raises ValueError where rows of a group are apart, or where the weights to join have different g_idx.
    """
    joined = weight if isinstance(weight, Quantized) else concatenate(weight)
    joined = joined.to(device)
    if joined.codes.is_cuda:
        return pack(joined, quads=torch.cuda.get_device_capability(joined.codes.device) < (9, 0))
    return pack_cpu(joined, dtype)


def matmul(x: Tensor, weight: Packed, invariant: bool = False) -> Tensor:
    """x [..., inputs] -> [..., columns] in x's dtype."""
    return torch.ops.tpshard.quantized_matmul(x, *_arguments(weight), invariant)


def gate_up(x: Tensor, weight: Packed, invariant: bool = False) -> Tensor:
    """silu(gate) * up [..., columns / 2], with `weight` holding gate and up side by side."""
    return torch.ops.tpshard.quantized_gate_up(x, *_arguments(weight), invariant)


def rms_norm_permuted(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """RMSNorm (fp32 inside) whose result is stored in `order`: out[..., i] = norm(x)[..., order[i]]."""
    return torch.ops.tpshard.rms_norm_permuted(x, weight, order, eps)


def _arguments(weight: Packed) -> tuple[Any, ...]:
    groups = (weight.chunk, weight.group_chunks, weight.first_chunk)
    form = [weight.bits, weight.width, weight.inputs, *groups, int(weight.quads)]
    tensors = (weight.words, weight.scales, weight.zeros, weight.row_group, weight.bias)
    return (*tensors, weight.int4, weight.int4_scales, form)


def _packed(
    words: Tensor, scales: Tensor, zeros: Tensor | None, row_group: Tensor | None, bias: Tensor | None,
    int4: Tensor | None, int4_scales: Tensor | None, form: Sequence[int],
) -> Packed:  # fmt: skip
    bits, width, inputs, chunk, group_chunks, first_chunk, quads = form
    return Packed(words, scales, zeros, row_group, bias, bits, width, inputs, chunk, group_chunks, first_chunk,
                  bool(quads), int4, int4_scales)  # fmt: skip


# CPU


def dequantize_cpu(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Dense weights [columns, inputs] (a view): scales * (codes - zeros) in one fp16 rounding, then `dtype`."""
    if weight.row_group is not None or weight.inputs % weight.chunk:
        plain = Quantized(weight.words, weight.scales, _zeros(weight), groups_of(weight), weight.bits)
        return plain.dequantize(dtype).T
    steps = weight.words.view(-1, weight.chunk, weight.columns).float()
    steps -= _zeros(weight).float().unsqueeze(1)
    steps *= weight.scales.float().unsqueeze(1)
    return steps.half().to(dtype).view(weight.inputs, weight.columns).T


def _zeros(weight: Packed) -> Tensor:
    assert weight.zeros is not None, "pack_cpu keeps the zeros"
    return weight.zeros


def _cpu_product(x: Tensor, weight: Packed, invariant: bool) -> Tensor:
    """x [rows, inputs] -> [rows, columns] with bias."""
    rows = x.shape[0]
    bias = None if weight.bias is None else weight.bias.to(x.dtype)
    if weight.int4 is not None and x.dtype == torch.bfloat16 and (invariant or rows <= _INT4_ROWS):
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight.int4, weight.chunk, weight.int4_scales)
        return y if bias is None else y + bias
    dense = dequantize_cpu(weight, x.dtype)
    if not invariant:
        return F.linear(x, dense, bias)
    from tpshard.kernels.rows_linear import TILE

    padded = F.pad(x, (0, 0, 0, -rows % TILE))
    return torch.ops.tpshard.rows_linear(padded, dense.contiguous(), bias)[:rows]


def _matmul_cpu(x: Tensor, *arguments: Any) -> Tensor:
    weight, invariant = _packed(*arguments[:-1]), arguments[-1]
    y = _cpu_product(x.reshape(-1, weight.inputs).contiguous(), weight, invariant)
    return y.view(*x.shape[:-1], weight.columns)


def _gate_up_cpu(x: Tensor, *arguments: Any) -> Tensor:
    gate, up = _matmul_cpu(x, *arguments).chunk(2, -1)
    return F.silu(gate) * up


def rms_norm_reference(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """What `triton_norm.rms_norm_kernel` computes, in plain operations."""
    wide = x.float()
    normed = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)
    return normed if order is None else normed[..., order.long()]


# CUDA


def _cuda_product(x: Tensor, weight: Packed, gated: bool, invariant: bool) -> Tensor:
    from tpshard.kernels import triton_launch

    rows = x.reshape(-1, weight.inputs).contiguous()
    with torch.cuda.device(x.device):
        if x.dtype == torch.float32:
            tile = None
        elif invariant:
            tile = triton_launch.tiles(1, weight, gated, 132)[0]  # the same sums in the same order for every batch
        else:
            tile = _choice.tile(rows, weight, gated)
        if tile is None:
            y = triton_launch.dense_matmul(rows, weight, gated)
        else:
            y = triton_launch.matmul(rows, weight, gated, tile)
    return y.view(*x.shape[:-1], y.shape[-1])


def _matmul_cuda(x: Tensor, *arguments: Any) -> Tensor:
    return _cuda_product(x, _packed(*arguments[:-1]), False, arguments[-1])


def _gate_up_cuda(x: Tensor, *arguments: Any) -> Tensor:
    return _cuda_product(x, _packed(*arguments[:-1]), True, arguments[-1])


def _rms_norm_cuda(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    from tpshard.kernels import triton_launch

    with torch.cuda.device(x.device):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return triton_launch.rms_norm(rows, weight, None if order is None else order.int(), eps).view(x.shape)


class _LazyChoice:
    """Imports Triton when a CUDA device first multiplies."""

    def tile(self, x: Tensor, weight: Packed, gated: bool) -> Any:
        from tpshard.kernels.triton_launch import Choice

        if not hasattr(self, "_choice"):
            self._choice = Choice()
        return self._choice.tile(x, weight, gated)


_choice = _LazyChoice()

_library.impl("quantized_matmul", _matmul_cpu, "CPU")
_library.impl("quantized_gate_up", _gate_up_cpu, "CPU")
_library.impl("rms_norm_permuted", rms_norm_reference, "CPU")
_library.impl("quantized_matmul", _matmul_cuda, "CUDA")
_library.impl("quantized_gate_up", _gate_up_cuda, "CUDA")
_library.impl("rms_norm_permuted", _rms_norm_cuda, "CUDA")


@torch.library.register_fake("tpshard::quantized_matmul", lib=_library)
def _(x: Tensor, words: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], scales.shape[1])


@torch.library.register_fake("tpshard::quantized_gate_up", lib=_library)
def _(x: Tensor, words: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], scales.shape[1] // 2)


@torch.library.register_fake("tpshard::rms_norm_permuted", lib=_library)
def _(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)
