"""Compares `plan --for serve` with a running `tpshard serve` under the same requests.

    python benchmarks/rehearsal.py [--json] [--record] [--rates 1,2] [--requests 60] [--prompt 96] [--answer 24]
                                   [--tp 1] [--repeat 3] [--device FILE]

`tpshard serve` runs a random Llama in a process of its own with its workers. Clients stream answers over HTTP, at the
same random times as in the plan's simulation. Shown is served time / planned time, for the time to the first token and
for each further token, at the median and the 99th percentile:

measured   the simulation with step times of the same run: for each step, a random one of the server's steps with as
           many rows that read about as much of the cache
priced     the simulation with step times priced on `--device` (by default the shipped `cpu`; `tpshard doctor
           --measure` writes this machine's file, with the host's time per step, token and request)

Runs of the rates are interleaved; each ratio is of one run.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tpshard.models import build, to_hf
from tpshard.models.families.config import ModelConfig
from tpshard.parallelism.pricing.cost import ServingOverhead
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.plan.server.rehearse import rehearse
from tpshard.plan.server.server_prices import ServerBuilder
from tpshard.plan.server.traffic import Answered, Rehearsal, StepTime, Traffic
from tpshard.programs.server.serving import BLOCK_SIZE
from tpshard.recipes.reading.load import loads
from tpshard.train.data.sample import ensure_sample

from record import Record, parser_of
from running import serving

NEAREST = 12
SHARES = {"median": 0.5, "99th": 0.99}


def model_folder(out: Path) -> Path:
    """A random Llama with the sample's tokenizer."""
    config = ModelConfig(
        family="llama", layers=6, width=512, heads=8, kv_heads=4, head_dim=64, mlp=1536, vocab=2048, max_seq=1024,
        seq_len=512, dtype="fp32",
    )  # fmt: skip
    to_hf(build(config, device="cpu", seed=0), out, tokenizer=ensure_sample().tokenizer)
    return out


# ---- the server's process -------------------------------------------------------------------------------------------
def serve_and_time(out: Path, arguments: list[str]) -> int:
    """`tpshard serve`, writing (rows, blocks read, blocks a row attends to, seconds) of each of its steps: to the start
    of the next one, or where nothing is left to do, to its end."""
    from tpshard.cli.main import run
    from tpshard.serve.api.metrics import Metrics
    from tpshard.serve.engine.engine import Engine
    from tpshard.serve.engine.step import StepInput

    steps: list[tuple[float, ...]] = []
    observe = Metrics.observe

    def observed(metrics: Metrics, engine: Engine) -> None:
        step, take = engine.step, engine._input
        last_input: list[StepInput] = []

        def keep_input(slices: Any) -> StepInput:
            last_input[:] = [take(slices)]
            return last_input[0]

        def measure_time() -> Any:
            begun = time.perf_counter()
            if steps and steps[-1][3] < 0:
                steps[-1] = (*steps[-1][:3], begun + steps[-1][3])
            events = step()
            if last_input:
                reach = last_input[0].positions // BLOCK_SIZE + 1
                blocks = sum(
                    int(reach[last_input[0].sequences == s].max()) for s in set(last_input[0].sequences.tolist())
                )
                step_s = -begun if engine.busy else time.perf_counter() - begun
                steps.append((len(reach), blocks, float(reach.mean()), step_s))
                last_input.clear()
            return events

        engine.step, engine._input = measure_time, keep_input  # type: ignore[method-assign]
        observe(metrics, engine)

    Metrics.observe = observed  # type: ignore[method-assign]
    try:
        return run(["serve", *arguments])
    finally:
        out.write_text(json.dumps([step for step in steps if step[3] > 0]))


async def ask(client: httpx.AsyncClient, address: str, model: str, traffic: Traffic, number: int) -> Answered:
    draw = random.Random(number)
    prompt = [draw.randrange(300, 2000) for _ in range(traffic.prompt)]
    body = {"model": model, "prompt": prompt, "max_tokens": traffic.answer, "ignore_eos": True, "stream": True}
    came, times = time.monotonic(), []
    async with client.stream("POST", f"{address}/completions", json=body) as response:
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return Answered(came, times[0], times[-1], traffic.answer)


