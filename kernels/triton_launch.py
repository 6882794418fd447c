"""Launching the Triton kernels: the tiles that fit a shape, and the choice among them by measuring on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import triton.testing
from torch import Tensor
from tpshard.kernels import triton_norm, triton_optimizer, triton_steps
from tpshard.kernels.experts.triton_experts import SortedChoices
from tpshard.kernels.linear import fixed_rows_linear
from tpshard.kernels.quantized import triton_quantized
from tpshard.kernels.quantized.packed import Packed
from tpshard.kernels.triton_device import arrivals, capability_of, programs_at_once, whole_waves


@dataclass(frozen=True)
class Tile:
    """The work of one Triton program: rows of x, columns of the output, and how many programs split the inputs."""

    rows: int
    columns: int
    parts: int = 1
    warps: int = 4
    stages: int = 4


def constants(
    packed: Packed, columns: int, gated: bool, tile: Tile, fast: bool, sharing: int = 0, large: bool = False
) -> dict[str, Any]:
    """The compile-time arguments of `matmul_kernel`. `fast` is off in Triton's interpreter. large: as in the kernel."""
    return {
        "SHARING": sharing,
        "BITS": packed.width,
        "MIDDLE": 1 << (packed.bits - 1),
        "CHUNK": packed.chunk,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "SPLIT_K": tile.parts > 1,
        "GATED": gated,
        "RAGGED": packed.pieces is not None,
        "SYMMETRIC": packed.zeros is None,
        "BIASED": packed.bias is not None,
        "EVEN_N": columns % tile.columns == 0,
        "EVEN_K": packed.pieces is not None or packed.inputs % packed.chunk == 0,
        "QUADS": packed.quads,
        "FAST": fast,
        "ONE_PASS": tile.rows <= 64,
        "PRECISION": "ieee",
        "LARGE": large,
    }


