"""A plan as one self-contained HTML file: verdict, mesh, shardings, timeline, memory, collectives, suggestions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from tpshard.diagnostics.diagnostic import plural
from tpshard.parallelism.words import axes_text
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Edit, Report
from tpshard.plan.report.screen_words import LABELS, sharding_text, step_text, verdict
from tpshard.plan.step.units import count, gib, memory_text, seconds
from tpshard.plan.views import page_data, pictures

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1060px;color:#222;background:#fff}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%}td,th{padding:3px 8px;border-bottom:1px solid #eee;text-align:left;
vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}tr:hover{background:#f6f8fa}
.good{color:#1a7f37}.bad{color:#cf222e}.how{color:#777;font-size:12px}code{font-size:13px}
.cards{display:flex;gap:12px;flex-wrap:wrap}.card{border:1px solid #ddd;border-radius:6px;padding:8px 14px}
.card b{display:block;font-size:18px}.scroll{max-height:480px;overflow:auto}svg{max-width:100%}
h3{font-size:14px;margin:12px 0 4px}
#shardings tbody tr,#collectives tbody tr,svg.timeline{cursor:pointer}
"""


def page(report: Report, drawing: Drawing) -> str:
    """The page as HTML; the same report and drawing give the same bytes."""
    how = report.provenance
    data = _in_script(report.to_json())
    parts = [
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
        f"<title>plan: {escape(report.job.name)}</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{_STYLE}</style></head><body>",
        _verdict(report),
        _section("mesh", "Mesh", pictures.mesh_map(report)),
        _section("shardings", "Sharding of each tensor", _shardings(report), "exact"),
        _section("timeline", "Timeline", _timelines(drawing), how["time"]),
        *_stages(report, drawing),
        _section("memory", "Memory over time", _memories(report, drawing), how["memory.peak_bytes"]),
        _section("collectives", "Collectives of a step", _collectives(report), f"bytes exact; time {how['time']}"),
        _section("what-if", "What if", _what_if(report), how["time"]),
        f'<script type="application/json" id="plan">{data}</script>',
        f'<script type="application/json" id="why-data">{_in_script(page_data.data(drawing))}</script>',
        f"<script>{_script()}</script>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _in_script(data: object) -> str:
    """JSON that can stand inside a `<script>` element."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).replace("</", "<\\/")


def _script() -> str:
    return resources.files("tpshard.plan.views").joinpath("page.js").read_text(encoding="utf-8").replace("</", "<\\/")


def _stages(report: Report, drawing: Drawing) -> list[str]:
    height = pictures.stages_height(report, drawing)
    if not height:
        return []
    drawn = (
        f'<svg width="1000" height="{height}" viewBox="0 0 1000 {height}" font-family="sans-serif" font-size="11" '
        'role="img" aria-label="Schedule of the pipeline: a lane per device, a bar per task">'
        f"{pictures.stages(report, drawing)}</svg>"
    )
    return [_section("pipeline", "Schedule of the pipeline", drawn, report.provenance["time"])]


def _section(name: str, title: str, body: str, how: str = "") -> str:
    label = f' <span class="how">[{escape(how)}]</span>' if how else ""
    return f'<section id="{name}"><h2>{escape(title)}{label}</h2>\n{body}\n</section>'


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), titles: Sequence[str] = ()
) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row)
        )

    body = []
    for i, row in enumerate(rows):
        title = f' title="{escape(titles[i], quote=True)}"' if titles else ""
        body.append(f"<tr{title}>{cells(row, 'td')}</tr>")
    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>"
    return f"<div class=scroll><table>{top}<tbody>{''.join(body)}</tbody></table></div>"


def _verdict(report: Report) -> str:
    job, times, how = report.job, report.pricing, report.provenance
    cards = [
        ("step", step_text(report), how["time"]),
        ("tokens/s a device", count(report.tokens_per_s_per_device), how["time"]),
        ("MFU", f"{100 * report.mfu:.1f}%", how["mfu"]),
        ("peak memory", gib(report.pricing.peak_bytes), how["memory.peak_bytes"]),
        ("exposed communication", seconds(times.exposed_s), how["time"]),
        ("FLOP efficiency", f"{report.flop_efficiency:.4f}", "exact"),
        ("parameters", count(job.params), "exact"),
    ]
    boxes = "".join(
        f"<div class=card>{escape(name)}<b>{escape(value)}</b><span class=how>{label}</span></div>"
        for name, value, label in cards
    )
    color = "good" if report.fits else "bad"
    notes = "".join(f"<li>{escape(text)}</li>" for text in report.warnings)
    where = "".join(f"<li>{escape(_edit(e))}</li>" for e in report.edits)
    fixes = f"<p>Smallest edits that would fit:</p><ul>{where}</ul>" if where else ""
    return (
        f'<section id="verdict"><h1>{escape(job.name)}</h1><p class="{color}"><b>{escape(verdict(report))}</b></p>'
        f"<p>{escape(job.model)}, {escape(job.what)}, seq {job.seq_len}, {escape(job.dtype)}; "
        f"mesh {escape(' x '.join(f'{k} {v}' for k, v in job.mesh.items()))} on {plural(job.nodes, 'host')} of "
        f"{job.devices_per_node} {escape(times.device.name)}; {job.global_sequences} sequences a step</p>"
        f"<div class=cards>{boxes}</div><p>Bottleneck: {escape(report.bottleneck)}</p>{fixes}"
        f"{f'<p>Warnings</p><ul>{notes}</ul>' if notes else ''}</section>"
    )


def _shardings(report: Report) -> str:
    rows, titles = [], []
    for t in report.tensors:
        rows.append(
            (
                t.name,
                "x".join(map(str, t.shape)),
                sharding_text(t.sharding, t.dims),
                sharding_text(t.stored, t.dims) if t.stored is not None else "",
            )
        )
        titles.append(t.reason)
    head = f"<p>{report.annotations}. A click on a tensor draws why.</p>"
    why = '<h3>Why <select id="tensor-choice"></select></h3><div id="tensor-graph"></div>'
    return head + _table(("tensor", "shape", "used as", "stored as"), rows, (), titles) + why


def _timelines(drawing: Drawing) -> str:
    out = []
    for part in drawing.parts:
        height = pictures.timeline_height(part)
        times = f"{plural(part.times, 'time')} a step, {seconds(part.each_s)} each"
        out.append(
            f"<p>{escape(part.name)}, {times}; the wheel zooms, a drag moves, a double click shows all; so do "
            "+ and -, arrows, and 0</p>"
            f'<svg class="timeline" width="1000" height="{height}" viewBox="0 0 1000 {height}" font-size="11" '
            'tabindex="0" role="img" aria-label="Timeline: + and - zoom, arrows move, 0 shows all">'
            f"{pictures.timeline(part)}</svg>"
        )
    return "\n".join(out)


def _memories(report: Report, drawing: Drawing) -> str:
    part = drawing.worst
    rows = [
        (LABELS.get(name, name), gib(size), f"{size}")
        for name, size in sorted(part.at_peak.items(), key=lambda item: (-item[1], item[0]))
        if size
    ]
    curve = pictures.memory(report, part, 240)
    name = 'role="img" aria-label="Memory over time"'
    picture = f'<svg width="1000" height="240" viewBox="0 0 1000 240" font-size="11" {name}>{curve}</svg>'
    times = report.pricing
    words = f"<p>Peak in {escape(times.peak_at)}; {gib(times.reserved_bytes)} reserved by the allocator.</p>"
    held = [
        (row["name"], row["category"], gib(row["bytes"]), row["made"], row["last"], "; ".join(row["told"]))
        for row in drawing.alive
    ]
    head = ("alive at the peak", "category", "size", "made in", "last read in", "lines")
    return picture + words + _table(("category at the peak", "size", "bytes"), rows, (1, 2)) + _table(head, held, (2,))


def _collectives(report: Report) -> str:
    rows = [
        (
            line.kind, axes_text(line.axes), line.of, line.phase, line.level, f"{line.count}", gib(line.bytes),
            gib(line.wire_bytes), seconds(line.time_s), seconds(line.exposed_s),
            "" if line.requested else "not asked for",
        )
        for line in report.lines
    ]  # fmt: skip
    titles = [line.reason for line in report.lines]
    head = ("kind", "axes", "of", "phase", "link", "count", "bytes", "sent", "time", "exposed", "")
    why = '<p>A click on a line shows the tensors and the lines behind it.</p><div id="collective-why"></div>'
    return _table(head, rows, (5, 6, 7, 8, 9), titles) + why


def _what_if(report: Report) -> str:
    edits = [*report.edits, *report.suggestions]
    if not edits:
        return "<p>No edit that was tried would help.</p>"
    rows = [
        (e.change, memory_text(e.needed_bytes, e.peak_bytes), seconds(e.step_s), "fits" if e.fits else "does not fit")
        for e in edits
    ]
    now = (
        "as it is", gib(report.pricing.needed_bytes), seconds(report.pricing.step_s),
        "fits" if report.fits else "does not fit",
    )  # fmt: skip
    return _table(("edit", "memory needed", "step", ""), [now, *rows], (1, 2))


def _edit(edit: Edit) -> str:
    return f"{edit.change}: {memory_text(edit.needed_bytes, edit.peak_bytes)}, step {seconds(edit.step_s)}"
