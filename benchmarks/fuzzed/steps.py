"""Steps of all kinds on any value: what follows an op of a family, and what chains are made of."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tpshard.parallelism import mesh_split

from fuzzed.writer import SIZES, Writer


def unary(w: Writer, rng: random.Random, i: int) -> None:
    name, fn = rng.choice([
        ("silu", F.silu), ("gelu", F.gelu), ("relu", torch.relu), ("sigmoid", torch.sigmoid), ("tanh", torch.tanh),
        ("neg", torch.neg), ("square", torch.square), ("exp", lambda x: (x / 8).exp()), ("abs", torch.abs),
        ("float32", lambda x: x.to(torch.float32).to(torch.float64)), ("scale", lambda x: x * 0.5),
        ("shift", lambda x: x + 1.5),
        ("clamp", lambda x: x.clamp(-1, 1)), ("rsub", lambda x: 1 - x), ("clone", torch.clone),
        ("rsqrt", lambda x: (x * x + 1).rsqrt()),
    ])  # fmt: skip
    w.step(name, fn, i)


def binary(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    same = [j for j in range(len(w.values)) if w.shape(j) == shape and w.values[j].is_floating_point()]
    name, fn = rng.choice([
        ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("max", torch.maximum),
        ("div", lambda a, b: a / (b * b + 1)), ("where", lambda a, b: torch.where(a > b, a, b * 0.5)),
    ])  # fmt: skip
    if rng.random() < 0.5 and len(same) > 1:
        w.step(name, fn, i, rng.choice(same))
        return
    other = tuple(1 if rng.random() < 0.3 else n for n in shape)[rng.randrange(len(shape) + 1) :] if shape else ()
    w.step(f"{name} broadcast", fn, *((i, w.floats(*other)) if rng.random() < 0.7 else (w.floats(*other), i)))


def linear(w: Writer, rng: random.Random, i: int) -> None:
    if not w.shape(i):
        return
    n, k = rng.choice(SIZES), w.shape(i)[-1]
    if rng.random() < 0.5:
        w.step("linear", F.linear, i, w.floats(n, k))
    else:
        w.step("linear with bias", F.linear, i, w.floats(n, k), w.floats(n))


def matmul(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if not shape:
        return
    batch = shape[:-2] if rng.random() < 0.5 else ()
    w.step("matmul", torch.matmul, i, w.floats(*batch, shape[-1], rng.choice(SIZES)))


def self_product(w: Writer, rng: random.Random, i: int) -> None:
    if len(w.shape(i)) >= 2:
        w.step("x @ x.mT", lambda x: x @ x.mT / x.shape[-1], i)


def einsum(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if not 2 <= len(shape) <= 4:
        return
    letters = "abcd"[: len(shape)]
    summed = rng.choice(letters)
    rest = [c for c in letters if c != summed]
    shared = [c for c in rest if rng.random() < 0.4]
    right = [summed, *shared, "z"]
    rng.shuffle(right)
    out = [*rest, "z"]
    rng.shuffle(out)
    equation = f"{letters},{''.join(right)}->{''.join(out)}"
    sizes = {**dict(zip(letters, shape)), "z": rng.choice(SIZES)}
    w.step(f"einsum {equation}", lambda a, b: torch.einsum(equation, a, b), i, w.floats(*(sizes[c] for c in right)))


def reduction(w: Writer, rng: random.Random, i: int) -> None:
    rank = len(w.shape(i))
    if not rank:
        return
    dims = rng.sample(range(rank), rng.randint(1, rank))
    keep = rng.random() < 0.5
    one = dims[0]
    name, fn = rng.choice([
        ("sum", lambda x: x.sum(dims, keepdim=keep)), ("mean", lambda x: x.mean(dims, keepdim=keep)),
        ("amax", lambda x: x.amax(dims, keepdim=keep)), ("amin", lambda x: x.amin(dims, keepdim=keep)),
        ("sum all", lambda x: x.sum()), ("var", lambda x: x.var(one, correction=0)),
        ("max", lambda x: x.max(one).values),
        ("logsumexp", lambda x: x.logsumexp(dims)), ("norm", lambda x: (x * x).sum(one, keepdim=keep).add(1).sqrt()),
    ])  # fmt: skip
    w.step(f"{name} {dims}", fn, i)


def along(w: Writer, rng: random.Random, i: int) -> None:
    rank = len(w.shape(i))
    if not rank:
        return
    d = rng.randrange(rank)
    name, fn = rng.choice([
        ("softmax", lambda x: x.softmax(d)), ("log_softmax", lambda x: x.log_softmax(d)),
        ("cumsum", lambda x: x.cumsum(d)),
        ("flip", lambda x: x.flip(d)), ("roll", lambda x: x.roll(1, d)), ("sort", lambda x: x.sort(d).values),
        ("topk", lambda x: x.topk(1, d).values), ("argmax", lambda x: x + x.argmax(d, keepdim=True)),
        ("cummax of 2", lambda x: x + x.roll(-2, d)),
    ])  # fmt: skip
    w.step(f"{name} {d}", fn, i)


def view(w: Writer, rng: random.Random, i: int) -> None:
    shape = list(w.shape(i))
    if not shape:
        return
    if rng.random() < 0.5 and len(shape) > 1:
        d = rng.randrange(len(shape) - 1)
        shape[d : d + 2] = [shape[d] * shape[d + 1]]
    else:
        d = rng.randrange(len(shape))
        divisors = [n for n in range(1, shape[d] + 1) if shape[d] % n == 0]
        a = rng.choice(divisors)
        shape[d : d + 1] = [a, shape[d] // a]
    if rng.random() < 0.15:
        shape = [math.prod(shape)]
    if len(shape) <= 5:
        w.step(f"reshape {shape}", lambda x: x.reshape(shape), i)


def permute(w: Writer, rng: random.Random, i: int) -> None:
    order = list(range(len(w.shape(i))))
    if len(order) > 1:
        rng.shuffle(order)
        w.step(f"permute {order}", lambda x: x.permute(order), i)


def pieces(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if not shape:
        return
    d = rng.randrange(len(shape))
    n = shape[d]
    a, b = sorted(rng.sample(range(n + 1), 2)) if n > 1 else (0, 1)
    half = max(1, n // 2)
    stride = rng.choice((1, 1, 2))
    name, fn = rng.choice([
        ("slice", lambda x: x[(slice(None),) * d + (slice(a, b, stride),)]), ("select", lambda x: x.select(d, a)),
        ("halves", lambda x: torch.cat(x.split(half, d)[::-1], d)),
        ("pad", lambda x: F.pad(x, [0, 0] * (len(shape) - 1 - d) + [1, 2])),
        ("cat", lambda x: torch.cat([x, x * 2], d)), ("stack", lambda x: torch.stack([x, -x], d)),
        ("rotate", lambda x: torch.cat([-x.narrow(d, n // 2, n - n // 2), x.narrow(d, 0, n // 2)], d)),
        ("unsqueeze", lambda x: x.unsqueeze(d)), ("chunk", lambda x: x.chunk(2, d)[0]),
        ("unbind", lambda x: x.unbind(d)[0] * 2),
        ("crop", lambda x: F.pad(x, [0, 0] * (len(shape) - 1 - d) + [-a, 1])),
        ("expand", lambda x: x.unsqueeze(d).expand(*shape[:d], 3, *shape[d:])),
    ])  # fmt: skip
    if len(shape) < 5:
        w.step(f"{name} {d} [{a}:{b}:{stride}]", fn, i)


def by_index(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if not shape:
        return
    d = rng.randrange(len(shape))
    kind = rng.choice(
        ["embedding", "gather", "gather", "index_select", "scatter", "scatter_add", "index", "index_add", "index pair"]
    )
    if kind == "embedding":
        table = w.pick(2)
        if table is not None:
            rows = w.integers(w.shape(table)[0], *(rng.choice((2, 3, 4)) for _ in range(rng.randint(1, 2))))
            w.step("embedding", lambda t, index: F.embedding(index, t), table, rows)
    elif kind == "index_select":
        w.step(f"index_select {d}", lambda x, k: x.index_select(d, k), i, w.integers(shape[d], rng.choice((2, 3, 4))))
    elif kind == "index":
        back = rng.choice((0, shape[d]))  # from the end, half of the time
        w.step(f"index {d}", lambda x, k: x[(slice(None),) * d + (k - back,)], i, w.integers(shape[d], 2, 3))
    elif kind == "index_add":
        size = [3 if e == d else n for e, n in enumerate(shape)]
        w.step(f"index_add {d}", lambda x, k, s: x.index_add(d, k, s), i, w.integers(shape[d], 3), w.floats(*size))
    elif kind == "index pair":
        if len(shape) >= 2:
            w.step("index pair", lambda x, j, k: x[j, k], i, w.integers(shape[0], 4), w.integers(shape[1], 4))
    else:
        size = [rng.choice((1, 2, 4)) if e == d else n for e, n in enumerate(shape)]
        if kind == "scatter":
            size[d] = 1
        index = w.integers(shape[d], *size)
        if kind == "gather":
            w.step(f"gather {d}", lambda x, k: x.gather(d, k), i, index)
        elif kind == "scatter_add":
            w.step(f"scatter_add {d}", lambda x, k, s: x.scatter_add(d, k, s), i, index, w.floats(*size))
        elif rng.random() < 0.5:
            w.step(f"scatter {d}", lambda x, k, s: x.scatter(d, k, s), i, index, w.floats(*size))
        else:
            w.step(f"scatter value {d}", lambda x, k: x.scatter(d, k, 2.5), i, index)


def mask(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if not shape:
        return
    d = rng.randrange(len(shape))
    n = shape[d]
    after = [1] * (len(shape) - 1 - d)
    choices: list[tuple[str, Callable[..., Any]]] = [
        ("arange", lambda x: x * torch.arange(n, dtype=x.dtype).view(n, *after)),
        ("arange mask", lambda x: torch.where(torch.arange(n).view(n, *after) < n // 2, x, 0.0)),
        ("arange of 2", lambda x: x + torch.arange(3, 3 + 2 * n, 2, dtype=x.dtype).view(n, *after)),
        ("ones_like", lambda x: x + torch.ones_like(x)),
        ("zeros", lambda x: torch.cat([torch.zeros(shape, dtype=x.dtype), x], d)),
        ("one_hot", lambda x: F.one_hot(torch.arange(n), n).to(x.dtype).sum(0).view(n, *after) * x),
        ("full", lambda x: torch.maximum(x, torch.full(shape, 0.1, dtype=x.dtype))),
    ]  # fmt: skip
    if len(shape) >= 2:
        triangle = torch.ones(shape[-2:], dtype=torch.bool).tril()
        choices += [("tril", lambda x: x.tril()), ("triu", lambda x: x.triu(1)),
                    ("causal", lambda x: x.masked_fill(triangle.clone() == 0, -2.0))]  # fmt: skip
    name, fn = rng.choice(choices)
    w.step(f"{name} {d}", fn, i)


def norm(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if not shape or shape[-1] == 1:
        return
    n = shape[-1]
    if rng.random() < 0.5:
        w.step("layer_norm", lambda x, g, b: F.layer_norm(x, (n,), g, b), i, w.floats(n), w.floats(n))
    else:
        w.step("rms_norm", lambda x, g: F.rms_norm(x, (n,), g), i, w.floats(n))


def loss(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if len(shape) < 2:
        return
    target = w.integers(shape[-1], math.prod(shape[:-1]))
    how = rng.choice(("sum", "mean"))
    w.step(f"cross_entropy {how}", lambda x, t: F.cross_entropy(x.flatten(0, -2), t, reduction=how), i, target)


def convolution(w: Writer, rng: random.Random, i: int) -> None:
    shape = w.shape(i)
    if len(shape) != 4 or min(shape[2:]) < 2:
        return
    bias = [w.floats(4)] if rng.random() < 0.5 else []
    pad, stride = rng.choice((0, 1)), rng.choice((1, 1, 2))
    k = rng.choice((1, 2, 3)) if pad else rng.choice((1, 2))
    weight = w.floats(4, shape[1], k, k)
    w.step(
        f"conv2d k{k} p{pad} s{stride}",
        lambda x, f, *b: F.conv2d(x, f, *b, stride=stride, padding=pad),
        i,
        weight,
        *bias,
    )


def annotation(w: Writer, rng: random.Random, i: int) -> None:
    names = [-1, *range(len(w.mesh.axes))]
    mapping: list[int] = []
    for _ in w.shape(i):
        chosen = rng.choice(names)
        mapping.append(chosen if chosen not in mapping else -1)
    w.step(f"mesh_split {mapping}", lambda x: mesh_split(x, w.mesh, mapping), i)


STEPS: list[Callable[[Writer, random.Random, int], None]] = [
    unary, unary, binary, binary, linear, linear, matmul, self_product, einsum, einsum, reduction, reduction, along,
    along,
    view, view, view, permute, pieces, pieces, pieces, by_index, by_index, mask, norm, loss, convolution, convolution,
    annotation,
]  # fmt: skip