async def served(address: str, traffic: Traffic) -> Rehearsal:
    """Sends the traffic to a server; returns the same figures as a simulation."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        model = (await client.get(f"{address}/models")).json()["data"][0]["id"]
        await ask(client, address, model, traffic, -1)
        begun = time.monotonic()

        async def one(number: int, at: float) -> Answered:
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            return await ask(client, address, model, traffic, number)

        answers = await asyncio.gather(*(one(i, at) for i, at in enumerate(traffic.arrivals())))
    return Rehearsal(tuple(answers), 0, 0, 0, time.monotonic() - begun, 0.0)


def drawn(steps: list[tuple[float, ...]], fitting: Callable[[int], int], seed: int) -> StepTime:
    """Step times drawn from a server's run: of steps with the same rows, one of the nearest in what they read."""
    by_size: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for step in steps:
        by_size[fitting(int(step[0]))].append(step)
    tables = {size: np.array(some) for size, some in by_size.items()}
    draw = random.Random(seed)

    def step_s(rows: int, cached: CacheReads, chunk: bool = False) -> float:
        size = fitting(rows)
        table = tables[size if size in tables else min(tables, key=lambda size_of_table: abs(size_of_table - size))]
        far = np.abs(table[:, 0] - rows) + np.abs(table[:, 1] - cached.blocks)
        near = np.argsort(far, kind="stable")[:NEAREST]
        return float(table[near[draw.randrange(len(near))], 3])

    return step_s


def main() -> int:
    if "--serve" in sys.argv[1:2]:
        return serve_and_time(Path(sys.argv[2]), sys.argv[3:])
    parser = parser_of(__doc__)
    parser.add_argument("--rates", type=lambda text: [float(x) for x in text.split(",")], default=[1.0, 2.0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    record = Record("rehearsal", quiet=options.json)
    ratios: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = model_folder(Path(scratch) / "model"), Path(scratch) / "steps.json"
        changes = [f"serve.checkpoint={folder}", f"serve.mesh={{tp: {options.tp}}}", "serve.requests=16",
                   "cluster.device=cpu"]  # fmt: skip
        recipe = loads("name: tiny\nmodel: {preset: tiny}\n", [*changes[:3], f"cluster.device={options.device}",
                       f"cluster.devices_per_node={options.tp}"])  # fmt: skip
        priced = ServerBuilder().build(recipe)
        for turn in range(options.repeat):
            for rate in options.rates:
                traffic = Traffic(options.prompt, options.answer, rate, count=options.requests, seed=turn)
                command = [sys.executable, __file__, "--serve", str(out), "tiny", *changes, "serve.port=0"]
                with serving(command, stderr=subprocess.DEVNULL) as address:
                    answered = asyncio.run(served(address, traffic))
                steps = json.loads(out.read_text())
                # a measured step ends with the start of the next one, so that it has the host's time in it
                whole = ServingOverhead(request_s=priced.overhead.request_s)
                measured = drawn(steps, lambda rows: priced.programs.fitting(rows).rows, turn)
                ways = {"measured": (measured, whole), "priced": (priced.prices, priced.overhead)}
                for way, (step_s, overhead) in ways.items():
                    planned = rehearse(priced.room, traffic, step_s, overhead)
                    row: dict[str, Any] = {"turn": turn, "rate": rate, "steps": way}
                    for name, share in SHARES.items():
                        for figure in ("ttft", "tpot"):
                            served_s, planned_s = getattr(answered, figure)(share), getattr(planned, figure)(share)
                            row[f"{figure}.{name}"] = [round(1e3 * served_s, 2), round(1e3 * planned_s, 2)]
                            ratios[f"{way}.{rate:g}.{figure}.{name}"].append(served_s / planned_s)
                    record.rows.append(row)
                    record.say(json.dumps(row))
    for name, values in ratios.items():
        record.figure(name, values, "times")
    record.close(write=options.record, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
