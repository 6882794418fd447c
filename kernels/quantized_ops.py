"""Products with quantized weights as operations that can be traced, each by the fastest path of its device.

    tpshard::quantized_matmul(x [..., inputs], ...packed weight...) -> [..., columns]
    tpshard::quantized_gate_up(x [..., inputs], ...packed weight...) -> silu(x @ gate) * (x @ up)   [..., columns / 2]
    tpshard::rms_norm_permuted(x [..., width], weight [width], order [width] | None, eps) -> [..., width]

`prepare` brings a `Quantized` linear into the form of a device; `matmul` and `gate_up` call the operations with it. On
CUDA the tile, or dequantize-and-multiply, is measured at first use (fp32 always dequantizes). A CPU has one kernel for
all bits, dtypes and numbers of rows (see `llvm_quantized`), which sums in fp32. With `invariant` a row's bits do not
depend on the others; on a CPU they never do. `used` (int64 [1], on the CPU) says how many of the first rows matter: on
a CPU the others are not multiplied and come out as 0, or the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import llvm_launch
from tpshard.kernels.blocked import Blocked, block, unblocked
from tpshard.kernels.packed import Packed, pack
from tpshard.kernels.quantized import Quantized, concatenate
from tpshard.kernels.rows import rms_norm

Prepared = Packed | Blocked
"""A weight as a GPU or a CPU multiplies by it."""

_WEIGHT = (
    "Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? groups, Tensor? bias, int[] form, bool invariant, "
    "Tensor? used=None"
)
_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define(f"quantized_matmul({_WEIGHT}) -> Tensor")
_library.define(f"quantized_gate_up({_WEIGHT}) -> Tensor")
_library.define("rms_norm_permuted(Tensor x, Tensor weight, Tensor? order, float eps) -> Tensor")
GATE_UP = torch.ops.tpshard.quantized_gate_up.default
NORM = torch.ops.tpshard.rms_norm_permuted.default


def prepare(weight: Quantized | Sequence[Quantized], device: torch.device | str) -> Prepared:
    """The form in which `device` multiplies. Several weights (gate, up) are put side by side.

    Raises ValueError where rows of a group are apart, or where the weights to join have different g_idx.
    """
    joined = weight if isinstance(weight, Quantized) else concatenate(weight)
    joined = joined.to(device)
    if joined.codes.is_cuda:
        return pack(joined, quads=torch.cuda.get_device_capability(joined.codes.device) < (9, 0))
    return block(joined)


def matmul(x: Tensor, weight: Prepared, invariant: bool = False) -> Tensor:
    """x [..., inputs] -> [..., columns] in x's dtype."""
    return torch.ops.tpshard.quantized_matmul(x, *arguments(weight), invariant)


def gate_up(x: Tensor, weight: Prepared, invariant: bool = False) -> Tensor:
    """silu(gate) * up [..., columns / 2], with `weight` holding gate and up side by side."""
    return torch.ops.tpshard.quantized_gate_up(x, *arguments(weight), invariant)


def rms_norm_permuted(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """RMSNorm (fp32 inside) whose result is stored in `order`: out[..., i] = norm(x)[..., order[i]]."""
    return torch.ops.tpshard.rms_norm_permuted(x, weight, order, eps)


def arguments(weight: Prepared) -> tuple[Any, ...]:
    """What the operations take of a weight; a form ends with the columns."""
    if isinstance(weight, Blocked):
        form = [weight.bits, weight.width, weight.inputs, weight.columns]
        return weight.codes, weight.scales, weight.zeros, weight.spans, weight.bias, form
    groups = (weight.chunk, weight.group_chunks, weight.first_chunk)
    form = [weight.bits, weight.width, weight.inputs, *groups, int(weight.quads), weight.columns]
    return weight.words, weight.scales, weight.zeros, weight.row_group, weight.bias, form


_FORM = 5
"""Where the form is among the arguments after x; `invariant` and, where it is given, `used` follow."""


# CPU


def _split(arguments: Sequence[Any]) -> list[Any]:
    return [*arguments[: _FORM + 1], arguments[_FORM + 2] if len(arguments) > _FORM + 2 else None]


def _cpu_product(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, spans: Tensor, bias: Tensor | None, form: Sequence[int],
    used: Tensor | None,
) -> Tensor:  # fmt: skip
    """x [..., inputs] -> fp32 [..., columns] with bias. Few calls: a decoded token waits for each of them."""
    _, width, inputs, columns = form
    rows = x if x.dim() == 2 else x.reshape(-1, inputs)
    if rows.dtype != torch.float32:
        rows = rows.float()
    if llvm_launch.available():
        count = rows.shape[0] if used is None else min(rows.shape[0], int(used))
        y = llvm_launch.matmul(rows, codes, scales, zeros, spans, width, count)
        if y.shape[1] != columns:
            y = y[:, :columns]
    else:
        y = rows @ unblocked(Blocked(codes, scales, zeros, spans, None, *form)).dequantize(torch.float32)
    if bias is not None:
        y = y + bias
    return y if x.dim() == 2 else y.view(*x.shape[:-1], columns)


def matmul_on_cpu(x: Tensor, *arguments: Any) -> Tensor:
    """quantized_matmul on a CPU."""
    y = _cpu_product(x, *_split(arguments))
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _gate_up_cpu(x: Tensor, *arguments: Any) -> Tensor:
    gate, up = _cpu_product(x, *_split(arguments)).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


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


def _packed(
    words: Tensor, scales: Tensor, zeros: Tensor | None, row_group: Tensor | None, bias: Tensor | None,
    form: Sequence[int],
) -> Packed:  # fmt: skip
    bits, width, inputs, chunk, group_chunks, first_chunk, quads, _ = form
    return Packed(words, scales, zeros, row_group, bias, bits, width, inputs, chunk, group_chunks, first_chunk,
                  bool(quads))  # fmt: skip


def _matmul_cuda(x: Tensor, *arguments: Any) -> Tensor:
    return _cuda_product(x, _packed(*arguments[: _FORM + 1]), False, arguments[_FORM + 1])


def _gate_up_cuda(x: Tensor, *arguments: Any) -> Tensor:
    return _cuda_product(x, _packed(*arguments[: _FORM + 1]), True, arguments[_FORM + 1])


def _rms_norm_cuda(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    from tpshard.kernels import triton_launch

    with torch.cuda.device(x.device):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return triton_launch.rms_norm(rows, weight, order, eps).view(x.shape)


class _LazyChoice:
    """Imports Triton when a CUDA device first multiplies."""

    def tile(self, x: Tensor, weight: Packed, gated: bool) -> Any:
        from tpshard.kernels.triton_launch import Choice

        if not hasattr(self, "_choice"):
            self._choice = Choice()
        return self._choice.tile(x, weight, gated)


_choice = _LazyChoice()

_library.impl("quantized_matmul", matmul_on_cpu, "CPU")
_library.impl("quantized_gate_up", _gate_up_cpu, "CPU")
_library.impl("rms_norm_permuted", rms_norm, "CPU")
_library.impl("quantized_matmul", _matmul_cuda, "CUDA")
_library.impl("quantized_gate_up", _gate_up_cuda, "CUDA")
_library.impl("rms_norm_permuted", _rms_norm_cuda, "CUDA")


@torch.library.register_fake("tpshard::quantized_matmul", lib=_library)
def _(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], arguments[_FORM][-1])


@torch.library.register_fake("tpshard::quantized_gate_up", lib=_library)
def _(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], arguments[_FORM][-1] // 2)


@torch.library.register_fake("tpshard::rms_norm_permuted", lib=_library)
def _(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)
