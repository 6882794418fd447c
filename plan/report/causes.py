"""The reasons of shardings and collectives, and the values alive at the peak, read off the programs for a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tpshard.parallelism import words
from tpshard.parallelism.pricing.flow import info_of
from tpshard.parallelism.pricing.liveness import Living
from tpshard.parallelism.program import Collective, Program
from tpshard.parallelism.why import Explanation, SourcePlace
from tpshard.plan.report.pattern import pattern
from tpshard.plan.report.report import Tensor
from tpshard.plan.report.screen_words import LABELS, sharding_text
from tpshard.plan.step.pricing import PricedPart, Pricing

MOST_ALIVE = 200
"""Values listed at the peak; the rest is one row."""


def causes(pricing: Pricing, tensors: Sequence[Tensor]) -> dict[str, list[Any]]:
    """The reasons of tensors by group, and of the collectives of each line."""
    program = pricing.parts[0].part.program
    for entry in pricing.parts:  # the micro-batch's program, not an update's or a gather's
        if entry.part.name.startswith("micro-batch"):
            program = entry.part.program
    return {
        "tensors": [tensor(group, program) for group in groups(tensors)],
        "collectives": [reasons(issued, program) for _, issued in pricing.issues()],
    }


def groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups the tensors that differ only by their layer."""
    by_key: dict[tuple[object, ...], list[Tensor]] = {}
    for one in tensors:
        key = (
            pattern(one.name),
            one.shape,
            sharding_text(one.sharding, one.dims),
            sharding_text(one.stored or (), one.dims),
            one.written_at,
        )
        by_key.setdefault(key, []).append(one)
    return list(by_key.values())


def tensor(group: Sequence[Tensor], program: Program) -> dict[str, Any]:
    """The page's entry for a group of like tensors: names, shape, and for each form its sharding with the reasons.

    The forms are the value itself (or the stored parameter), the used parameter, and the gradient.
    """
    first = group[0]
    forms = []
    for form, name in (("", first.name), ("used", f"{first.name}.used"), ("gradient", f"{first.name}.grad")):
        record = program.records.get(name)
        if record is not None:
            explanation = program.explanation_of(name)
            forms.append({
                "form": form or ("stored" if first.stored is not None else "value"),
                "sharding": record.layout.notation(program.mesh, record.dims), "chains": chains(explanation),
                "annotated": _annotation(explanation),
            })  # fmt: skip
    return {
        "name": first.name, "pattern": pattern(first.name), "names": [one.name for one in group],
        "shape": list(first.shape), "forms": forms,
    }  # fmt: skip


def _annotation(explanation: Explanation) -> str:
    """The tensor's own annotation with its place in the recipe; "" if it has none."""
    if not explanation.written_at:
        return ""
    return f"{explanation.annotated} at {'; '.join(map(place, explanation.written_at))}"


def chains(explanation: Explanation) -> list[dict[str, Any]]:
    """The steps by which each axis reached the tensor: values from the annotation on, with the operations between."""
    result: list[dict[str, Any]] = []
    at: tuple[str, int] | None = None
    for hop in explanation.links:
        if at != (hop.value, hop.dim) or not result or result[-1]["axis"] != hop.axis:
            result.append({"axis": hop.axis, "dim": hop.dim, "told": [], "steps": []})
        chain = result[-1]
        through = "" if hop.through is None else words.op(hop.through)
        chain["steps"].insert(0, {"value": hop.value, "dim": hop.dim, "through": through})
        chain["told"] = [place(written) for written in hop.written_at]
        at = (hop.source, hop.source_dim) if hop.source else None
    return result


# ---- collectives ----------------------------------------------------------------------------------------------------
def reasons(issued: Sequence[Collective], program: Program) -> list[dict[str, Any]]:
    """The reasons of a line's collectives: for each tensor its reader, both layouts and the annotations that caused it.

    Tensors of different layers that have the same reason are counted together.
    """
    counts: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    for comm in issued:
        for name, demand in zip(comm.value, comm.why):
            record = program.records.get(name)
            called = kind(record.label if record is not None and record.label else name)
            where = f" in {pattern(demand.op.module)}" if demand.op.module else ""
            moved = f"{demand.before} -> {demand.after}" if demand.before else ""
            counts[called, words.cause(demand, kind) + where, moved, tuple(map(place, demand.written_at))] += 1
    return [
        {"value": value, "cause": cause, "moved": moved, "told": list(places), "count": count}
        for (value, cause, moved, places), count in counts.items()
    ]


def kind(name: str) -> str:
    """The part of a name that all layers share: `mm_30` -> `mm`, `layers.3.mlp.hidden` -> `layers.*.mlp.hidden`."""
    return re.sub(r"_\d+$", "", pattern(name))


def place(source: SourcePlace) -> str:
    """The text of a place in a recipe, as `words.place` gives it, without the file's folders."""
    return words.place(source._replace(source=source.source.rpartition("/")[2]))


# ---- memory ---------------------------------------------------------------------------------------------------------
def peak_values(entry: PricedPart) -> list[dict[str, Any]]:
    """The values in memory at the peak, largest first: name, producer, last reader, annotations."""
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
    """The page's row for a value in memory at the peak; `name` is its port's, "" if it is no input."""
    info, nodes = info_of(one.node), entry.priced.kernels
    sources: tuple[SourcePlace, ...] = ()
    if info.comm is not None:
        values = info.comm.value
        name = name or ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")
        sources = tuple(dict.fromkeys(source for demand in info.comm.why for source in demand.written_at))
    name = name or info.origin or one.node.name
    program = entry.part.program
    record = program.records.get(info.origin or name)
    if record is not None:
        name = record.label or name
        sources = sources or program.explanation_of(record.name).roots
    last = "the end" if one.last >= len(nodes) else _producer(info_of(nodes[one.last].node))
    row = _row(name, one.category, one.bytes)
    return row | {"made": _producer(info), "last": last, "told": [place(one) for one in sources]}


def _producer(info: Any) -> str:
    """The phase and the module of a node, such as `backward layers.0.mlp`."""
    return " ".join(filter(None, (info.phase, info.module or info.origin)))


def _row(name: str, category: str, size: int) -> dict[str, Any]:
    label = LABELS.get(category, category)
    return {"name": name, "category": label, "bytes": size, "made": "", "last": "", "told": []}
