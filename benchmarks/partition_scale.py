"""Partitions a training step of Llama 405B for 16,384 devices: seconds and memory of every stage, without a plan.

    python benchmarks/partition_scale.py [--record] [--json]

The step (forward, loss, gradients) is captured, its shardings are propagated, and the program of one device is made.
The limits are 60 s for propagation and partitioning, and 8 GiB for the whole process. Seconds are of the processor,
which other work on the machine lengthens least; wall time is beside them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

from record import Record, parser_of

RECIPE = """
name: scale
cluster: {device: h100-sxm-80g, nodes: 2048, devices_per_node: 8}
mesh: {dp: 128, fsdp: 16, tp: 8}
model: {preset: llama3-405b}
batch: {global_sequences: 2048, per_device: 1}
remat: full
"""

LIMIT_S, LIMIT_GIB = 60, 8


class Stages:
    """Seconds of the processor, and of the wall, that each stage takes."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[stage] = self.cpu.get(stage, 0.0) + time.process_time() - cpu
        self.wall[stage] = self.wall.get(stage, 0.0) + time.perf_counter() - wall

    def watch(self, module: Any, name: str, stage: str) -> None:
        """Times every call of a module's function from now on."""
        plain = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            with self.timed(stage):
                return plain(*args, **options)

        setattr(module, name, watched)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record, stages = Record("partition_scale", quiet=options.json), Stages()
    for name, stage in (
        ("capture", "capture"), ("propagate_and_store", "propagation"), ("partition_graph", "partitioning"),
    ):  # fmt: skip
        stages.watch(step_programs, name, stage)
    with stages.timed("everything"):
        program = step_programs.micro_program(Setting.of(loads(RECIPE)))
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    record.figure("nodes", len(program.nodes), "nodes")
    record.figure("collectives", len(program.collectives), "collectives")
    for stage, seconds in stages.cpu.items():
        record.figure(f"{stage}.cpu", seconds, "s of the processor")
        record.figure(f"{stage}.wall", stages.wall[stage], "s")
    both = sum(stages.cpu[stage] for stage in ("propagation", "partitioning"))
    record.figure("both.cpu", both, "s of the processor for propagation and partitioning")
    record.figure("memory", peak_gib, "GiB at the peak")
    record.say(f"within the limits of {LIMIT_S} s and {LIMIT_GIB} GiB: {both <= LIMIT_S and peak_gib <= LIMIT_GIB}")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
