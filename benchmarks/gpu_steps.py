"""Where the time of a server's decode step goes on one GPU: its kernels, its launch, choosing tokens, the engine.

    python benchmarks/gpu_steps.py FOLDER [--rows 1,16,64] [--profile] [--record] [--json]

FOLDER is a Hugging Face folder, dense or GPTQ (`random_llama.py` writes one). The server's programs run in this
process, without HTTP and without another process. Medians of 40 steps after 10, in ms: `kernels` the replayed graph
between two events, `logits` a step until its logits are there, `engine` the engine's whole step, `rest` what is not the
logits: choosing tokens, bringing them to the host, scheduling. Greedy, drawn with a temperature, and with top-p.
`--profile` prints the functions of the host that take longest.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.parallelism.runtime.context import alone
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.runner import ProgramRunner

from record import Record, parser_of

RECIPE = """
name: served
cluster: {device: h100-sxm-80g, devices_per_node: 1}
model: {hf: FOLDER}
serve: {checkpoint: FOLDER, mesh: {tp: 1}, dtype: bf16}
"""
SAMPLINGS = {"greedy": Sampling(temperature=0), "drawn": Sampling(), "top-p": Sampling(top_p=0.9, temperature=0.8)}
WARM, STEPS = 10, 40


def runner_of(folder: str) -> ProgramRunner:
    recipe = loads(RECIPE.replace("FOLDER", folder), [])
    programs = build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "gpu"), "gpu"))
    weights = stored_weights(open_source(folder, modules=True))
    runner = ProgramRunner(alone(torch.device("cuda")), programs, weights, 4096)
    runner.warm()
    return runner


class Timed:
    """Seconds of the calls of a method while it stands in the method's place."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.seconds = run, list[float]()

    def __call__(self, *args: Any, **how: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = self.run(*args, **how)
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)
        return result

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[WARM:])


def engine_of(runner: ProgramRunner, rows: int, sampling: Sampling, steps: int) -> Engine:
    """An engine whose next steps each compute the next token of `rows` answers."""
    engine = Engine(runner)
    for i in range(rows):
        engine.add(Sequence(tuple(range(5 + i, 133 + i)), replace(sampling, seed=i), steps + 2))
    while any(s.computed < len(s.prompt) for s in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    return engine


def timed(runner: ProgramRunner, rows: int, sampling: Sampling) -> dict[str, float]:
    engine = engine_of(runner, rows, sampling, WARM + STEPS)
    whole = Timed(engine.step)
    for _ in range(WARM + STEPS):
        whole()
    engine = engine_of(runner, rows, sampling, WARM + STEPS)
    logits = Timed(runner.logits)
    steps = Timed(engine.step)
    runner.logits = logits  # type: ignore[method-assign]
    for _ in range(WARM + STEPS):
        steps()
    del runner.logits
    apart = [a - b for a, b in zip(steps.seconds, logits.seconds[-WARM - STEPS :])]
    return {"engine": whole.ms, "logits": logits.ms, "rest": 1e3 * statistics.median(apart[WARM:])}


def replayed(runner: ProgramRunner, rows: int) -> float:
    """Milliseconds of the graph of a step with this many rows, replayed ten times."""
    graph = runner._run[runner._programs.fitting(rows)]._graph  # type: ignore[attr-defined]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(5):
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 10)
    return statistics.median(taken)


def profiled(runner: ProgramRunner, rows: int, sampling: Sampling) -> None:
    engine = engine_of(runner, rows, sampling, WARM + STEPS)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(STEPS):
        engine.step()
    profile.disable()
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    record = Record("gpu_steps", quiet=options.json)
    runner = runner_of(str(options.folder.resolve()))
    for rows in options.rows:
        for name, sampling in SAMPLINGS.items():
            row = {"rows": rows, "sampling": name, **timed(runner, rows, sampling), "kernels": replayed(runner, rows)}
            record.rows.append(row)
            record.say(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
            for part in ("engine", "logits", "rest", "kernels"):
                record.figure(f"{name}.{rows}.{part}", row[part], "ms")
        if options.profile:
            profiled(runner, rows, SAMPLINGS["drawn"])
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
