"""A random function of tensors, written step by step, with a random mesh and random shardings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism import Mesh, partition

MESHES: list[dict[str, int]] = [
    {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}, {"x": 4, "y": 2}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2},
]  # fmt: skip
SIZES = (1, 2, 3, 4, 4, 5, 6, 8, 8, 12)
LARGEST = 6000
"""Elements of a tensor."""

Family = Callable[["Writer", random.Random], None]


def by_name(*families: Family) -> dict[str, Family]:
    return {family.__name__: family for family in families}


def written(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that returns a copy of its first argument into which `write` has written."""

    def copied(x: Tensor, *others: Tensor) -> Tensor:
        y = x.clone()
        write(y, *others)
        return y

    return copied


@dataclass
class Case:
    """A function, its arguments, a mesh, and shardings for arguments and results (None: free)."""

    family: str
    seed: int
    mesh: Mesh
    args: list[Tensor]
    steps: list[tuple[str, Callable[..., Any], list[int]]]
    outputs: list[int]
    differentiate: bool
    in_shardings: list[Any] | None = None
    out_shardings: list[Any] | None = None
    draws: bool = False
    """Whether it draws random numbers, which eager mode draws otherwise."""

    def expected(self) -> list[Tensor]:
        """The results of one device: eager mode's, or those of the unsharded program where numbers are drawn."""
        torch.manual_seed(self.seed)
        if self.draws:
            return partition(self.fn, self.args, Mesh(dict.fromkeys(self.mesh.axes, 1))).simulate(*self.args)
        return self.fn(*(a.clone() for a in self.args))

    def fn(self, *args: Tensor) -> list[Tensor]:
        """The results; with gradients of a function of them for the floating-point arguments."""
        if self.differentiate:
            args = tuple(a.detach().requires_grad_() if a.is_floating_point() else a for a in args)
        floats = [a for a in args if a.is_floating_point()]
        env = list(args)
        for _, step, operands in self.steps:
            env.append(step(*(env[i] for i in operands)))
        results = [env[i] for i in self.outputs]
        if not self.differentiate:
            return results
        total = sum((r.tanh() * r.detach().cos()).sum() for r in results if r.requires_grad)
        if not isinstance(total, Tensor):
            return results
        grads = torch.autograd.grad(total, floats, allow_unused=True)
        return [r.detach() for r in results] + [g for g in grads if g is not None]

    def __str__(self) -> str:
        lines = [f"{self.family} {self.seed}: mesh {self.mesh.axes}, gradients {self.differentiate}"]
        lines += [f"  %{i} = input {tuple(a.shape)} {a.dtype}" for i, a in enumerate(self.args)]
        lines += [f"  %{len(self.args) + i} = {what} of {of}" for i, (what, _, of) in enumerate(self.steps)]
        return "\n".join(
            [*lines, f"  return {self.outputs}", f"  in  {self.in_shardings}", f"  out {self.out_shardings}"]
        )


