"""`plan --net`: the network links over which each mesh axis communicates, and the price of other orders of the axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.network import Level, Topology
from tpshard.parallelism.pricing.timeline import price
from tpshard.parallelism.words import axes_text
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.screen_words import cut
from tpshard.plan.search import search
from tpshard.plan.step.figures import Line
from tpshard.plan.step.units import gib, seconds
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe

WHOLE = 5
"""The number of best orders whose programs are built: enough for all orders of three axes."""


@dataclass(frozen=True)
class AxisPlace:
    """The place of one mesh axis in the network: the stride of its groups, and the levels that they use."""

    axis: str
    size: int
    stride: int
    """The distance between neighbours along the axis, in devices."""
    levels: tuple[tuple[str, int], ...]
    """The network levels that its groups use, from the nearest, each with the number of units it joins."""


@dataclass(frozen=True)
class Placement:
    """The times of a step if devices are numbered in one order of the mesh's axes, outer to inner."""

    order: tuple[str, ...]
    comm_s: float
    exposed_s: float
    step_s: float
    whole: bool
    """Whether a program was built for this order; otherwise the recipe's own program is priced with it."""


@dataclass(frozen=True)
class Net:
    """The answer of `plan --net`: the network, where the axes run, the collectives, and the orders that were priced."""

    levels: tuple[Level, ...]
    places: tuple[AxisPlace, ...]
    lines: tuple[Line, ...]
    placements: tuple[Placement, ...]
    """The recipe's own first, then from the fastest."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "levels": [
                {"name": one.name, "devices": one.devices, "hosts": one.hosts, "rate": one.rate,
                 "latency_s": one.link.latency_s, "oversubscribed": one.oversubscribed, "rails": one.rails,
                 "shared": one.link.shared} for one in self.levels
            ],
            "axes": [
                {**asdict(place), "levels": [{"level": name, "joins": parts} for name, parts in place.levels]}
                for place in self.places
            ],
            "collectives": [
                {"kind": line.kind, "axes": axes_text(line.axes), "of": line.of, "level": line.level,
                 "algorithm": line.algorithm, "count": line.count, "bytes": line.bytes, "time_s": line.time_s,
                 "exposed_s": line.exposed_s} for line in self.lines
            ],
            "placements": [asdict(one) for one in self.placements],
        }  # fmt: skip


def net(planned: Planned, recipe: Recipe, variants: Variants | None = None) -> Net:
    """Prices a planned training step with every order of the mesh's axes, and builds the programs of the best ones.

    `variants` has the recipe's own programs.
    """
    report = planned.report
    device, per_host = report.pricing.device, report.job.devices_per_node
    axes = dict(report.job.mesh)
    mesh = Mesh(axes)
    topology = Topology(mesh, per_host)
    places = tuple(_place(device, topology, name) for name, size in axes.items() if size > 1)
    own = Placement(tuple(axes), report.pricing.comm_s, report.pricing.exposed_s, report.pricing.step_s, whole=True)
    others = [] if report.pricing.pipeline is not None else [price_order(planned, order) for order in _orders(axes)]
    ranked = sorted(others, key=lambda one: (one.step_s, one.order))
    variants = variants or Variants()
    ranked = [*(_price_build(recipe, one, axes, variants) for one in ranked[:WHOLE]), *ranked[WHOLE:]]
    return Net(device.network, places, tuple(report.lines), (own, *sorted(ranked, key=lambda one: one.step_s)))


def _place(device: Device, topology: Topology, name: str) -> AxisPlace:
    axis = topology.mesh.axis(name)
    crossings = topology.crossings((axis,), device.network, device.host_devices)
    levels = tuple((one.level.name, one.parts) for one in crossings)
    return AxisPlace(name, axis.size, topology.mesh.stride[name], levels)


def _orders(axes: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """All other orders of the mesh's axes; axes of size 1 stay outermost."""
    sized = [name for name, size in axes.items() if size > 1]
    alone = [name for name, size in axes.items() if size <= 1]
    for order in itertools.permutations(sized):
        if list(order) != sized:
            yield (*alone, *order)


