"""The CPU's product with 4-bit weights, beside torch's int4 product (bf16), the dense product (fp32) with weights that
are dense already, and the same after making them so each time (`made`).

    python benchmarks/cpu_kernels.py [--json] [--rounds 9]

Weights in groups of 128; several copies of each are multiplied in turn, so that they come from memory as in a model. A
server's step has at most 64 rows on a CPU. The four take turns; medians in ms of one product. A ratio above 1 says how
much longer the other one takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import quantized_ops as ops
from tpshard.kernels.quantized import Quantized, group_index

SHAPES = ((1024, 1024), (1024, 2816), (2816, 1024), (2048, 7168))
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
GROUP = 128
COLD_BYTES = 64 << 20
"""Codes of all copies of a weight: more than most last caches hold."""


def linear(inputs: int, outputs: int) -> Quantized:
    groups = inputs // GROUP
    codes, zeros = (torch.randint(0, 16, (n, outputs), dtype=torch.uint8) for n in (inputs, groups))
    return Quantized(codes, (torch.rand(groups, outputs) * 0.01).half(), zeros, group_index(inputs, GROUP), 4)


def torch_int4(weight: Quantized) -> Callable[[Tensor], Tensor]:
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.T.contiguous().int(), 1)
    shift = (8 - weight.zeros.float()) * weight.scales.float()  # torch means scale * (q - 8) + shift
    scales = torch.stack([weight.scales.float(), shift], -1).bfloat16().contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), codes, GROUP, scales)


def made_dense(weight: Quantized) -> Callable[[Tensor], Tensor]:
    """Dequantizes, then multiplies; without the rounding to fp16 in between."""
    scales, zeros = weight.scales.float()[:, None], weight.zeros.float()[:, None]
    by_group = weight.codes.view(-1, GROUP, weight.outputs)
    return lambda x: x @ ((by_group.float() - zeros) * scales).view(weight.codes.shape)


def ways(inputs: int, outputs: int) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    count = max(2, 2 * COLD_BYTES // (inputs * outputs))
    weights = [linear(inputs, outputs) for _ in range(count)]
    packed = [ops.prepare(weight, "cpu") for weight in weights]
    dense = [weight.dequantize(torch.float32).T.contiguous() for weight in weights[: max(2, count // 8)]]
    return {
        "tpshard": [lambda x, w=w: ops.matmul(x, w) for w in packed],
        "torch int4": [torch_int4(weight) for weight in weights],
        "dense": [lambda x, w=w: F.linear(x, w) for w in dense],
        "made": [made_dense(weight) for weight in weights[:4]],
    }


def measure(rounds: int) -> list[dict[str, float]]:
    found = []
    for inputs, outputs in SHAPES:
        known = ways(inputs, outputs)
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            taken: dict[str, list[float]] = {name: [] for name in known}
            for turn in range(rounds + 1):
                for name, products in known.items():
                    some = products[: max(2, 128 // rows)]
                    began = time.perf_counter()
                    for product in some:
                        product(x)
                    if turn:
                        taken[name].append(1e3 * (time.perf_counter() - began) / len(some))
            ms = {f"{name} ms": statistics.median(times) for name, times in taken.items()}
            ratio = {f"{name} ratio": ms[f"{name} ms"] / ms["tpshard ms"] for name in known if name != "tpshard"}
            found.append({"inputs": inputs, "outputs": outputs, "M": rows} | ms | ratio)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the rows")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with torch.inference_mode():
        rows = measure(options.rounds)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{platform.machine()} {capability}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'inputs':>6}{'outputs':>9}{'M':>5}{'tpshard ms':>12}{'int4 ms':>9}{'dense ms':>10}{'made ms':>10}"
          f"{'int4':>7}{'dense':>7}{'made':>7}")  # fmt: skip
    for row in rows:
        print(
            f"{row['inputs']:>6}{row['outputs']:>9}{row['M']:>5}{row['tpshard ms']:>12.3f}{row['torch int4 ms']:>9.3f}"
            f"{row['dense ms']:>10.3f}{row['made ms']:>10.3f}{row['torch int4 ratio']:>7.2f}{row['dense ratio']:>7.2f}"
            f"{row['made ratio']:>7.2f}"
        )
    for name in ("torch int4", "dense", "made"):
        ratios = [row[f"{name} ratio"] for row in rows]
        print(f"{name} / tpshard: {statistics.geometric_mean(ratios):.2f}, geometric mean; least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