@dataclass
class Writer:
    """Writes a random function step by step, running it on the way to know shapes."""

    rng: random.Random
    mesh: Mesh
    args: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """Arguments and results of steps, in the order in which they were made."""
    steps: list[tuple[str, Callable[..., Any], list[tuple[str, int]]]] = field(default_factory=list)
    refs: list[tuple[str, int]] = field(default_factory=list)
    """What each of `values` is: an argument or a step, by its number."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    draws: bool = False
    """Whether a step draws random numbers."""
    reuses: bool = False
    """Whether new tensors are mostly elements of earlier values, not arguments."""

    def argument(self, tensor: Tensor) -> int:
        self.refs.append(("arg", len(self.args)))
        self.args.append(tensor)
        self.values.append(tensor)
        return len(self.values) - 1

    def floats(self, *shape: int) -> int:
        """A new argument of normal numbers, or elements of an earlier value (see `reuses`)."""
        i = self.pick() if self.reuses and self.rng.random() < 0.8 else None
        count = math.prod(shape)
        fits = i is not None and self.values[i].numel() >= count  # repeated elements would tie in sorts
        if i is not None and fits and self.step("elements", lambda x: x.reshape(-1)[:count].reshape(shape), i):
            return len(self.values) - 1
        return self.argument(torch.randn(shape, generator=self.generator, dtype=torch.float64))

    def integers(self, below: int, *shape: int) -> int:
        """A new argument of integers in [0, below)."""
        return self.argument(torch.randint(0, below, shape, generator=self.generator))

    def booleans(self, *shape: int) -> int:
        return self.argument(torch.randint(0, 2, shape, generator=self.generator).bool())

    def sizes(self, rank: int, sizes: Sequence[int] = SIZES) -> list[int]:
        return [self.rng.choice(sizes) for _ in range(rank)]

    def tensor(self, *ranks: int) -> int:
        """A new argument of normal numbers, of random sizes and one of these ranks."""
        return self.floats(*self.sizes(self.rng.choice(ranks)))

    def dim(self, i: int) -> int:
        """A random dim of a value, half of the time counted from the end."""
        rank = self.values[i].dim()
        d = self.rng.randrange(rank)
        return d if self.rng.random() < 0.5 else d - rank

    def one(self, *choices: tuple[Any, ...]) -> bool:
        """A step of one of `choices`: each a name, a function and the values that it reads."""
        what, fn, *operands = self.rng.choice(choices)
        return self.step(what, fn, *operands)

    def step(self, what: str, fn: Callable[..., Any], *operands: int) -> bool:
        """Adds a step, unless its result is empty, very large or not finite."""
        result = fn(*(self.values[i].clone() for i in operands))
        if result.numel() > LARGEST or result.numel() == 0 or not bool(torch.isfinite(result).all()):
            return False
        self._keep(what, fn, operands, result)
        if result.is_floating_point() and result.abs().max() > 50:
            return self.step("tanh", lambda x: (x / 16).tanh(), len(self.values) - 1)
        return True

    def to_double(self) -> None:
        """Adds a step that makes the last value float64, unless it is."""
        if self.values[-1].dtype != torch.float64:
            self.step("double", lambda x: x.real.double() if x.is_complex() else x.double(), len(self.values) - 1)

    def _keep(self, what: str, fn: Callable[..., Any], operands: Sequence[int], result: Tensor) -> None:
        self.steps.append((what, fn, [self.refs[i] for i in operands]))
        self.refs.append(("step", len(self.steps) - 1))
        self.values.append(result.detach())

    def pick(self, rank: int | None = None, least: int = 0) -> int | None:
        """One of the float64 values, a recent one most of the time."""
        fitting = [
            i for i, v in enumerate(self.values)
            if v.dtype == torch.float64 and v.dim() >= least and (rank is None or v.dim() == rank)
        ]  # fmt: skip
        recent = fitting[-4:] if self.rng.random() < 0.7 else fitting
        return self.rng.choice(recent) if recent else None

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.values[i].shape)

    def case(self, family: str, seed: int) -> Case:
        """A test case of the function written so far, with random shardings; its results are the last value and up to
        two others."""
        rng = self.rng
        used = sorted({i for _, _, of in self.steps for kind, i in of if kind == "arg"})

        def place(kind: str, i: int) -> int:
            return used.index(i) if kind == "arg" else len(used) + i

        steps = [(what, fn, [place(*ref) for ref in of]) for what, fn, of in self.steps]
        results = range(len(used), len(used) + len(steps))
        chosen = sorted({results[-1], *rng.sample(results, min(2, len(results)))})
        drawn = Case(family, seed, self.mesh, [self.args[i] for i in used], steps, chosen, rng.random() < 0.5)
        drawn.draws = self.draws
        drawn.in_shardings = [sharding(rng, self.mesh, a.dim()) if rng.random() < 0.8 else None for a in drawn.args]
        if rng.random() < 0.5:
            expected = drawn.fn(*(a.clone() for a in drawn.args))
            drawn.out_shardings = [sharding(rng, self.mesh, r.dim()) if rng.random() < 0.6 else None for r in expected]
        return drawn


def as_text(rng: random.Random, dims: Sequence[Any]) -> str:
    """A random sharding as text, with some dims open and some priorities."""
    texts = []
    for dim in dims:
        parts = [] if dim is None else [dim] if isinstance(dim, str) or isinstance(dim[1], int) else list(dim)
        names = [part if isinstance(part, str) else f"{part[0]}:({part[1]}){part[2]}" for part in parts]
        names += ["?"] if rng.random() < 0.5 else []
        texts.append("{" + ",".join(names) + "}" + rng.choice(("", "", "p1", "p2")))
    return "[" + " ".join(texts) + "]"


def sharding(rng: random.Random, mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """Random axes (whole or parts of them) on random dims, also where they do not divide."""
    pieces: list[Any] = []
    for name, size in mesh.axes.items():
        if size == 4 and rng.random() < 0.3:
            pieces += [(name, 1, 2), (name, 2, 2)]
        else:
            pieces.append(name)
    rng.shuffle(pieces)
    dims: list[list[Any]] = [[] for _ in range(rank)]
    for piece in pieces:
        if rank and rng.random() < 0.65:
            dims[rng.randrange(rank)].append(piece)
    return tuple(None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims)
