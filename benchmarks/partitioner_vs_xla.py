"""Annotated programs, partitioned by tpshard and by XLA: bytes that a device sends, and the share of useful FLOPs.

    python benchmarks/partitioner_vs_xla.py [NAME ...] [--json] [--record]

Every program is written once, against a few operations that both torch and jax have, and gets the same annotations of
its arguments, results and `split` values. XLA runs on eight virtual CPU devices where `jax` can be imported, Shardy
propagates for it; its collectives are read after its partitioner's and simplifier's passes, and an all-reduce of which
a device keeps its slice counts as the reduce-scatter that it becomes on accelerators. Bytes are a ring's
(`cost.wire_bytes`), of one device. `--record` keeps the table in benchmarks/records/partitioner_vs_xla.json.
"""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from tpshard.parallelism import Mesh, mesh_split, partition
from tpshard.parallelism.pricing.cost import wire_bytes

from record import Record, parser_of

Dims = tuple[Any, ...]


class Torch:
    """The operations of a program, in torch."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.names = mesh, list(mesh.axes)

    einsum = staticmethod(torch.einsum)
    relu = staticmethod(torch.relu)
    roll = staticmethod(torch.roll)
    logsumexp = staticmethod(torch.logsumexp)
    silu = staticmethod(F.silu)
    softmax = staticmethod(torch.softmax)
    cat = staticmethod(torch.cat)
    topk = staticmethod(torch.topk)
    argmax = staticmethod(torch.argmax)
    cumsum = staticmethod(torch.cumsum)
    flip = staticmethod(torch.flip)

    def sort(self, x: Any, dim: int) -> Any:
        return torch.sort(x, dim).values

    def take(self, table: Any, index: Any) -> Any:
        return F.embedding(index, table)

    def pick(self, x: Any, index: Any) -> Any:
        return torch.gather(x, -1, index[..., None])[..., 0]

    def one_hot(self, index: Any, count: int) -> Any:
        return (index[..., None] == torch.arange(count)).float()

    def scatter_add(self, rows: int, index: Any, x: Any) -> Any:
        return torch.zeros(rows, x.shape[1]).index_add(0, index, x)

    def conv(self, x: Any, w: Any) -> Any:
        return F.conv2d(x, w, padding=w.shape[-1] // 2)

    def causal(self, scores: Any) -> Any:
        n, m = scores.shape[-2:]
        return scores.masked_fill(torch.arange(m)[None] > torch.arange(n)[:, None], -1e9)

    def grad(self, loss: Callable[..., Any], at: Sequence[Any]) -> Any:
        return torch.autograd.grad(loss(*at), list(at))

    def split(self, x: Any, *dims: Any) -> Any:
        return mesh_split(x, self.mesh, [self.names.index(d) if d else -1 for d in dims])


class Jax:
    """The same operations in jax."""

    def __init__(self, jax: ModuleType, mesh: Any):
        import jax.numpy as jnp

        self.jax, self.jnp, self.mesh = jax, jnp, mesh
        self.einsum, self.roll, self.cumsum, self.flip = jnp.einsum, jnp.roll, jnp.cumsum, jnp.flip
        self.cat, self.sort, self.argmax = jnp.concatenate, jnp.sort, jnp.argmax
        self.relu, self.silu, self.softmax, self.one_hot = jax.nn.relu, jax.nn.silu, jax.nn.softmax, jax.nn.one_hot
        self.topk, self.logsumexp = jax.lax.top_k, jax.scipy.special.logsumexp

    def take(self, table: Any, index: Any) -> Any:
        return table[index]

    def pick(self, x: Any, index: Any) -> Any:
        return self.jnp.take_along_axis(x, index[..., None], -1)[..., 0]

    def scatter_add(self, rows: int, index: Any, x: Any) -> Any:
        return self.jnp.zeros((rows, x.shape[1])).at[index].add(x)

    def conv(self, x: Any, w: Any) -> Any:
        return self.jax.lax.conv(x, w, (1, 1), "SAME")

    def causal(self, scores: Any) -> Any:
        n, m = scores.shape[-2:]
        return self.jnp.where(self.jnp.arange(m)[None] > self.jnp.arange(n)[:, None], -1e9, scores)

    def grad(self, loss: Callable[..., Any], at: Sequence[Any]) -> Any:
        return self.jax.grad(loss, tuple(range(len(at))))(*at)

    def split(self, x: Any, *dims: Any) -> Any:
        spec = self.jax.sharding.PartitionSpec(*dims)
        return self.jax.lax.with_sharding_constraint(x, self.jax.sharding.NamedSharding(self.mesh, spec))


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


def shift(xp: Any, s: Any) -> Any:
    """A pipeline's step: every stage's state moves to the next stage."""
    return xp.cat([s[:1], xp.relu(s[:-1])], 0)


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
}  # fmt: skip


def ours(case: Case) -> tuple[dict[str, tuple[int, int]], float]:
    """(count, wire bytes) per kind of collective, and the FLOP efficiency, of tpshard's program."""
    mesh = Mesh(case.mesh)
    args = [
        torch.empty(shape, dtype=torch.int64 if i in case.indices else torch.float32, device="meta")
        for i, (shape, _) in enumerate(case.args)
    ]
    for arg in args:
        arg.requires_grad_(arg.is_floating_point())
    program = partition(
        lambda *inputs: case.fn(Torch(mesh), *inputs), args, mesh, [dims for _, dims in case.args], case.out
    )
    return totals((c.kind, c.bytes, c.size) for c in program.collectives), program.flop_efficiency


