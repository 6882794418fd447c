"""Times decoding through an act-ordered layer on several ranks in three layouts: naive, rank-local sort, TP-aware.

    python benchmarks/tp_aware.py [--ranks 2 4 8] [--rows 8 16] [--rounds 20] [--record] [--json]

One layer of Llama-70B and of Granite-20B with dims divided by 4, quantized to 4 bits in groups of 128 with a random
act-order, runs as a server's programs (bf16, torch's int4 product) on gloo processes of this machine. Every row decodes
one token of its own sequence. Rounds are interleaved and start with a different layout each; times are medians in ms of
a step on rank 0. `collectives` is the time that a step waits for them; only the naive layout gathers the activations
before each row-parallel linear.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.quantized import Quantized, group_index
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.runtime.context import Context, connect
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.programs.server.act_order import LAYOUTS, act_orders
from tpshard.programs.server.padding import shared_rows
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import Quantization, Served
from tpshard.programs.server.serving import build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Weights

from record import Record, parser_of

GROUP, PAST = 128, 128
LLAMA = ModelConfig(
    family="llama", layers=1, width=2048, heads=16, kv_heads=8, head_dim=128, mlp=7168, vocab=1024, max_seq=512,
    seq_len=512, dtype="bf16",
)  # fmt: skip
GRANITE = ModelConfig(
    family="granite", layers=1, width=1536, heads=48, kv_heads=1, head_dim=32, mlp=6144, vocab=1024, max_seq=512,
    seq_len=512, dtype="bf16", attention_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
SHAPES = {"llama-70b/4": LLAMA, "granite-20b/4": GRANITE}


def weights_of(config: ModelConfig) -> tuple[Weights, Quantization]:
    """Random weights; the groups of a matrix's rows are in random order, for attention's output within heads."""
    quantized: dict[str, Quantized] = {}
    for seed, (name, (outputs, inputs)) in enumerate((n, s) for n, s in config.shapes.items() if len(s) == 2):
        if not name.startswith("layers."):
            continue
        g = torch.Generator().manual_seed(seed)
        shared = torch.Generator().manual_seed(inputs)  # products of one input share its order
        size = min(GROUP, config.head_dim) if name.endswith("wo.weight") else GROUP
        group = group_index(inputs, size)
        if not name.endswith("wo.weight"):
            group = group[torch.randperm(inputs, generator=shared)]
        groups = int(group.max()) + 1
        codes = torch.randint(0, 16, (inputs, outputs), generator=g, dtype=torch.uint8)
        scales = (torch.rand(groups, outputs, generator=g) * 0.1 / math.sqrt(inputs)).half()
        quantized[name] = Quantized(codes, scales, torch.full((groups, outputs), 8, dtype=torch.uint8), group, 4)

    def block(name: str, starts: object, sizes: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(tuple(sizes)) * (1 if "norm" in name else 0.01)

    read = {name: weight.group for name, weight in quantized.items()}.get
    settings = GPTQConfig(group_size=GROUP, desc_act=True)
    orders = act_orders(config.parameters, (config.heads, config.kv_heads, config.head_dim), read)
    quantization = Quantization(
        settings, dict.fromkeys(quantized, settings), orders, shared_rows(config.parameters, read)
    )
    return Weights(config.shapes, block, quantized.get, read), quantization


def runners(config: ModelConfig, ranks: int, rows: list[int], context: Context) -> dict[str, ProgramRunner]:
    weights, quantized = weights_of(config)
    by_layout = {}
    for layout in LAYOUTS:
        recipe = loads(
            "name: layouts\ncluster: {device: cpu}\nmodel: {preset: tiny}\n",
            [f"serve.mesh.tp={ranks}", f"serve.layout={layout}", f"serve.requests={max(rows)}"],
        )
        setting = ServeSetting.of(recipe, Served(FamilyModel(config), "bf16", quantized), "cpu")
        by_layout[layout] = ProgramRunner(context, build_serving(setting, map(Size, rows)), weights, 16 * max(rows))
    return by_layout


def batch(rows: int) -> StepInput:
    """A token of each of `rows` sequences, after PAST others."""
    width = PAST // 16 + 1
    tables = 1 + np.arange(rows * width).reshape(rows, width)
    place, row = np.full(rows, PAST), np.arange(rows)
    return StepInput(row % 1000, place, tables[:, -1] * 16, row, tables, row)


def measure(context: Context, ranks: int, rows: list[int], rounds: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for shape, config in SHAPES.items():
        by_layout = runners(config, ranks, rows, context)
        for m in rows:
            milliseconds: dict[str, list[float]] = {layout: [] for layout in by_layout}
            waited: dict[str, list[float]] = {layout: [] for layout in by_layout}
            turns = list(by_layout.items())
            for i in range(rounds + 3):
                turns.append(turns.pop(0))
                for layout, runner in turns:
                    context.barrier()
                    executor, began = runner._run[Size(m)], time.perf_counter()
                    before = executor.waited_s  # type: ignore[attr-defined]
                    runner.logits(batch(m))
                    if i >= 3:
                        milliseconds[layout].append(1e3 * (time.perf_counter() - began))
                        waited[layout].append(1e3 * (executor.waited_s - before))  # type: ignore[attr-defined]
            row: dict[str, Any] = {"shape": shape, "ranks": ranks, "M": m}
            for layout in LAYOUTS:
                row[f"{layout}_ms"] = statistics.median(milliseconds[layout])
                row[f"{layout}_collectives_ms"] = statistics.median(waited[layout])
            results.append(row)
    return results


def worker(rank: int, ranks: int, rows: list[int], rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = WorkerPlace(rank, ranks, rank, ranks, f"file:{folder / 'store'}", "tpshard")
    with connect(place, Mesh({"tp": ranks}), watch=False) as context:
        measured = measure(context, ranks, rows, rounds)
        if rank == 0:
            (folder / "rows.json").write_text(json.dumps(measured))
        context.barrier()


def run(ranks: int, rows: list[int], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (ranks, rows, rounds, Path(folder)), nprocs=ranks)
        results: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return results


def mean_ratio(rows: list[dict[str, Any]], over: str, ranks: list[int]) -> float:
    return statistics.geometric_mean(row[over] / row["tp_aware_ms"] for row in rows if row["ranks"] in ranks)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    record = Record("tp_aware", quiet=options.json)
    record.say(f"{'shape':<15} ranks   M    naive  local_sort  tp_aware   ms; naive/tp_aware; collectives of the three")
    for row in (row for ranks in options.ranks for row in run(ranks, options.rows, options.rounds)):
        record.rows.append(row)
        waits = " ".join(f"{row[f'{layout}_collectives_ms']:.2f}" for layout in LAYOUTS)
        record.say(f"{row['shape']:<15} {row['ranks']:>5} {row['M']:>3} {row['naive_ms']:>8.2f} "
                   f"{row['local_sort_ms']:>11.2f} {row['tp_aware_ms']:>9.2f}   "
                   f"{row['naive_ms'] / row['tp_aware_ms']:.2f}   {waits}")  # fmt: skip
    for ranks in options.ranks:
        record.figure(f"naive.{ranks}", mean_ratio(record.rows, "naive_ms", [ranks]), "times tp_aware, geometric mean")
    for layout in ("naive", "local_sort"):
        record.figure(layout, mean_ratio(record.rows, f"{layout}_ms", options.ranks), "times tp_aware, geometric mean")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