def price_order(planned: Planned, order: Sequence[str]) -> Placement:
    """Prices the plan's programs with devices numbered in another order of the axes."""
    pricing, job = planned.pricing, planned.report.job
    topology = Topology(Mesh({name: job.mesh[name] for name in order}), job.devices_per_node)
    comm = exposed = total = 0.0
    for entry in pricing.parts:
        part = entry.part
        timeline = price(
            part.program, pricing.device, topology.per_host, compiled=part.compiled, cached=part.cached,
            topology=topology,
        ).run()  # fmt: skip
        comm, exposed = comm + timeline.comm_s * part.times, exposed + timeline.exposed_s * part.times
        total += timeline.seconds * part.times
    return Placement(tuple(order), comm, exposed, total + pricing.fixed_s, whole=False)


def _price_build(recipe: Recipe, one: Placement, axes: dict[str, int], variants: Variants) -> Placement:
    """Prices an order by building the recipe with it; returns the placement unchanged where that is not possible."""
    mesh = ", ".join(f"{name}: {axes[name]}" for name in one.order)
    price = search.price_changes(recipe, [f"mesh={{{mesh}}}"], variants)
    return one if price is None else Placement(one.order, price.comm_s, price.exposed_s, price.step_s, whole=True)


# ---- the screen -----------------------------------------------------------------------------------------------------
def text(network: Net) -> str:
    """The answer as text, in lines of 100 columns."""
    lines = ["NET  from the nearest level outwards"]
    for level in network.levels:
        joins = f"{level.devices:,} devices" if level.devices and level.devices < 1 << 20 else ""
        joins = joins or (f"{level.hosts:,} hosts" if level.hosts else "a host" if level.devices else "all hosts")
        notes = [f"{level.oversubscribed:g} times oversubscribed"] if level.oversubscribed > 1 else []
        notes += ["rails"] if level.rails else []
        notes += ["shared by a host"] if level.link.shared else []
        rate = f"{level.rate / 1e9:,.1f} GB/s a device, {seconds(level.link.latency_s)} a hop"
        lines.append(f"  {level.name:<10}{joins:<16}{rate}{', ' if notes else ''}{', '.join(notes)}")
    lines.append("AXES   size  stride  runs over")
    for place in network.places:
        over = ", ".join(f"{name} (joins {parts})" for name, parts in place.levels)
        lines.append(f"  {place.axis:<5}{place.size:5,}{place.stride:8,}  {over}")
    lines.append(
        "COLLECTIVES             axes      of         level      algorithm           bytes      time   exposed"
    )
    for line in network.lines:
        lines.append(
            f"  {line.count:6,} {line.kind:<15}{cut(axes_text(line.axes), 9):<10}{line.of:<11}{line.level:<11}"
            f"{cut(line.algorithm, 14):<14}{gib(line.bytes):>11}{seconds(line.time_s):>10}{seconds(line.exposed_s):>10}"
        )
    lines.append("PLACED  axes from the outermost                    communication    exposed       step")
    for i, one in enumerate(network.placements):
        order = ", ".join(f"{name} {_size(network, name)}" for name in one.order if _size(network, name) > 1)
        note = "the recipe's" if i == 0 else "built whole" if one.whole else "the recipe's program, placed so"
        times = f"{seconds(one.comm_s):>16}{seconds(one.exposed_s):>11}{seconds(one.step_s):>11}"
        lines.append(f"  {cut(order, 44):<46}{times}  {note}")
    best = min(network.placements, key=lambda one: one.step_s if one.whole else math.inf)
    if best is not network.placements[0] and best.step_s < 0.99 * network.placements[0].step_s:
        mesh = ", ".join(f"{name}: {_size(network, name)}" for name in best.order)
        lines.append(f"  try: mesh: {{{mesh}}}")
    elif len(network.placements) > 1:
        lines.append("  no other order that was built is faster by 1%")
    return "\n".join(lines) + "\n"


def _size(network: Net, name: str) -> int:
    return next((place.size for place in network.places if place.axis == name), 1)
