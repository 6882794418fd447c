"""SVG drawings of a plan: timeline, memory over time, the mesh. Self-contained strings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pricing.cost import BUS_LANES
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report
from tpshard.plan.report.screen_words import LABELS
from tpshard.plan.step.figures import DrawnPart, PlannedOp
from tpshard.plan.step.units import bytes_axis, gib, seconds, seconds_axis
from tpshard.plan.views.stage_lanes import stage_lanes

COLORS = {
    "parameters": "#4e79a7", "gradients": "#f28e2b", "optimizer": "#76b7b2", "activations": "#59a14f",
    "gathered": "#edc948", "logits_and_loss": "#b07aa1", "communication": "#ff9da7", "cache": "#9c755f",
    "temporary": "#bab0ac", "forward": "#4e79a7", "backward": "#59a14f", "recompute": "#edc948",
    "update": "#76b7b2", "inside": "#b07aa1", "across": "#e15759", "wait": "#d62728",
    "bus": "#9c755f",
}  # fmt: skip
TINTS = {
    "forward": "forward", "backward": "backward", "recompute": "recomputed", "update": "update",
    "inside": "collective inside a host", "across": "collective between hosts", "wait": "waiting for a collective",
    "bus": "copy to the host's memory, or back",
}  # fmt: skip
"""The meanings of a timeline's colours."""
_W, _LEFT, _ROW = 1000, 130, 22
_POINTS = 300


def svg(report: Report, drawing: Drawing) -> str:
    """Timeline and memory of the longest part of a step, as one standalone file; for a pipeline also its schedule."""
    part = max(drawing.parts, key=lambda p: p.seconds)
    stages_h, time_h, memory_h = stages_height(report, drawing), timeline_height(part), 240
    whole_h = stages_h + time_h + memory_h + 40
    staged = f'<g transform="translate(0,28)">{stages(report, drawing)}</g>\n' if stages_h else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_W}" height="{whole_h}" '
        f'viewBox="0 0 {_W} {whole_h}" font-family="sans-serif" font-size="11" '
        f'role="img" aria-label="{escape(report.job.name)}: timeline and memory">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="8" y="18" font-size="14">{escape(report.job.name)}: {escape(part.name)}, '
        f"{seconds(part.each_s)}</text>\n"
        f"{staged}"
        f'<g transform="translate(0,{28 + stages_h})">{timeline(part)}</g>\n'
        f'<g transform="translate(0,{28 + stages_h + time_h})">{memory(report, part, memory_h)}</g>\n</svg>\n'
    )


def stages_height(report: Report, drawing: Drawing) -> int:
    pipeline = stage_lanes(report, drawing)
    return 0 if pipeline is None else _ROW * pipeline.table.devices + 58


def stages(report: Report, drawing: Drawing) -> str:
    """The schedule of a pipeline over a step: a lane per device and a bar per task; devices wait in gaps."""
    pipeline = stage_lanes(report, drawing)
    if pipeline is None:
        return ""
    scale = (_W - _LEFT - 10) / (pipeline.seconds or 1.0)
    out = [f'<text x="8" y="{_ROW * d + 15}">device {d}</text>' for d in range(pipeline.table.devices)]
    for task, start, end in pipeline.slots:
        words = f"{task}, {seconds(end - start)}"
        x0, x1 = _LEFT + start * scale, min(_LEFT + end * scale, _W - 10)
        out.append(_bar((x0, x1 - 0.5, COLORS[_TASKS[task.kind]], words), _ROW * pipeline.table.device_of(task.stage)))
        fits = (x1 - x0) / (0.6 * max(1, len(str(task.micro))))  # the size at which the number is as wide as its bar
        if fits >= 4:
            x, y = (x0 + x1) / 2, _ROW * pipeline.table.device_of(task.stage) + 15
            out.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#ffffff" font-size="{min(11, fits):.3g}">'
                       f"{task.micro}</text>")  # fmt: skip
    y = _ROW * pipeline.table.devices
    out += _time_axis(pipeline.seconds, y)
    kinds = {_TASKS[task.kind] for task, _, _ in pipeline.slots}
    out += legend({words: COLORS[kind] for kind, words in TASK_WORDS.items() if kind in kinds}, y + 20)
    out.append(f'<text x="{_LEFT}" y="{y + 46}" fill="#555555">{pipeline.words}; numbers are micro-batches</text>')
    return "\n".join(out)


