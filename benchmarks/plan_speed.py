"""How long a plan takes: 8B on 64 devices, 70B on 256, 405B on 16,384; each should be under 60 s on two cores.

Without names, all of them:

    python benchmarks/plan_speed.py [NAME ...] [--record] [--json]
"""

from __future__ import annotations

import argparse
import time

from tpshard.plan import make, screen
from tpshard.programs.setting import Setting
from tpshard.recipes.load import loads

from record import Record, add_options

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    add_options(parser)
    asked = parser.parse_args()
    record = Record("plan_speed", quiet=asked.json)
    record.figure("pace", pace(), "s for a plain Python loop of 3 million")
    record.say("case  devices   nodes  build s  price s  total s (cpu s)   needs GiB    step s")
    for name in asked.names or CASES:
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
        screen.screen(report)
        end = time.perf_counter()
        used = time.process_time() - cpu
        record.rows.append({"case": name, "devices": devices, "nodes": len(programs.micro.nodes),
                            "build_s": built - start, "price_s": end - built, "cpu_s": used})  # fmt: skip
        record.figure(f"{name}.total", end - start, "s")
        record.figure(f"{name}.cpu", used, "s")
        record.say(
            f"{name:<5} {devices:>7} {len(programs.micro.nodes):>7} {built - start:>8.1f} {end - built:>8.1f} "
            f"{end - start:>8.1f} ({used:.1f}) {report.pricing.needed_bytes / 2**30:>12.1f} "
            f"{report.pricing.step_s:>9.2f}"
        )
    record.close(write=asked.record, as_json=asked.json)


if __name__ == "__main__":
    main()
