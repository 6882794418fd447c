"""The data behind a plan's page: reasons of shardings and collectives, values alive at the peak, timeline events."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tpshard.parallelism import words
from tpshard.parallelism.flow import known
from tpshard.parallelism.liveness import Living
from tpshard.parallelism.program import Program
from tpshard.parallelism.why import Explanation, Told
from tpshard.plan.pictures import COLORS, tint
from tpshard.plan.pricing import Line, PricedPart
from tpshard.plan.report import Report, Tensor
from tpshard.plan.rows import pattern
from tpshard.plan.screen import LABELS, spread
from tpshard.plan.trace import lanes

FINEST = 20_000
"""Resolution of a timeline; closer neighbours of one colour are one event."""
MOST_ALIVE = 200
"""Values listed at the peak; the rest is one row."""


def data(report: Report) -> dict[str, Any]:
    """All data of the page."""
    program = report.pricing.parts[0].part.program
    for entry in report.pricing.parts:  # that of the step, not of an update or a gather
        if entry.part.name.startswith("micro-batch"):
            program = entry.part.program
    return {
        "tensors": [tensor(group, program) for group in groups(report.tensors)],
        "collectives": [behind(line, program) for line in report.lines],
        "timelines": [timeline(part) for part in report.pricing.parts],
    }


# ---- tensors --------------------------------------------------------------------------------------------------------
def groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups that differ only by their layer."""
    found: dict[tuple[object, ...], list[Tensor]] = {}
    for one in tensors:
        key = (
            pattern(one.name),
            one.shape,
            spread(one.sharding, one.dims),
            spread(one.stored or (), one.dims),
            one.told,
        )
        found.setdefault(key, []).append(one)
    return list(found.values())


def tensor(group: Sequence[Tensor], program: Program) -> dict[str, Any]:
    """The first tensor of a group, the group's names, and for each form the chains from annotations to its sharding."""
    first = group[0]
    forms = []
    for form, name in (("", first.name), ("used", f"{first.name}.used"), ("gradient", f"{first.name}.grad")):
        record = program.records.get(name)
        if record is not None:
            found = program.explained(name)
            forms.append({
                "form": form or ("stored" if first.stored is not None else "value"),
                "sharding": record.layout.notation(program.mesh, record.dims), "chains": chains(found),
                "annotated": f"{found.annotated} at {'; '.join(map(place, found.told))}" if found.told else "",
            })  # fmt: skip
    return {
        "name": first.name, "pattern": pattern(first.name), "names": [one.name for one in group],
        "shape": list(first.shape), "forms": forms,
    }  # fmt: skip


def chains(found: Explanation) -> list[dict[str, Any]]:
    """Chains from annotations to the tensor: per axis the values on the way, each with the operation that leads to
    it."""
    made: list[dict[str, Any]] = []
    at: tuple[str, int] | None = None
    for hop in found.links:
        if at != (hop.value, hop.dim) or not made or made[-1]["axis"] != hop.axis:
            made.append({"axis": hop.axis, "dim": hop.dim, "told": [], "steps": []})
        chain = made[-1]
        through = "" if hop.through is None else words.op(hop.through)
        chain["steps"].insert(0, {"value": hop.value, "dim": hop.dim, "through": through})
        chain["told"] = [place(told) for told in hop.told]
        at = (hop.source, hop.source_dim) if hop.source else None
    return made


# ---- collectives ----------------------------------------------------------------------------------------------------
def behind(line: Line, program: Program) -> list[dict[str, Any]]:
    """The tensors of a line's collectives, over all layers: the reader that needs them moved, both layouts, and the
    annotations behind it."""
    found: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    for comm in line.issues:
        for name, need in zip(comm.value, comm.why):
            record = program.records.get(name)
            called = kind(record.label if record is not None and record.label else name)
            where = f" in {pattern(need.op.module)}" if need.op.module else ""
            moved = f"{need.before} -> {need.after}" if need.before else ""
            found[called, words.cause(need, kind) + where, moved, tuple(map(place, need.told))] += 1
    return [
        {"value": value, "cause": cause, "moved": moved, "told": list(told), "count": count}
        for (value, cause, moved, told), count in found.items()
    ]


