"""Entries of random ops, which draw by global position (see `draws`), so that every mesh draws the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tpshard.parallelism.draws import DRAW
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.rules.rule import Factors, LocalOp, Rule

aten = torch.ops.aten
Distribution = Callable[..., Tensor]
"""A function (a tensor like the result, *parameters) that returns random numbers in the result's shape and dtype."""


def random(op: Op) -> Rule:
    """The rule of random(seed, number, size, begins, strides, dtype, row): a device draws its own part."""
    factors = Factors()
    dims = factors.dims(op.results[0].shape)

    def local(at: LocalOp) -> Any:
        seed, number, _, _, *rest = op.args
        begins = [at.offset(dim[0]) if dim else 0 for dim in dims]
        return at.with_args(seed, number, list(at.shape()), begins, *rest)

    return factors.rule([((),) * op.operands[0].rank], [dims], local=local, priority=0)


# ---- distributions ---------------------------------------------------------------------------------------------------
def _uniform(x: Tensor, low: Any = 0.0, high: Any = 1.0) -> Tensor:
    if not x.dtype.is_floating_point:
        raise ValueError(f"random numbers of {x.dtype} are not drawn: only real floating-point numbers and int64 are")
    return _scale_and_shift(DRAW(x.shape, x.dtype), high - low, low)


def _scale_and_shift(x: Tensor, scale: Any, by: Any) -> Tensor:
    plain = not isinstance(by, Tensor) and not isinstance(scale, Tensor) and (scale, by) == (1, 0)
    return x if plain else x * scale + by


def _positive(x: Tensor) -> Tensor:
    """Uniform draws in (0, 1], whose logarithm is finite."""
    return 1 - _uniform(x)


def _normal(x: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    standard = (torch.erfinv(_uniform(wide) * 2 - 1 + torch.finfo(wide.dtype).eps / 2) * math.sqrt(2)).to(x.dtype)
    return _scale_and_shift(standard, std, mean)


def _bernoulli(x: Tensor, p: Any = 0.5) -> Tensor:
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    return (DRAW(x.shape, kind) < p).to(x.dtype)


def _integers(x: Tensor, *bounds: int | None, low: int = 0, high: int | None = None) -> Tensor:
    """Integers in [low, high), or [0, high); without bounds, all that the dtype (or a float's mantissa) can hold."""
    if bounds:
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])  # type: ignore[assignment]
    if high is None:
        real = x.dtype.is_floating_point
        high = 2 ** round(1 - math.log2(torch.finfo(x.dtype).eps)) + 1 if real else torch.iinfo(x.dtype).max
    if high <= low:
        raise ValueError(f"there is no integer in [{low}, {high})")
    return (DRAW(x.shape, torch.int64) % (high - low) + low).to(x.dtype)


def _exponential(x: Tensor, rate: float = 1.0) -> Tensor:
    return _positive(x).log() / -rate


def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return torch.tan((_uniform(x) - 0.5) * math.pi) * sigma + median


def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(x, mean, std).exp()


def _geometric(x: Tensor, p: float) -> Tensor:
    wide = x if x.dtype.is_floating_point else x.to(torch.float32)
    return ((_positive(wide).log() / math.log1p(-p)).floor() + 1).to(x.dtype)


