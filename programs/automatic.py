"""What a recipe leaves to be chosen: buckets under time and memory, and whether gathered parameters are kept.

Every choice is made by pricing the program that would run, on the recipe's device; nothing looks at the machine.
"""

from __future__ import annotations

from collections.abc import Callable

from tpshard.devices.read import device as read_device
from tpshard.parallelism.cost import Device, Topology, collective
from tpshard.parallelism.fusion import Compiled, Kernel, kernels, seconds
from tpshard.parallelism.liveness import liveness
from tpshard.parallelism.passes import buckets
from tpshard.parallelism.passes.bucket import bucket
from tpshard.parallelism.passes.schedule import schedule
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.simulation import price
from tpshard.programs.setting import Setting, devices_of

ASSUMED = "cpu"
"""Device of a recipe that names none."""
CLEARLY = 0.98
"""Share of the time per unit below which greedy buckets are chosen."""
RESERVE = 0.08
"""Share of a device's memory that is left to the allocator and the communication library."""


class Chooser:
    """Prices variants of one setting's programs."""

    def __init__(self, setting: Setting):
        self.setting, recipe = setting, setting.recipe
        cluster = recipe.cluster
        whole = read_device(cluster.device if cluster else ASSUMED, recipe.where("cluster.device"))
        self.per_host = cluster.devices_per_node if cluster else devices_of(recipe)
        self.device: Device = whole.shared_by(self.per_host)
        self.compiled: Compiled = "all" if recipe.compile == "inductor" else "none"
        self.topology = Topology(setting.mesh, self.per_host)
        self._finished: dict[tuple[int, tuple[tuple[str, ...], ...]], tuple[Program, Program]] = {}
        limit = recipe.fsdp.memory_limit
        self.memory = limit if limit is not None else int(self.device.memory_bytes * (1 - RESERVE))

    def seconds(self, program: Program) -> float:
        return price(program, self.device, self.per_host, compiled=self.compiled).run().seconds

    def kernels(self, program: Program) -> list[Kernel]:
        return kernels(program, compiled=self.compiled)

    def peak(self, program: Program) -> int:
        """Bytes at the peak of the step, with both moments of every parameter."""
        moments = 2 * sum(port.local_bytes for port in program.inputs if port.kind == "parameter")
        return liveness(program, self.kernels(program), always={"optimizer": moments}).peak_bytes

    def finished(self, program: Program, groups: buckets.Groups) -> Program:
        """Bucketed and scheduled; made once for the same groups, since choosing prices what then runs."""
        key = (id(program), tuple(map(tuple, groups)))
        if key not in self._finished:
            done = schedule(bucket(program, groups), prefetch=self.setting.recipe.fsdp.prefetch, own=True)
            self._finished[key] = (program, done)  # holding the program keeps its id its own
        return self._finished[key][1]

    # ---- buckets --------------------------------------------------------------------------------------------
    def pieces(self, program: Program) -> list[buckets.Piece]:
        """Every parameter, in order of use, with the computing from its first use to the next one's."""
        order, parts = buckets.in_order_of_use(program), self.kernels(program)
        first = buckets.first_uses(program)
        starts = sorted((at, name) for name, at in first.items())
        costs = [seconds(kernel, self.device) if info(kernel.node).phase == "forward" else 0.0 for kernel in parts]
        sizes = {port.name: _gathered(port.shape, self.setting.param_dtype.itemsize) for port in program.inputs}
        spent = {}
        for i, (at, name) in enumerate(starts):
            end = starts[i + 1][0] if i + 1 < len(starts) else len(costs)
            spent[name] = sum(costs[at:end])
        return [buckets.Piece(name, sizes[name], spent[name]) for name in order]

    def greedy(self, program: Program) -> buckets.Groups:
        """SimpleFSDP's greedy auto-wrapping under time and memory."""
        axis = self.setting.fsdp_axis
        if axis is None or not buckets.in_order_of_use(program):
            return [[port.name] for port in program.inputs if port.kind == "parameter"]

        def gather_s(size: int) -> float:
            cost = collective(self.device, self.topology, "all_gather", (axis,), size)
            return cost.seconds + self.device.overhead.issue_s

        pieces = self.pieces(program)
        total = sum(piece.bytes for piece in pieces)
        held = self.peak(program)
        room = max(float(max(piece.bytes for piece in pieces)), min(float(total), self.memory - held))
        return buckets.greedy(pieces, gather_s, room)

    def best(self, program: Program, by_unit: buckets.Groups) -> buckets.Groups:
        """One bucket per unit, which users recognise, unless greedy ones are clearly sooner, or alone fit."""
        if self.setting.fsdp_axis is None or not buckets.in_order_of_use(program):
            return by_unit
        greedy = self.greedy(program)
        plain, merged = self.finished(program, by_unit), self.finished(program, greedy)
        over, over_merged = (max(0, self.peak(p) - self.memory) for p in (plain, merged))
        if over or over_merged:
            return greedy if over_merged < over else by_unit
        return greedy if self.seconds(merged) < CLEARLY * self.seconds(plain) else by_unit

    def keeps_gathered(self, make: Callable[[bool], Program]) -> bool:
        """Whether gathered parameters may stay for the backward pass: `make(reshard)` is the step either way."""
        return self.peak(make(False)) <= self.memory


def _gathered(shape: tuple[int, ...], itemsize: int) -> int:
    n = itemsize
    for size in shape:
        n *= size
    return n
