"""Families that move data: views, writes into views, pieces, joins, padding, and what depends on position."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzed.writer import Writer, by_name, written


def at(dim: int, rank: int, index: Any) -> tuple[Any, ...]:
    """The index of all of a tensor but for one dim."""
    return (*[slice(None)] * (dim % rank), index)


def span(rng: random.Random, n: int) -> slice:
    """A random slice of n elements that is not empty: any bounds, also negative ones, and any step."""
    start = rng.randrange(n)
    stop = rng.randint(start + 1, n)
    step = rng.choice((1, 1, 1, 2, 3))
    back = rng.random() < 0.3
    return slice(start - n if back else start, None if stop == n and rng.random() < 0.5 else stop, step)


def views(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3, 4)
    shape = w.shape(i)
    d = w.dim(i)
    n = shape[d]
    k = rng.choice([k for k in range(1, n + 1) if n % k == 0])
    order = rng.sample(range(len(shape)), len(shape))
    w.one(
        ("flatten", lambda x: x.flatten(), i),
        ("reverse sizes", lambda x: x.reshape(shape[::-1]), i),
        ("unflatten", lambda x: x.unflatten(d, (k, -1)), i),
        ("flatten of permuted", lambda x: x.permute(order).flatten(0, 1), i),
        ("view of permuted", lambda x: x.permute(order).reshape(-1, shape[order[-1]]), i),
        ("movedim", lambda x: x.movedim(d, 0), i),
        ("transpose", lambda x: x.transpose(d, 0).contiguous().view(-1), i),
        ("view, add, view", lambda x: (x.view(-1) + 1).view(shape), i),
        ("squeeze", lambda x: x.unsqueeze(d).squeeze(d).squeeze(), i),
        ("expand_as", lambda x: x.unsqueeze(0).expand(3, *shape), i),
        ("swapaxes of even halves", lambda x: x.reshape(-1, 1).swapaxes(0, 1), i),
        ("pairs of odd", lambda x: x.reshape(math.prod(shape), 1).expand(-1, 2).flatten(), i),
        ("mT", lambda x: x.mT @ x, i),
        ("adjoint", lambda x: x.adjoint() * 2, i),
        ("view_as", lambda x: x.view_as(x.clone()).narrow(d, 0, 1), i),
        ("tensor_split", lambda x: torch.cat(x.tensor_split(3, d), d) * 2, i),
    )


def written_views(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3)
    shape = w.shape(i)
    d = w.dim(i)
    where = at(d, len(shape), span(rng, shape[d]))
    row = rng.randrange(shape[0])
    piece = w.values[i][where].shape
    other = w.floats(*piece)

    def chunks(y: Tensor) -> None:
        for k, part in enumerate(y.chunk(2, d)):
            part.mul_(k + 2)

    def rows(y: Tensor) -> None:
        for k in range(shape[0]):
            y[k] += y[k - 1]

    def twice(y: Tensor) -> None:
        part = y[where]
        part.add_(1)
        y.mul_(2)
        part.sub_(0.5)

    def filled(x: Tensor, _: Tensor) -> Tensor:
        places = (torch.arange(n).view([-1 if e == d else 1 for d in range(len(shape))]) for e, n in enumerate(shape))
        return torch.zeros_like(x).index_put_(tuple(places), x) + x

    def read_after(x: Tensor) -> Tensor:
        y = x.clone()
        part = y[where]
        y.tanh_()
        return part * 2

    w.one(
        ("x[...] = 1", written(lambda y: y.__setitem__(where, 1.0)), i),
        ("x[...] = k", written(lambda y, k: y.__setitem__(where, k)), i, other),
        ("x[...] *= k", written(lambda y, k: y[where].mul_(k)), i, other),
        ("x[row].zero_()", written(lambda y: y[row].zero_()), i),
        ("x.view(-1).add_(1)", written(lambda y: y.view(-1).add_(1)), i),
        ("x.view(-1)[::2] = 0", written(lambda y: y.view(-1)[::2].fill_(0.5)), i),
        ("chunks", written(chunks), i),
        ("rows", written(rows), i),
        ("diagonal", written(lambda y: y.diagonal(0, 0, 1).fill_(3.0)), i),
        ("twice", written(twice), i),
        ("view read after a write", read_after, i),
        ("transposed", written(lambda y: y.transpose(0, 1)[0].zero_()), i),
        ("x.select.copy_", written(lambda y, k: y[where].copy_(k)), i, other),
        ("x.T.copy_", written(lambda y: y.transpose(0, 1).copy_(y.clone().transpose(0, 1) * 2)), i),
        ("unsqueeze_", lambda x: x.clone().unsqueeze_(d), i),
        ("fill of a new tensor", filled, i, other),
    )


def in_place(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    j = w.floats(*w.shape(i))
    mask = w.booleans(*w.shape(i))
    w.one(
        ("add_", lambda x, y: x.clone().add_(y, alpha=2), i, j),
        ("mul_", lambda x, y: (x * 1).mul_(y), i, j),
        ("relu_", lambda x: F.relu(x + 0.1, inplace=True), i),
        ("clamp_", lambda x: x.clone().clamp_(-1, 0.5), i),
        ("masked_fill_", lambda x, m: x.clone().masked_fill_(m, 0.25), i, mask),
        ("+= of a sum", lambda x, y: _added(x, y), i, j),
        ("copy_", lambda x, y: x.clone().copy_(y), i, j),
        ("out of empty", lambda x: torch.empty_like(x).copy_(x * 3), i),
        ("addcmul_", lambda x, y: x.clone().addcmul_(y, y, value=0.5), i, j),
        ("zero_", lambda x, y: (x * 2).zero_() + y, i, j),
        ("fill_", lambda x: torch.zeros_like(x).fill_(2.0) * x, i),
        ("lerp_", lambda x, y: x.clone().lerp_(y, 0.3), i, j),
        ("sub_, div_", lambda x: (x * 2).sub_(1).div_(3), i),
        ("exp_ of neg_", lambda x: x.clone().neg_().exp_(), i),
        ("pow_", lambda x: x.clone().abs_().add_(1).pow_(2), i),
        ("silu_", lambda x: F.silu(x * 1.0, inplace=True), i),
        ("logical", lambda x, m: x * m.clone().logical_not_(), i, mask),
    )


def _added(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for k in range(3):
        total += (x * k).sum()
    total = total + 0 * y.sum()
    return total


def strided(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    count = w.values[i].numel()
    b = rng.randint(1, 3)
    rows = max(1, count // (2 * b))
    step = rng.choice((1, b))
    width = rng.randint(1, max(1, count - (rows - 1) * step))
    start = rng.randint(0, count - ((rows - 1) * step + width))
    w.one(
        ("as_strided", lambda x: x.as_strided((rows, width), (step, 1), start), i),
        ("as_strided of a product", lambda x: (x * 2).as_strided((rows, width), (step, 1), start), i),
        ("as_strided written", written(lambda y: y.as_strided((rows,), (step,), start).mul_(2)), i),
    )


def joined(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    shape = list(w.shape(i))
    other = list(shape)
    other[d] = rng.choice((1, 2, 3, 4, 8))
    j, k = w.floats(*other), w.floats(*shape)
    w.one(
        ("cat", lambda x, y: torch.cat([x, y], d), i, j),
        ("cat of three", lambda x, y: torch.cat([x, y, x], d), i, j),
        ("cat of slices", lambda x, y: torch.cat([x.narrow(d, 0, 1), y], d), i, j),
        ("stack", lambda x, y: torch.stack([x, y, x * 2], d), i, k),
        ("hstack", lambda x, y: torch.hstack([x, y]), i, k),
        ("vstack", lambda x, y: torch.vstack([x, y]), i, k),
        ("dstack", lambda x, y: torch.dstack([x, y]), i, k),
        ("cat with empty", lambda x: torch.cat([torch.zeros(0, dtype=x.dtype), x.flatten()]), i),
        ("column_stack", lambda x, y: torch.column_stack([x, y]), i, k),
        ("cat of types", lambda x, y: torch.cat([x.float(), y], d), i, j),
        ("shift by one", lambda x: torch.cat([x[:1], x[:-1] * 2]), i),
        ("block_diag", lambda x: torch.block_diag(x.flatten(0, -2) if x.dim() > 1 else x, torch.ones(2, 2)), i),
    )


def divided(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    n = w.shape(i)[d]
    k = rng.randint(1, n)
    cuts = [k, n - k] if k < n else [n]

    def gates(x: Tensor) -> Tensor:
        a, *b = x.chunk(2, d)
        return a.sigmoid() * b[0].narrow(d, 0, 1) if b else a.sigmoid()

    w.one(
        ("split", lambda x: sum(p.sum(d) * (e + 1) for e, p in enumerate(x.split(k, d))), i),
        ("split of sizes", lambda x: torch.cat(x.split(cuts, d)[::-1], d), i),
        ("chunk", lambda x: torch.cat([p * (e + 1) for e, p in enumerate(x.chunk(3, d))], d), i),
        ("first of split", lambda x: x.split(k, d)[0] * 2, i),
        ("last of chunk", lambda x: x.chunk(2, d)[-1], i),
        ("unbind", lambda x: sum(p * (e + 1) for e, p in enumerate(x.unbind(d))), i),
        ("unsafe_chunk", lambda x: torch.unsafe_chunk(x, 2, d)[0], i),
        ("hsplit", lambda x: x.tensor_split([k], d)[0] * 1.5, i),
        ("gates", gates, i),
    )


def sliced(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3, 4)
    shape = w.shape(i)
    index = tuple(
        span(rng, n) if rng.random() < 0.6 else rng.randrange(-n, n) if rng.random() < 0.3 else slice(None)
        for n in shape
    )
    d = w.dim(i)
    n = shape[d]
    a = rng.randrange(n)

    def along(*bounds: int | None) -> tuple[Any, ...]:
        return at(d, len(shape), slice(*bounds))

    w.one(
        (f"x{index}", lambda x: x[index] * 1, i),
        ("narrow", lambda x: x.narrow(d, a, n - a), i),
        ("select", lambda x: x.select(d, a), i),
        ("None", lambda x: x[None, ..., None] + 1, i),
        ("shifted difference", lambda x: x[along(1, None)] - x[along(None, -1)], i),
        ("first and last", lambda x: x.narrow(d, 0, 1) + x.narrow(d, n - 1, 1), i),
        ("every other", lambda x: x[along(None, None, 2)].exp(), i),
        ("slice of slice", lambda x: x[index][..., None] * 2, i),
    )


def scattered_slices(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    shape = w.shape(i)
    d = w.dim(i)
    part = span(rng, shape[d])
    start, stop = part.indices(shape[d])[:2]
    j = w.floats(*w.values[i][at(d, len(shape), part)].shape)
    one = w.floats(*(n for e, n in enumerate(shape) if e != d % len(shape)))
    row = rng.randrange(shape[d])
    choices: list[tuple[Any, ...]] = [
        ("slice_scatter", lambda x, y: x.slice_scatter(y, d, start, stop, part.step), i, j),
        ("select_scatter", lambda x, y: x.select_scatter(y, d, row), i, one),
    ]
    if len(shape) > 1:
        on = w.floats(*w.values[i].diagonal(0, 0, 1).shape)
        choices.append(("diagonal_scatter", lambda x, y: x.diagonal_scatter(y, 0, 0, 1), i, on))
    w.one(*choices)


def padded(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3)
    shape = w.shape(i)
    width = [rng.randint(0, shape[-1] - 1) for _ in range(2)]
    both = [rng.randint(-1, 2) if n > 2 else 1 for n in (shape[-1], shape[-1], shape[-2], shape[-2])]
    five = w.tensor(4)
    side = w.shape(five)
    four = [rng.randint(0, n - 1) for n in (side[-1], side[-1], side[-2], side[-2])]
    w.one(
        ("constant", lambda x: F.pad(x, both), i),
        ("value", lambda x: F.pad(x, both, value=1.5), i),
        ("reflect", lambda x: F.pad(x, width, mode="reflect"), i),
        ("replicate", lambda x: F.pad(x, width, mode="replicate"), i),
        ("circular", lambda x: F.pad(x, width, mode="circular"), i),
        ("reflect 2d", lambda x: F.pad(x, four, mode="reflect"), five),
        ("replicate 2d", lambda x: F.pad(x, four, mode="replicate"), five),
        ("circular 2d", lambda x: F.pad(x, four, mode="circular"), five),
    )


def rolled(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    rank = len(w.shape(i))
    d, by = w.dim(i), rng.randint(-9, 9)
    dims = rng.sample(range(rank), rng.randint(1, rank))
    shifts = [rng.randint(-3, 3) for _ in dims]
    w.one(
        ("roll", lambda x: x.roll(by, d), i),
        ("roll of several", lambda x: x.roll(shifts, dims), i),
        ("roll of all", lambda x: x.roll(by), i),
        ("neighbours", lambda x: x.roll(1, d) - 2 * x + x.roll(-1, d), i),
    )


def flipped(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3)
    dims = rng.sample(range(len(w.shape(i))), rng.randint(1, 2))
    turns = rng.randint(-2, 3)
    w.one(
        ("flip", lambda x: x.flip(dims), i),
        ("fliplr", lambda x: x.fliplr(), i),
        ("flipud", lambda x: x.flipud(), i),
        ("rot90", lambda x: x.rot90(turns, (0, 1)), i),
    )


def repeated(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    times = [rng.randint(1, 3) for _ in w.shape(i)]

    def repeat_kv(x: Tensor) -> Tensor:
        heads = x.unsqueeze(d)
        sizes = [-1] * heads.dim()
        sizes[d] = 3
        return heads.expand(sizes).flatten(0, 1)

    w.one(
        ("repeat", lambda x: x.repeat(*times), i),
        ("tile", lambda x: x.tile((2,)), i),
        ("repeat with more dims", lambda x: x.repeat(2, *times), i),
        ("repeat_interleave", lambda x: x.repeat_interleave(3, d), i),
        ("repeat_kv", repeat_kv, i),
        ("broadcast_to", lambda x: x.broadcast_to(4, *x.shape) * 1, i),
    )


def windows(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    size = rng.randint(1, w.shape(i)[d])
    step = rng.randint(1, 3)
    image = w.floats(rng.choice((1, 2, 4)), rng.choice((1, 2, 3)), *w.sizes(2, (4, 5, 6, 8)))
    k, pad, stride = rng.choice((1, 2, 3)), rng.choice((0, 1)), rng.choice((1, 2))
    w.one(
        ("unfold", lambda x: x.unfold(d, size, step), i),
        ("windowed sum", lambda x: x.unfold(d, size, step).sum(-1), i),
        ("im2col", lambda x: F.unfold(x, k, padding=pad, stride=stride), image),
        (
            "col2im",
            lambda x: F.fold(F.unfold(x, k, padding=pad, stride=stride), x.shape[-2:], k, padding=pad, stride=stride),
            image,
        ),
    )


def diagonals(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3)
    k = rng.randint(-2, 2)
    w.one(
        ("diagonal", lambda x: x.diagonal(k, -2, -1), i),
        ("tril", lambda x: x.tril(k), i),
        ("triu", lambda x: x.triu(k), i),
        ("diag_embed", lambda x: torch.diag_embed(x, k), i),
        ("trace", lambda x: x.flatten(0, -2).trace(), i),
        ("diag", lambda x: x.flatten().diag(k), i),
        (
            "causal softmax",
            lambda x: x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), float("-inf")).softmax(-1),
            i,
        ),
        ("tril_indices", lambda x: x.flatten(0, -2)[tuple(torch.tril_indices(*x.flatten(0, -2).shape))], i),
    )


def shuffled(w: Writer, rng: random.Random) -> None:
    image = w.floats(rng.choice((1, 2, 4)), rng.choice((4, 8, 12)), *w.sizes(2, (2, 4, 6)))
    w.one(
        ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), image),
        ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), image),
        ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), image),
        ("channels_last", lambda x: x.contiguous(memory_format=torch.channels_last) * 2, image),
        (
            "patches",
            lambda x: x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3),
            image,
        ),
    )


def created(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    shape = w.shape(i)
    d = w.dim(i)
    n = shape[d]
    after = [1] * (len(shape) - 1 - d % len(shape))
    kind = rng.choice((torch.float32, torch.float64, torch.int64, torch.int32))
    start, step = rng.randint(-3, 3), rng.choice((1, 2, 0.5, -1))
    w.one(
        ("arange", lambda x: x + torch.arange(n, dtype=kind).view(-1, *after), i),
        (
            "arange of step",
            lambda x: x + torch.arange(start, start + n * step, step, dtype=torch.float32).view(-1, *after),
            i,
        ),
        ("arange alone", lambda x: (torch.arange(n, dtype=kind) * 2, x)[0] * x.sum().sign().to(kind), i),
        ("full", lambda x: torch.full(shape, 3, dtype=kind) + x.to(kind), i),
        ("full int", lambda x: torch.full(shape, 3) * x, i),
        ("linspace", lambda x: x * torch.linspace(-1, 1, n, dtype=x.dtype).view(-1, *after), i),
        ("logspace", lambda x: x * torch.logspace(0, 1, n, dtype=x.dtype).view(-1, *after), i),
        ("eye", lambda x: x.unsqueeze(-1) * torch.eye(shape[-1], dtype=x.dtype), i),
        (
            "zeros, ones",
            lambda x: torch.zeros(shape, dtype=kind) + torch.ones(shape, dtype=torch.int32) * x.to(kind),
            i,
        ),
        ("new_full", lambda x: x.new_full(shape, 2.0, dtype=kind) * x.to(kind), i),
        ("full_like", lambda x: torch.full_like(x, 2, dtype=kind), i),
        ("bool", lambda x: torch.ones(shape, dtype=torch.bool).logical_not() | (x > 0), i),
        (
            "meshgrid",
            lambda x: sum(torch.meshgrid(*(torch.arange(m, dtype=x.dtype) for m in shape), indexing="ij")) * x,
            i,
        ),
        ("positions", lambda x: torch.outer(torch.arange(n, dtype=x.dtype), 1 / 10 ** torch.arange(4)).cos(), i),
        ("half range", lambda x: torch.arange(n, dtype=torch.bfloat16).view(-1, *after).to(x.dtype) + x, i),
    )


FAMILIES = by_name(
    views, written_views, in_place, strided, joined, divided, sliced, scattered_slices, padded, rolled, flipped,
    repeated, windows, diagonals, shuffled, created,
)  # fmt: skip
