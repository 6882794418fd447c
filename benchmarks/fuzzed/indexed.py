"""Families that read and write by index, and that order what they are given."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzed.data_movement import at
from fuzzed.writer import Writer, by_name, written


def indexed(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3)
    shape = w.shape(i)
    d = w.dim(i)
    rank = len(shape)
    one = w.integers(shape[d], *w.sizes(rng.choice((1, 2)), (1, 2, 3, 4)))
    count = rng.choice((1, 2, 3, 4))
    first, second = w.integers(shape[0], count), w.integers(shape[1], count)
    last = w.integers(shape[-1], count)
    w.one(
        ("x[:, i]", lambda x, a: x[at(d, rank, a)], i, one),
        ("x[:, i - n]", lambda x, a: x[at(d, rank, a - shape[d])], i, one),
        ("x[i, j]", lambda x, a, b: x[a, b], i, first, second),
        ("x[i[:, None], j]", lambda x, a, b: x[a[:, None], b], i, first, second),
        ("x[i, ..., k]", lambda x, a, c: x[a, ..., c], i, first, last),
        ("x[arange, i]", lambda x, b: x[torch.arange(min(count, shape[0])), b[: min(count, shape[0])]], i, second),
        ("x[list]", lambda x: x[[0, shape[0] - 1, 0]], i),
        ("x[i, None]", lambda x, a: x[a, None] * 2, i, first),
        ("where mask", lambda x: torch.where(x > 0, x, x * 2), i),
    )


def index_writes(w: Writer, rng: random.Random) -> None:
    i = w.tensor(2, 3)
    shape = w.shape(i)
    count = rng.randint(1, min(3, shape[0], shape[1]))
    a = w.argument(torch.randperm(shape[0], generator=w.generator)[:count])
    b = w.argument(torch.randperm(shape[1], generator=w.generator)[:count])
    again = w.integers(shape[0], 4)
    rows, more = w.floats(count, *shape[1:]), w.floats(4, *shape[1:])
    points = w.floats(count, *shape[2:])
    mask = w.booleans(*shape)

    w.one(
        ("x[i] = v", written(Tensor.__setitem__), i, a, rows),
        ("index_put", lambda x, k, v: x.index_put((k,), v), i, a, rows),
        ("index_put adds", lambda x, k, v: x.index_put((k,), v, accumulate=True), i, again, more),
        ("index_put pair", lambda x, j, k, v: x.index_put((j, k), v), i, a, b, points),
        ("x[mask] = 0", lambda x, m: x.clone().masked_fill_(m, 0.0), i, mask),
        ("x[mask] = 1", written(lambda y, m: y.__setitem__(m, 1.0)), i, mask),
        ("index_copy", lambda x, k, v: x.index_copy(0, k, v), i, a, rows),
        ("index_fill", lambda x, k: x.index_fill(0, k, 2.0), i, a),
        ("index_add", lambda x, k, v: x.index_add(0, k, v, alpha=2), i, again, more),
        ("index_reduce", lambda x, k, v: x.index_reduce(0, k, v, "amax"), i, again, more),
        ("scalar put", lambda x, k: x.index_put((k,), torch.tensor(3.0, dtype=x.dtype)), i, a),
        ("unsafe put", lambda x, j, k, v: torch.ops.aten._unsafe_index_put(x, [j, k], v, True), i, a, b, points),
        ("cache", _cache, i, a, rows),
    )


def _cache(x: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache = torch.zeros_like(x)
    cache[at] = new
    return (cache * x).sum(-1)


def selected(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    shape = w.shape(i)
    index = w.integers(shape[d], rng.choice((1, 2, 4, 6)))
    flat = w.integers(w.values[i].numel(), 5)
    rows = w.integers(w.shape(i)[0], 2, 3)
    w.one(
        ("index_select", lambda x, k: x.index_select(d, k), i, index),
        ("take", lambda x, k: x.take(k), i, flat),
        ("embedding", lambda x, k: F.embedding(k, x.reshape(x.shape[0], -1)), i, rows),
        (
            "take_along_dim",
            lambda x, k: x.take_along_dim(k.view([-1 if e == d % x.dim() else 1 for e in range(x.dim())]), d),
            i,
            index,
        ),
        ("embedding with padding", lambda x, k: F.embedding(k, x.reshape(x.shape[0], -1), padding_idx=0), i, rows),
    )


def gathered(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    shape = w.shape(i)
    size = [
        rng.choice((1, 2, n)) if e == d % len(shape) else rng.randint(1, n) if rng.random() < 0.3 else n
        for e, n in enumerate(shape)
    ]
    k = w.integers(shape[d], *size)
    w.one(
        ("gather", lambda x, k: x.gather(d, k), i, k),
        ("gather of sorted", lambda x, k: x.gather(d, k.sort(d).values) * 2, i, k),
        ("gather argmax", lambda x: x.gather(d, x.argmax(d, keepdim=True)), i),
        ("gather argsort", lambda x: (x * 2).gather(d, x.argsort(d)), i),
    )


def scattered(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    shape = w.shape(i)
    e = d % len(shape)
    count = rng.randint(1, shape[d])
    size = [count if f == e else n for f, n in enumerate(shape)]
    order = torch.rand([shape[e] if f == e else n for f, n in enumerate(shape)], generator=w.generator).argsort(e)
    unique = w.argument(order.narrow(e, 0, count).contiguous())
    any_ = w.integers(shape[d], *size)
    src = w.floats(*size)
    how = rng.choice(("sum", "prod", "mean", "amax", "amin"))
    own = rng.random() < 0.5
    w.one(
        ("scatter", lambda x, k, s: x.scatter(d, k, s), i, unique, src),
        ("scatter value", lambda x, k: x.scatter(d, k, 1.5), i, any_),
        ("scatter_add", lambda x, k, s: x.scatter_add(d, k, s), i, any_, src),
        (f"scatter_reduce {how}", lambda x, k, s: x.scatter_reduce(d, k, s, how, include_self=own), i, any_, src),
        ("scatter add", lambda x, k, s: x.scatter(d, k, s, reduce="add").detach() + x, i, any_, src),
        ("zeros scatter_", lambda x, k, s: torch.zeros_like(x).scatter_(d, k, s) + x, i, unique, src),
        (
            "counts",
            lambda x, k: x + torch.zeros_like(x).scatter_add_(d, k, torch.ones(k.shape, dtype=x.dtype)),
            i,
            any_,
        ),
    )


def ordered(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    n = w.shape(i)[d]
    k = rng.randint(1, n)
    down = rng.random() < 0.5
    w.one(
        ("sort", lambda x: x.sort(d, descending=down).values, i),
        ("argsort", lambda x: x.argsort(d), i),
        ("stable sort", lambda x: torch.sort(x, stable=True, dim=d).values * 2, i),
        ("topk", lambda x: x.topk(k, d, largest=down).values, i),
        ("topk index", lambda x: x.topk(k, d).indices, i),
        ("kthvalue", lambda x: x.kthvalue(k, d).values, i),
        ("median", lambda x: x.median(d).values, i),
        ("mode", lambda x: (x * 2).round().mode(d).values, i),
        ("msort", lambda x: x.msort(), i),
        ("quantile", lambda x: x.quantile(0.3, d), i),
        ("median of all", lambda x: x.median(), i),
        ("nanmedian", lambda x: x.nanmedian(d).values, i),
        ("rank", lambda x: x.argsort(d).argsort(d), i),
        (
            "top of experts",
            lambda x: torch.zeros_like(x).scatter(d, x.topk(k, d).indices, x.softmax(d).topk(k, d).values),
            i,
        ),
    )


def one_hot(w: Writer, rng: random.Random) -> None:
    n = rng.choice((2, 3, 4, 8))
    k = w.integers(n, *w.sizes(rng.choice((1, 2)), (1, 2, 3, 4, 6)))
    table = w.floats(n, rng.choice((2, 3, 4)))
    sent = w.integers(n, 6)
    w.one(
        ("one_hot", lambda k, t: F.one_hot(k, n).to(t.dtype), k, table),
        ("one_hot product", lambda k, t: F.one_hot(k, n).to(t.dtype) @ t, k, table),
        ("compare", lambda k, t: (k[..., None] == torch.arange(n)).to(t.dtype) @ t, k, table),
        ("bincount", lambda k, t: t * torch.bincount(k.flatten(), minlength=n)[:n, None], sent, table),
        ("histogram by one_hot", lambda k, t: F.one_hot(k, n).sum(0)[:, None] * t, sent, table),
        ("capacity", lambda k, t: (F.one_hot(k, n).cumsum(0) * F.one_hot(k, n)).sum(-1).to(t.dtype), sent, table),
    )


def searched(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2)
    edges = w.argument(torch.randn(rng.choice((2, 4, 5)), generator=w.generator, dtype=torch.float64).sort().values)
    w.one(
        ("bucketize", lambda x, e: torch.bucketize(x, e), i, edges),
        ("searchsorted", lambda x, e: torch.searchsorted(e, x, right=True) * x, i, edges),
        ("searchsorted of rows", lambda x, e: torch.searchsorted(x.sort(-1).values, x), i, edges),
        ("isin", lambda x, e: torch.isin(x.round(), e.round()), i, edges),
        ("histc", lambda x, e: torch.histc(x, 4, -2.0, 2.0) * e.sum(), i, edges),
    )


def embedding_bags(w: Writer, rng: random.Random) -> None:
    n, width = rng.choice((4, 6, 8)), rng.choice((2, 4, 5))
    table = w.floats(n, width)
    k = w.integers(n, rng.choice((1, 2, 4)), rng.choice((2, 3, 4)))
    flat = w.integers(n, 7)
    starts = w.argument(torch.tensor([0, 2, 3]))
    weight = w.floats(*w.shape(k))
    how = rng.choice(("sum", "mean", "max"))
    w.one(
        (f"embedding_bag {how}", lambda t, k: F.embedding_bag(k, t, mode=how), table, k),
        (f"embedding_bag {how} of offsets", lambda t, k, o: F.embedding_bag(k, t, o, mode=how), table, flat, starts),
        (
            "embedding_bag weighted",
            lambda t, k, s: F.embedding_bag(k, t, per_sample_weights=s, mode="sum"),
            table,
            k,
            weight,
        ),
        ("embedding sum", lambda t, k: F.embedding(k, t).sum(1), table, k),
        ("tied", lambda t, k: F.embedding(k, t) @ t.t(), table, k),
    )


FAMILIES = by_name(indexed, index_writes, selected, gathered, scattered, ordered, one_hot, searched, embedding_bags)