def totals(collectives: Iterable[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """(count, wire bytes) per kind of collective, each of which is given as kind, bytes and number of members."""
    by_kind: dict[str, tuple[int, int]] = {}
    for kind, size, members in collectives:
        count, total = by_kind.get(kind, (0, 0))
        by_kind[kind] = count + 1, total + wire_bytes(kind, size, members)
    return by_kind


_KINDS = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "collective-permute": "permute",
}  # fmt: skip
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "bf16": 2, "s64": 8, "f64": 8, "u8": 1, "s8": 1, "u16": 2}


def theirs(jax: ModuleType, case: Case, folder: str) -> dict[str, tuple[int, int]]:
    """(count, wire bytes) per kind of collective of XLA's program."""
    import numpy as np

    count = math.prod(case.mesh.values())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(tuple(case.mesh.values())), tuple(case.mesh))

    def placed(dims: Dims) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))

    even = all(
        n % math.prod(case.mesh[a] for a in ((d,) if isinstance(d, str) else d or ())) == 0
        for shape, dims in case.args for n, d in zip(shape, dims)
    )  # fmt: skip
    args = [
        jax.ShapeDtypeStruct(shape, np.int32 if i in case.indices else np.float32)
        for i, (shape, _) in enumerate(case.args)
    ]
    xp = Jax(jax, mesh)

    def function(*inputs: Any) -> Any:
        # jax refuses uneven arguments, XLA does not: constraints inside the function say the same
        pinned = inputs if even else [xp.split(g, *dims) for g, (_, dims) in zip(inputs, case.args)]
        results = case.fn(xp, *pinned)
        return results if even or case.out is None else xp.split(results, *case.out[0])

    outs = None if case.out is None or not even else [placed(d) for d in case.out]
    if outs is not None and len(outs) == 1 and not isinstance(jax.eval_shape(function, *args), (tuple, list)):
        outs = outs[0]
    elif outs is not None:
        outs = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(function, *args)), outs)
    shutil.rmtree(folder, ignore_errors=True)
    ins = tuple(placed(dims) for _, dims in case.args) if even else None
    jax.jit(function, in_shardings=ins, out_shardings=outs).lower(*args).compile()
    (path,) = glob.glob(f"{folder}/*jit_function*before_all-reduce-promotion.txt")
    with open(path) as file:
        return totals(collectives(file.read(), count))


