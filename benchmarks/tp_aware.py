"""Decoding through act-ordered layers on several ranks: the naive layout beside a rank-local sort and the TP-aware one.

    python benchmarks/tp_aware.py [--json] [--ranks 2 4 8] [--rounds 30] [--record]

MLPs of Llama-70B and Granite-20B and whole layers, dims divided by 4, on gloo processes of this machine, fp32 as a
server on a CPU computes. All layouts multiply by the server's kernels. (Local sort's ragged groups are timed as if they
were regular, which are half as large: the strong baseline.) They reduce as the server does, by one exchange (see
parallelism/exchange.py); the naive layout gathers by gloo's all-gather. `at_once` is that gather sent as an exchange
too, which no server here does, and `naive at once` the ratio that the parts predict with it.

Rounds are interleaved and begin with another layout each; a row's times are medians in ms on rank 0, of four calls in a
row, as layers follow each other, between two barriers, less the barriers. `parts` are the naive layout's pieces timed
one by one; `explained` is the ratio naive / tp_aware that they predict over the ratio measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import quantized_ops as ops
from tpshard.kernels.attention import attention
from tpshard.kernels.layouts import LAYOUTS, LocalPair, arrange, shard, shard_attention
from tpshard.kernels.quantized import Quantized, group_count, group_index
from tpshard.kernels.rows import gate, rms_norm
from tpshard.parallelism.exchange import exchanged
from tpshard.parallelism.runtime.execute import copies, piece_sizes, reduce_pieces
from tpshard.parallelism.runtime.gloo import all_gather

from record import Record, add_options

funcol = torch.ops._c10d_functional
wait = funcol.wait_tensor.default

ROWS = (1, 2, 4, 8, 16)
GROUP = 128
CONTEXT = 128  # tokens of the past that a decoded token attends to
IN_A_ROW = 4  # calls


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    mlp: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (
    Shape("llama-70b/4", 2048, 7168, True, 16, 8, 128),
    Shape("granite-20b/4", 1536, 6144, False, 48, 1, 32),
)


def linear(inputs: int, outputs: int, seed: int, group: Tensor | None = None, size: int = GROUP) -> Quantized:
    g = torch.Generator().manual_seed(seed)
    groups = group_count(inputs, size)
    if group is None:
        group = group_index(inputs, size)[torch.randperm(inputs, generator=g)]
    codes = torch.randint(0, 16, (inputs, outputs), generator=g, dtype=torch.uint8)
    scales = (torch.rand(groups, outputs, generator=g) * 0.01 / math.sqrt(inputs / 64)).half()
    return Quantized(codes, scales, torch.full_like(scales, 8).to(torch.uint8), group, 4)


class Product:
    """x [rows, inputs] -> [rows, outputs]"""

    def __init__(self, weight: Quantized):
        size = next(s for s in (128, 64, 32) if weight.inputs % s == 0)
        regular = replace(linear(weight.inputs, 1, 0, group_index(weight.inputs, size), size), codes=weight.codes)
        spread = (t.expand(-1, weight.outputs).contiguous() for t in (regular.scales, regular.zeros))
        packed = ops.prepare(Quantized(weight.codes, *spread, regular.group, 4), "cpu")
        self.arguments = ops.arguments(packed)
        self.outputs = weight.outputs

    def __call__(self, x: Tensor) -> Tensor:
        return ops.matmul_on_cpu(x, *self.arguments, False)


class Products:
    """A pair's shards."""

    def __init__(self, local: LocalPair):
        self.local = local
        self.column = [Product(w) for w in local.column]
        self.row = Product(local.row)

    def first(self, x: Tensor) -> list[Tensor]:
        shared = x[..., self.local.input_orders[0]]  # one order for all, as in found checkpoints
        return [product(shared) for product in self.column]


def gather(own: Tensor) -> Tensor:
    """Joins the ranks' last dims by gloo's all-gather; [rows, own] -> [rows, ranks * own]."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    whole = wait(all_gather(own.contiguous(), ranks, group))
    return whole.view(ranks, *own.shape).movedim(0, -2).flatten(-2)


def exchange(own: Tensor) -> Tensor:
    """[rows, own] -> [ranks * rows * own]: what each rank has, sent to each other at once."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    sent = copies(own, ranks)
    sizes = piece_sizes(sent, ranks)
    return wait(funcol.all_to_all_single.default(sent, sizes, sizes, group))


def gather_at_once(own: Tensor) -> Tensor:
    """`gather` as the exchange that a small all-reduce is."""
    return exchange(own).view(-1, *own.shape).movedim(0, -2).flatten(-2)


