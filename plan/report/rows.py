"""The tables and figures of a report, read off the programs: reshards, lost FLOPs, FSDP's buckets, bytes at rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tpshard.parallelism import words
from tpshard.parallelism.pricing.flow import info_of, op_name
from tpshard.plan.report.pattern import pattern
from tpshard.plan.step.figures import (
    Bucket,
    DrawnPart,
    PartFigures,
    PlannedEvent,
    PlannedOp,
    StepFigures,
)
from tpshard.plan.step.pricing import PricedPart, Pricing, work_of
from tpshard.plan.step.units import round_figure


def reshards_of(pricing: Pricing) -> list[dict[str, Any]]:
    """The collectives that no annotation asks for, grouped, the most expensive first."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in pricing.parts:
        for _, comm, cost, _ in entry.collectives():
            if comm.requested:
                continue
            demand, value = comm.why[0], pattern(comm.value[0])
            key = (comm.kind, comm.axes, pattern(demand.mixes) or value, comm.bytes)
            row = groups.setdefault(
                key,
                {
                    "kind": comm.kind, "axes": [str(a) for a in comm.axes], "value": value, "count": 0,
                    "bytes": 0, "time_s": 0.0, "reason": f"{words.cause(demand, pattern)}: {words.way(demand)}",
                },
            )  # fmt: skip
            row["count"] += entry.part.times
            row["bytes"] += comm.bytes * entry.part.times
            row["time_s"] = round_figure(row["time_s"] + cost.seconds * entry.part.times)
    return sorted(groups.values(), key=lambda row: (-row["time_s"], row["value"]))


def losses_of(pricing: Pricing, devices: int, bubble: float = 0.0) -> list[dict[str, Any]]:
    """Operations whose FLOPs over all devices exceed those of the whole operation, worst first.

    bubble: the share of the layers' FLOPs that fills and drains a vectorized pipeline, which is not counted here.
    `where` is a module of the model, or the phase for operations outside of modules (rotary angles, the optimizer).
    """
    flops_of: dict[tuple[str, str], list[int]] = {}
    for entry in pricing.parts:
        for kernel in entry.priced.kernels:
            info = info_of(kernel.node)
            local, whole = work_of(kernel)
            if local and info.phase != "recompute":
                row = flops_of.setdefault((op_name(kernel.node), pattern(info.module or info.phase)), [0, 0])
                row[0] += round(local * (1.0 - bubble if info.place.layer else 1.0)) * entry.part.times
                row[1] += whole * entry.part.times
    rows = [
        {
            "op": op,
            "where": where,
            "efficiency": round_figure(whole / (devices * local)),
            "wasted": devices * local - whole,
        }
        for (op, where), (local, whole) in flops_of.items()
        if devices * local > whole * 1.0001
    ]
    return sorted(rows, key=lambda row: (-int(str(row["wasted"])), str(row["where"])))


def buckets_of(pricing: Pricing) -> list[Bucket]:
    """FSDP's collectives in issue order, for the part that takes most of a step's time."""
    part = max(pricing.parts, key=lambda part: part.seconds)
    behind = part.priced.behind()
    return [
        Bucket(comm.kind, info.phase, comm.value, comm.bytes, cost.seconds, behind[i], exposed)
        for i, (info, comm, cost, exposed) in zip(part.priced.costs, part.collectives())
        if comm.of in ("parameter", "gradient")
    ]


def figures_of(pricing: Pricing) -> StepFigures:
    """The figures of a priced step."""
    worst = pricing.worst
    return StepFigures(
        pricing.device, [_part(entry) for entry in pricing.parts], _part(worst),
        _peak_at(worst), pricing.step_s, pricing.compute_s, pricing.comm_s, pricing.exposed_s, pricing.slowed_s,
        pricing.idle_s, pricing.fixed_s, _work_seconds(pricing), _static_bytes(pricing), pricing.local_flops,
        pricing.useful_flops, pricing.reserved_bytes, pricing.segmented_bytes, pricing.pipeline, pricing.limit,
        pricing.offloaded, pricing.recomputed_s,
    )  # fmt: skip


def _part(entry: PricedPart) -> PartFigures:
    return PartFigures(**_figures(entry))


def _figures(entry: PricedPart) -> dict[str, Any]:
    """The fields of `PartFigures`."""
    memory, part = entry.memory, entry.part
    return {
        "name": part.name, "times": part.times, "each_s": entry.timeline.seconds, "size": len(entry.priced.kernels),
        "peak_bytes": memory.peak_bytes, "at_peak": memory.at_peak, "largest": memory.largest, "always": part.always,
    }  # fmt: skip


def drawn_part(entry: PricedPart) -> DrawnPart:
    """A part with its timeline and its memory over time."""
    memory, timeline = entry.memory, entry.timeline
    ops = []
    for i, kernel in enumerate(entry.priced.kernels):
        info, cost = info_of(kernel.node), entry.priced.costs.get(i)
        op = PlannedOp(info.module, info.phase, info.origin, info.flops, wire="" if cost is None else cost.wire)
        if (comm := info.comm) is not None:
            op = op._replace(kind=comm.kind, value=next(iter(comm.value), ""), bytes=comm.bytes, reason=comm.reason)
        ops.append(op)
    events = [PlannedEvent(*event) for event in timeline.events]
    return DrawnPart(**_figures(entry), ops=ops, events=events, at=timeline.at, curve=memory.curve,
                     curves=memory.by_category)  # fmt: skip


def _work_seconds(pricing: Pricing) -> dict[str, float]:
    """Seconds of the computing lane by kind of work, per step."""
    total = {"matmul": 0.0, "attention": 0.0, "stream": 0.0}
    for entry in pricing.parts:
        for task, kernel in zip(entry.priced.tasks, entry.priced.kernels):
            if task.kind == "compute" and kernel.work != "free":
                kind = "attention" if kernel.work.startswith("attention") else kernel.work
                total[kind] += task.seconds * entry.part.times
    return total


def _peak_at(entry: PricedPart) -> str:
    """Where in the step memory peaks: part, module and operation."""
    if not entry.priced.kernels:
        return entry.part.name
    node = entry.priced.kernels[entry.memory.peak_index].node
    info = info_of(node)
    place = info.module or info.origin or node.name
    return f"{entry.part.name}, {info.phase} of {place} ({op_name(node)})"


def _static_bytes(pricing: Pricing) -> dict[str, int]:
    """Bytes per device of stored parameters, gradients and optimizer state: exact."""
    held: Counter[str] = Counter()
    for entry in pricing.parts:
        part_bytes: Counter[str] = Counter()
        for port in entry.part.program.inputs:
            if (kept := _KEPT.get(port.kind)) is not None:
                part_bytes[kept] += port.local_bytes
        for port in entry.part.program.outputs:
            if port.kind == "gradient":
                part_bytes["gradients"] += port.local_bytes
        for kind, size in entry.part.always.items():
            # `always` has the part of the cache that a step does not use; of other kinds the larger figure counts
            part_bytes[kind] = part_bytes[kind] + size if kind == "cache" else max(part_bytes[kind], size)
        for kind, size in part_bytes.items():
            held[kind] = max(held[kind], size)
    return dict(sorted(held.items()))


_KEPT = {"parameter": "parameters", "optimizer": "optimizer", "cache": "cache", "state": "cache"}
"""What is kept between steps, by the kind of a program's input."""
