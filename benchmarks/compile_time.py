"""How long torch's compiler takes for a training step, by its size: for the whole program, or for its layers.

    python benchmarks/compile_time.py [--layers 8,16,32] [--how inductor,blocks] [--json] [--record]

A narrow Llama's micro-batch (forward and backward) is compiled at its first call, in a process of its own with an empty
cache, on this machine's CPU; for a GPU it was not measured. Figures are CPU seconds of that process, which also builds
the program. The program's operations are counted, not those that the compiler makes of them. Layers that are alike
are compiled once, so that `blocks` takes as long for any number of them. Above `LARGE` operations
(parallelism/pricing/fusion.py) `compile: auto` compiles the layers alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from tpshard.parallelism.runtime.context import alone
from tpshard.parallelism.runtime.execute import Executor
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

from record import Record, parser_of

RECIPE = """
name: deep
cluster: {device: cpu}
mesh: {fsdp: 1}
model: {preset: tiny, layers: LAYERS, width: 64, heads: 2, kv_heads: 1, head_dim: 32, mlp: 128, vocab: 256, seq_len: 32}
batch: {global_sequences: 1}
compile: HOW
"""


def compiled(layers: int, how: str) -> dict[str, float]:
    """Operations of a micro-batch's program, and seconds of its first call and of the second."""
    recipe = loads(RECIPE.replace("LAYERS", str(layers)).replace("HOW", how))
    program = training.build(Setting.of(recipe)).micro
    executor = Executor(program, alone(), compiled=compiled_by(recipe))
    inputs = [torch.zeros(port.local, dtype=port.dtype) for port in program.inputs]
    stamps = [time.perf_counter()]
    for _ in range(2):
        executor(*[x.clone() for x in inputs])
        stamps.append(time.perf_counter())
    count = sum(node.op == "call_function" for node in program.graph.nodes)
    return {"operations": count, "first_s": stamps[1] - stamps[0], "second_s": stamps[2] - stamps[1]}


def cpu_s() -> float:
    """CPU seconds of the processes that this one has started and seen to their ends."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], default=[8, 16, 32])
    parser.add_argument("--how", type=lambda text: text.split(","), default=["inductor", "blocks"])
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "HOW"), help="print the numbers of one, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compiled(int(options.one[0]), options.one[1])))
        return
    record = Record("compile_time", quiet=options.json)
    for how in options.how:
        for layers in options.layers:
            with tempfile.TemporaryDirectory() as cache:
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                command = [sys.executable, __file__, "--one", str(layers), how]
                began = cpu_s()
                done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            row = {"how": how, "layers": layers, "cpu_s": cpu_s() - began, **json.loads(done.stdout.splitlines()[-1])}
            record.rows.append(row)
            record.say(f"{how:<9} {layers:>4} layers {row['operations']:>6} operations {row['first_s']:>7.1f} s, "
                       f"{row['cpu_s']:>6.1f} s of CPU")  # fmt: skip
            record.figure(f"{how}.{layers}", row["cpu_s"], "s")
            record.figure(f"{how}.{layers}.operations", row["operations"], "operations")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