TASK_WORDS = {"forward": "forward", "backward": "backward", "update": "gradients of weights"}
"""The meanings of a schedule's colours."""


def _time_axis(total: float, y: float) -> list[str]:
    """Round seconds of a picture's time, below the height `y`."""
    size, unit = seconds_axis(total)
    out = []
    for tick in round_ticks(total / size):
        x = _LEFT + (_W - _LEFT - 10) * tick * size / (total or 1.0)
        anchor = "middle" if x < _W - 30 else "end"  # the last one would be cut off
        out.append(f'<text x="{x:.1f}" y="{y + 14}" text-anchor="{anchor}" fill="#555555">{tick:g} {unit}</text>')
    return out


def round_ticks(top: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten from 0 to `top`, at most `most` above 0."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if top / (n * power) <= most)
    return [float(f"{i * step:.6g}") for i in range(int(top / step + 1e-9) + 1)]


_TASKS = {"F": "forward", "B": "backward", "I": "backward", "W": "update"}


def timeline_height(part: DrawnPart) -> int:
    return _ROW * len(part.lanes) + 44


def timeline(part: DrawnPart) -> str:
    """The SVG of a part's timeline, a lane per resource; adjacent events of one colour are merged below a few pixels,
    and those of less than a pixel with the bar before them, so that a picture of many layers stays small."""
    total = part.drawn_s
    scale = (_W - _LEFT - 10) / total
    out = []
    for row, lane in enumerate(part.lanes):
        y = row * _ROW
        title = {"compute": "compute", "wait": "waiting"}.get(lane, lane)
        out.append(f'<text x="8" y="{y + 15}">{escape(title)}</text>')
        run: tuple[float, float, str, str] | None = None
        for event in part.events:
            if event.lane != lane:
                continue
            op = part.ops[event.op]
            color = COLORS.get(tint(lane, op), "#888888")
            x0, x1 = _LEFT + event.start * scale, _LEFT + event.end * scale
            alike = run is not None and (x1 - x0 < 1 if run[2] != color else run[1] - run[0] < 6)
            if run is not None and alike and x0 - run[1] < 0.3:
                run = (run[0], x1, color, run[3])
                continue
            if run is not None:
                out.append(_bar(run, y))
            words = f"{op.module or op.origin or event.name} {op.phase} {seconds(event.end - event.start)}"
            if op.kind:
                words += f" {op.kind} {gib(op.bytes)}: {op.reason}"
            run = (x0, x1, color, words)
        if run is not None:
            out.append(_bar(run, y))
    y = _ROW * len(part.lanes)
    out += _time_axis(total, y)
    tints = {tint(event.lane, part.ops[event.op]) for event in part.events}
    out += legend({words: COLORS[name] for name, words in TINTS.items() if name in tints}, y + 22)
    return "\n".join(out)


def _bar(run: tuple[float, float, str, str], y: float) -> str:
    """A bar with its words, which one of less than a pixel has no room to show."""
    x0, x1, color, words = run
    title = f"<title>{escape(words)}</title>" if x1 - x0 >= 1 else ""
    return (
        f'<rect x="{x0:.2f}" y="{y + 2}" width="{max(x1 - x0, 0.25):.2f}" height="{_ROW - 4}" fill="{color}">'
        f"{title}</rect>"
    )


def tint(lane: str, op: PlannedOp) -> str:
    """The key in `COLORS` for an event: its phase, the link of a collective, `bus` or `wait`."""
    return "wait" if lane == "wait" else "bus" if lane in BUS_LANES else op.wire or op.phase


def memory(report: Report, part: DrawnPart, height: int) -> str:
    """Draws the memory of a part over time, stacked by category, with the device's memory as a line."""
    at, curves = part.at, part.curves
    total = part.each_s or 1.0
    plot_h = height - 76
    device = report.pricing.device
    limit = device.memory_bytes
    # a peak far below the limit would be a line at the bottom
    top = max(part.peak_bytes, limit, 1) if 4 * part.peak_bytes >= limit else max(1, 2 * part.peak_bytes)
    picks = sample(at, part.curve)
    scale_x, scale_y = (_W - _LEFT - 10) / total, plot_h / top
    base = [0.0] * len(picks)
    out = []
    names = list(curves)
    for name in names:
        upper = [b + curves[name][i] for b, i in zip(base, picks)]
        points = [f"{_LEFT + at[i] * scale_x:.1f},{plot_h - v * scale_y:.1f}" for i, v in zip(picks, upper)]
        back = [f"{_LEFT + at[i] * scale_x:.1f},{plot_h - v * scale_y:.1f}" for i, v in zip(picks, base)][::-1]
        out.append(
            f'<polygon points="{" ".join(points + back)}" fill="{COLORS[name]}"><title>{LABELS[name]}</title></polygon>'
        )
        base = upper
    size, unit = bytes_axis(top)
    driver = f", {device.context_bytes / size:.2f} {unit} of it driver and libraries" if device.context_bytes else ""
    words = f"device {limit / size:.2f} {unit}{driver}; peak {part.peak_bytes / size:.2f} {unit}"
    y = max(0.0, plot_h - limit * scale_y)
    if limit <= top:
        out.append(f'<line x1="{_LEFT}" x2="{_W - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d62728" stroke-width="2"/>')
    else:
        words += "; the device's limit is above the picture"
    out.append(f'<text x="{_W - 12}" y="{y + 12:.1f}" text-anchor="end" fill="#d62728">{words}</text>')
    for tick in round_ticks(top / size, 5):
        y = plot_h - plot_h * tick * size / top
        out.append(
            f'<text x="{_LEFT - 6}" y="{max(9.0, y + 4):.1f}" text-anchor="end" fill="#555555">{tick:g} {unit}</text>'
        )
    out += _time_axis(total, plot_h)
    out += legend({LABELS[name]: COLORS[name] for name in names}, plot_h + 24)
    return "\n".join(out)


def legend(colors: Mapping[str, str], y: float) -> list[str]:
    """A row of coloured boxes with their meanings, at height `y`."""
    out, x = ['<g class="legend">'], _LEFT
    for words, color in colors.items():
        out.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{x + 14}" y="{y + 9}">{escape(words)}</text>')
        x += 28 + 6 * len(words)
    return [*out, "</g>"]


def sample(at: Sequence[float], curve: Sequence[int]) -> list[int]:
    """Picks the points of a curve to draw: at most a few hundred indices, with the maximum of each stretch."""
    if not at:
        return []
    total = at[-1] or 1.0
    best: dict[int, int] = {}
    for i, t in enumerate(at):
        slot = int(_POINTS * t / total)
        if slot not in best or curve[i] > curve[best[slot]]:
            best[slot] = i
    return sorted({0, *best.values(), len(at) - 1})


def mesh_map(report: Report) -> str:
    """Draws the mesh: a box per device in a frame per host, coloured by its place on the last axis that has
    several devices; at most 8 hosts."""
    per, nodes = report.job.devices_per_node, report.job.nodes
    shown, cell = min(nodes, 8), 44
    columns = min(per, 8)
    rows = -(-per // columns)
    mesh = Mesh(report.job.mesh)
    axes = [axis for axis in map(mesh.axis, mesh.axes) if axis.size > 1]
    out, host_w, host_h = [], columns * cell + 12, rows * cell + 28
    across = max(1, min(shown, 960 // host_w))
    for host in range(shown):
        x, y = 8 + (host % across) * (host_w + 8), (host // across) * (host_h + 8)
        out.append(f'<rect x="{x}" y="{y}" width="{host_w}" height="{host_h}" fill="none" stroke="#999999" rx="4"/>')
        out.append(f'<text x="{x + 6}" y="{y + 14}">host {host}</text>')
        for local in range(min(per, report.devices - host * per)):
            rank = host * per + local
            label = ", ".join(f"{axis.name} {mesh.index(axis, rank)}" for axis in axes) or "alone"
            cx, cy = x + 6 + (local % columns) * cell, y + 20 + (local // columns) * cell
            hue = 360 * mesh.index(axes[-1], rank) // axes[-1].size if axes else 0
            out.append(
                f'<rect x="{cx}" y="{cy}" width="{cell - 4}" height="{cell - 4}" fill="hsl({hue},55%,80%)" rx="3">'
                f"<title>device {rank}: {escape(label)}</title></rect>"
                f'<text x="{cx + cell / 2 - 2}" y="{cy + cell / 2 + 2}" text-anchor="middle">{rank}</text>'
            )
    height = -(-shown // across) * (host_h + 8)
    more = f"<p>and {nodes - shown} hosts more</p>" if nodes > shown else ""
    return (
        f'<svg width="{_W}" height="{height}" viewBox="0 0 {_W} {height}" font-family="sans-serif" font-size="11" '
        f'role="img" aria-label="Hosts and their devices">' + "\n".join(out) + f"</svg>{more}"
    )
