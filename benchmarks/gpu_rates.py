"""Measures what one GPU reaches: matrix products by shape, attention by implementation, memory, launches.

    python benchmarks/gpu_rates.py [--json] [--record]

Products are those of linears in bf16 (forward, gradient of the input, gradient of the weight), on random
data. `share` is of the peak in the device file nearest to this GPU. Attention is causal and grouped-query:
`flash` is what tpshard runs, `cudnn` torch's other implementation, with whether two backward passes give the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tpshard.devices.measuring.measure_gpu import nearest
from tpshard.devices.read import device
from tpshard.kernels.attention import attention  # noqa: F401  whose import registers torch.ops.tpshard.attention

from record import Record, parser_of

LINEARS = {
    "1b": [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (2048, 128256)],
    "8b": [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256)],
    "8b tp 8": [(4096, 512), (4096, 128), (4096, 1792), (1792, 4096), (512, 4096)],
    "70b": [(8192, 8192), (8192, 28672), (28672, 8192)],
}
TOKENS = (1024, 4096, 16384)


def seconds(run: Callable[[], object], graphed: bool = True) -> float:
    """Median seconds of a call: of ten in a CUDA graph, without the host's time; else of one between events."""
    run(), run()
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 10 if graphed else 1
    if graphed:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
    taken = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if graphed:
            graph.replay()
        else:
            run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(taken)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def products(peak: float) -> list[dict[str, Any]]:
    rows = []
    for model, linears in LINEARS.items():
        for tokens in TOKENS:
            for inputs, outputs in linears:
                if tokens * outputs > 1 << 30:
                    continue
                x, w, dy = drawn(tokens, inputs), drawn(outputs, inputs), drawn(tokens, outputs)
                timed = [seconds(lambda: x @ w.T), seconds(lambda: dy @ w), seconds(lambda: dy.T @ x)]  # noqa: B023
                shares = [2 * tokens * inputs * outputs / s / peak for s in timed]
                rows.append({
                    "model": model, "tokens": tokens, "inputs": inputs, "outputs": outputs,
                    "share": [round(s, 3) for s in shares], "us": [round(1e6 * s, 1) for s in timed],
                })  # fmt: skip
    return rows


def attentions(peak: float) -> list[dict[str, Any]]:
    rows = []
    for b, h, kv, d in ((1, 32, 8, 64), (1, 32, 8, 128), (4, 32, 8, 128), (1, 8, 1, 128)):
        s, scale = 4096, d**-0.5
        q, k, v, dout = drawn(b, s, h, d), drawn(b, s, kv, d), drawn(b, s, kv, d), drawn(b, s, h, d)
        flops = 4 * b * h * s * s * d // 2
        ours, back = torch.ops.tpshard.attention, torch.ops.tpshard.attention_backward
        out, lse = ours(q, k, v, None, scale)
        row: dict[str, Any] = {"b": b, "h": h, "kv": kv, "d": d}
        row["flash"] = [flops / seconds(lambda: ours(q, k, v, None, scale)) / peak,  # noqa: B023
                        2.5 * flops / seconds(lambda: back(dout, q, k, v, out, lse, None, scale)) / peak]  # noqa: B023  # fmt: skip
        try:
            row["cudnn"] = cudnn(q, k, v, dout, scale, flops / peak)
        except (RuntimeError, TypeError) as error:
            row["cudnn"] = str(error).splitlines()[0]
        rows.append(row)
    return rows


def cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, scale: float, at_peak_s: float
) -> list[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=True, scale=scale, enable_gqa=True
            )

    out, turned = forward(), dout.transpose(1, 2)
    grads = [torch.autograd.grad(out, inputs, turned, retain_graph=True) for _ in range(3)]
    same = all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))
    back = seconds(lambda: torch.autograd.grad(out, inputs, turned, retain_graph=True), graphed=False)
    return [at_peak_s / seconds(forward), 2.5 * at_peak_s / back, same]


def memory() -> dict[str, Any]:
    """Bytes per second of an addition and a copy by size, and microseconds of launches."""
    rows = {}
    for size in (1 << 22, 1 << 25, 1 << 28):
        x, y, z = drawn(size), drawn(size), drawn(size)
        rows[2 * size] = {"add": 6 * size / seconds(lambda: torch.add(x, y, out=z)),  # noqa: B023
                          "copy": 4 * size / seconds(lambda: z.copy_(x))}  # noqa: B023  # fmt: skip
    small = torch.ones(8, device="cuda")
    many = lambda: [small + small for _ in range(1000)]  # noqa: E731
    rows["launch_us"], rows["graphed_us"] = (1e3 * seconds(many, graphed) for graphed in (False, True))
    return rows


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record("gpu_rates", quiet=options.json)
    properties = torch.cuda.get_device_properties(0)
    peak = device(nearest(properties.name, properties.total_memory)).rates["bf16"]
    record.rows += [{"products": products(peak)}, {"attention": attentions(peak)}, {"memory": memory()}]
    for row in record.rows[0]["products"]:
        record.say(f"{row['model']:<9}{row['tokens']:>7}{row['inputs']:>7}{row['outputs']:>8}  {row['share']}")
    for row in (*record.rows[1]["attention"], record.rows[2]["memory"]):
        record.say(str(row))
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
