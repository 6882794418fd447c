"""The tables of a report, read off the programs: reshards, lost FLOPs, FSDP's buckets."""

from __future__ import annotations

from typing import Any

from tpshard.parallelism import words
from tpshard.parallelism.pricing.flow import info_of, op_name
from tpshard.plan.step.pricing import Pricing, work_of
from tpshard.plan.step.units import round_figure


def pattern(name: str) -> str:
    """Replaces the numbers in a name by `*`: `layers.3.mlp.up.weight` -> `layers.*.mlp.up.weight`."""
    first, *rest = name.split(".")
    return ".".join([first, *("*" if part.isdigit() else part for part in rest)])


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


def buckets_of(pricing: Pricing) -> list[dict[str, Any]]:
    """FSDP's collectives in issue order with their bytes, for the part that takes most of a step's time."""
    return [
        {
            "kind": comm.kind, "unit": info.unit, "phase": info.phase, "members": comm.members,
            "values": ", ".join(comm.value), "bytes": comm.bytes, "time_s": round_figure(cost.seconds),
        }
        for info, comm, cost, _ in max(pricing.parts, key=lambda part: part.seconds).collectives()
        if comm.of in ("parameter", "gradient")
    ]  # fmt: skip
