"""Products of tokens with the matrices of their experts in Triton: one launch, whatever each expert's share of tokens.

The host reads nothing from the device: it launches as many programs as tokens can need at the most, and a program
looks up whose tokens it computes.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# (kernel arguments are Triton's own values, typed at launch)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from tpshard.kernels.experts.grouped_rows import GroupedRows, by_library
from tpshard.kernels.triton_device import capability_of


@triton.jit
def _row(choice, SHARING: tl.constexpr):
    """The row that a choice shares with its neighbours. Half as long as a 64-bit division by a number not known."""
    return (choice.to(tl.uint32) // SHARING).to(tl.int64)


@triton.jit
def expert_linear_kernel(
    x, weight, out, order, starts, ends, experts, first_block, count, columns, inputs,
    by_expert, by_column, by_input, SHARING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """out[c] = weight[expert of choice c] @ x[c // SHARING], for BLOCK_M choices of one expert.

    x: [rows, inputs], weight: [count, columns, inputs] with strides by_expert, by_column, by_input, out: [choices,
    columns]; order: the choices, sorted by expert; starts, ends, first_block: [count], an expert's part of `order` and
    its first program; experts: the expert of each program, `count` where there is none.
    """
    block = tl.program_id(0)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < count:
        m, n, k = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        place = tl.load(starts + expert) + (block - tl.load(first_block + expert)) * BLOCK_M + m
        own, in_n = place < tl.load(ends + expert), n < columns
        choice = tl.load(order + place, mask=own, other=0)
        values = x + _row(choice, SHARING)[:, None] * inputs + k[None, :]
        weights = weight + expert * by_expert + k[:, None] * by_input + n[None, :] * by_column
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, inputs, BLOCK_K):
            if EVEN_K:
                a = tl.load(values, mask=own[:, None], other=0.0)
                b = tl.load(weights, mask=in_n[None, :], other=0.0)
            else:
                in_k = start + k < inputs
                a = tl.load(values, mask=own[:, None] & in_k[None, :], other=0.0)
                b = tl.load(weights, mask=in_k[:, None] & in_n[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            values += BLOCK_K
            weights += BLOCK_K * by_input
        to = out + choice[:, None] * columns + n[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=own[:, None] & in_n[None, :])


@triton.jit
def expert_outer_kernel(
    dout, x, out, order, starts, ends, columns, inputs, SHARING_DOUT: tl.constexpr, SHARING: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[e] = the sum over the choices c of expert e of dout[c // SHARING_DOUT] x[c // SHARING]^T, for one block.

    dout: [rows, columns], x: [rows, inputs], out: [count, columns, inputs]; order, starts, ends as above.
    """
    expert = tl.program_id(2).to(tl.int64)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_n, in_k, row, end = n < columns, k < inputs, tl.arange(0, ROWS), tl.load(ends + expert)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(tl.load(starts + expert), end, ROWS):
        own = start + row < end
        choice = tl.load(order + start + row, mask=own, other=0)
        grads = dout + _row(choice, SHARING_DOUT)[:, None] * columns + n[None, :]
        values = x + _row(choice, SHARING)[:, None] * inputs + k[None, :]
        grads = tl.load(grads, mask=own[:, None] & in_n[None, :], other=0.0)
        values = tl.load(values, mask=own[:, None] & in_k[None, :], other=0.0)
        total = tl.dot(tl.trans(grads), values, total, input_precision="ieee")
    to = out + (expert * columns + n[:, None]) * inputs + k[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=in_n[:, None] & in_k[None, :])


@triton.jit
def combine_kernel(
    values, shares, places, out, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr, PLACED: tl.constexpr
):  # fmt: skip
    """out[r] = the sum over a row's CHOICES of shares[r, c] * values[r, c], in fp32 and in the order of the choices.

    With PLACED, places[r, c] is the row of a choice in values; below 0 it has none.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for c in range(CHOICES):
        place = row * CHOICES + c
        share = tl.load(shares + place).to(tl.float32)
        if PLACED:
            place = tl.load(places + place)
        value = tl.load(values + place * width + i, mask=i < tl.where(place >= 0, width, 0), other=0.0)
        total += share * value.to(tl.float32)
    tl.store(out + row * width + i, total.to(out.dtype.element_ty), mask=i < width)


@triton.jit
def swiglu_kernel(gated, linear, size, BLOCK: tl.constexpr):
    """silu(gated) * linear, over gated."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gated + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(linear + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(gated + i, (g * tl.sigmoid(g) * up).to(gated.dtype.element_ty), mask=i < size)


@triton.jit
def swiglu_backward_kernel(gated, linear, dhidden, shares, dshares, width, BLOCK: tl.constexpr):
    """The gradients of a row's share and of its gated and linear, over these; over dhidden its share of hidden.

    hidden = silu(gated) * linear, whose gradient is share * dhidden. Grid: rows, all [rows, width].
    """
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(shares + row).to(tl.float32)
    kind = gated.dtype.element_ty
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, inside = row * width + i, i < width
        g = tl.load(gated + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(linear + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dhidden + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid(g)
        hidden = g * gate * up
        products += d * hidden
        d *= share
        tl.store(dhidden + at, (hidden * share).to(kind), mask=inside)
        tl.store(gated + at, (d * up * gate * (1 + g * (1 - gate))).to(kind), mask=inside)
        tl.store(linear + at, (d * g * gate).to(kind), mask=inside)
    tl.store(dshares + row, tl.sum(products))


@dataclass(frozen=True)
class ExpertTile:
    """The choices, columns and inputs of one product of a Triton program."""

    choices: int
    columns: int
    inputs: int
    warps: int
    stages: int

    @staticmethod
    def of(
        choices: int, experts: int, dtype: torch.dtype, fixed: bool, capability: tuple[int, int] = (9, 0)
    ) -> ExpertTile:
        """A tile for this many choices; with `fixed` the same for any number, so that a row's bits are, too.

        The tiles spill no registers, as a test that compiles them checks; none was measured on a GPU yet.
        """
        mean = choices // experts
        if dtype == torch.float32:
            return ExpertTile(16, 64, 32, 4, 3) if fixed or mean <= 32 else ExpertTile(64, 64, 32, 8, 2)
        if fixed or mean <= 32:
            return ExpertTile(16, 64, 128, 4, 3)
        if mean <= 128:
            return ExpertTile(64, 128, 64, 4, 3)
        # before Hopper, sums and operands are in the same registers
        return ExpertTile(128, 256 if capability >= (9, 0) else 128, 64, 8, 3)

    @staticmethod
    def of_outer(dtype: torch.dtype) -> ExpertTile:
        """A tile of a sum of outer products."""
        return ExpertTile(32, 32, 32, 4, 2) if dtype == torch.float32 else ExpertTile(64, 128, 256, 8, 3)


class SortedChoices:
    """The choices of all tokens, sorted by expert, and the products that compute them.

    ids: [..., k]; of those outside 0 .. count - 1 nothing is computed. block: choices of a program, if not the tile's.
    """

    def __init__(self, ids: Tensor, count: int, dtype: torch.dtype, fixed: bool, block: int | None = None) -> None:
        flat = ids.reshape(-1)
        self.choices, self.count = len(flat), count
        self.tile = ExpertTile.of(self.choices, count, dtype, fixed, capability_of(ids))
        owner = torch.where((flat >= 0) & (flat < count), flat, count)
        owner, self.order = torch.sort(owner, stable=True)
        bounds = torch.searchsorted(owner, torch.arange(count + 1, device=ids.device))
        self.starts, self.ends = bounds[:-1], bounds[1:]
        block = block or self.tile.choices
        blocks = (self.ends - self.starts + block - 1) // block
        last = blocks.cumsum(0)
        self.first_block = last - blocks
        self.most = min(self.choices, (self.choices + count * (block - 1)) // block)
        """Programs at the most; the last ones may have nothing to do."""
        self.experts = torch.searchsorted(last, torch.arange(self.most, device=ids.device), right=True)
        self.places: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """The rows as `linear` and `outer` read them; `GroupedRows` moves them."""
        return x

    def in_choices(self, values: Tensor) -> Tensor:
        """The values of rows in the order of choices, in which these products leave them."""
        return values

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [choices or rows, i] by weight [e, o, i] -> [choices, o]; rows are shared by their choices, in sequence."""
        x, (_, columns, inputs) = x.contiguous(), weight.shape
        out, tile = x.new_zeros(self.choices, columns), self.tile
        if out.numel():
            expert_linear_kernel[self.most, triton.cdiv(columns, tile.columns)](
                x, weight, out, self.order, self.starts, self.ends, self.experts, self.first_block, self.count,
                columns, inputs, *weight.stride(), SHARING=self.choices // len(x), BLOCK_M=tile.choices,
                BLOCK_N=tile.columns, BLOCK_K=tile.inputs, EVEN_K=inputs % tile.inputs == 0,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        return out

    def outer(self, dout: Tensor, x: Tensor) -> Tensor:
        """The sums of outer products of dout [choices or rows, o] and x [choices or rows, i] per expert: [e, o, i]."""
        dout, x = dout.contiguous(), x.contiguous()
        columns, inputs = dout.shape[1], x.shape[1]
        if not self.choices:
            return x.new_zeros(self.count, columns, inputs)
        out, tile = x.new_empty(self.count, columns, inputs), ExpertTile.of_outer(x.dtype)
        expert_outer_kernel[triton.cdiv(columns, tile.columns), triton.cdiv(inputs, tile.inputs), self.count](
            dout, x, out, self.order, self.starts, self.ends, columns, inputs,
            SHARING_DOUT=self.choices // len(dout), SHARING=self.choices // len(x),
            BLOCK_N=tile.columns, BLOCK_K=tile.inputs, ROWS=tile.choices, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


def combine(values: Tensor, shares: Tensor, places: Tensor | None = None) -> Tensor:
    """The sums of values [rows * k, m] with shares [rows, k] -> [rows, m]; places: see `combine_kernel`."""
    (rows, choices), width = shares.shape, values.shape[1]
    out = values.new_empty(rows, width)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        combine_kernel[rows, triton.cdiv(width, block)](
            values, shares.contiguous(), values if places is None else places, out, width, CHOICES=choices,
            BLOCK=block, PLACED=places is not None,
        )  # fmt: skip
    return out


def chosen_by(
    ids: Tensor, count: int, sizes: tuple[int, ...], dtype: torch.dtype, fixed: bool
) -> SortedChoices | GroupedRows:
    """What multiplies the rows of choices by the matrices, of these sizes, of `count` experts. With `fixed` a row's
    bits do not depend on the other rows, which is not known of the library's product."""
    if not fixed and by_library(ids, count, sizes, dtype):
        return GroupedRows(ids, count)
    return SortedChoices(ids, count, dtype, fixed)


def swiglu(gated: Tensor, linear: Tensor) -> Tensor:
    """silu(gated) * linear, in the memory of gated."""
    if gated.numel():
        swiglu_kernel[(triton.cdiv(gated.numel(), 1024),)](gated, linear, gated.numel(), BLOCK=1024)
    return gated


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, fixed: bool) -> Tensor:
    """Arguments and result as of `kernels.experts`. With `fixed` a token's bits do not depend on other tokens."""
    chosen = chosen_by(ids, len(gate), gate.shape[1:], x.dtype, fixed)
    rows = chosen.rows(x.reshape(-1, x.shape[-1]))
    hidden = swiglu(chosen.linear(rows, gate), chosen.linear(rows, up))
    return combine(chosen.linear(hidden, down), weights.reshape(-1, ids.shape[-1]), chosen.places).view(x.shape)


def experts_backward(
    dout: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `experts`: of x, weights, gate, up and down."""
    chosen = chosen_by(ids, len(gate), gate.shape[1:], x.dtype, False)
    rows, grads = (chosen.rows(tensor.reshape(-1, x.shape[-1])) for tensor in (x, dout))
    gated, linear = chosen.linear(rows, gate), chosen.linear(rows, up)
    dhidden = chosen.linear(grads, down.transpose(1, 2))
    shares = chosen.rows(weights.reshape(-1, 1)).contiguous()
    dshares = torch.empty(shares.shape, dtype=torch.float32, device=x.device)
    if len(gated):
        swiglu_backward_kernel[(len(gated),)](gated, linear, dhidden, shares, dshares, gated.shape[1], BLOCK=1024)
    dgated, dlinear, hidden = gated, linear, dhidden
    ddown = chosen.outer(hidden, grads).transpose(1, 2).contiguous()
    dx = chosen.linear(dgated, gate.transpose(1, 2)) + chosen.linear(dlinear, up.transpose(1, 2))
    ones = torch.ones(ids.numel() // ids.shape[-1], ids.shape[-1], device=x.device)
    dgate, dup = chosen.outer(dgated, rows), chosen.outer(dlinear, rows)
    return (
        combine(dx, ones, chosen.places).view(x.shape),
        chosen.in_choices(dshares).to(weights.dtype).view(weights.shape), dgate, dup, ddown,
    )  # fmt: skip
