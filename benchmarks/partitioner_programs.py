"""The annotated programs that `partitioner_vs_xla.py` compares, each written once for torch and for jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Dims = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A program of `xp` and its arguments, with each argument's shape (and "i" for indices) and sharding."""

    fn: Callable[..., Any]
    mesh: dict[str, int]
    args: list[tuple[tuple[int, ...], Dims]]
    out: list[Dims] | None = None
    indices: tuple[int, ...] = ()


def mlp(xp: Any, x: Any, up: Any, down: Any) -> Any:
    return xp.einsum("bf,fd->bd", xp.relu(xp.einsum("bd,df->bf", x, up)), down)


def mlp_grads(xp: Any, x: Any, up: Any, down: Any) -> Any:
    return xp.grad(lambda up, down: (mlp(xp, x, up, down) ** 2).sum(), (up, down))


def heads(xp: Any, q: Any, k: Any, v: Any) -> Any:
    weights = xp.softmax(xp.causal(xp.einsum("bqhd,bkhd->bhqk", q, k)), -1)
    return xp.einsum("bhqk,bkhd->bqhd", weights, v)


def attention(xp: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    q, k, v = (xp.einsum("bse,ehd->bshd", x, w) for w in (wq, wk, wv))
    return xp.einsum("bshd,hde->bse", heads(xp, q, k, v), wo)


def attention_grads(xp: Any, x: Any, *weights: Any) -> Any:
    return xp.grad(lambda *ws: (attention(xp, x, *ws) ** 2).sum(), weights)


def sequence_to_heads(xp: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention over a sharded sequence: heads are sharded inside (Ulysses)."""
    q, k, v = (xp.split(t, None, None, "x", None) for t in (q, k, v))
    return heads(xp, q, k, v)


def next_token(xp: Any, table: Any, x: Any, labels: Any) -> Any:
    logits = xp.einsum("bse,ve->bsv", x, table)
    return (xp.logsumexp(logits, -1) - xp.pick(logits, labels)).sum()


def vocabulary_grads(xp: Any, table: Any, tokens: Any, labels: Any) -> Any:
    return xp.grad(lambda table: next_token(xp, table, xp.take(table, tokens), labels), (table,))


def llama(xp: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any, gate: Any, up: Any, down: Any) -> Any:
    x = x + attention(xp, x / (x * x).mean(-1)[..., None], wq, wk, wv, wo)
    normed = x / (x * x).mean(-1)[..., None]
    inner = xp.silu(xp.einsum("bse,ef->bsf", normed, gate)) * xp.einsum("bse,ef->bsf", normed, up)
    return x + xp.einsum("bsf,fe->bse", inner, down)


def llama_grads(xp: Any, x: Any, *weights: Any) -> Any:
    return xp.grad(lambda x, *ws: (llama(xp, x, *ws) ** 2).sum(), (x, *weights))


def moe_einsum(xp: Any, x: Any, router: Any, up: Any, down: Any) -> Any:
    """GShard's einsum mixture: g groups of s tokens, e experts of capacity c, dispatch and combine by one-hot masks."""
    capacity = 8
    gates = xp.softmax(xp.einsum("gsd,de->gse", x, router), -1)
    chosen = xp.one_hot(xp.argmax(gates, -1), router.shape[1])
    place = (xp.cumsum(chosen, 1) - 1.0) * chosen
    mask = xp.one_hot(place, capacity) * chosen[..., None]
    sent = xp.einsum("gsec,gsd->egcd", mask, x)
    computed = xp.einsum("egcf,efd->egcd", xp.relu(xp.einsum("egcd,edf->egcf", sent, up)), down)
    return xp.einsum("gsec,egcd->gsd", mask * gates[..., None], computed)


def moe_einsum_grads(xp: Any, x: Any, router: Any, up: Any, down: Any) -> Any:
    return xp.grad(lambda *w: (moe_einsum(xp, x, *w) ** 2).sum(), (router, up, down))


def moe_index(xp: Any, x: Any, place: Any, up: Any, down: Any) -> Any:
    """A mixture by index: tokens are written to `place` (expert times capacity), computed per expert, and read back."""
    experts, (tokens, width) = up.shape[0], x.shape
    sent = xp.scatter_add(experts * (tokens // experts), place, x).reshape(experts, tokens // experts, width)
    computed = xp.einsum("ecf,efd->ecd", xp.relu(xp.einsum("ecd,edf->ecf", sent, up)), down)
    return xp.take(computed.reshape(tokens, width), place)


def convolutions(xp: Any, x: Any, w1: Any, w2: Any) -> Any:
    return xp.conv(xp.relu(xp.conv(x, w1)), w2)


def convolution_grads(xp: Any, x: Any, w1: Any, w2: Any) -> Any:
    return xp.grad(lambda w1, w2: (convolutions(xp, x, w1, w2) ** 2).sum(), (w1, w2))


def xp_conv(xp: Any, x: Any, w: Any) -> Any:
    return xp.conv(x, w)


def conv_grads(xp: Any, x: Any, w: Any) -> Any:
    return xp.grad(lambda x, w: (xp.conv(x, w) ** 2).sum(), (x, w))


def unfold_grads(xp: Any, x: Any, w: Any) -> Any:
    """The gradients of a convolution written as a product with columns."""
    return xp.grad(lambda x, w: (xp.einsum("ok,nkl->nol", w, xp.unfold(x, 3, 1, 1)) ** 2).sum(), (x, w))


def shift(xp: Any, s: Any) -> Any:
    """A pipeline's step: every stage's state moves to the next stage."""
    return xp.cat([s[:1], xp.relu(s[:-1])], 0)


def shifted_windows(xp: Any, x: Any, wq: Any, wk: Any, wv: Any, axis: str | None = None) -> Any:
    """Attention inside of windows of 8 x 8 of images [n, h, w, e] that are moved by 4 and back, as in Swin."""
    (n, h, w, e), moved = x.shape, xp.roll(x, (-4, -4), (1, 2))
    parts = xp.permute(moved.reshape(n, h // 8, 8, w // 8, 8, e), (0, 1, 3, 2, 4, 5)).reshape(-1, 64, e)
    parts = xp.split(parts, axis, None, None) if axis else parts
    parts = heads(xp, *(xp.einsum("bse,end->bsnd", parts, m) for m in (wq, wk, wv))).reshape(-1, 64, e)
    back = xp.permute(parts.reshape(n, h // 8, w // 8, 8, 8, e), (0, 1, 3, 2, 4, 5)).reshape(n, h, w, e)
    return xp.roll(back, (4, 4), (1, 2))


def annotated_windows(xp: Any, x: Any, *weights: Any) -> Any:
    """The same with the windows sharded by hand, as shards lie after the move."""
    return shifted_windows(xp, x, *weights, axis="x")


def shifted_windows_grads(xp: Any, x: Any, *weights: Any) -> Any:
    return xp.grad(lambda *ws: (shifted_windows(xp, x, *ws) ** 2).sum(), weights)


def squares(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of the sum of a function's squared results."""
    return lambda xp, *at: xp.grad(lambda *at: (fn(xp, *at) ** 2).sum(), at)


def skip_connection(xp: Any, x: Any, down: Any, up: Any) -> Any:
    """A level of a U-Net: down, up, and a convolution of both."""
    return xp.conv(xp.cat([x, xp.twice(xp.relu(xp.conv(x, down, 2, 1)))], 1), up)


def around(xp: Any, x: Any, w: Any) -> Any:
    return xp.conv(xp.around(x, 1), w, 1, 0)


def nodes(xp: Any, x: Any, source: Any, target: Any, w: Any) -> Any:
    """A graph's messages: each node adds up what its edges bring."""
    return xp.scatter_add(x.shape[0], target, xp.einsum("ed,df->ef", xp.take(x, source), w))


def group_norm(xp: Any, x: Any) -> Any:
    """Of images [n, c, h, w] with three groups of channels."""
    parts = x.reshape(x.shape[0], 3, -1)
    centred = parts - parts.mean(2)[..., None]
    return (centred / ((centred**2).mean(2)[..., None] + 1e-5) ** 0.5).reshape(x.shape)


def layer_norm(xp: Any, x: Any) -> Any:
    centred = x - x.mean(-1)[..., None]
    return centred / ((centred * centred).mean(-1)[..., None] + 1e-5)


B, S, E, N, D, H, V = 64, 128, 256, 8, 32, 1024, 4096
MLP = [((B, E), ("x",)), ((E, H), (None, "x")), ((H, E), ("x",))]
FSDP = [((B, E), ("x",)), ((E, H), ("x",)), ((H, E), ("x",))]
BOTH = [((B, E), ("x",)), ((E, H), ("x", "y")), ((H, E), ("y", "x"))]
WQ, WO = ((E, N, D), (None, "x")), ((N, D, E), ("x",))
WQ2, WO2 = ((E, N, D), ("x", "y")), ((N, D, E), ("y", None, "x"))
LAYER = [((8, S, E), ("x",)), WQ2, WQ2, WQ2, WO2, ((E, H), ("x", "y")), ((E, H), ("x", "y")), ((H, E), ("y", "x"))]
MOE = [((8, 64, E), ("x",)), ((E, 8), ()), ((8, E, H), ("x",)), ((8, H, E), ("x",))]
INDEX = [((512, E), ("x",)), ((512,), ("x",)), ((8, E, H), ("x",)), ((8, H, E), ("x",))]
IMAGES = [((4, 16, 64, 32), (None, None, "x")), ((16, 16, 3, 3), ()), ((16, 16, 3, 3), ())]
SWIN: tuple[tuple[int, ...], Dims] = ((8, 64, 32, 64), (None, "x"))
WINDOWS: list[tuple[tuple[int, ...], Dims]] = [((64, 4, 16), ())] * 3
ONE, TWO = {"x": 8}, {"x": 4, "y": 2}

CASES: dict[str, Case] = {
    "mlp, tensor parallel": Case(mlp, ONE, [((B, E), ()), *MLP[1:]], [()]),
    "mlp, tensor parallel, gradients": Case(mlp_grads, ONE, [((B, E), ()), *MLP[1:]], [d for _, d in MLP[1:]]),
    "mlp, fsdp": Case(mlp, ONE, FSDP, [("x",)]),
    "mlp, fsdp, gradients": Case(mlp_grads, ONE, FSDP, [("x",), ("x",)]),
    "mlp, 2-d": Case(mlp, TWO, BOTH, [("x",)]),
    "mlp, 2-d, gradients": Case(mlp_grads, TWO, BOTH, [d for _, d in BOTH[1:]]),
    "attention, heads": Case(attention, ONE, [((2, S, E), ()), WQ, WQ, WQ, WO], [()]),
    "attention, heads, gradients": Case(attention_grads, ONE, [((2, S, E), ()), WQ, WQ, WQ, WO], [WQ[1]] * 3 + [WO[1]]),
    "attention, fsdp and heads, gradients": Case(
        attention_grads, TWO, [((8, S, E), ("x",)), WQ2, WQ2, WQ2, WO2], [WQ2[1]] * 3 + [WO2[1]]
    ),
    "attention, sequence to heads": Case(sequence_to_heads, ONE, [((4, S, N, D), (None, "x"))] * 3, [(None, "x")]),
    "vocabulary loss, gradients": Case(
        vocabulary_grads, TWO, [((V, E), ("y",)), ((8, S), ("x",)), ((8, S), ("x",))], [("y",)], (1, 2)
    ),
    "vocabulary loss, fsdp too, gradients": Case(
        vocabulary_grads, TWO, [((V, E), (("y", "x"),)), ((8, S), ("x",)), ((8, S), ("x",))], [(("y", "x"),)], (1, 2)
    ),
    "llama layer": Case(llama, TWO, LAYER, [("x",)]),
    "llama layer, gradients": Case(llama_grads, TWO, LAYER, [d for _, d in LAYER]),
    "moe, einsum": Case(moe_einsum, ONE, MOE, [("x",)]),
    "moe, einsum, gradients": Case(moe_einsum_grads, ONE, MOE, [d for _, d in MOE[1:]]),
    "moe, index": Case(moe_index, ONE, INDEX, [("x",)], (1,)),
    "convolution, spatial": Case(convolutions, ONE, IMAGES, [(None, None, "x")]),
    "convolution, spatial, gradients": Case(convolution_grads, ONE, IMAGES, [(), ()]),
    "convolution, batch, gradients": Case(
        convolution_grads, ONE, [((8, 16, 32, 32), ("x",)), *IMAGES[1:]], [(), ()]
    ),
    "uneven rows": Case(lambda xp, x, w: xp.einsum("bd,df->bf", x, w), {"x": 3}, [((1000, E), ("x",)), ((E, H), ())],
                        [("x",)]),
    "uneven heads": Case(attention, {"x": 4}, [((2, S, 192), ()), *[((192, 6, D), (None, "x"))] * 3,
                                               ((6, D, 192), ("x",))], [()]),
    "shift by one": Case(shift, ONE, [((8, 64, E), ("x",))], [("x",)]),
    "roll": Case(lambda xp, x: xp.roll(x, 3, 0), ONE, [((B, E), ("x",))], [("x",)]),
    "flip": Case(lambda xp, x: xp.flip(x, (0,)), ONE, [((B, E), ("x",))], [("x",)]),
    "sort": Case(lambda xp, x: xp.sort(x, 1), ONE, [((B, E), (None, "x"))], [(None, "x")]),
    "topk": Case(lambda xp, x: xp.topk(x, 4), ONE, [((B, V), (None, "x"))], [(), ()]),
    "argmax": Case(lambda xp, x: xp.argmax(x, 1), ONE, [((B, V), (None, "x"))], [()]),
    "cumulative sum": Case(lambda xp, x: xp.cumsum(x, 1), ONE, [((B, E), (None, "x"))], [(None, "x")]),
    "softmax": Case(lambda xp, x: xp.softmax(x, 1), ONE, [((B, E), (None, "x"))], [(None, "x")]),
    "layer norm": Case(layer_norm, ONE, [((B, E), (None, "x"))], [(None, "x")]),
    "transposed": Case(lambda xp, x: x.T + 1.0, ONE, [((B, E), ("x",))], [("x",)]),
    "sort, rows sharded": Case(lambda xp, x: xp.sort(x, 1), ONE, [((B, E), ("x",))], [("x",)]),
    "sort, part of the axes": Case(lambda xp, x: xp.sort(x, 1), TWO, [((B, E), ("x", "y"))], [("x", "y")]),
    "sort of pairs": Case(lambda xp, k, v: xp.sort_by(k, v), ONE, [((B, E), (None, "x"))] * 2, [(None, "x")] * 2),
    "sort of pairs, rows sharded": Case(lambda xp, k, v: xp.sort_by(k, v), ONE, [((B, E), ("x",))] * 2, [("x",)] * 2),
    "topk, rows sharded": Case(lambda xp, x: xp.topk(x, 4), ONE, [((B, V), ("x",))], [("x",), ("x",)]),
    "topk, rows and part sharded": Case(lambda xp, x: xp.topk(x, 4), TWO, [((B, V), ("x", "y"))], [("x",), ("x",)]),
    "pad to twice the size": Case(lambda xp, x: xp.pad(x, 0, B), ONE, [((B, E), ("x",))], [("x",)]),
    "pad by one": Case(lambda xp, x: xp.pad(x, 8, 0), ONE, [((B, E), ("x",))], [("x",)]),
    "gather of sharded rows": Case(lambda xp, t, i: xp.take(t, i), ONE, [((V, E), ("x",)), ((512,), ("x",))], [("x",)],
                                   (1,)),
    "gather of sharded columns": Case(lambda xp, t, i: xp.take(t, i), ONE, [((V, E), (None, "x")), ((512,), ("x",))],
                                      [("x",)], (1,)),
    "gather behind a barrier": Case(lambda xp, t, i: xp.barrier(xp.take(xp.barrier(t), i)), ONE,
                                    [((V, E), ("x",)), ((512,), ())], [()], (1,)),
    "sum sharded further": Case(lambda xp, a, b: a + b, TWO, [((B, E), ("x",)), ((B, E), ())], [("x", "y")]),
    "product sharded further": Case(lambda xp, x, w: xp.relu(xp.einsum("bd,df->bf", x, w)), TWO,
                                    [((B, E), ("x",)), ((E, H), ())], [("x", "y")]),
    "roll, uneven": Case(lambda xp, x: xp.roll(x, 3, 0), {"x": 3}, [((1000, E), ("x",))], [("x",)]),
    "flip, uneven": Case(lambda xp, x: xp.flip(x, (0,)), {"x": 3}, [((1000, E), ("x",))], [("x",)]),
    "halves swapped": Case(lambda xp, x: xp.cat([-x[B // 2:], x[:B // 2]], 0), {"x": 4}, [((B, E), ("x",))], [("x",)]),
    "wrapped around": Case(lambda xp, x: xp.cat([x[-1:], x[:-1]], 0), ONE, [((B, E), ("x",))], [("x",)]),
    "every second row": Case(lambda xp, x: x[::2], ONE, [((B, E), ("x",))], [("x",)]),
    "convolution, ViT's patches": Case(lambda xp, x, w: xp.conv(x, w, 16, 0), {"x": 2},
                                       [((4, 3, 224, 224), (None, None, "x")), ((64, 3, 16, 16), ())],
                                       [(None, None, "x")]),
    "convolution, ViT's patches, uneven": Case(lambda xp, x, w: xp.conv(x, w, 16, 0), {"x": 4},
                                               [((4, 3, 224, 224), (None, None, "x")), ((64, 3, 16, 16), ())],
                                               [(None, None, "x")]),
    "convolution, ViT's patches, gradients": Case(
        lambda xp, x, w: xp.grad(lambda w: (xp.conv(x, w, 16, 0) ** 2).sum(), (w,)), {"x": 2},
        [((4, 3, 224, 224), (None, None, "x")), ((64, 3, 16, 16), ())], [()]),
    "convolution, ConvNeXt's stem": Case(lambda xp, x, w: xp.conv(x, w, 4, 0), ONE,
                                         [((4, 3, 224, 224), (None, None, "x")), ((96, 3, 4, 4), ())],
                                         [(None, None, "x")]),
    "convolution, depthwise": Case(xp_conv, ONE, [((4, 96, 64, 64), (None, None, "x")), ((96, 1, 7, 7), ())],
                                   [(None, None, "x")]),
    "convolution, depthwise, channels": Case(xp_conv, ONE, [((4, 96, 64, 64), (None, "x")), ((96, 1, 7, 7), ("x",))],
                                             [(None, "x")]),
    "convolution, depthwise, gradients": Case(conv_grads, ONE, [((4, 96, 64, 64), (None, None, "x")),
                                                                ((96, 1, 7, 7), ())], [(None, None, "x"), ()]),
    "convolution, groups": Case(xp_conv, ONE, [((4, 64, 32, 32), (None, "x")), ((64, 8, 3, 3), ("x",))], [(None, "x")]),
    "convolution, dilated": Case(lambda xp, x, w: xp.conv(x, w, dilation=2), ONE,
                                 [((4, 16, 64, 64), (None, None, "x")), ((16, 16, 3, 3), ())], [(None, None, "x")]),
    "convolution, U-Net's way down": Case(lambda xp, x, w: xp.conv(x, w, 2, 1), ONE,
                                          [((4, 16, 64, 64), (None, None, "x")), ((32, 16, 3, 3), ())],
                                          [(None, None, "x")]),
    "convolution, U-Net's way up": Case(lambda xp, x, w: xp.upsample(x, w, 2), ONE,
                                        [((4, 32, 32, 32), (None, None, "x")), ((32, 16, 2, 2), ())],
                                        [(None, None, "x")]),
    "convolution, transposed": Case(lambda xp, x, w: xp.upsample(x, w, 2), ONE,
                                    [((4, 32, 32, 32), (None, None, "x")), ((32, 16, 4, 4), ())],
                                    [(None, None, "x")]),
    "convolution, volumes": Case(xp_conv, ONE, [((2, 8, 32, 32, 32), (None, None, "x")), ((8, 8, 3, 3, 3), ())],
                                 [(None, None, "x")]),
    "convolution, volumes in 2-d": Case(xp_conv, TWO, [((2, 8, 32, 32, 32), (None, None, "x", "y")),
                                                       ((8, 8, 3, 3, 3), ())], [(None, None, "x", "y")]),
    "columns of patches": Case(lambda xp, x: xp.unfold(x, 4, 4, 0), ONE, IMAGES[:1], [(None, None, "x")]),
    "columns, their product, gradients": Case(
        unfold_grads, ONE, [((4, 16, 64, 64), (None, None, "x")), ((32, 144), ())], [(None, None, "x"), ()]
    ),
    "rows mirrored at the edges": Case(lambda xp, x: xp.mirror(x), ONE, IMAGES[:1]),
    "diagonal": Case(lambda xp, x: xp.diagonal(x), TWO, [((8, 64, 64), (None, "x", "y"))]),
    "cumulative sum, gradients": Case(lambda xp, x: xp.grad(lambda x: (xp.cumsum(x, 1) ** 2).sum(), (x,)), ONE,
                                      [((B, E), (None, "x"))], [(None, "x")]),
    "shifted windows": Case(shifted_windows, ONE, [SWIN, *WINDOWS], [SWIN[1]]),
    "shifted windows, gradients": Case(shifted_windows_grads, ONE, [SWIN, *WINDOWS], [()] * 3),
    "shifted windows in 2-d": Case(shifted_windows, TWO, [((8, 64, 32, 64), (None, "x", "y")), *WINDOWS],
                                   [(None, "x", "y")]),
    "shifted windows, uneven": Case(annotated_windows, {"x": 4}, [((8, 56, 56, 64), (None, "x")), *WINDOWS],
                                    [(None, "x")]),
    "shifted windows without annotations, uneven": Case(
        shifted_windows, {"x": 4}, [((8, 56, 56, 64), (None, "x")), *WINDOWS], [(None, "x")]
    ),
    "shifted windows of uneven images": Case(
        shifted_windows, {"x": 3}, [((8, 48, 32, 64), (None, "x")), *WINDOWS], [(None, "x")]
    ),
    "shifted windows, uneven, gradients": Case(
        shifted_windows_grads, {"x": 4}, [((8, 56, 56, 64), (None, "x")), *WINDOWS], [()] * 3
    ),
    "group norm, uneven": Case(group_norm, {"x": 2}, [((4, 96, 32, 32), (None, "x"))], [(None, "x")]),
    "rows in blocks, uneven": Case(lambda xp, x: xp.softmax(x.reshape(15, 64, E), 1), ONE, [((960, E), ("x",))]),
    "convolution, channels": Case(xp_conv, ONE, [((4, 64, 32, 32), (None, "x")), ((64, 64, 3, 3), (None, "x"))],
                                  [(None, "x")]),
    "shifted windows in 2-d, uneven": Case(
        shifted_windows, TWO, [((8, 56, 56, 64), (None, "x", "y")), *WINDOWS], [(None, "x", "y")]
    ),
    "shifted windows in 2-d, of 40 rows": Case(
        shifted_windows, TWO, [((8, 40, 56, 64), (None, "x", "y")), *WINDOWS], [(None, "x", "y")]
    ),
    "shifted windows, images too": Case(
        shifted_windows, TWO, [((8, 56, 56, 64), ("y", "x")), *WINDOWS], [("y", "x")]
    ),
    "rows around": Case(around, {"x": 4}, [((4, 16, 64, 32), (None, None, "x")), ((16, 16, 3, 3), ())]),
    "rows around, gradients": Case(squares(around), {"x": 4}, [((4, 16, 64, 32), (None, None, "x")),
                                                               ((16, 16, 3, 3), ())], [(None, None, "x"), ()]),
    "means of windows, uneven": Case(lambda xp, x: xp.windows_of(x, 7), {"x": 4}, IMAGES[:1]),
    "largest of windows in place": Case(lambda xp, x: xp.pooled_back(x), ONE, IMAGES[:1], [(None, None, "x")]),
    "largest of windows in place, gradients": Case(squares(lambda xp, x: xp.pooled_back(x)), ONE, IMAGES[:1],
                                                   [(None, None, "x")]),
    "bags": Case(lambda xp, t, i: xp.bags(t, i), ONE, [((V, E), ()), ((512, 6), ("x",))], [("x",)], (1,)),
    "bags of a sharded table": Case(lambda xp, t, i: xp.bags(t, i), ONE, [((V, E), (None, "x")), ((512, 6), ("x",))],
                                    [("x",)], (1,)),
    "bilinear": Case(lambda xp, x, y, w: xp.bilinear(x, y, w), TWO, [((B, 32), ("x",)), ((B, 48), ("x",)),
                                                                     ((64, 32, 48), ("y",))], [("x", "y")]),
    "bilinear, gradients": Case(squares(lambda xp, x, y, w: xp.bilinear(x, y, w)), TWO, [
        ((B, 32), ("x",)), ((B, 48), ("x",)), ((64, 32, 48), ("y",))], [("x",), ("x",), ("y",)]),
    "distances": Case(lambda xp, x, y: xp.distances(x, y), TWO, [((512, 32), ("x",)), ((384, 32), ("y",))]),
    "product of a row": Case(lambda xp, x: xp.prod(x), ONE, [((B, E), (None, "x"))], [()]),
    "layer norm's own, gradients": Case(squares(lambda xp, x: xp.layer_norm(x)), ONE, [((B, E), (None, "x"))],
                                        [(None, "x")]),
    "a level of a U-Net": Case(skip_connection, ONE, [((4, 16, 64, 32), (None, None, "x")), ((16, 16, 3, 3), ()),
                                                      ((16, 32, 3, 3), ())], [(None, None, "x")]),
    "sums over edges": Case(nodes, ONE, [((512, E), ()), ((4096,), ("x",)), ((4096,), ("x",)), ((E, E), ())], [("x",)],
                            (1, 2)),
}  # fmt: skip
