"""Runs on a machine with one GPU what no CPU can show, in steps with a time limit each, and keeps what each step says.

    python benchmarks/first_lease.py --out DIR [--stages ABC] [--steps NAME ...] [--preset llama3-8b] [--list]

A: correctness (the tests of `make gpu`, `tpshard doctor`). B: kernels and `doctor --measure`. C: training and serving
as a user does, beside the plan and beside transformers. Each stage takes at most nine minutes. DIR gets what
`leased.py` says. Needs torch, Triton and the packages of pyproject.toml, except wandb. Exits with 1 if a step failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from leased import TPSHARD, Step, json_lines, parser_of, python, run_all, training
from record import ROOT

RECIPE = """
name: NAME
extends: llama3-1b
cluster: {device: DEVICE, devices_per_node: 1}
mesh: {fsdp: 1}
model: {seq_len: 4096}
data: {source: sample, tokenizer: null}
batch: {global_sequences: 4, per_device: 1}
train: {steps: 12}
schedule: {warmup_steps: 2}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 0}
logging: {every_steps: 1, wandb: null}
"""


def steps(out: Path, preset: str) -> Iterator[Step]:
    measured = out / "h100.yaml"
    device = str(measured) if measured.exists() else "h100-sxm-80g"
    pytest = "-m pytest -m gpu --continue-on-collection-errors -n 12 --durations=25 -v -rf --tb=short -p no:benchmark"
    yield Step("tests", "A", python(*pytest.split(), str(ROOT / "tests" / "gpu")), 240)
    yield Step("doctor", "A", [*TPSHARD, "doctor"], 60)
    yield Step("measure", "B", [*TPSHARD, "doctor", "--measure", str(measured)], 90, lambda *_: measured.read_text())
    yield Step("rates", "B", python("gpu_rates.py"), 60)
    yield Step("times", "B", python("kernel_times.py"), 120)
    yield Step("kernels", "B", python("kernels.py", "--json", "--models", "llama3-8b"), 200)
    recipe = RECIPE.replace("DEVICE", device)
    yield training("eager", "C", out, recipe, 75, "compile=eager")
    yield training("blocks", "C", out, recipe, 150, "compile=blocks")
    yield training("inductor", "C", out, recipe, 240, "compile=inductor")
    yield training("no-remat", "C", out, recipe, 120, "compile=blocks", "remat=none", "batch.per_device=2")
    yield training("fp8", "C", out, recipe, 150, "compile=blocks", "model.dtype=fp8")
    yield Step("peer-train", "C", python("gpu_peer.py", "train"), 150, json_lines)
    folders = {kind: str(out / "work" / kind) for kind in ("quantized", "dense")}
    for kind, folder in folders.items():
        flags = ["--preset", preset, "--device", "cuda", *(["--quantized"] if kind == "quantized" else [])]
        yield Step(f"write-{kind}", "C", python("random_llama.py", folder, *flags), 90)
        yield Step(f"serve-{kind}", "C", python("gpu_serving.py", folder), 150, json_lines)
    yield Step("peer-serve", "C", python("gpu_peer.py", "serve", folders["dense"]), 100, json_lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", default="llama3-8b", help="the model that is served")
    options = parser.parse_args()
    sys.exit(run_all(options, lambda out: steps(out, options.preset)))


if __name__ == "__main__":
    main()
