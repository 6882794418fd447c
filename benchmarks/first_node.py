"""Runs on a host with eight GPUs what one GPU cannot show, in steps with a time limit each, and keeps what each says.

    python benchmarks/first_node.py --out DIR [--ranks 8] [--device h100-sxm-80g] [--stages ABC] [--steps NAME ...]
    python benchmarks/first_node.py --out DIR --device cpu --ranks 2        # the same steps by gloo, with tiny models

A: `tpshard doctor`, the groups of all axes and their collectives, each kind timed by size beside the plan
(`node_collectives.py`). B: training by fsdp, by tp, and by 1f1b of four stages and eight micro-batches, in the same
steps on the same data, whose losses have to agree. C: greedy decoding on one device and by tp on all. Each stage takes
at most nine minutes. DIR gets what `leased.py` says; needs what `first_lease.py` needs. Exits with 1 if a step failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from leased import TPSHARD, Step, json_lines, parser_of, python, rows_of, run_all, trained, training

RECIPE = """
name: NAME
extends: BASE
cluster: {device: DEVICE, nodes: 1, devices_per_node: RANKS}
mesh: {fsdp: RANKS}
model: {seq_len: LENGTH}
data: {source: sample, tokenizer: null}
batch: {global_sequences: 16, per_device: 1}
train: {steps: 12}
schedule: {warmup_steps: 2}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 0}
logging: {every_steps: 1, wandb: null}
compile: eager
"""
MICRO_BATCHES = 8


def beside_fsdp(out: Path, folder: Path, output: str) -> dict[str, Any]:
    """What a run measured, and by how much its losses differ from those of the step `fsdp`."""
    own, fsdp = trained(folder, output), rows_of(out)["fsdp"]["figures"]
    differences = [abs(a - b) for a, b in zip(own["losses"], fsdp["losses"], strict=True)]
    return own | {"largest_difference": max(differences)}


def steps(out: Path, ranks: int, device: str) -> Iterator[Step]:
    on_cpu = device == "cpu"
    of_devices = ("--ranks", str(ranks), "--device", device)
    yield Step("doctor", "A", [*TPSHARD, "doctor"], 60)
    yield Step("groups", "A", python("node_collectives.py", "groups", *of_devices), 240, json_lines)
    most = ("--most-mib", "1" if on_cpu else "512")
    yield Step("sweep", "A", python("node_collectives.py", "sweep", *of_devices, *most), 180, json_lines)
    recipe = RECIPE.replace("DEVICE", device).replace("RANKS", str(ranks))
    base, length = ("tiny", "64") if on_cpu else ("llama3-1b", "4096")
    recipe = recipe.replace("BASE", base).replace("LENGTH", length)
    yield training("fsdp", "B", out, recipe, 100)
    stages = min(4, ranks)
    others: dict[str, tuple[int, tuple[str, ...]]] = {"tp": (100, (f"mesh={{fsdp: {ranks // 2}, tp: 2}}",))}
    rows = 16 // (ranks // stages * MICRO_BATCHES)
    piped = (
        f"mesh={{pp: {stages}, fsdp: {ranks // stages}}}", f"batch.per_device={rows}", "pipeline.schedule=1f1b",
        f"pipeline.micro_batches={MICRO_BATCHES}",
    )  # fmt: skip
    others["1f1b"] = 120, piped
    if not on_cpu:
        others["1f1b-blocks"] = 200, (*piped, "compile=blocks")
    for name, (limit_s, overrides) in others.items():
        step = training(name, "B", out, recipe, limit_s, *overrides)
        yield replace(step, figures=lambda folder, output: beside_fsdp(out, folder, output))
    for kind in ("dense",) if on_cpu else ("dense", "quantized"):
        folder, preset = str(out / "work" / kind), "tiny" if on_cpu else "llama3-8b"
        flags = ["--preset", preset, *([] if on_cpu else ["--device", "cuda"])]
        flags += ["--quantized"] if kind == "quantized" else []
        yield Step(f"write-{kind}", "C", python("random_llama.py", folder, *flags), 60)
        few = ("--clients", "1,2", "--prompt", "8", "--new", "8", "--dtype", "fp32") if on_cpu else ()
        for tp in (1, ranks):
            served = python("gpu_serving.py", folder, "--device", device, "--tp", str(tp), *few)
            yield Step(f"decode-{kind}-tp{tp}", "C", served, 100, json_lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=8, choices=(2, 4, 8))
    parser.add_argument("--device", default="h100-sxm-80g", help="a device file of the host, or cpu")
    options = parser.parse_args()
    sys.exit(run_all(options, lambda out: steps(out, options.ranks, options.device)))


if __name__ == "__main__":
    main()
