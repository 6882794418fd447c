"""Families of neural-network layers: convolution, pooling, resizing, norms, losses, attention, recurrent layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzed.writer import Family, Writer, by_name

SIDES = (3, 4, 5, 6, 8)


def _image(w: Writer, rank: int, channels: tuple[int, ...] = (1, 2, 3, 4, 6)) -> int:
    return w.floats(w.rng.choice((1, 2, 3, 4)), w.rng.choice(channels), *w.sizes(rank, SIDES if rank < 3 else (3, 4)))


def _convolution(rank: int) -> Family:
    def family(w: Writer, rng: random.Random) -> None:
        groups = rng.choice((1, 1, 2, 4))
        c_in, c_out = groups * rng.choice((1, 2, 3)), groups * rng.choice((1, 2, 4))
        x = _image(w, rank, (c_in,))
        kernel = [rng.choice((1, 2, 3)) for _ in range(rank)]
        stride = [rng.choice((1, 1, 2)) for _ in range(rank)]
        dilation = [rng.choice((1, 1, 2)) for _ in range(rank)]
        padding: Any = [rng.choice((0, 1)) for _ in range(rank)]
        bias = [w.floats(c_out)] if rng.random() < 0.5 else []
        options = {"stride": stride, "dilation": dilation, "groups": groups}
        if rng.random() < 0.35:
            name, sides = f"conv_transpose{rank}d", (c_in, c_out // groups)
            options["output_padding"] = [rng.randint(0, s - 1) for s in stride]
        else:
            name, sides = f"conv{rank}d", (c_out, c_in // groups)
            if max(stride) == 1 and rng.random() < 0.3:
                padding = "same"
        w.step(
            f"{name} k{kernel} s{stride} d{dilation} p{padding} g{groups}",
            lambda x, f, *b: getattr(F, name)(x, f, *b, padding=padding, **options),
            x,
            w.floats(*sides, *kernel),
            *bias,
        )

    return family


def pooled(w: Writer, rng: random.Random) -> None:
    rank = rng.choice((1, 2, 2, 3))
    x = _image(w, rank)
    k, s, p = rng.choice((2, 3)), rng.choice((1, 2, 3)), rng.choice((0, 1))
    ceil, count = rng.random() < 0.3, rng.random() < 0.5
    out = rng.randint(1, 3)

    def of(name: str) -> Callable[..., Tensor]:
        return getattr(F, f"{name}{rank}d")

    w.one(
        ("max_pool", lambda x: of("max_pool")(x, k, s, p, ceil_mode=ceil), x),
        ("avg_pool", lambda x: of("avg_pool")(x, k, s, p, ceil, count), x),
        ("adaptive_avg_pool", lambda x: of("adaptive_avg_pool")(x, out), x),
        ("adaptive_max_pool", lambda x: of("adaptive_max_pool")(x, out), x),
        ("global average", lambda x: of("adaptive_avg_pool")(x, 1).flatten(1), x),
        ("max_pool with dilation", lambda x: of("max_pool")(x, 2, s, 0, 2), x),
        ("lp_pool", lambda x: of("lp_pool")(x.abs() + 0.1, 2, k, s), x),
        ("max_unpool", lambda x: of("max_unpool")(*of("max_pool")(x, 2, 2, return_indices=True), 2, 2), x),
    )


def resized(w: Writer, rng: random.Random) -> None:
    rank = rng.choice((1, 2, 2, 3))
    x = _image(w, rank)
    linear = ("linear", "bilinear", "trilinear")[rank - 1]
    corners = rng.random() < 0.5
    size = w.sizes(rank, (2, 3, 5, 8))
    flat = _image(w, 2)
    grid = w.floats(w.shape(flat)[0], 3, 2, 2)
    theta = w.floats(w.shape(flat)[0], 2, 3)
    w.one(
        ("nearest", lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), x),
        ("nearest of size", lambda x: F.interpolate(x, size=size, mode="nearest"), x),
        ("nearest-exact", lambda x: F.interpolate(x, size=size, mode="nearest-exact"), x),
        (linear, lambda x: F.interpolate(x, size=size, mode=linear, align_corners=corners), x),
        ("linear x2", lambda x: F.interpolate(x, scale_factor=2, mode=linear, align_corners=corners), x),
        ("bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=corners), flat),
        ("antialias", lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True), flat),
        ("area", lambda x: F.interpolate(x, size=size, mode="area"), x),
        ("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), flat, grid),
        ("affine_grid", lambda x, t: F.affine_grid(t, list(x.shape), align_corners=False), flat, theta),
    )


def norms(w: Writer, rng: random.Random) -> None:
    rank = rng.choice((0, 1, 2))
    channels = rng.choice((2, 4, 6))
    x = w.floats(rng.choice((2, 3, 4, 8)), channels, *w.sizes(rank, (2, 3, 4)))
    g, b = w.floats(channels), w.floats(channels)
    mean, var = w.floats(channels), w.argument(torch.rand(channels, generator=w.generator, dtype=torch.float64) + 0.5)
    rows = w.floats(*w.sizes(rng.choice((1, 2)), (1, 2, 3, 4, 8)), channels)
    groups = rng.choice((1, 2))
    tail = w.shape(x)[1:]
    weight, shift = w.floats(*tail), w.floats(*tail)
    matrix = w.floats(3, channels)

    def statistics(x: Tensor, g: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Tensor:
        m, v = m.clone(), v.clone()
        y = F.batch_norm(x, m, v, g, b, training=True)
        return y + (m + v).view(-1, *[1] * (x.dim() - 2))

    w.one(
        ("batch_norm", lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True), x, g, b),
        ("batch_norm in evaluation", lambda x, g, b, m, v: F.batch_norm(x, m, v, g, b), x, g, b, mean, var),
        ("batch_norm with statistics", statistics, x, g, b, mean, var),
        ("group_norm", lambda x, g, b: F.group_norm(x, groups, g, b), x, g, b),
        ("group_norm plain", lambda x: F.group_norm(x, groups), x),
        ("layer_norm", lambda x, g, b: F.layer_norm(x, (channels,), g, b), rows, g, b),
        ("layer_norm float", lambda x, g: F.layer_norm(x.float(), (channels,), g.float()), rows, g),
        ("layer_norm of dims", lambda x, g, b: F.layer_norm(x, tail, g, b), x, weight, shift),
        ("layer_norm plain", lambda x: F.layer_norm(x, tail), x),
        ("rms_norm", lambda x, g: F.rms_norm(x, (channels,), g), rows, g),
        ("instance_norm", lambda x, g, b: F.instance_norm(x, weight=g, bias=b) if rank else x, x, g, b),
        ("local_response_norm", lambda x: F.local_response_norm(x, 3) if rank else x, x),
        ("weight_norm", lambda x, m: x @ torch._weight_norm(m, m.norm(dim=1, keepdim=True) * 2, 0).mT, rows, matrix),
        ("channels first", lambda x, g, b: F.layer_norm(x.movedim(1, -1), (channels,), g, b).movedim(-1, 1), x, g, b),
    )


def losses(w: Writer, rng: random.Random) -> None:
    classes = rng.choice((2, 3, 4, 8))
    rows = rng.choice((1, 2, 3, 4, 6))
    x, target = w.floats(rows, classes), w.integers(classes, rows)
    masked = w.argument(torch.where(torch.rand(rows, generator=w.generator) < 0.3, -100, w.values[target]))
    y, weight = w.floats(rows, classes), w.argument(torch.rand(classes, generator=w.generator, dtype=torch.float64))
    spatial, at = w.floats(rows, classes, 3), w.integers(classes, rows, 3)
    signs = w.argument(torch.where(torch.rand(rows, generator=w.generator) < 0.5, -1, 1))
    how = rng.choice(("sum", "mean", "none"))
    w.one(
        ("cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction=how), x, target),
        ("cross_entropy weighted", lambda x, t, c: F.cross_entropy(x, t, c, reduction=how), x, target, weight),
        ("cross_entropy masked", lambda x, t: F.cross_entropy(x, t, reduction="sum"), x, masked),
        ("cross_entropy smoothed", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction=how), x, target),
        ("cross_entropy of probabilities", lambda x, y: F.cross_entropy(x, y.softmax(-1), reduction=how), x, y),
        ("cross_entropy 2d", lambda x, t: F.cross_entropy(x, t, reduction=how), spatial, at),
        ("nll", lambda x, t: F.nll_loss(x.log_softmax(-1), t, reduction=how), x, target),
        ("nll 2d", lambda x, t: F.nll_loss(x.log_softmax(1)[..., None], t[..., None], reduction=how), spatial, at),
        ("mse", lambda x, y: F.mse_loss(x, y, reduction=how), x, y),
        ("l1", lambda x, y: F.l1_loss(x, y, reduction=how), x, y),
        ("huber", lambda x, y: F.huber_loss(x, y, reduction=how, delta=0.7), x, y),
        ("smooth_l1", lambda x, y: F.smooth_l1_loss(x, y, reduction=how, beta=0.5), x, y),
        ("bce", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=how), x, y),
        ("bce with logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=how), x, y),
        ("kl_div", lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=how), x, y),
        ("soft_margin", lambda x, y: F.soft_margin_loss(x, y.sign(), reduction=how), x, y),
        ("hinge", lambda x, y: F.hinge_embedding_loss(x, y.sign(), reduction=how), x, y),
        ("margin", lambda x, s: F.margin_ranking_loss(x[:, 0], x[:, 1], s, 0.3, reduction=how), x, signs),
        ("cosine", lambda x, y, s: F.cosine_embedding_loss(x, y, s, reduction=how), x, y, signs),
        ("triplet", lambda x, y: F.triplet_margin_loss(x, y, x + y, reduction=how), x, y),
        ("multi_margin", lambda x, t: F.multi_margin_loss(x, t, reduction=how), x, target),
        ("multilabel", lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).double(), reduction=how), x, y),
        ("poisson", lambda x, y: F.poisson_nll_loss(x, y.abs(), reduction=how), x, y),
        ("gaussian", lambda x, y: F.gaussian_nll_loss(x, y, y.abs() + 1, reduction=how), x, y),
        (
            "ctc",
            lambda x: F.ctc_loss(
                x.log_softmax(-1), torch.ones(2, 1, dtype=torch.int64), torch.tensor([3, 3]), torch.tensor([1, 1])
            ),
            w.floats(3, 2, classes),
        ),
    )


def attention(w: Writer, rng: random.Random) -> None:
    b, h, s, d = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 4, 6)), rng.choice((2, 4, 5, 8)), rng.choice((2, 4, 8))
    t = s if rng.random() < 0.7 else rng.choice((3, 4, 8))
    q, k, v = w.floats(b, h, s, d), w.floats(b, h, t, d), w.floats(b, h, t, d)
    shape = rng.choice(((b, h, s, t), (b, 1, s, t), (1, h, s, t), (s, t), (1, 1, s, t), (b, 1, 1, t)))
    mask = w.floats(*shape)
    allowed = w.argument(torch.rand(shape, generator=w.generator) < 0.7)
    w.values[allowed][..., 0] = True
    kv = [n for n in (1, 2, 3) if h % n == 0]
    groups = rng.choice(kv)
    few_k, few_v = w.floats(b, groups, t, d), w.floats(b, groups, t, d)
    merged = w.floats(b, s, h * d)
    sdpa = F.scaled_dot_product_attention

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (h, d)).transpose(1, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ k.mT / d**0.5 + m).softmax(-1) @ v

    def module(x: Tensor) -> Tensor:
        x = x.float()
        size = h * d
        weight, bias = torch.linspace(-0.5, 0.5, 3 * size * size).view(3 * size, size), torch.zeros(3 * size)
        q, k, v = (x.transpose(0, 1) for _ in range(3))
        own = (size, h, weight, bias, None, None, False, 0.0, torch.eye(size), None)
        return F.multi_head_attention_forward(q, k, v, *own, training=False, need_weights=rng_weights)[0]

    rng_weights = rng.random() < 0.5
    w.one(
        ("attention", lambda q, k, v: sdpa(q, k, v), q, k, v),
        ("causal", lambda q, k, v: sdpa(q, k[:, :, :s], v[:, :, :s], is_causal=True), q, k, v),
        *[(f"bias {shape}", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, mask)] * 2,
        (f"mask {shape}", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, allowed),
        (
            f"float mask {shape}",
            lambda q, k, v, m: sdpa(q.float(), k.float(), v.float(), attn_mask=m),
            q,
            k,
            v,
            allowed,
        ),
        ("grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, few_k, few_v),
        (
            "repeated kv",
            lambda q, k, v: sdpa(q, k.repeat_interleave(h // groups, 1), v.repeat_interleave(h // groups, 1)),
            q,
            few_k,
            few_v,
        ),
        ("plain", plain, q, k, v, mask),
        (
            "merged heads",
            lambda x: sdpa(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2),
            merged,
        ),
        ("scaled", lambda q, k, v: sdpa(q, k, v, scale=0.3), q, k, v),
        ("module", module, merged),
        (
            "einsum",
            lambda q, k, v: torch.einsum("bhst,bhtd->bshd", torch.einsum("bhsd,bhtd->bhst", q, k).softmax(-1), v),
            q,
            k,
            v,
        ),
        ("strided", lambda q, k, v: sdpa(q.mT.contiguous().mT, k, v.flip(-1)), q, k, v),
    )


def recurrent(w: Writer, rng: random.Random) -> None:
    b, t, d, h = rng.choice((1, 2, 4)), rng.choice((2, 3)), rng.choice((2, 4)), rng.choice((2, 3, 4))
    kind = rng.choice(("LSTM", "GRU", "RNN"))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    x = w.floats(b, t, d)
    weights = [w.floats(gates * h, d), w.floats(gates * h, h), w.floats(gates * h), w.floats(gates * h)]

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        zero = torch.zeros(1, b, h, dtype=x.dtype)
        if kind == "LSTM":
            return torch.lstm(x, (zero, zero), list(weights), True, 1, 0.0, False, False, True)[0]
        run: Callable[..., Any] = torch.gru if kind == "GRU" else torch.rnn_tanh
        return run(x, zero, list(weights), True, 1, 0.0, False, False, True)[0]

    def cell(x: Tensor, *weights: Tensor) -> Tensor:
        state = torch.zeros(b, h, dtype=x.dtype)
        if kind == "LSTM":
            return torch.lstm_cell(x[:, 0], (state, state), *weights)[0]
        return (torch.gru_cell if kind == "GRU" else torch.rnn_tanh_cell)(x[:, 0], state, *weights)

    w.one((kind, layer, x, *weights), (f"{kind} cell", cell, x, *weights))


def blocks(w: Writer, rng: random.Random) -> None:
    """Small networks: an MLP, a transformer layer, a residual block, experts by einsum and by index."""
    b, s, d, h = rng.choice((1, 2, 3, 4)), rng.choice((2, 4, 6)), 8, 2
    x = w.floats(b, s, d)
    up, down, qkv = w.floats(16, d), w.floats(d, 16), w.floats(3 * d, d)
    image, f1, f2 = w.floats(b, 4, 4, 4), w.floats(4, 4, 3, 3), w.floats(4, 4, 3, 3)
    experts, router = w.floats(4, d, d), w.floats(d, 4)

    def layer(x: Tensor, qkv: Tensor, up: Tensor, down: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (h, -1)).transpose(1, 2) for p in F.linear(F.layer_norm(x, (d,)), qkv).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.linear(F.gelu(F.linear(F.rms_norm(x, (d,)), up)), down)

    def residual(x: Tensor, f: Tensor, g: Tensor) -> Tensor:
        y = F.conv2d(x, f, padding=1)
        y = F.relu(F.batch_norm(y, None, None, training=True))
        return F.relu(x + F.group_norm(F.conv2d(y, g, padding=1), 2))

    def unet(x: Tensor, f: Tensor, g: Tensor) -> Tensor:
        low = F.silu(F.conv2d(F.avg_pool2d(x, 2), f, padding=1))
        return F.conv2d(torch.cat([F.interpolate(low, scale_factor=2), x], 1)[:, ::2], g, padding=1)

    def dispatched(x: Tensor, e: Tensor, r: Tensor) -> Tensor:
        gate = (x @ r).softmax(-1)
        chosen = F.one_hot(gate.argmax(-1), 4).to(x.dtype) * gate
        return torch.einsum("bse,bsed->bsd", chosen, torch.einsum("bsd,edf->bsef", x, e))

    def by_index(x: Tensor, e: Tensor, r: Tensor) -> Tensor:
        weight, expert = (x @ r).softmax(-1).topk(2, -1)
        return (weight[..., None, None] * e[expert] * x[:, :, None, :, None]).sum((2, 3))

    w.one(
        ("mlp", lambda x, u, d: F.linear(F.silu(F.linear(x, u)), d), x, up, down),
        ("layer", layer, x, qkv, up, down),
        ("residual", residual, image, f1, f2),
        ("unet", unet, image, f1, f2),
        ("experts by einsum", dispatched, x, experts, router),
        ("experts by index", by_index, x, experts, router),
    )


FAMILIES = {"conv1d": _convolution(1), "conv2d": _convolution(2), "conv3d": _convolution(3)} | by_name(
    pooled, resized, norms, losses, attention, recurrent, blocks
)