def reduce(own: Tensor) -> Tensor:
    """The sum over ranks, sent as a server sends it."""
    ranks = dist.get_world_size()
    if exchanged("all_reduce", own.nbytes, ranks):
        return reduce_pieces(exchange(own), ranks, "sum").view_as(own)
    return wait(funcol.all_reduce.default(own.contiguous(), "sum", dist.group.WORLD.group_name))


class MLP:
    def __init__(self, shape: Shape, layout: str, rank: int, ranks: int):
        up = linear(shape.width, shape.mlp, 1)
        column = [up, linear(shape.width, shape.mlp, 2, up.group)] if shape.gated else [up]
        local = shard(layout, column, linear(shape.mlp, shape.width, 3), rank, ranks)  # type: ignore[arg-type]
        self.products, self.gated = Products(local), shape.gated

    def hidden(self, x: Tensor) -> Tensor:
        first = self.products.first(x)
        return gate(first[0], first[1]) if self.gated else F.gelu(first[0], approximate="tanh")

    def __call__(self, x: Tensor) -> Tensor:
        p = self.products
        return reduce(p.row(arrange(p.local, self.hidden(x), gather)))


class Attention:
    """One new token for each row, against CONTEXT tokens of the past."""

    def __init__(self, shape: Shape, layout: str, rank: int, ranks: int, rows: int):
        inner = shape.heads * shape.head_dim
        size = min(GROUP, shape.head_dim)
        q = linear(shape.width, inner, 4)
        k, v = (linear(shape.width, shape.kv_heads * shape.head_dim, seed, q.group) for seed in (5, 6))
        # Ours are quantized head by head, so that V absorbs the order; found checkpoints order over all heads.
        order = group_index(inner, size) if layout == "tp_aware" else None
        o = linear(inner, shape.width, 7, order, size)
        self.products = Products(shard_attention(layout, q, k, v, o, shape.head_dim, rank, ranks))  # type: ignore[arg-type]
        self.head_dim = shape.head_dim
        kv = self.products.column[1].outputs // shape.head_dim
        self.past = torch.randn(2, rows, CONTEXT, kv, shape.head_dim)

    def __call__(self, x: Tensor) -> Tensor:
        p = self.products
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).unsqueeze(1) for y in p.first(x))
        keys, values = torch.cat([self.past[0], k], 1), torch.cat([self.past[1], v], 1)
        out = attention(q, keys, values).flatten(1)
        return reduce(p.row(arrange(p.local, out, gather)))


class Layer:
    def __init__(self, shape: Shape, layout: str, rank: int, ranks: int, rows: int):
        self.attention, self.mlp = Attention(shape, layout, rank, ranks, rows), MLP(shape, layout, rank, ranks)
        self.scale = torch.ones(shape.width)

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.attention(rms_norm(x, self.scale, None, 1e-5))
        return x + self.mlp(rms_norm(x, self.scale, None, 1e-5))


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median ms of each call, one after the other in every round, between barriers."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    turns = list(calls.items())
    for i in range(rounds + 3):
        turns.append(turns.pop(0))
        for name, call in turns:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(IN_A_ROW):
                call()
            dist.barrier()
            if i >= 3:
                taken[name].append(1e3 * (time.perf_counter() - began) / IN_A_ROW)
    return {name: statistics.median(values) for name, values in taken.items()}


def parts_of(mlps: dict[str, MLP], x: Tensor) -> dict[str, Callable[[], object]]:
    """The naive layout's pieces, and what is in every time without doing anything: the barriers."""
    naive = mlps["naive"]
    p = naive.products
    own = naive.hidden(x)
    whole = gather(own)
    order, start, stop = p.local.gathered_order, p.local.start, p.local.stop
    result = torch.zeros(x.shape[0], x.shape[1])

    def products() -> Tensor:
        return p.row(naive.hidden(x))

    return {"empty": lambda: None, "all_gather": lambda: gather(own), "products": products,
            "permutation": lambda: whole[..., order][..., start:stop].contiguous(),
            "all_reduce": lambda: reduce(result), "at_once": lambda: gather_at_once(own)}  # fmt: skip


