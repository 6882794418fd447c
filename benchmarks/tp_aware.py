"""Times act-ordered layers on several ranks in three layouts (naive, rank-local sort, TP-aware), beside their plan.

    tpshard doctor --measure measured.yaml
    python benchmarks/tp_aware.py --device measured.yaml --netlab NETLAB --links loopback 1gbit 10gbit --record
    python benchmarks/tp_aware.py --shapes llama-70b/16 --ranks 4 --rows 1 16               a cell on loopback
    python benchmarks/tp_aware.py ... --shapes llama-70b granite-20b --rows 1 4 16          records/tp_aware_wide.json

One layer of Llama-70B and of Granite-20B (arXiv 2402.04925), quantized to 4 bits in groups of 128 with a random
act-order, as a server's program computes it: bf16, torch's int4 product. `--shapes` has both with dims divided, and at
full width, whose record is one of its own. `layer` is the whole layer, decoding one token of each row's own sequence;
`mlp` is its MLP, which the paper's tables are about, with the nodes of the same program. Only the naive layout gathers
activations before a row-parallel linear.

Ranks are processes of one thread on this machine: on loopback, or each in a network namespace of its own with a link of
a rate, which the script NETLAB makes (`up HOSTS RATE`, `rate RATE`, `run 1 -- COMMAND`, `down`) as root. A round trip
of a byte takes some 30 us there, as through a switch, so that bytes and hops cost what they do between devices. With
more ranks than cores the ranks' products still take turns on the cores. Rounds are interleaved and start with a
different layout each. A time is the median in ms of a call, of four in a row after a barrier, on rank 0; of one where a
call takes more than 50 ms.

Beside each ratio of naive to TP-aware stands the plan's. It is the price of the same programs on the device of
`--device`, where what a collective costs is fitted anew on the link (`doctor --measure`'s own measurement of it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from tpshard.devices.measuring.clock import Clock
from tpshard.devices.measuring.measure import communicating
from tpshard.devices.measuring.measure_links import communications, messages
from tpshard.devices.read import device as device_of
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.quantized import Quantized, group_index
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.node_info import INFO, offset
from tpshard.parallelism.pricing.cost import Crowd, Device
from tpshard.parallelism.pricing.flow import info_of
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.runtime.context import Context, connect
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.sharding import replicated
from tpshard.plan.step.pricing import StepPart, price_parts
from tpshard.programs.server.act_order import LAYOUTS, act_orders
from tpshard.programs.server.padding import shared_rows
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import Quantization, Served
from tpshard.programs.server.serving import STEP, build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Filler, Weights

from record import Record, parser_of

GROUP, PAST, IN_A_ROW, SLOW = 128, 128, 4, 50
_LLAMA = ModelConfig(
    family="llama", layers=1, width=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672, vocab=1024, max_seq=512,
    seq_len=512, dtype="bf16",
)  # fmt: skip
_GRANITE = ModelConfig(
    family="granite", layers=1, width=6144, heads=48, kv_heads=1, head_dim=128, mlp=24576, vocab=1024, max_seq=512,
    seq_len=512, dtype="bf16", attention_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
SHAPES = {
    "llama-70b/16": replace(_LLAMA, width=512, mlp=1792, heads=8, head_dim=64),
    "granite-20b/16": replace(_GRANITE, width=384, mlp=1536, heads=16, head_dim=32),
    "llama-70b/4": replace(_LLAMA, width=2048, mlp=7168, heads=16),
    "granite-20b/4": replace(_GRANITE, width=1536, mlp=6144, head_dim=32),
    "llama-70b": _LLAMA,
    "granite-20b": _GRANITE,
}
"""One layer of each model with its dims divided; heads stay divisible by eight ranks, and their size by 32."""
WIDE = {"llama-70b", "granite-20b"}
"""The models' own widths, which have a record of their own: a CPU takes minutes to pack their weights."""
PARTS = {"mlp": "layers.0.mlp", "layer": "layers.0"}