# ---- the ops' decompositions -----------------------------------------------------------------------------------------
def _parameters(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a distribution, from those of an op. Raises ValueError for a generator."""
    if keywords.pop("generator", None) is not None:
        raise ValueError(
            "a `torch.Generator` draws on one device, from its own state: leave it out, and seed the program instead"
        )
    names = {"lambd": "rate", "from": "low", "to": "high"}
    elsewhere = ("dtype", "layout", "device", "pin_memory", "memory_format")
    return {names.get(key, key): value for key, value in keywords.items() if key not in elsewhere}


def _creates(draw: Distribution, kind: torch.dtype | None = None) -> Entry:
    """The entry of an op that creates a tensor; its arguments are the distribution's parameters, then the size."""

    def decomposition(*args: Any, **keywords: Any) -> Tensor:
        *parameters, size = args
        dtype = keywords.get("dtype") or kind or torch.get_default_dtype()
        return draw(aten.empty.memory_format(list(size), dtype=dtype), *parameters, **_parameters(keywords))

    return Entry(recorded=decomposition)


def _creates_like(draw: Distribution) -> Entry:
    """The entry of an op that creates a tensor like its first argument."""

    def decomposition(x: Tensor, *parameters: Any, **keywords: Any) -> Tensor:
        dtype = keywords.get("dtype")
        like = x if dtype is None else aten.empty.memory_format(list(x.shape), dtype=dtype)
        return draw(like, *parameters, **_parameters(keywords))

    return Entry(recorded=decomposition)


def _fills(draw: Distribution) -> Entry:
    """The entry of an op that fills its first argument."""
    return Entry(recorded=lambda x, *parameters, **keywords: x.copy_(draw(x, *parameters, **_parameters(keywords))))


def _normal_of_tensors(mean: Any, std: Any = 1.0, *rest: Any, **keywords: Any) -> Tensor:
    """Computes normal; `mean` and `std` are tensors or numbers. If both are numbers, `rest` begins with a size."""
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors)) if tensors else rest[0]
    dtype = keywords.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return _normal(aten.empty.memory_format(list(shape), dtype=dtype), mean, std, **_parameters(keywords))


def _bernoulli_of_tensor(x: Tensor, p: Any = None, **keywords: Any) -> Tensor:
    """Computes bernoulli: the probability of each element is `p`, or by default its value in x."""
    return _bernoulli(x, x if p is None else p, **_parameters(keywords))


def _permutation(n: int, **keywords: Any) -> Tensor:
    """Computes randperm: the order of n draws."""
    dtype = keywords.get("dtype") or torch.int64
    _parameters(keywords)
    return torch.argsort(DRAW([n], torch.int64), stable=True).to(dtype)


def _multinomial(x: Tensor, samples: int, replacement: bool = False, **keywords: Any) -> Tensor:
    """Computes multinomial: the largest of weights divided by exponential draws (Efraimidis and Spirakis, 2006)."""
    _parameters(keywords)
    if replacement and samples > 1:
        spread = x.unsqueeze(-2).expand(*x.shape[:-1], samples, x.shape[-1])
        return (spread / _exponential(spread)).argmax(-1)
    return torch.topk(x / _exponential(x), samples, -1).indices


def _dropout(x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Computes native_dropout: the result, and the mask of the elements that remain."""
    if not train or p == 0:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool)
    mask = DRAW(x.shape, torch.float32) >= p
    return torch.where(mask, x * (0.0 if p == 1 else 1 / (1 - p)), 0.0), mask


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **keywords: Any
) -> Tensor:
    """Computes rrelu_with_noise, which also writes the slopes into `noise`."""
    slopes = _uniform(x, lower, upper, **_parameters(keywords)) if training else (lower + upper) / 2
    slopes = torch.where(x <= 0, slopes, 1.0).to(x.dtype)
    if training:
        noise.copy_(slopes)
    return x * slopes


OPS: Table = {
    "tpshard.random": Entry(random, exponentials=1),
    aten.rand: _creates(_uniform),
    aten.randn: _creates(_normal),
    aten.randint: _creates(_integers, torch.int64),
    aten.rand_like: _creates_like(_uniform),
    aten.randn_like: _creates_like(_normal),
    aten.randint_like: _creates_like(_integers),
    aten.normal_functional: _creates_like(_normal),
    aten.bernoulli: Entry(recorded=_bernoulli_of_tensor),
    aten.normal: Entry(recorded=_normal_of_tensors),
    aten.normal_: _fills(_normal),
    aten.bernoulli_: _fills(_bernoulli),
    aten.random_: _fills(_integers),
    aten.randperm: Entry(recorded=_permutation),
    aten.multinomial: Entry(recorded=_multinomial),
    aten.native_dropout: Entry(recorded=_dropout),
    aten.rrelu_with_noise: Entry(recorded=_rrelu),
    aten.rrelu_with_noise_: Entry(recorded=lambda x, *args, **keywords: x.copy_(_rrelu(x, *args, **keywords))),
}
_DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": _uniform, "exponential": _exponential, "cauchy": _cauchy, "log_normal": _log_normal,
    "geometric": _geometric,
}  # fmt: skip
for _name, _draw in _DISTRIBUTIONS.items():
    OPS |= {getattr(aten, _name): _creates_like(_draw), getattr(aten, f"{_name}_"): _fills(_draw)}