def measure(rank: int, ranks: int, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        mlps = {layout: MLP(shape, layout, rank, ranks) for layout in LAYOUTS}
        layers: dict[str, Layer] = {}
        for m in ROWS:
            x = torch.randn(m, shape.width, generator=torch.Generator().manual_seed(m))
            pieces = parts_of(mlps, x)
            calls: dict[str, Callable[[], object]] = {name: partial(mlp, x) for name, mlp in mlps.items()}
            ms = milliseconds(calls | pieces, rounds)
            empty = ms.pop("empty")
            parts = {name: ms[name] - empty for name in pieces if name not in ("empty", "at_once")}
            aware = parts["products"] + parts["all_reduce"]
            predicted = sum(parts.values()) / aware
            measured = (ms["naive"] - empty) / (ms["tp_aware"] - empty)
            at_once = predicted + (ms["at_once"] - empty - parts["all_gather"]) / aware
            rows.append(row(f"{shape.name} mlp", ranks, m, ms, empty)
                        | {"parts": parts, "explained": predicted / measured, "naive_at_once": at_once})  # fmt: skip
            for layout in LAYOUTS:
                if layout not in layers:
                    layers[layout] = Layer(shape, layout, rank, ranks, m)
                kv = layers[layout].attention.past.shape[3]
                layers[layout].attention.past = torch.randn(2, m, CONTEXT, kv, shape.head_dim)
            whole: dict[str, Callable[[], object]] = {name: partial(layer, x) for name, layer in layers.items()}
            rows.append(row(f"{shape.name} layer", ranks, m, milliseconds(whole, rounds), empty))
    return rows


def row(shape: str, ranks: int, m: int, ms: dict[str, float], empty: float) -> dict[str, object]:
    return {"shape": shape, "ranks": ranks, "M": m} | {f"{layout}_ms": ms[layout] - empty for layout in LAYOUTS}


def worker(rank: int, ranks: int, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    with torch.no_grad():
        rows = measure(rank, ranks, rounds)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, rounds: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--folder", folder, "--ranks", str(ranks)]
        workers = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(ranks)]
        codes = [process.wait() for process in workers]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        rows: list[dict[str, object]] = json.loads((Path(folder) / "rows.json").read_text())
        return rows


def mean_ratio(rows: list[dict[str, object]], over: str, kind: str, ranks: tuple[int, ...]) -> float:
    logs = [math.log(float(r[over]) / float(r["tp_aware_ms"]))  # type: ignore[arg-type]
            for r in rows if str(r["shape"]).endswith(kind) and r["ranks"] in ranks]  # fmt: skip
    return math.exp(statistics.mean(logs)) if logs else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        return worker(a.rank, a.ranks[0], a.rounds, a.folder)
    record = Record("tp_aware", quiet=a.json)
    rows = [found for ranks in a.ranks for found in run(ranks, a.rounds)]
    record.rows += rows
    record.say(f"{'shape':<22} ranks   M    naive  local_sort  tp_aware   ms; naive/tp_aware; explained; parts")
    for r in rows:
        ratio = float(r["naive_ms"]) / float(r["tp_aware_ms"])  # type: ignore[arg-type]
        line = f"{r['shape']:<22} {r['ranks']:>5} {r['M']:>3} {r['naive_ms']:>8.2f} {r['local_sort_ms']:>11.2f} "
        line += f"{r['tp_aware_ms']:>9.2f}   {ratio:.2f}"
        if "parts" in r:
            parts = " ".join(f"{n} {t:.2f}" for n, t in r["parts"].items())  # type: ignore[attr-defined]
            line += f"   {r['explained']:.2f}   {parts}"
        record.say(line)
    many = tuple(n for n in a.ranks if n >= 4)
    for kind, wanted in (("mlp", 1.8), ("layer", 1.4)):
        found = mean_ratio(rows, "naive_ms", kind, many)
        beside = mean_ratio(rows, "local_sort_ms", kind, tuple(a.ranks))
        record.figure(f"{kind}.naive", found, "times tp_aware, geometric mean at 4 and 8 ranks")
        record.figure(f"{kind}.local_sort", beside, "times tp_aware, geometric mean")
        for n in a.ranks:
            record.figure(f"{kind}.naive.{n}", mean_ratio(rows, "naive_ms", kind, (n,)), f"times tp_aware, {n} ranks")
        each = ", ".join(f"{mean_ratio(rows, 'naive_ms', kind, (n,)):.2f} at {n}" for n in a.ranks)
        record.say(f"{kind}: naive / tp_aware {found:.2f} at 4 and 8 ranks, geometric mean (wanted: {wanted}); {each}")
        record.say(f"{kind}: local_sort / tp_aware {beside:.2f} over all (wanted: at least 0.97)")
    told = [float(r["explained"]) for r in rows if "explained" in r]  # type: ignore[arg-type]
    near = sum(0.85 <= share <= 1.15 for share in told)
    record.say(f"mlp: the parts explain {statistics.median(told):.2f} of the ratio, median; {near} of {len(told)} rows "
               "are within 15% (wanted)")  # fmt: skip
    logs = [math.log(float(r["naive_at_once"]))  # type: ignore[arg-type]
            for r in rows if "naive_at_once" in r and r["ranks"] in many]  # fmt: skip
    if logs:
        once = math.exp(statistics.mean(logs))
        record.figure("mlp.naive_at_once", once, "times tp_aware at 4 and 8 ranks, from the parts")
    record.close(write=a.record, as_json=a.json)


if __name__ == "__main__":
    main()