def kind(name: str) -> str:
    """`mm_30` -> `mm`, `layers.3.mlp.hidden` -> `layers.*.mlp.hidden`: what names of all layers have in common."""
    return re.sub(r"_\d+$", "", pattern(name))


def place(told: Told) -> str:
    """As `words.place`, without folders."""
    return words.place(told._replace(source=told.source.rpartition("/")[2]))


# ---- memory ---------------------------------------------------------------------------------------------------------
def alive(report: Report) -> list[dict[str, Any]]:
    """The values in memory at the peak, largest first: name, producer, last reader, annotations."""
    entry = report.pricing.worst
    ports = dict(zip((k.node for k in entry.priced.kernels if k.node.op == "placeholder"), entry.part.program.inputs))
    rows = []
    for one in entry.memory.alive[:MOST_ALIVE]:
        port = ports.get(one.node)
        rows.append(_living(one, "" if port is None else port.name, entry))
    rest = entry.memory.alive[MOST_ALIVE:]
    if rest:
        rows.append(_row(f"{len(rest):,} smaller ones", "", sum(one.bytes for one in rest)))
    for name, size in entry.part.always.items():
        if size:
            rows.append(_row("held beside this program", name, size))
    return rows


def _living(one: Living, name: str, entry: PricedPart) -> dict[str, Any]:
    here, nodes = known(one.node), entry.priced.kernels
    told: tuple[Told, ...] = ()
    if here.comm is not None:
        values = here.comm.value
        name = name or ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
        told = tuple(dict.fromkeys(said for need in here.comm.why for said in need.told))
    name = name or here.origin or one.node.name
    program = entry.part.program
    record = program.records.get(here.origin or name)
    if record is not None:
        name = record.label or name
        told = told or program.explained(record.name).roots
    last = "the end" if one.last >= len(nodes) else _made(known(nodes[one.last].node))
    row = _row(name, one.category, one.bytes)
    return row | {"made": _made(here), "last": last, "told": [place(one) for one in told]}


def _made(here: Any) -> str:
    return " ".join(filter(None, (here.phase, here.module or here.origin)))


def _row(name: str, category: str, size: int) -> dict[str, Any]:
    label = LABELS.get(category, category)
    return {"name": name, "category": label, "bytes": size, "made": "", "last": "", "told": []}


# ---- timelines ------------------------------------------------------------------------------------------------------
def timeline(part: PricedPart) -> dict[str, Any]:
    """The events of each lane as [start, length, colour, words], in units of `seconds` / `FINEST`."""
    total = part.timeline.seconds or 1.0
    colors: dict[str, int] = {}
    said: dict[str, int] = {}
    made: dict[str, list[list[int]]] = {lane: [] for lane in lanes(part)}
    for event in part.timeline.events:
        here = known(part.priced.kernels[event.task].node)
        name = pattern(here.module or here.origin or event.name)
        if here.comm is not None:
            name = f"{here.comm.kind} of {pattern(here.comm.value[0])}" if here.comm.value else here.comm.kind
        color = colors.setdefault(COLORS.get(tint(event.lane, part, event.task), "#888888"), len(colors))
        start, end = round(event.start / total * FINEST), round(event.end / total * FINEST)
        before = made[event.lane][-1] if made[event.lane] else None
        short = before is not None and end - start <= 1 and before[1] <= 1
        if before is not None and short and before[2] == color and start - before[0] - before[1] <= 0:
            before[1] = end - before[0]
            continue
        made[event.lane].append([start, end - start, color, said.setdefault(f"{name} ({here.phase})", len(said))])
    return {
        "seconds": part.timeline.seconds, "finest": FINEST, "colors": list(colors), "words": list(said), "lanes": made,
    }  # fmt: skip
