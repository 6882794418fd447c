"""How long a plan takes: 8B on 64 devices, 70B on 256, 405B on 16,384; each should be under 60 s on two cores.

    python benchmarks/plan_speed.py [NAME ...]
"""

from __future__ import annotations

import os
import platform
import sys
import time

from tpshard.plan import make, text
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads

CASES = {
    "8b": ("llama3-8b", 64, "{fsdp: 64, tp: 1}", 64),
    "70b": ("llama3-70b", 256, "{fsdp: 32, tp: 8}", 64),
    "405b": ("llama3-405b", 16384, "{dp: 128, fsdp: 16, tp: 8}", 2048),
}


def pace() -> float:
    """Seconds of a plain Python loop: what to compare machines, or one machine's good and bad hours, by."""
    start, seen = time.perf_counter(), {}
    for i in range(3_000_000):
        seen[i % 1000] = (i, str(i & 255))
    return time.perf_counter() - start


def main() -> None:
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"a plain Python loop of 3 million takes {pace():.2f} s"
    )
    print("case  devices   nodes  build s  price s  total s (cpu s)   needs GiB    step s")
    for name in sys.argv[1:] or CASES:
        preset, devices, mesh, sequences = CASES[name]
        recipe = loads(
            f"""
name: {name}
cluster: {{device: h100-sxm-80g, nodes: {devices // 8}, devices_per_node: 8}}
mesh: {mesh}
model: {{preset: {preset}}}
batch: {{global_sequences: {sequences}, per_device: 1}}
remat: full
""",
            file=name,
        )
        start, cpu = time.perf_counter(), time.process_time()
        with make.uncollected():  # as `make.report`, which does both
            programs = make.built(Setting.of(recipe))
            built = time.perf_counter()
            report = make.of_training(programs, name)
        text.screen(report)
        end = time.perf_counter()
        print(
            f"{name:<5} {devices:>7} {len(programs.micro.nodes):>7} {built - start:>8.1f} {end - built:>8.1f} "
            f"{end - start:>8.1f} ({time.process_time() - cpu:.1f}) {report.pricing.needed_bytes / 2**30:>12.1f} "
            f"{report.pricing.step_s:>9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
