"""The GPU measurements of `doctor --measure`: matrix products, attention and memory of one device."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from tpshard.devices.read import device
from tpshard.kernels.attention import attention  # noqa: F401  whose import registers torch.ops.tpshard.attention
from tpshard.parallelism.pricing.network import Link
from tpshard.recipes.keys.schema import DEVICES


def best(run: Callable[[], object], times: int = 10) -> float:
    """Median seconds of one call on the device, timed by CUDA events."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return sorted(seconds)[len(seconds) // 2]


def nearest(name: str, memory: int) -> str:
    """The name of the shipped device that is most like a GPU of this name and memory; its links are assumed."""
    kinds = {"A100": "a100", "H100": "h100", "H200": "h200", "GB200": "gb200", "GB300": "gb300", "B200": "b200",
             "B300": "b300", "RTX 4090": "rtx-4090", "RTX A6000": "rtx-a6000"}  # fmt: skip
    family = next((short for long, short in kinds.items() if re.search(rf"\b{long}\b", name)), "h100")
    candidates = [shipped for shipped in DEVICES if shipped.startswith(family)] or ["h100-sxm-80g"]
    return min(candidates, key=lambda shipped: (abs(device(shipped).memory_bytes - memory), shipped))


def measure_gpu(tell: Callable[[str], None], name: str, today: str) -> str:
    """The text of a device file for the first GPU of this machine."""
    properties = torch.cuda.get_device_properties(0)
    base_name = nearest(properties.name, properties.total_memory)
    base = device(base_name)
    tell(f"{properties.name}: links taken from {base_name}")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sustained = 2 * 8192**3 / best(lambda: a @ a, 30)
    x = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    y, z = torch.randn_like(x), torch.empty_like(x)
    moved = 3 * x.numel() * 2 / best(lambda: torch.add(x, y, out=z))
    q = torch.randn(2, 4096, 32, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 4096, 8, 128, device="cuda", dtype=torch.bfloat16)
    forward = torch.ops.tpshard.attention
    o, lse = forward(q, k, k, None, 0.088)
    flops = 4 * 2 * 32 * 4096 * 4096 * 128 // 2
    ahead = flops / best(lambda: forward(q, k, k, None, 0.088))
    back = 2.5 * flops / best(lambda: torch.ops.tpshard.attention_backward(o, q, k, k, o, lse, None, 0.088))
    small = torch.ones(8, device="cuda")
    op = best(lambda: [small + small for _ in range(200)]) / 200
    peak = base.rates["bf16"]
    rates = ", ".join(f"{dtype}: {rate / 1e12:g} TFLOP/s" for dtype, rate in base.rates.items())

    def link(of: Link) -> str:
        return (
            f"{{bandwidth: {of.bandwidth / 1e9:g} GB/s, latency: {of.latency_s * 1e6:g} us, "
            f"efficiency: {of.efficiency:g}, slowdown: {of.slowdown:g}}}"
        )

    fitted_on = f"measured {today}"
    return f"""# {properties.name}; written by `tpshard doctor --measure`.
# Dense rates and links are those of {base_name}.
schema: 1
name: {name}
kind: gpu
backend: nccl
measured: {today}
memory: {properties.total_memory // 2**20} MiB
context: {base.context_bytes // 2**20} MiB
channels: {base.channels}
memory_bandwidth: {base.memory_bandwidth / 1e12:g} TB/s
rates: {{{rates}}}
host:
  devices: {base.host_devices}
  inside: {link(base.inside)}
  across: {link(base.across)}
constants: {{matmul: {min(1.0, sustained / peak):.3g}, attention: {min(1.0, ahead / peak):.3g}, """ + (
        f"attention_backward: {min(1.0, back / peak):.3g}, streaming: {min(1.0, moved / base.memory_bandwidth):.3g}, "
        f"op: {op * 0.5e6:.3g} us, eager_op: {op * 1e6:.3g} us}}\n"
        f'fitted: {{matmul: "{fitted_on}, 8192^3 in bf16", streaming: "{fitted_on}, 512 MiB in bf16", '
        f'attention: "{fitted_on}"}}\n'
    )
