"""Families that draw random numbers: the same ones on every mesh."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzed.writer import Writer, by_name


def _value(w: Writer, rng: random.Random, *ranks: int) -> int:
    """An argument, half of the time the result of a step on it; the draws are as many on every run."""
    torch.manual_seed(rng.getrandbits(31))
    w.draws = True
    i = w.tensor(*ranks)
    if rng.random() < 0.5 and w.step("gelu", F.gelu, i):
        return len(w.values) - 1
    return i


def dropped(w: Writer, rng: random.Random) -> None:
    """Dropout of elements, of channels and inside of attention; slopes drawn by rrelu."""
    i, p = _value(w, rng, 1, 2, 2, 3, 3, 4), rng.choice((0.1, 0.5, 0.8))
    rank = len(w.shape(i))
    w.one(
        ("dropout", lambda x: F.dropout(x, p), i),
        ("twice dropout", lambda x: F.dropout(F.dropout(x, p) + x, p), i),
        ("alpha_dropout", lambda x: F.alpha_dropout(x, p, training=True), i),
        ("rrelu", lambda x: F.rrelu(x, training=True), i),
        *([("dropout1d", lambda x: F.dropout1d(x, p), i)] if rank == 3 else []),
        *([("dropout2d", lambda x: F.dropout2d(x, p), i)] if rank == 4 else []),
        *([("attention", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=p), i)] if rank >= 3 else []),
    )


def drawn(w: Writer, rng: random.Random) -> None:
    """A tensor of a distribution, made like another, of a size, or written in place."""
    i = _value(w, rng, 1, 2, 2, 3, 4)
    shape = w.shape(i)
    samplers: list[tuple[str, Callable[[Tensor], Any]]] = [
        ("rand_like", torch.rand_like), ("randn_like", torch.randn_like),
        ("rand", lambda x: torch.rand(shape, dtype=x.dtype)), ("randn", lambda x: torch.randn(shape)),
        ("randint", lambda x: torch.randint(-3, 7, shape)), ("randint_like", lambda x: torch.randint_like(x, 5)),
        ("bernoulli", lambda x: torch.bernoulli(x.sigmoid())), ("bernoulli_", lambda x: x.clone().bernoulli_(0.3)),
        ("uniform_", lambda x: torch.empty_like(x).uniform_(-1, 2)), ("normal_", lambda x: x.clone().normal_(1, 2)),
        ("normal", lambda x: torch.normal(x, 0.5)), ("normal of two", lambda x: torch.normal(x, x * x + 0.1)),
        ("exponential_", lambda x: x.clone().exponential_(2.0)), ("cauchy_", lambda x: x.clone().cauchy_().tanh()),
        ("log_normal_", lambda x: x.clone().log_normal_(0, 0.5)), ("geometric_", lambda x: x.clone().geometric_(0.4)),
        ("random_", lambda x: x.clone().random_(9)),
    ]  # fmt: skip
    what, fn = rng.choice(samplers)
    w.step(what, lambda x: x + fn(x).to(x.dtype), i)


def chosen(w: Writer, rng: random.Random) -> None:
    """Draws that choose elements: permutations, samples of a distribution, hard choices."""
    i = _value(w, rng, 1, 2, 2, 3)
    d = rng.randrange(len(w.shape(i)))
    n, samples, again = w.shape(i)[d], rng.randint(1, w.shape(i)[-1]), rng.random() < 0.5
    w.one(
        ("randperm", lambda x: x.index_select(d, torch.randperm(n)), i),
        ("shuffled", lambda x: x.gather(d, torch.rand_like(x).argsort(d)), i),
        ("multinomial", lambda x: torch.multinomial(x.flatten(0, -2).softmax(-1), samples, again), i)
        if len(w.shape(i)) > 1
        else ("multinomial", lambda x: torch.multinomial(x.softmax(0), samples, again), i),
        ("gumbel", lambda x: (x - x.clone().exponential_().log()).softmax(d), i),
        ("hard gumbel", lambda x: F.gumbel_softmax(x, hard=True, dim=d), i),
        ("masked", lambda x: torch.where(torch.rand(x.shape) < 0.3, 0.0, x), i),
    )


FAMILIES = by_name(dropped, drawn, chosen)
