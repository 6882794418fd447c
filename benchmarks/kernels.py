"""Times fused dequantize-and-multiply on a GPU against cuBLAS in bf16, dequantize + cuBLAS, and the memory's bandwidth.

    python benchmarks/kernels.py [--rows 1 16] [--models llama3-8b llama3-70b] [--check] [--record] [--json]

Measures every linear of the models at TP 1 and 8 (q|k|v and gate|up side by side), 4 bits, groups of 128, symmetric,
bf16. `fused` is the path that the operation chooses; `better` is the faster of dequantize + cuBLAS and the fastest
kernel among the choices. Times are per call in replayed CUDA graphs that rotate over copies of the weights, so that no
weight stays in the cache. `limit` is the packed bytes over the device's measured copy bandwidth.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import triton_launch as launch
from tpshard.kernels.quantized.packed import Packed, unpack
from tpshard.kernels.triton_launch import Tile, TileChoice

from record import Record, parser_of

GROUP = 128
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CACHE = 256 << 20  # more than any device's cache


@dataclass(frozen=True)
class Product:
    """One weight [inputs, columns]; if gated, columns are gate and up and the result is silu(gate) * up."""

    model: str
    name: str
    tp: int
    inputs: int
    columns: int
    gated: bool = False

    @property
    def dense_bytes(self) -> int:
        return 2 * self.inputs * self.columns


def products(models: list[str]) -> list[Product]:
    from tpshard.models.families.presets import PRESETS

    listed = []
    for model in models:
        c = PRESETS[model]
        for tp in (1, 8):
            heads, kv = c.heads * c.head_dim // tp, c.kv_heads * c.head_dim // tp
            listed += [
                Product(model, "q|k|v", tp, c.width, heads + 2 * kv),
                Product(model, "o", tp, heads, c.width),
                Product(model, "gate|up", tp, c.width, 2 * c.mlp // tp, gated=True),
                Product(model, "down", tp, c.mlp // tp, c.width),
            ]
    return listed


def random_codes(p: Product) -> Packed:
    """A random weight: any words are valid.

    Scales are like a trained model's, so that silu sees values of usual size.
    """
    chunks = p.inputs // GROUP
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (chunks, p.columns, GROUP // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(chunks, p.columns, device="cuda") * 0.5 + 0.5) * (0.2 / math.sqrt(p.inputs))
    quads = torch.cuda.get_device_capability() < (9, 0)
    return Packed(words, scales.half(), None, None, None, 4, 4, p.inputs, GROUP, quads=quads)


def microseconds(calls: list[Callable[[], Tensor]], seconds: float = 0.03) -> float:
    """Median time of a call when all calls are captured in one graph and replayed for about `seconds`, five times."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop) / (replays * len(calls))

    once(1)
    replays = max(1, int(seconds * 1e6 / 5 / (once(2) * len(calls))))
    return statistics.median(once(replays) for _ in range(5))


def copies(nbytes: int) -> int:
    return min(64, max(1, -(-CACHE // nbytes)))


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, reads plus writes."""
    source = torch.randint(0, 127, (1 << 31,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * microseconds([lambda: target.copy_(source)]))


def relative_error(x: Tensor, packed: Packed, gated: bool, tile: Tile | None) -> float:
    """The relative error of one product against dense fp32 weights."""
    weight = unpack(packed).dequantize(torch.float32)
    expected = x.float() @ weight
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    y = launch.dense_matmul(x, packed, gated) if tile is None else launch.matmul(x, packed, gated, tile)
    return float((y.float() - expected).norm() / expected.norm())


def dense_call(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def measure(p: Product, rows: list[int], choice: TileChoice, bandwidth: float, check: bool) -> list[dict[str, Any]]:
    first = random_codes(p)
    packed = [first, *(replace(first, words=first.words.clone()) for _ in range(copies(first.nbytes) - 1))]
    dense = [torch.randn(p.columns, p.inputs, dtype=torch.bfloat16, device="cuda") / math.sqrt(p.inputs)
             for _ in range(copies(p.dense_bytes))]  # fmt: skip
    results = []
    for m in rows:
        x = torch.randn(m, p.inputs, dtype=torch.bfloat16, device="cuda")
        tile = choice.tile(x, first, p.gated)
        guesses = choice.milliseconds[choice.key(x, first, p.gated)]
        error = relative_error(x, first, p.gated, tile) if check else None

        quickest = min((t for t in guesses if t is not None), key=guesses.__getitem__)
        kernel_us = microseconds([partial(launch.matmul, x, w, p.gated, quickest) for w in packed])
        dequantize_us = microseconds([partial(launch.dense_matmul, x, w, p.gated) for w in packed])
        cublas_us = microseconds([partial(dense_call, x, w, p.gated) for w in dense])
        fused_us = dequantize_us if tile is None else kernel_us
        better = min(kernel_us, dequantize_us)
        results.append({
            "model": p.model, "linear": p.name, "tp": p.tp, "inputs": p.inputs, "columns": p.columns, "M": m,
            "fused_us": fused_us, "cublas_us": cublas_us, "dequantize_us": dequantize_us, "better_us": better,
            "limit_us": 1e6 * first.nbytes / bandwidth, "speedup": cublas_us / fused_us,
            "of_better": better / fused_us, "tile": str(tile), "error": error,
            "large": p.dense_bytes >= 100e6,
        })  # fmt: skip
        if error is not None and not error < 1e-2:
            print(f"WRONG: {p} M={m} {tile}: relative error {error}", file=sys.stderr)
    return results


def mean(rows: list[dict[str, Any]], m: int) -> float:
    logs = [math.log(float(r["speedup"])) for r in rows if r["large"] and r["M"] == m]
    return math.exp(statistics.mean(logs)) if logs else math.nan


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "llama3-70b"])
    parser.add_argument("--check", action="store_true", help="compare every product with fp32")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")

    record = Record("kernels", quiet=a.json)
    rows = record.rows
    bandwidth = copy_bandwidth()
    record.figure("copy", bandwidth / 1e12, "TB/s")
    record.say(f"{'':<30} {'M':>4} {'fused':>8} {'cuBLAS':>8} {'dequant+':>8} {'limit':>7} us  speedup  of limit  "
               "of better")  # fmt: skip
    choice = TileChoice()
    for p in products(a.models):
        for r in measure(p, a.rows, choice, bandwidth, a.check):
            rows.append(r)
            record.say(f"{p.model + ' ' + p.name + ' tp' + str(p.tp):<30} {r['M']:>4} {r['fused_us']:>8.1f} "
                       f"{r['cublas_us']:>8.1f} {r['dequantize_us']:>8.1f} {r['limit_us']:>7.1f}     "
                       f"{r['speedup']:>6.2f}  {r['limit_us'] / r['fused_us']:>7.0%}  {r['of_better']:>8.2f}  "
                       f"{r['tile']}")  # fmt: skip
        torch.cuda.empty_cache()
    for m, goal in ((1, 2.5), (16, 2.0)):
        if m in a.rows:
            record.figure(f"large.{m}", mean(rows, m), f"times cuBLAS (wanted: {goal})")
    worst = min(rows, key=lambda r: float(r["of_better"]))
    record.figure("of_better.worst", worst["of_better"], "of the better path (wanted: 0.90)")
    record.say(f"worst at {worst['model']} {worst['linear']} tp{worst['tp']} M={worst['M']}")
    record.close(write=a.record, as_json=a.json)


if __name__ == "__main__":
    main()
