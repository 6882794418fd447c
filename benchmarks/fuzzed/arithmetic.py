"""Families that compute: pointwise, products, reductions, scans, linear algebra, transforms, loops, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzed.writer import Writer, by_name

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": torch.erf, "erfc": torch.erfc, "expm1": torch.expm1, "log1p_abs": lambda x: x.abs().log1p(),
    "sinh": torch.sinh, "cosh": torch.cosh, "atan": torch.atan, "asinh": torch.asinh, "floor": torch.floor,
    "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "frac": torch.frac, "sign": torch.sign,
    "reciprocal": lambda x: (x.abs() + 0.5).reciprocal(), "rsqrt_abs": lambda x: (x.abs() + 1).rsqrt(),
    "lgamma": lambda x: (x.abs() + 0.5).lgamma(), "digamma": lambda x: (x.abs() + 0.5).digamma(),
    "sigmoid": torch.sigmoid, "logit_in": lambda x: x.sigmoid().logit(1e-6), "deg2rad": torch.deg2rad,
    "exp2": torch.exp2, "sinc": torch.sinc, "i0": torch.i0, "nan_to_num": torch.nan_to_num, "square": torch.square,
    "positive": torch.positive, "isnan": torch.isnan, "signbit": torch.signbit, "logical_not": torch.logical_not,
}  # fmt: skip
ACTIVATIONS = (
    F.relu, F.relu6, F.elu, F.selu, F.celu, F.leaky_relu, F.gelu, F.silu, F.mish, F.softplus, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.logsigmoid, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, F.rrelu,
)  # fmt: skip


def pointwise(w: Writer, rng: random.Random) -> None:
    i = w.tensor(0, 1, 2, 3)
    shape = w.shape(i)
    j = w.floats(*(1 if rng.random() < 0.3 else n for n in shape))
    name = rng.choice(list(UNARY))
    w.one(
        (name, UNARY[name], i),
        ("atan2", torch.atan2, i, j),
        ("fmod", lambda x, y: x.fmod(y.abs() + 1), i, j),
        ("remainder", lambda x, y: x.remainder(y.abs() + 1), i, j),
        ("hypot", torch.hypot, i, j),
        ("pow", lambda x, y: (x.abs() + 0.5).pow(y), i, j),
        ("pow of number", lambda x: (x.abs() + 0.5) ** 1.5, i),
        ("number pow", lambda x: 2**x, i),
        ("lerp", lambda x, y: x.lerp(y, 0.25), i, j),
        ("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.5), i, j),
        ("addcdiv", lambda x, y: torch.addcdiv(x, x, y.abs() + 1), i, j),
        ("fmin", torch.fmin, i, j),
        ("copysign", torch.copysign, i, j),
        ("clamp of tensors", lambda x, y: x.clamp(y - 1, y + 1), i, j),
        ("heaviside", torch.heaviside, i, j),
        ("xlogy", lambda x, y: torch.xlogy(x, y.abs() + 1), i, j),
        ("logaddexp", torch.logaddexp, i, j),
        ("floor_divide", lambda x, y: x.floor_divide(y.abs() + 1), i, j),
        ("compare", lambda x, y: ((x > y) & (x < 1)) | (y <= 0), i, j),
        ("eq", lambda x, y: x.eq(y).logical_xor(x > 0), i, j),
        ("where", lambda x, y: torch.where(x > y, x, 0.0), i, j),
        ("isclose", torch.isclose, i, j),
        ("rsub", lambda x, y: torch.rsub(x, y, alpha=2), i, j),
        ("true_divide", lambda x: 3 / (x.abs() + 1), i),
        ("bits", lambda x: (x * 4).to(torch.int64).bitwise_and(5) << 1, i),
        ("dist", torch.dist, i, j),
        ("ldexp", lambda x: torch.ldexp(x, torch.tensor(2)), i),
        ("nextafter", torch.nextafter, i, j),
    )


def activations(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    gate = w.floats(*w.sizes(rng.choice((1, 2)), (1, 2, 3, 4)), rng.choice((2, 4, 6, 8)))
    slope = w.floats(1)
    activation: Callable[..., Tensor] = rng.choice(ACTIVATIONS)
    w.one(
        *[(activation.__name__, activation, i)] * 4,
        ("glu", lambda x: F.glu(x, -1), gate),
        ("prelu", lambda x, s: F.prelu(x, s), i, slope),
        ("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), i),
        ("threshold", lambda x: F.threshold(x, 0.1, 2.0), i),
        ("softmin", lambda x: F.softmin(x, d), i),
        ("swiglu", lambda x: (lambda a, b: F.silu(a) * b)(*x.chunk(2, -1)), gate),
        ("normalize", lambda x: F.normalize(x, dim=d), i),
        ("dropout in evaluation", lambda x: F.dropout(x, 0.5, training=False), i),
        ("log_softmax float", lambda x: x.float().log_softmax(d), i),
        ("softmax to float", lambda x: x.float().softmax(d, dtype=torch.float64), i),
        ("safe softmax", lambda x: torch.ops.aten._safe_softmax(x, d), i),
    )


def casts(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    kind = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8))
    w.one(
        (f"to {kind}", lambda x: (x.abs() * 4).to(kind), i),
        ("to and back", lambda x: x.float().double() + x, i),
        ("type promotion", lambda x: x.float() + torch.arange(x.shape[-1]), i),
        ("half sum", lambda x: x.float().sum(), i),
        ("integer mean", lambda x: (x * 8).to(torch.int64).sum(-1) / 3, i),
        ("int division", lambda x: (x * 8).to(torch.int32) // 3, i),
        ("bool sum", lambda x: (x > 0).sum(-1), i),
        ("bool mean", lambda x: (x > 0).double().mean(), i),
        ("int max", lambda x: (x * 9).to(torch.int32).amax(-1), i),
        ("int cumsum", lambda x: (x * 9).to(torch.int32).cumsum(-1), i),
        ("view as ints", lambda x: x.view(torch.int64) >> 52, i),
        ("view as floats", lambda x: x.view(torch.float32)[..., 1::2].nan_to_num(0, 0, 0).clamp(-4, 4), i),
        ("int product", lambda x: (x * 3).to(torch.int64) @ torch.ones(x.shape[-1], 2, dtype=torch.int64), i),
    )


def products(w: Writer, rng: random.Random) -> None:
    m, k, n, b = w.sizes(4)
    x, y, bias = w.floats(m, k), w.floats(k, n), w.floats(n)
    batch_x, batch_y, added = w.floats(b, m, k), w.floats(b, k, n), w.floats(m, n)
    v, u = w.floats(k), w.floats(m)
    w.one(
        ("mm", torch.mm, x, y),
        ("addmm", torch.addmm, bias, x, y),
        ("addmm scaled", lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2), added, x, y),
        ("bmm", torch.bmm, batch_x, batch_y),
        ("baddbmm", lambda c, x, y: torch.baddbmm(c, x, y, beta=2), added, batch_x, batch_y),
        ("addbmm", torch.addbmm, added, batch_x, batch_y),
        ("mv", torch.mv, x, v),
        ("addmv", lambda c, x, v: torch.addmv(c, x, v, alpha=2), u, x, v),
        ("dot", torch.dot, v, v),
        ("outer", torch.outer, u, v),
        ("addr", torch.addr, x, u, v),
        ("inner", torch.inner, x, batch_x),
        ("kron", torch.kron, u, v),
        ("tensordot", lambda x, y: torch.tensordot(x, y, 1), batch_x, y),
        ("matmul of 4 dims", lambda x, y: x.unsqueeze(1) @ y, batch_x, batch_y),
        ("x.T @ x", lambda x: x.mT @ x, batch_x),
        ("chain", lambda x, y: torch.linalg.multi_dot([x, y, y.mT]), x, y),
        ("bilinear", lambda x, y: F.bilinear(x, x, torch.ones(2, x.shape[-1], x.shape[-1], dtype=x.dtype)), batch_x, y),
        ("cdist", lambda x: torch.cdist(x, x[:, :1]), batch_x),
        ("cosine", lambda x: F.cosine_similarity(x[:, :, None], x[:, None], dim=-1), batch_x),
        ("pairwise", lambda x: F.pairwise_distance(x, x[:, :1]), batch_x),
        ("vander", lambda v: torch.vander(v.tanh(), 3), v),
        (
            "cross",
            lambda v: torch.cross(
                v[:, None].expand(-1, 3), torch.arange(3, dtype=v.dtype).expand(v.shape[0], 3), dim=-1
            ),
            v,
        ),
    )


def einsums(w: Writer, rng: random.Random) -> None:
    sizes = {c: rng.choice((1, 2, 3, 4, 6, 8)) for c in "abcdef"}
    for _ in range(20):
        left = rng.sample("abcdef", rng.randint(1, 3))
        right = rng.sample("abcdef", rng.randint(1, 3))
        letters = [c for c in "abcdef" if c in left or c in right]
        out = rng.sample(letters, rng.randint(0, min(3, len(letters))))
        operands = [left, right]
        if rng.random() < 0.25:
            operands.append(rng.sample(letters, 1))
        if rng.random() < 0.1:
            operands, out = [left], [c for c in left if rng.random() < 0.6]
        equation = f"{','.join(''.join(o) for o in operands)}->{''.join(out)}"
        tensors = [w.floats(*(sizes[c] for c in o)) for o in operands]
        if w.step(f"einsum {equation}", lambda *a, e=equation: torch.einsum(e, *a), *tensors):
            return


def reductions(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3, 4)
    rank = len(w.shape(i))
    dims = [d - (rank if rng.random() < 0.3 else 0) for d in rng.sample(range(rank), rng.randint(1, rank))]
    d, keep = dims[0], rng.random() < 0.5
    several = ["sum", "mean", "amax", "amin", "logsumexp", "nansum", "nanmean"]
    single = ["prod", "argmax", "argmin", "any", "all", "count_nonzero"]
    pairs = ["max", "min", "median"]
    name, alone, pair = rng.choice(several), rng.choice(single), rng.choice(pairs)
    order = rng.choice((1, 2, 3, float("inf"), 0.5))
    both = rng.randint(0, 1)
    w.one(
        *[(f"{name} {dims}", lambda x: getattr(torch, name)(x, dims, keepdim=keep), i)] * 2,
        (f"{alone} {d}", lambda x: getattr(torch, alone)(x, d), i),
        (f"{pair} {d}", lambda x: getattr(torch, pair)(x, d, keepdim=keep)[both], i),
        ("sum of all", lambda x: x.sum(), i),
        ("mean of all", lambda x: x.mean(), i),
        ("max of all", lambda x: x.max() - x.min(), i),
        ("prod of all", lambda x: (x * 0.5).tanh().prod(), i),
        ("argmax of all", lambda x: x.argmax(), i),
        ("any of all", lambda x: (x > 1).any() ^ (x > -3).all(), i),
        (f"norm {order}", lambda x: torch.linalg.vector_norm(x, order, dims, keepdim=keep), i),
        ("norm of all", lambda x: x.norm(), i),
        ("aminmax", lambda x: sum(torch.aminmax(x, dim=d)), i),
        ("sum of squares", lambda x: (x * x).sum(dims).sqrt(), i),
        ("softmax of sums", lambda x: x.sum(dims).softmax(-1) if rank > len(dims) else x.sum(dims), i),
        ("trapezoid", lambda x: torch.trapezoid(x, dim=d), i),
        ("masked mean", lambda x: (x * (x > 0)).sum(d) / (x > 0).sum(d).clamp(min=1), i),
        ("renorm", lambda x: x.renorm(2, 0, 1.0) if rank > 1 else x, i),
    )


def statistics(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d, keep, c = w.dim(i), rng.random() < 0.5, rng.choice((0, 1))
    rank = len(w.shape(i))
    dims = rng.sample(range(rank), rng.randint(1, rank))
    matrix = w.floats(*w.sizes(2, (2, 3, 4, 6)))
    w.one(
        ("var", lambda x: x.var(d, correction=c, keepdim=keep), i),
        ("std", lambda x: x.std(d, correction=c), i),
        ("var of dims", lambda x: x.var(dims, correction=0), i),
        ("var_mean", lambda x: sum(torch.var_mean(x, d, correction=c)), i),
        ("std_mean", lambda x: sum(torch.std_mean(x, dims, correction=0)), i),
        ("var of all", lambda x: x.var(correction=0), i),
        ("cov", torch.cov, matrix),
        ("corrcoef", torch.corrcoef, matrix),
        (
            "standardized",
            lambda x: (x - x.mean(d, keepdim=True)) / (x.var(d, keepdim=True, correction=0) + 1).sqrt(),
            i,
        ),
        ("moments", lambda x: ((x - x.mean()) ** 3).mean(), i),
        ("diff", lambda x: x.diff(dim=d), i),
        ("gradient", lambda x: torch.gradient(x, dim=0)[0], matrix),
        ("histogram", lambda x: (x[..., None] > torch.arange(-2, 2)).sum(d), i),
    )


def scans(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    w.one(
        ("cumsum", lambda x: x.cumsum(d), i),
        ("cumprod", lambda x: x.tanh().cumprod(d), i),
        ("cummax", lambda x: x.cummax(d).values, i),
        ("cummin index", lambda x: x.cummin(d).indices, i),
        ("logcumsumexp", lambda x: x.logcumsumexp(d), i),
        ("cumsum of flip", lambda x: x.flip(d).cumsum(d).flip(d), i),
        ("cumulative_trapezoid", lambda x: torch.cumulative_trapezoid(x, dim=d), i),
        ("int cumsum", lambda x: (x > 0).cumsum(d), i),
        ("segments", lambda x: (x > 0).to(torch.int64).cumsum(d).unsqueeze(-1) == (x > 0).cumsum(d).unsqueeze(-2), i),
    )


def linear_algebra(w: Writer, rng: random.Random) -> None:
    batch = w.sizes(rng.choice((0, 1, 2)), (1, 2, 3, 4, 6))
    n, m = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3, 4))
    x, y = w.floats(*batch, n, n), w.floats(*batch, n, m)

    def spd(x: Tensor) -> Tensor:
        return x @ x.mT + torch.eye(n, dtype=x.dtype) * n

    def sure(x: Tensor) -> Tensor:
        return x * 0.2 + torch.eye(n, dtype=x.dtype) * 2

    w.one(
        ("inverse", lambda x: sure(x).inverse(), x),
        ("solve", lambda x, y: torch.linalg.solve(sure(x), y), x, y),
        ("det", lambda x: sure(x).det(), x),
        ("slogdet", lambda x: torch.linalg.slogdet(sure(x))[1], x),
        ("cholesky", lambda x: torch.linalg.cholesky(spd(x)), x),
        ("qr", lambda x: torch.linalg.qr(sure(x))[1].abs(), x),
        ("cholesky_solve", lambda x, y: torch.cholesky_solve(y, torch.linalg.cholesky(spd(x))), x, y),
        ("triangular", lambda x, y: torch.linalg.solve_triangular(sure(x).triu(), y, upper=True), x, y),
        ("eigvalsh", lambda x: torch.linalg.eigvalsh(spd(x)), x),
        ("svdvals", lambda x: torch.linalg.svdvals(sure(x)), x),
        ("eigh", lambda x: (lambda e: e[1] @ torch.diag_embed(e[0]) @ e[1].mT)(torch.linalg.eigh(spd(x))), x),
        (
            "svd",
            lambda x: (lambda u, s, v: (u * s.unsqueeze(-2)) @ v)(*torch.linalg.svd(sure(x), full_matrices=False)),
            x,
        ),
        ("pinv", lambda x: torch.linalg.pinv(sure(x)), x),
        ("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), x),
        ("matrix_exp", lambda x: torch.linalg.matrix_exp(x * 0.3), x),
        ("norm", torch.linalg.matrix_norm, x),
        ("lu", lambda x: (lambda p, low, up: p @ low @ up)(*torch.linalg.lu(sure(x))), x),
        ("lu_solve", lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(sure(x)), y), x, y),
        ("lstsq", lambda x, y: torch.linalg.lstsq(sure(x), y).solution, x, y),
    )


def transforms(w: Writer, rng: random.Random) -> None:
    i = w.tensor(1, 2, 3)
    d = w.dim(i)
    n = w.shape(i)[d]
    many = rng.choice((None, n + 1, max(1, n - 1)))
    how = rng.choice((None, "ortho", "forward"))
    last = w.floats(*w.sizes(2, (1, 2, 3, 4)), rng.choice((4, 8)))
    w.one(
        ("fft", lambda x: torch.view_as_real(torch.fft.fft(x, many, d, how)), i),
        ("ifft", lambda x: torch.fft.ifft(torch.fft.fft(x, dim=d, norm=how) * 1j, dim=d, norm=how).imag, i),
        ("rfft", lambda x: torch.fft.rfft(x, many, d, how).abs(), i),
        ("irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=d), n, d), i),
        ("rfft of squares", lambda x: (torch.fft.rfft(x, dim=d).abs() ** 2).sum(d), i),
        ("fft2", lambda x: torch.fft.fft2(x).real, last),
        ("rfftn", lambda x: torch.fft.rfftn(x).imag, last),
        ("hfft", lambda x: torch.fft.hfft(x.to(torch.complex128), dim=d), i),
        ("fftshift", lambda x: torch.fft.fftshift(x, d), i),
        (
            "fft convolution",
            lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.flip(-1)), x.shape[-1]),
            last,
        ),
        (
            "stft",
            lambda x: torch.stft(
                x.flatten(0, 1), 4, 2, window=torch.ones(4, dtype=x.dtype), return_complex=True, center=False
            ).abs(),
            last,
        ),
    )


def complexes(w: Writer, rng: random.Random) -> None:
    i = w.floats(*w.sizes(rng.choice((1, 2))), 2)
    j = w.floats(*w.shape(i))
    c = torch.view_as_complex

    def rotate(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype)
        return torch.view_as_real(c(x) * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    w.one(
        ("product", lambda x, y: torch.view_as_real(c(x) * c(y)), i, j),
        ("abs", lambda x: c(x).abs(), i),
        ("conj", lambda x, y: (c(x) * c(y).conj()).real, i, j),
        ("rotary", rotate, i),
        ("complex", lambda x: torch.complex(x[..., 0], x[..., 1]).angle(), i),
        ("exp", lambda x: c(x).exp().imag, i),
        ("matmul", lambda x, y: torch.view_as_real(c(x).unsqueeze(-1) @ c(y).unsqueeze(-2)), i, j),
        ("sum", lambda x: torch.view_as_real(c(x).sum(-1)), i),
        ("real of view", lambda x: torch.view_as_real(c(x.contiguous())) * 2, i),
    )


def loops(w: Writer, rng: random.Random) -> None:
    x, state = w.floats(*w.sizes(3, (1, 2, 3, 4, 6))), w.floats(rng.choice((2, 4)))
    steps = w.shape(x)[1]
    square = w.floats(w.shape(x)[2], w.shape(x)[2])

    def recurrent(x: Tensor, m: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype)
        outs = []
        for t in range(steps):
            h = torch.tanh(x[:, t] + h @ m)
            outs.append(h)
        return torch.stack(outs, 1)

    def scan(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for t in range(steps):
            out[:, t] = x[:, t] + (0.5 * out[:, t - 1] if t else 0)
        return out

    def newton(x: Tensor) -> Tensor:
        y = x.abs() + 1
        for _ in range(4):
            y = 0.5 * (y + (x.abs() + 1) / y)
        return y

    def halves(x: Tensor) -> Tensor:
        while x.shape[1] > 1:
            half = x.shape[1] // 2
            x = torch.cat([x[:, :half] + x[:, half : 2 * half], x[:, 2 * half :]], 1)
        return x

    def shifts(x: Tensor) -> Tensor:
        s = x
        for _ in range(3):
            s = torch.cat([x[:1], s[:-1].tanh()])
        return s

    w.one(
        ("recurrent", recurrent, x, square),
        ("scan", scan, x),
        ("newton", newton, x),
        ("halves", halves, x),
        ("pipeline shift", shifts, x),
        ("polynomial", lambda x, s: sum(c * x**k for k, c in enumerate(s.unbind())), x, state),
        ("power", lambda m: m / 4 @ m @ m, square),
    )


FAMILIES = by_name(
    pointwise, activations, casts, products, einsums, reductions, statistics, scans, linear_algebra, transforms,
    complexes, loops,
)  # fmt: skip