def tiles(
    rows: int, packed: Packed, gated: bool, multiprocessors: int, capability: tuple[int, int] = (9, 0)
) -> list[Tile]:
    """Tiles worth measuring for `rows` rows of x, the best guess first."""
    outputs = packed.columns // (2 if gated else 1)
    # Registers set the limits: none of these tiles spills, as a test that compiles them checks.
    most = 64 if packed.quads else 128
    block = min(most, 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128)
    wide, narrow = (64, 32) if gated else (128, 64)
    if block <= 32:
        shapes = [(wide, 4, 4), (narrow, 4, 4), (wide, 4, 6), (narrow, 4, 6)]
    elif block == 64:
        shapes = [(wide, 8, 4), (narrow, 4, 4)]
        if gated and packed.quads:
            shapes = shapes[1:]
        elif gated and packed.zeros is not None:
            shapes = shapes[:1]  # the zeros of two matrices spill with four warps
        if not gated:  # the narrow one took two thirds of the wide one's time on an H100
            shapes.reverse()
            if not packed.quads:  # fewer columns' programs read x fewer times, of which two fit a multiprocessor or one
                shapes = [(wide, 4, 3)] * (packed.width < 8) + shapes
            if capability[0] == 9:
                shapes.append((2 * wide, 8, 3))
    else:
        shapes = [(wide, 8, 3)]
    if packed.chunk == 32 and capability >= (10, 0):  # the compiler of Triton 3.9 fails at such tiles
        shapes = [shape for shape in shapes if shape[:2] != (128, 4)]
    chunks = len(packed.words)
    candidates = []
    for width, warps, stages in shapes:
        blocks = -(-outputs // width) * -(-rows // block)
        # As many programs as registers of all multiprocessors hold at once: no second wave with a few of them.
        resident = max(1, {16: 24, 32: 16, 64: 8, 128: 4}[block] * narrow // (width * warps))
        parts = max(1, min(resident * multiprocessors // blocks, chunks // 4, 32))
        candidates += [Tile(block, width, p, warps, stages) for p in sorted({parts, max(1, parts // 2)}, reverse=True)]
        if parts * 2 <= chunks // 4 and block <= 64:
            candidates.append(Tile(block, width, parts * 2, warps, stages))
    return candidates


def in_waves(tile: Tile, rows: int, packed: Packed, gated: bool, places: int) -> Tile:
    """The tile with as many parts as are whole waves on a device that holds so many of its programs at once."""
    outputs = packed.columns // (2 if gated else 1)
    blocks = -(-outputs // tile.columns) * -(-rows // tile.rows)
    return replace(tile, parts=whole_waves(blocks, places, max(1, min(len(packed.words) // 4, 32))))


def matmul(x: Tensor, packed: Packed, gated: bool, tile: Tile, choices: SortedChoices | None = None) -> Tensor:
    """The product of `launch_matmul`."""
    return launch_matmul(x, packed, gated, tile, choices)[0]


def launch_matmul(
    x: Tensor, packed: Packed, gated: bool, tile: Tile, choices: SortedChoices | None = None
) -> tuple[Tensor, Any]:
    """x [rows, inputs] contiguous -> [rows, columns]; if gated silu(gate) * up [rows, columns / 2].

    One kernel launch; another one before it spreads x where groups are ragged. With `choices`, `packed` is a stack of
    experts: x [choices or rows, inputs] -> [choices, columns], 0 for those that another device computes. Also returns
    Triton's compiled kernel; None where there is nothing to compute, and in the interpreter.
    """
    x = x if packed.rows is None else x.index_select(-1, packed.rows)
    rows, inputs = x.shape
    columns = packed.columns // (2 if gated else 1)
    experts, blocks_m, sharing = 1, -(-rows // tile.rows), 0
    out = x.new_empty(rows, columns)
    routing = (packed.words,) * 5
    if choices is not None:
        experts, blocks_m, sharing = choices.count, choices.most, choices.choices // rows
        rows, out = choices.choices, x.new_zeros(choices.choices, columns)
        routing = (choices.order, choices.starts, choices.ends, choices.experts, choices.first_block)
    if not out.numel():
        return out, None
    blocks, large = blocks_m * -(-columns // tile.columns), rows * max(inputs, columns) >= 2**31
    partial, arrived = out, out
    if tile.parts > 1:
        partial = x.new_empty((tile.parts, 2 if gated else 1, rows, columns), dtype=torch.float32)
        arrived = arrivals(x.device)
        if blocks > arrived.numel():
            raise ValueError(f"{blocks} blocks are too many to split their inputs.")
    compiled = triton_quantized.matmul_kernel[(blocks, tile.parts)](
        x, packed.words, packed.scales, _or(packed.zeros, packed.scales), _or(packed.bias, packed.scales), out, partial,
        arrived, *routing, rows, columns, inputs, len(packed.words) // experts, packed.group_chunks, packed.first_chunk,
        blocks_m, experts, len(packed.scales) // experts, num_warps=tile.warps, num_stages=tile.stages,
        **constants(packed, columns, gated, tile, x.is_cuda and x.dtype != torch.float32, sharing, large),
    )  # fmt: skip
    return out, compiled


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The dense weight [columns, inputs], the layout of torch's linear."""
    columns, words = packed.columns, packed.words
    out = torch.empty(columns, packed.inputs, dtype=dtype, device=words.device)
    triton_quantized.dequantize_kernel[(-(-columns // 64), words.shape[0])](
        words, packed.scales, _or(packed.zeros, packed.scales), _or(packed.pieces, words), out, columns,
        packed.inputs, len(words), packed.group_chunks, packed.first_chunk, BITS=packed.width,
        MIDDLE=1 << (packed.bits - 1), CHUNK=packed.chunk, BLOCK_N=64, RAGGED=packed.pieces is not None,
        SYMMETRIC=packed.zeros is None, QUADS=packed.quads, FAST=out.is_cuda and dtype != torch.float32,
    )  # fmt: skip
    return out


def dense_matmul(x: Tensor, packed: Packed, gated: bool, fixed_rows: bool = False) -> Tensor:
    """The result of `matmul` by dequantizing and the library's product: the faster path for many rows. With
    `fixed_rows` a row's bits do not depend on the other rows."""
    bias, dense = None if packed.bias is None else packed.bias.to(x.dtype), dequantize(packed, x.dtype)
    if fixed_rows:
        y = fixed_rows_linear(x, dense)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, dense, bias)
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., rows, width], permuted by `order` [width]; columns of a wider tensor are read in place."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, *x.shape[-2:])
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    _norm_rows(x, None, weight, order, out, out, eps)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, order: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + y [..., width], and `rms_norm` of it."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm_rows(x.contiguous().view(1, -1, x.shape[-1]), y.contiguous(), weight, order, total, out, eps)
    return total, out


def _norm_rows(
    x: Tensor, y: Tensor | None, weight: Tensor, order: Tensor | None, total: Tensor, out: Tensor, eps: float
) -> None:
    outer, inner, width = x.shape
    triton_norm.rms_norm_kernel[(outer * inner,)](
        x, _or(y, x), weight, _or(order, weight), total, out, inner, x.stride(0), width, eps,
        BLOCK=triton.next_power_of_2(width), PERMUTED=order is not None, ADDED=y is not None,
        num_warps=8 if width >= 4096 else 4,
    )  # fmt: skip


def rotate(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """`kernels.rotary` in Triton, two tensors a launch."""
    cos, sin, results = cos.contiguous(), sin.contiguous(), list[Tensor]()
    for first in range(0, len(xs), 2):
        pair = [x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in xs[first : first + 2]]
        outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in pair]
        heads, (_, rows, _, head) = [x.shape[2] for x in pair], pair[0].shape
        # a product is rounded before it is added, so that bits are those of torch's operations
        triton_steps.rotate_kernel[rows, sum(heads)](
            pair[0], pair[-1], cos, sin, outs[0], outs[-1], pair[0].stride(1), pair[-1].stride(1), heads[0],
            HEAD=head, BLOCK=triton.next_power_of_2(head), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        results += outs
    return results


def store_rows(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Writes k and v [b, t, kv, d] to the slots [b, t] of pools [n, s, kv, d], in one launch."""
    _, _, kv, d = k.shape
    k, v = (x.flatten(0, 1) if x.stride()[2:] == (d, 1) else x.contiguous().flatten(0, 1) for x in (k, v))
    triton_steps.store_rows_kernel[k.shape[0], 2](
        k, v, k_pool, v_pool, slots.reshape(-1), k.stride(0), v.stride(0), kv * d,
        BLOCK=triton.next_power_of_2(kv * d), num_warps=4,
    )  # fmt: skip


def reorder(x: Tensor, order: Tensor, blocks: int) -> Tensor:
    """`kernels.quantized.reorder` in Triton: each of `blocks` parts of the last dim in its order."""
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if out.numel():
        triton_steps.reorder_kernel[x.numel() // width, triton.cdiv(width, 1024)](
            x, order, out, width, width // blocks, BLOCK=1024
        )
    return out


def largest(keys: Tensor, count: int) -> Tensor:
    """`kernels.largest` in Triton; a few numbers are sorted by torch."""
    out = keys.new_empty(len(keys), count)
    if out.numel():
        triton_steps.largest_kernel[(len(keys),)](
            keys.contiguous(), out, keys.shape[1], count, BLOCK=4096, num_warps=16
        )
    return out.sort(-1, descending=True).values


STEP_BLOCK = 1024
"""Elements of a parameter that one Triton program updates."""


def adamw_step_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, finite: Tensor, scale: Tensor, lr: Tensor,
    update: Tensor, beta1: float, beta2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """Runs one AdamW step in place; arguments as of `optimizer_steps`."""

    def launch(grad: Tensor, *written: Tensor) -> None:
        param, exp_avg, exp_avg_sq = written
        size = param.numel()
        triton_optimizer.adamw_kernel[(triton.cdiv(size, STEP_BLOCK),)](
            param, grad, exp_avg, exp_avg_sq, finite, scale, lr, update, size, LOG_BETA1=_log(beta1),
            LOG_BETA2=_log(beta2), BETA1=beta1, BETA2=beta2, EPS=eps, DECAY=decay, WIDE=_computed_in(param),
            BLOCK=STEP_BLOCK,
        )  # fmt: skip

    _contiguous(launch, grad, param, exp_avg, exp_avg_sq)


def lion_step_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, finite: Tensor, scale: Tensor, lr: Tensor, beta1: float,
    beta2: float, decay: float,
) -> None:  # fmt: skip
    """Runs one Lion step in place; arguments as of `optimizer_steps`."""

    def launch(grad: Tensor, *written: Tensor) -> None:
        param, exp_avg = written
        size = param.numel()
        triton_optimizer.lion_kernel[(triton.cdiv(size, STEP_BLOCK),)](
            param, grad, exp_avg, finite, scale, lr, size, BETA1=beta1, BETA2=beta2, DECAY=decay,
            WIDE=_computed_in(param), BLOCK=STEP_BLOCK,
        )  # fmt: skip

    _contiguous(launch, grad, param, exp_avg)


def _log(beta: float) -> float:
    """The logarithm of an optimizer's beta; for 0 a number so low that exp of it is 0."""
    return math.log(beta) if beta > 0 else -1e3


def _computed_in(param: Tensor) -> Any:
    return tl.float64 if param.dtype == torch.float64 else tl.float32


def _contiguous(launch: Callable[..., None], grad: Tensor, *written: Tensor) -> None:
    """Calls launch(grad, *written) with contiguous tensors, and copies what it writes to those that are not."""
    if not written[0].numel():
        return
    flat = [x.contiguous() for x in written]
    launch(grad.contiguous(), *flat)
    for x, values in zip(written, flat):
        if values is not x:
            x.copy_(values)


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if tensor is None else tensor


class TileChoice:
    """Chooses the tile by measuring, once per device, shape and number of rows (rounded up to a power of two).

    `tile(...)` returns a Tile, or None for dequantize-and-multiply. Nothing can be measured while a CUDA graph is
    captured: then it returns the earlier choice for that shape, else the first guess.
    """

    def __init__(self) -> None:
        self.choices: dict[tuple[object, ...], Tile | None] = {}
        self.milliseconds: dict[tuple[object, ...], dict[Tile | None, float]] = {}

    def tile(self, x: Tensor, packed: Packed, gated: bool) -> Tile | None:
        """The fastest tile for a product of this size, measured at its first use; None where another way is faster."""
        key = self.key(x, packed, gated)
        if key not in self.choices:
            multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
            guesses = tiles(x.shape[0], packed, gated, multiprocessors, capability_of(x))
            if torch.cuda.is_current_stream_capturing():
                return guesses[0] if x.shape[0] <= 64 else None
            self.milliseconds[key] = self._measure(x, packed, gated, guesses, multiprocessors)
            self.choices[key] = min(self.milliseconds[key], key=lambda tile: self.milliseconds[key][tile])
        return self.choices[key]

    def key(self, x: Tensor, packed: Packed, gated: bool) -> tuple[object, ...]:
        rows = triton.next_power_of_2(x.shape[0])
        form = (packed.width, packed.inputs, packed.columns, packed.chunk, packed.group_chunks, packed.zeros is None)
        return (x.device, x.dtype, rows, gated, packed.pieces is None, packed.bias is None, *form)

    def _measure(
        self, x: Tensor, packed: Packed, gated: bool, guesses: list[Tile], multiprocessors: int
    ) -> dict[Tile | None, float]:
        """Milliseconds of each way, and of the best guess in as many parts as are whole waves of its programs."""
        times: dict[Tile | None, float] = {None: _median_ms(lambda: dense_matmul(x, packed, gated))}
        for guess in guesses:
            try:
                times[guess] = _median_ms(lambda tile=guess: matmul(x, packed, gated, tile))  # type: ignore[misc]
            except triton.runtime.errors.OutOfResources:
                continue  # the tile needs more shared memory than the device has
        if tried := [guess for guess in guesses if guess in times]:
            best = min(tried, key=lambda guess: times[guess])
            compiled = launch_matmul(x, packed, gated, best)[1]
            programs = programs_at_once(compiled.n_regs, compiled.metadata.shared, best.warps, capability_of(x))
            tile = in_waves(best, x.shape[0], packed, gated, multiprocessors * programs)
            if tile not in times:
                times[tile] = _median_ms(lambda: matmul(x, packed, gated, tile))
        return times


def _median_ms(call: Callable[[], Tensor]) -> float:
    return float(triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