# ---- the programs ---------------------------------------------------------------------------------------------------
def weights_of(config: ModelConfig) -> tuple[Weights, Quantization]:
    """Weights made when they are read; groups of rows in random order, for attention's output within heads."""
    names = [n for n, shape in config.shapes.items() if len(shape) == 2 and n.startswith("layers.")]

    def group(name: str) -> Tensor | None:
        if name not in names:
            return None
        inputs = config.shapes[name][1]
        shared = torch.Generator().manual_seed(inputs)  # products of one input share its order
        own = name.endswith("wo.weight")
        index = group_index(inputs, min(GROUP, config.head_dim) if own else GROUP)
        return index if own else index[torch.randperm(inputs, generator=shared)]

    def quantized(name: str) -> Quantized | None:
        index = group(name)
        if index is None:
            return None
        outputs, inputs = config.shapes[name]
        g = torch.Generator().manual_seed(names.index(name))
        codes = torch.randint(0, 16, (inputs, 64), generator=g, dtype=torch.uint8).repeat(1, -(-outputs // 64))
        groups = int(index.max()) + 1
        scales = (torch.rand(groups, outputs, generator=g) * 0.1 / math.sqrt(inputs)).half()
        zeros = torch.full((groups, outputs), 8, dtype=torch.uint8)
        return Quantized(codes[:, :outputs].contiguous(), scales, zeros, index, 4)

    def block(name: str, starts: object, sizes: tuple[int, ...]) -> Tensor:
        return torch.ones(tuple(sizes)) * (1 if "norm" in name else 0.01)

    settings = GPTQConfig(group_size=GROUP, desc_act=True)
    orders = act_orders(config.parameters, (config.heads, config.kv_heads, config.head_dim), group)
    quantization = Quantization(settings, dict.fromkeys(names, settings), orders, shared_rows(config.parameters, group))
    return Weights(config.shapes, block, quantized, group), quantization


def part_of(program: Program, module: str) -> Program:
    """The nodes of a module, and of those in it, as a program; what they read of others becomes inputs."""
    inside = [n for n in program.nodes if n.op == "call_function" and f"{info_of(n).module}.".startswith(f"{module}.")]
    ports = dict(zip(program.graph.find_nodes(op="placeholder"), program.inputs))
    graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Port]()
    read = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in inside)
    free = [node for node in read if node.target is offset]
    for node in (node for node in read if node not in free):
        spec = info_of(node).specs[0]
        copies[node] = graph.placeholder(node.name)
        copies[node].meta[INFO] = replace(info_of(node), comm=None, flops=0, global_flops=0)
        value = Port(node.name, spec.shape, spec.dtype, replicated(len(spec.shape)), "received")
        inputs.append(ports.get(node, value))
    for node in (*free, *inside):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [node for node in inside if any(user not in inside for user in node.users)]
    graph.output([copies[node] for node in results])
    specs = [info_of(node).specs[0] for node in results]
    outputs = [Port(n.name, s.shape, s.dtype, replicated(len(s.shape)), "sent") for n, s in zip(results, specs)]
    return replace(program, graph=graph, inputs=tuple(inputs), outputs=tuple(outputs), donated={})


