"""Times a server's decode step on one CPU thread: 4-bit weights by torch's int4 product against the same weights dense.

    python benchmarks/cpu_decode.py [--json] [--width 1024] [--layers 8] [--rounds 9] [--context 100]

The model is a random Llama (heads of 64, a quarter as many KV heads, MLP 11/4 as wide, 8,192 tokens), its layers
quantized to 4 bits in groups of 128. It is served in bf16 (int4) and in fp32 (dense, equal to the file's weights),
batch invariant. Each row decodes one token of its own sequence, with `--context` tokens before it. The two variants
take turns. Results are medians of a step's thread time in ms, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from tpshard.kernels.gptq_config import GPTQConfig
from tpshard.kernels.quantized import Quantized, group_index
from tpshard.models import Blueprint
from tpshard.models.config import ModelConfig
from tpshard.parallelism.runtime.context import alone
from tpshard.programs.serve_setting import ServeSetting
from tpshard.programs.served import Quantization, Served
from tpshard.programs.serving import build_serving
from tpshard.recipes.load import loads
from tpshard.serve.runner import ProgramRunner
from tpshard.serve.step import StepInput
from tpshard.serve.weights import Weights

GROUP = 128
ROWS = (8, 16, 32, 64)
DTYPES = {"int4 bf16": "bf16", "dense fp32": "fp32"}


def weights_of(config: ModelConfig) -> Weights:
    generator = torch.Generator().manual_seed(0)

    def linear(outputs: int, inputs: int) -> Quantized:
        groups = inputs // GROUP
        codes = torch.randint(0, 16, (inputs, outputs), dtype=torch.uint8, generator=generator)
        scales = (torch.rand(groups, outputs, generator=generator) * 0.004).half()
        zeros = torch.full((groups, outputs), 8, dtype=torch.uint8)
        return Quantized(codes, scales, zeros, group_index(inputs, GROUP), 4)

    coded = {name: linear(*shape) for name, shape in config.shapes.items() if ".attention.w" in name or ".mlp." in name}

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return torch.ones(*sizes) if "norm" in name else torch.randn(*sizes, generator=generator) * 0.02

    return Weights(config.shapes, block, coded.get, lambda name: coded[name].group if name in coded else None)


def runners(config: ModelConfig, blocks: int) -> dict[str, ProgramRunner]:
    weights, settings = weights_of(config), GPTQConfig(group_size=GROUP)
    coded = {name: settings for name in config.shapes if weights.group(name) is not None}
    recipe = loads("name: decode\ncluster: {device: cpu}\nmodel: {preset: tiny}\nserve: {mesh: {tp: 1}}\n")
    by_dtype = {}
    for name, dtype in DTYPES.items():
        served = Served(Blueprint(config), dtype, Quantization(settings, coded, {}))
        programs = build_serving(ServeSetting.of(recipe, served, "cpu"), ROWS)
        by_dtype[name] = ProgramRunner(alone(), programs, weights, blocks)
    return by_dtype


def batch(rows: int, context: int) -> StepInput:
    width = context // 16 + 1
    tables = 1 + np.arange(rows * width).reshape(rows, width)
    row = np.arange(rows)
    return StepInput(row + 5, np.full(rows, context), tables[:, -1] * 16 + context % 16, row, tables, row)


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    width = options.width
    config = ModelConfig(
        family="llama", layers=options.layers, width=width, heads=width // 64, kv_heads=max(1, width // 256),
        head_dim=64, mlp=width * 11 // 4 // 256 * 256, vocab=8192, max_seq=2048, seq_len=512, dtype="fp32",
    )  # fmt: skip
    by_dtype = runners(config, max(ROWS) * (options.context // 16 + 1))
    results = []
    for rows in ROWS:
        milliseconds: dict[str, list[float]] = {name: [] for name in by_dtype}
        for turn in range(options.rounds + 2):
            for name, runner in by_dtype.items():
                began = time.thread_time()
                for _ in range(4):
                    runner.step(batch(rows, options.context))
                if turn > 1:
                    milliseconds[name].append(1e3 * (time.thread_time() - began) / 4)
        results.append({"M": rows} | {name: statistics.median(times) for name, times in milliseconds.items()})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the rows")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--context", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, one thread, torch {torch.__version__}")
    print(f"{options.layers} layers of width {options.width}, {options.context} tokens before\n")
    print(f"{'M':>4}" + "".join(f"{name + ' ms':>16}" for name in DTYPES) + "   dense / int4")
    for row in rows:
        times = "".join(f"{row[name]:>16.2f}" for name in DTYPES)
        print(f"{row['M']:>4}{times}   {row['dense fp32'] / row['int4 bf16']:.2f}")


if __name__ == "__main__":
    main()