def collectives(text: str, devices: int) -> Iterator[tuple[str, int, int]]:
    """Kind, bytes and number of members of each collective of an HLO module."""
    lines = text.splitlines()
    for line in lines:
        match = re.match(r"\s*(?:ROOT )?(%\S+) = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
                         r"collective-permute)\((.*?)\)", line)  # fmt: skip
        if match is None:
            continue
        name, type_text, kind = _KINDS[match[3]], match[2], match[3]
        size = sum(
            math.prod(int(n) for n in dims.split(",") if n) * _BYTES[dtype]
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", type_text)
        )
        members = _members(line, devices)
        if kind == "reduce-scatter":
            size *= members
        readers = [r for r in lines if f"{match[1]}," in r.split(" = ")[-1] or f"{match[1]})" in r.split(" = ")[-1]]
        if kind == "all-reduce" and len(readers) == 1 and " dynamic-slice(" in readers[0]:
            name = "reduce_scatter"
        yield name, size, members


def _members(line: str, devices: int) -> int:
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    plain = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(plain[1].split(",")) if plain else devices


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"no program {', '.join(sorted(unknown))}: {', '.join(CASES)}")
    record = Record("partitioner_vs_xla", "jax", quiet=options.json)
    folder = tempfile.mkdtemp(prefix="tpshard-xla-")
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count=8 --xla_dump_to={folder} --xla_dump_hlo_pass_re=all-reduce-promotion"
    )
    try:
        import jax
    except ImportError:
        jax = None  # type: ignore[assignment]
    rows = record.rows
    record.say("MB that a device sends (2^20 bytes)")
    record.say(f"{'program':<40} {'tpshard':>8} {'XLA':>8} {'ratio':>6} {'FLOPs':>6}  collectives (tpshard | XLA)")
    for name in options.names or CASES:
        row: dict[str, Any] = {"program": name}
        try:
            row["collectives"], row["flop_efficiency"] = ours(CASES[name])
            row["bytes"] = sum(size for _, size in row["collectives"].values())
        except Exception as error:  # a program that one of the two refuses is a row as well
            row["error"] = f"{type(error).__name__}: {error}"
        if jax is not None:
            try:
                row["xla_collectives"] = theirs(jax, CASES[name], folder)
                row["xla_bytes"] = sum(size for _, size in row["xla_collectives"].values())
            except Exception as error:
                row["xla_error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        record.say(_show(row))
    if jax is not None:
        above = [r["program"] for r in rows if r.get("bytes", math.inf) > r.get("xla_bytes", math.inf)]
        record.say(f"\nabove XLA: {len(above)} of {len(rows)}: {'; '.join(above)}")
        record.figure("programs", len(rows), "programs")
        record.figure("above-xla", len(above), "programs")
    record.close(as_json=options.json, write=options.record)


def _show(row: dict[str, Any]) -> str:
    def kinds(totals: dict[str, tuple[int, int]]) -> str:
        return " ".join(f"{n} {kind}" for kind, (n, _) in sorted(totals.items())) or "none"

    if "error" in row:
        return f"{row['program']:<40} {row['error'].splitlines()[0][:100]}"
    mine, other = row["bytes"], row.get("xla_bytes")
    ratio = "" if other is None else "1.00" if mine == other else f"{mine / other:.2f}" if other else "inf"
    peer = row.get("xla_error", "")[:60] or kinds(row.get("xla_collectives", {}))
    other_mib = "" if other is None else f"{other / 2**20:.3f}"
    return (
        f"{row['program']:<40} {mine / 2**20:>8.3f} {other_mib:>8} {ratio:>6} {row['flop_efficiency']:>6.2f}"
        f"  {kinds(row['collectives'])} | {peer}"
    )


if __name__ == "__main__":
    main()
