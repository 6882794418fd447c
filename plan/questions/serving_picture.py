"""A server's latencies over the rate of requests, as an SVG."""

from __future__ import annotations

from html import escape

from tpshard.plan.questions.serving_answers import Figures, ServeAnswers
from tpshard.plan.step.units import seconds_axis
from tpshard.plan.views.pictures import legend

_W, _H, _LEFT, _GAP = 1000, 220, 90, 60
_COLORS = {"median": "#4e79a7", "99th percentile": "#e15759"}


def draw(answers: ServeAnswers) -> str:
    """The drawing: TTFT above, TPOT below, each at the median and the 99th percentile; limits as lines."""
    charts = [
        _chart("TTFT", [f.ttft_s for f in answers.curve], answers.curve, answers.limits.ttft),
        _chart("TPOT", [f.tpot_s for f in answers.curve], answers.curve, answers.limits.tpot),
    ]
    height = 30 + 2 * (_H + _GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_W}" height="{height}" viewBox="0 0 {_W} {height}" '
        'font-family="sans-serif" font-size="11" role="img" aria-label="Time to the first and between later tokens">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="14">{escape(answers.server.recipe.name)}: prompts of '
        f"{answers.traffic.prompt:,}, answers of {answers.traffic.answer:,} tokens, at random times</text>",
    ]
    for i, chart in enumerate(charts):
        out.append(f'<g transform="translate(0,{34 + i * (_H + _GAP)})">{chart}</g>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _chart(name: str, times: list[tuple[float, float]], curve: tuple[Figures, ...], limit: float | None) -> str:
    top = max([t for pair in times for t in pair] + ([] if limit is None else [limit]))
    most = curve[-1].rate
    size, unit = seconds_axis(top)

    def at(rate: float, t: float) -> str:
        return f"{_LEFT + (_W - _LEFT - 20) * rate / most:.1f},{_H - _H * t / top:.1f}"

    out = [f'<text x="8" y="12">{name}</text>']
    for tick in range(5):
        y = _H - _H * tick / 4
        words = f"{top * tick / 4 / size:.3g} {unit}"
        out.append(f'<text x="{_LEFT - 6}" y="{max(9.0, y + 4):.1f}" text-anchor="end" fill="#555555">{words}</text>')
        out.append(f'<line x1="{_LEFT}" x2="{_W - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eeeeee"/>')
    for curve_index, color in enumerate(_COLORS.values()):
        points = " ".join(at(f.rate, pair[curve_index]) for f, pair in zip(curve, times))
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    if limit is not None:
        y = _H - _H * limit / top
        out.append(
            f'<line x1="{_LEFT}" x2="{_W - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d62728" stroke-dasharray="4"/>'
        )
    for f in curve:
        x = at(f.rate, 0).partition(",")[0]
        out.append(f'<text x="{x}" y="{_H + 14}" text-anchor="middle" fill="#555555">{f.rate:.3g}</text>')
    out.append(f'<text x="8" y="{_H + 14}" fill="#555555">requests/s</text>')
    return "\n".join([*out, *legend(_COLORS, _H + 22)])