def batch(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """A token of each of `rows` sequences, after PAST others."""
    width = PAST // 16 + 1
    tables = 1 + np.arange(rows * width).reshape(rows, width)
    place, row = np.full(rows, PAST), np.arange(rows)
    step = StepInput(row % 1000, place, tables[:, -1] * 16, row, tables, row)
    return step.pad(rows, rows).arguments(False)


class Layout:
    """A layer in one layout on this rank: the programs of its parts by part and rows, and their inputs."""

    def __init__(self, config: ModelConfig, layout: str, ranks: int, rows: Sequence[int]):
        weights, quantized = weights_of(config)
        recipe = loads(
            "name: layouts\ncluster: {device: cpu}\nmodel: {preset: tiny}\n",
            [f"serve.mesh.tp={ranks}", f"serve.layout={layout}", f"serve.requests={max(rows)}"],
        )
        self.setting = ServeSetting.of(recipe, Served(FamilyModel(config), "bf16", quantized), "cpu")
        self.served = build_serving(self.setting, map(Size, rows))
        self.weights = weights
        self.programs = {
            (part, m): part_of(self.served.by_size[Size(m)], module)
            for (part, module), m in itertools.product(PARTS.items(), rows)
        }

    def calls(self, context: Context, blocks: int) -> dict[tuple[str, int], Callable[[], object]]:
        fill = Filler(
            self.weights, self.served.arrangement, self.served.shapes, self.setting.mesh, context.rank, context.device,
            blocks,
        )  # fmt: skip
        calls: dict[tuple[str, int], Callable[[], object]] = {}
        for (part, m), program in self.programs.items():
            step, run = batch(m), Executor(program, context)
            arguments = []
            for port in program.inputs:
                if port.kind == "received":
                    arguments.append(torch.randn(port.shape).to(port.dtype))
                else:
                    arguments.append(torch.from_numpy(step[port.name]) if port.name in STEP else fill(port))
            calls[part, m] = lambda run=run, arguments=arguments: run(*arguments)  # type: ignore[misc]
        return calls

    def planned_ms(self, part: str, rows: int, device: Device, ranks: int) -> float:
        cached = CacheReads(rows * (PAST // 16 + 1), PAST // 16 + 1)
        step = StepPart(part, self.programs[part, rows], compiled="none", cached=cached)
        return 1e3 * price_parts([step], device, ranks).step_s


# ---- the link -------------------------------------------------------------------------------------------------------
def on_link(device: Device, ranks: int, context: Context) -> Device:
    """The device with what a collective costs among these ranks, on this link, with this load. Every rank calls it."""
    if ranks == 1:
        return device
    cores = max(1, device.cpu.cores)
    comm, message = communications(ranks, cores), messages(ranks)
    clock = Clock(1, max(1.0, ranks / cores))
    results = context.gather({"comm": comm(clock), "message": message(clock)})
    fitted, _ = communicating(results, device.shared_by(ranks).stream_rate)
    measured = max((n for n in device.cpu.crowds if n <= ranks), default=0)
    own = device.cpu.crowds.get(measured, Crowd())
    more = max(1.0, ranks / cores) / max(1.0, measured / cores)
    crowd = replace(
        own, overhead=own.overhead * more, bandwidth=fitted.bandwidth, latency_s=fitted.latency_s,
        skew_s=fitted.skew_s, spread=fitted.spread, slowdown=fitted.slowdown, message_s=fitted.message_s,
    )  # fmt: skip
    return replace(device, cpu=replace(device.cpu, crowds={**device.cpu.crowds, ranks: crowd}))


def worker(options: dict[str, Any]) -> None:
    """One rank: measures every shape, part and number of rows; rank 0 writes the rows."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = options["address"] or f"tcp:{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    alone = WorkerPlace(rank, ranks, rank, ranks, address, "tpshard")
    place = alone if options["address"] else replace(alone, local_rank=0, local_world=1)
    rows: list[dict[str, Any]] = []
    devices: dict[str, Device] = {}
    with connect(place, Mesh({"tp": ranks}), watch=False) as context:
        for shape in options["shapes"]:
            layouts = {layout: Layout(SHAPES[shape], layout, ranks, options["rows"]) for layout in LAYOUTS}
            calls = {name: layout.calls(context, 16 * max(options["rows"])) for name, layout in layouts.items()}
            for link in options["links"]:
                if link != "loopback" and context.is_main:
                    subprocess.run([options["netlab"], "rate", link], check=True)
                context.barrier()
                if link not in devices:
                    devices[link] = on_link(device_of(options["device"]), ranks, context)
                for part, m in itertools.product(PARTS, options["rows"]):
                    ms = milliseconds({name: each[part, m] for name, each in calls.items()}, options["rounds"], context)
                    planned = {name: each.planned_ms(part, m, devices[link], ranks) for name, each in layouts.items()}
                    rows.append(
                        {"shape": shape, "part": part, "ranks": ranks, "M": m, "link": link}
                        | {f"{layout}_ms": round(ms[layout], 4) for layout in LAYOUTS}
                        | {"planned_ratio": round(planned["naive"] / planned["tp_aware"], 4)}
                        | {f"planned_{layout}_ms": round(planned[layout], 4) for layout in LAYOUTS}
                    )
            del calls, layouts
        if context.is_main:
            Path(options["out"]).write_text(json.dumps(rows))
        context.barrier()


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int, context: Context) -> dict[str, float]:
    """The median ms of each call, of `IN_A_ROW` in a row; the calls take turns at going first.

    Calls that take longer than `SLOW` ms, where a barrier costs nothing beside them, are one in a row and fewer.
    """
    began = time.perf_counter()
    for call in calls.values():
        call()
    slow = context.largest(round(1e3 * (time.perf_counter() - began) / len(calls))) > SLOW
    in_a_row, rounds, warm = (1, max(3, rounds // 4), 1) if slow else (IN_A_ROW, rounds, 3)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    turns = list(calls.items())
    for i in range(warm + rounds):
        turns.append(turns.pop(0))
        for name, call in turns:
            context.barrier()
            began = time.perf_counter()
            for _ in range(in_a_row):
                call()
            if i >= warm:
                taken[name].append(1e3 * (time.perf_counter() - began) / in_a_row)
    return {name: statistics.median(values) for name, values in taken.items()}


# ---- the ranks ------------------------------------------------------------------------------------------------------
@contextmanager
def hosts(netlab: str, ranks: int, rate: str) -> Iterator[None]:
    subprocess.run([netlab, "up", str(ranks), rate], check=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run([netlab, "down"], check=True)


def run(options: argparse.Namespace, ranks: int, links: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one number of ranks on loopback, or on links of some rates."""
    with tempfile.TemporaryDirectory() as folder:
        out, local = Path(folder) / "rows.json", links == ["loopback"]
        settings = {key: getattr(options, key) for key in ("device", "shapes", "rows", "rounds", "netlab")}
        settings |= {"links": links, "out": str(out), "address": f"file:{folder}/store" if local else ""}
        command = [sys.executable, __file__, "--worker", json.dumps(settings)]
        if local:
            own = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            workers = [subprocess.Popen(command, env={**os.environ, **own, "RANK": str(r)}) for r in range(ranks)]
            if codes := [code for worker in workers if (code := worker.wait())]:
                raise SystemExit(f"workers ended with {codes}")
        else:
            with hosts(options.netlab, ranks, links[0]):
                subprocess.run([options.netlab, "run", "1", "--", *command], check=True)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--links", nargs="+", default=["loopback"], help="loopback, or rates such as 1gbit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="a file of `tpshard doctor --measure`")
    parser.add_argument("--netlab", default="netlab", help="the script that makes hosts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return
    options.device = options.device if options.device == "cpu" else str(Path(options.device).resolve())
    record = Record("tp_aware_wide" if set(options.shapes) <= WIDE else "tp_aware", quiet=options.json)
    record.say(
        f"{'shape':<15} {'part':<5} ranks   M     link    naive  local_sort  tp_aware   ms; naive/tp_aware; planned"
    )
    rates = [link for link in options.links if link != "loopback"]
    starts = [links for links in (["loopback"] if "loopback" in options.links else [], rates) if links]
    for links, ranks in itertools.product(starts, options.ranks):
        if ranks == 1 and links == rates:
            continue
        for row in run(options, ranks, links):
            record.rows.append(row)
            record.say(
                f"{row['shape']:<15} {row['part']:<5} {ranks:>5} {row['M']:>3} {row['link']:>8} "
                f"{row['naive_ms']:>8.2f} {row['local_sort_ms']:>11.2f} {row['tp_aware_ms']:>9.2f}   "
                f"{row['naive_ms'] / row['tp_aware_ms']:.2f}   {row['planned_ratio']:.2f}"
            )
    figures(record)
    record.close(write=options.record, as_json=options.json)


def figures(record: Record) -> None:
    """Geometric means over shapes and rows, by part, ranks and link; the plan's error over all cells."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows:
        if row["ranks"] > 1:
            cells.setdefault(f"{row['part']}.{row['ranks']}.{row['link']}", []).append(row)
    for name, rows in cells.items():
        for layout in ("naive", "local_sort"):
            mean = statistics.geometric_mean(row[f"{layout}_ms"] / row["tp_aware_ms"] for row in rows)
            record.figure(f"{name}.{layout}", mean, "times tp_aware, geometric mean")
    errors = [
        row["planned_ratio"] * row["tp_aware_ms"] / row["naive_ms"] - 1 for rows in cells.values() for row in rows
    ]
    if errors:
        record.figure("planned.error", statistics.mean(map(abs, errors)), "of the ratio, mean")
        record.figure("planned.within_15_percent", sum(abs(e) <= 0.15 for e in errors) / len(errors), "of the cells")


if __name__ == "__main__":
    main()
