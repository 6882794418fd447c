"""The difference of two plans: what changes, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tpshard.diagnostics.diagnostic import printable
from tpshard.parallelism.words import axes_text
from tpshard.plan import outputs
from tpshard.plan.outputs import CommandResult, PlanOptions
from tpshard.plan.report import report_file
from tpshard.plan.report.pattern import pattern
from tpshard.plan.report.report import Report
from tpshard.plan.report.screen_words import cut, pipeline_words, sharding_text
from tpshard.plan.saved_plan import SavedPlan
from tpshard.plan.step.units import FORMS, gib
from tpshard.recipes.keys.schema import Recipe

MOST_ROWS = 24
"""The largest number of rows of a table on the screen."""


def figures(report: Report) -> dict[str, float]:
    """The figures of a plan that a comparison shows, by name."""
    return {
        "step_s": report.pricing.step_s,
        "exposed_comm_s": report.pricing.exposed_s,
        "tokens_per_s_per_device": report.tokens_per_s_per_device,
        "mfu": report.mfu,
        "needed_bytes": float(report.pricing.needed_bytes),
        "sent_bytes": float(sum(line.wire_bytes for line in report.lines)),
        "flop_efficiency": report.flop_efficiency,
    }


def answered(before: Recipe | SavedPlan, after: Recipe | SavedPlan, options: PlanOptions) -> CommandResult:
    """The answer of `--diff`. A recipe whose plan is in the cache is not planned again."""
    saved = [outputs.report_in(one).job.what for one in (before, after) if isinstance(one, SavedPlan)]
    options = replace(options, what=saved[0] if saved else options.what)
    changed = diff(_report(before, options), _report(after, options))
    changed |= dict(zip(("before", "after"), options.compared))
    shown = "\n".join(map(printable, text(changed).split("\n")))
    return outputs.answer(options.as_json, changed, shown)


def _report(plan: Recipe | SavedPlan, options: PlanOptions) -> Report:
    """The report that is saved, in the cache, or made now; without suggestions, and kept where only a comparison looks.

    Raises `Mistakes` where the recipe cannot be planned, or another version saved the plan.
    """
    if isinstance(plan, SavedPlan):
        return outputs.report_in(plan)
    entry = outputs.entry(plan, replace(options, source="--diff"))
    for place in (outputs.entry(plan, options), entry):
        texts = None if place is None else place.read(["report"])
        if texts is not None and (known := report_file.loads(texts["report"], Report)) is not None:
            return known
    from tpshard.plan import planner  # imports torch

    report = planner.report(plan, plan.name, options.what)
    if entry is not None:
        entry.write({"report": report_file.dumps(report)})
    return report


def diff(before: Report, after: Report) -> dict[str, Any]:
    """Compares two plans: their figures, and the shardings and collectives that differ, as plain data."""
    old, new = figures(before), figures(after)
    return {
        "before": before.job.name,
        "after": after.job.name,
        "figures": {
            name: {"before": old[name], "after": new[name], "change": new[name] / old[name] - 1 if old[name] else None}
            for name in old
        },
        "pipeline": [pipeline_words(before) or None, pipeline_words(after) or None],
        "shardings": _shardings(before, after),
        "collectives": _collectives(before, after),
        "fits": [before.fits, after.fits],
        "devices": [before.devices, after.devices],
    }


def _shardings(before: Report, after: Report) -> list[dict[str, Any]]:
    def table(report: Report) -> dict[str, str]:
        texts = {}
        for tensor in report.tensors:
            used = sharding_text(tensor.sharding, tensor.dims)
            stored = used if tensor.stored is None else sharding_text(tensor.stored, tensor.dims)
            texts[tensor.name] = used if stored == used else f"{used} stored {stored}"
        return texts

    old, new = table(before), table(after)
    names = [*old, *(name for name in new if name not in old)]
    return [
        {"name": name, "before": old.get(name), "after": new.get(name)}
        for name in names
        if old.get(name) != new.get(name)
    ]


def _collectives(before: Report, after: Report) -> list[dict[str, Any]]:
    def table(report: Report) -> dict[tuple[str, str, str], list[float]]:
        sums: dict[tuple[str, str, str], list[float]] = {}
        for line in report.lines:
            row = sums.setdefault((line.kind, axes_text(line.axes), line.of), [0, 0, 0.0])
            row[0], row[1], row[2] = row[0] + line.count, row[1] + line.wire_bytes, row[2] + line.time_s
        return sums

    old, new = table(before), table(after)
    rows = []
    for key in sorted({*old, *new}):
        a, b = old.get(key, [0, 0, 0.0]), new.get(key, [0, 0, 0.0])
        if a != b:
            rows.append(
                {
                    "kind": key[0], "axes": key[1], "of": key[2], "count": [a[0], b[0]], "wire_bytes": [a[1], b[1]],
                    "time_s": [a[2], b[2]],
                }
            )  # fmt: skip
    return rows


def text(difference: dict[str, Any]) -> str:
    """The result of `diff` as text."""

    lines = [f"{difference['before']} -> {difference['after']}"]
    if difference["devices"][0] != difference["devices"][1]:
        before, after = difference["devices"]
        lines.append(f"  on {before:,} and on {after:,} devices: figures are of one device each")
    for name, row in difference["figures"].items():
        form = FORMS.get(name, lambda v: f"{v:.4g}")
        change = "" if row["change"] is None else f"  {100 * row['change']:+.1f}%"
        lines.append(f"  {name:<26} {form(row['before']):>12} -> {form(row['after']):>12}{change}")
    if difference["pipeline"][0] != difference["pipeline"][1]:
        before, after = (words or "none" for words in difference["pipeline"])
        lines.append(f"PIPELINE  {before} -> {after}")
    if difference["fits"][0] != difference["fits"][1]:
        lines.append("  it does not fit, the other did" if difference["fits"][0] else "  it fits, the other did not")
    lines.append(f"SHARDINGS  {len(difference['shardings'])} tensors change")
    groups = Counter((pattern(r["name"]), r["before"], r["after"]) for r in difference["shardings"])
    for (name, before, after), members in list(groups.items())[:MOST_ROWS]:
        many = f" x{members}" if members > 1 else ""
        lines.append(f"  {name}{many}: {before or '(none)'} -> {after or '(none)'}")
    lines += _more(len(groups))
    lines.append(f"COLLECTIVES  {len(difference['collectives'])} kinds change")
    for r in difference["collectives"][:MOST_ROWS]:
        lines.append(
            f"  {r['kind']} over {r['axes']} of {r['of']}: {r['count'][0]} -> {r['count'][1]}, sent "
            f"{gib(r['wire_bytes'][0])} -> {gib(r['wire_bytes'][1])}"
        )
    lines += _more(len(difference["collectives"]))
    return "\n".join(cut(line) for line in lines) + "\n"


def _more(rows: int) -> list[str]:
    return [f"  ... {rows - MOST_ROWS} more (--json)"] if rows > MOST_ROWS else []
