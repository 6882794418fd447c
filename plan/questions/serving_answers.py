"""The answers of a server under a load: latencies, maximal rates, and the best alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.parallelism.pricing.cost import ServingOverhead
from tpshard.plan.server.rehearse import rehearse
from tpshard.plan.server.server_prices import PricedServer, ServerBuilder
from tpshard.plan.server.traffic import Rehearsal, Traffic
from tpshard.plan.step.units import gib, seconds
from tpshard.programs.server.serving import BLOCK_SIZE
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

SHARE = 0.99
"""The share of requests for which limits must hold."""
FRONT_REQUESTS = (8, 32, 128, 512)
"""The values of `serve.requests` that a front tries."""
HALVINGS = 7
"""Bisections of the search for the highest rate, which find it to 1%."""


@dataclass(frozen=True)
class TimeLimits:
    """Limits for 99 of 100 requests, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def hold_for(self, rehearsal: Rehearsal) -> bool:
        """Whether no request was refused and the limits hold."""
        first = self.ttft is None or rehearsal.ttft(SHARE) <= self.ttft
        return first and (self.tpot is None or rehearsal.tpot(SHARE) <= self.tpot) and not rehearsal.refused

    def __bool__(self) -> bool:
        return self.ttft is not None or self.tpot is not None

    def __str__(self) -> str:
        named = (("TTFT", self.ttft), ("TPOT", self.tpot))
        return " and ".join(f"{name} {seconds(limit)}" for name, limit in named if limit is not None)


@dataclass(frozen=True)
class Figures:
    """The figures of a server under one load."""

    rate: float
    """Requests per second that arrived; in a closed loop, that were answered."""
    requests_a_second: float
    tokens_a_second: float
    """Answer tokens per second."""
    ttft_s: tuple[float, float]
    """Seconds to the first token: median and 99th percentile."""
    tpot_s: tuple[float, float]
    """Seconds per further token: median and 99th percentile."""
    mean_running: float
    refused: int
    preempted: int
    within_limits: bool
    """Whether the limits, if any, hold."""

    @staticmethod
    def of(rehearsal: Rehearsal, traffic: Traffic, limits: TimeLimits) -> Figures:
        done = rehearsal.requests_a_second
        return Figures(
            rate=done if traffic.rate is None else traffic.rate, requests_a_second=done,
            tokens_a_second=done * traffic.answer, ttft_s=(rehearsal.ttft(0.5), rehearsal.ttft(SHARE)),
            tpot_s=(rehearsal.tpot(0.5), rehearsal.tpot(SHARE)), mean_running=rehearsal.mean_running,
            refused=rehearsal.refused, preempted=rehearsal.preempted, within_limits=limits.hold_for(rehearsal),
        )  # fmt: skip


@dataclass(frozen=True)
class FrontPoint:
    """One of the tried servers that no other beats in both tokens per second and device, and time per token."""

    mesh: str
    requests: int
    tokens_a_second_a_device: float
    tpot_s: float
    ttft_s: float
    rate: float
    """The highest rate in requests per second, within the limits if any."""


@dataclass(frozen=True)
class ServeAnswers:
    """The plan of a server under a load."""

    server: PricedServer
    traffic: Traffic
    limits: TimeLimits
    at_rate: Figures | None
    """Figures at the requested rate."""
    saturated: Figures
    """Figures in a closed loop with `serve.requests` clients, each sending its next request after its last answer."""
    highest: Figures | None
    """Figures at the highest rate within the limits; None without limits, or if no rate keeps them."""
    curve: tuple[Figures, ...] = ()
    """Figures at rates up to the server's maximum."""
    front: tuple[FrontPoint, ...] = ()
    refused: tuple[str, ...] = ()
    """Meshes of the front that could not be built, and why."""

    @property
    def fitting(self) -> int:
        """Number of requests whose prompt and answer fit into the cache at once."""
        return self.server.fitting(self.traffic.prompt + self.traffic.answer)

    @property
    def provenance(self) -> str:
        """The basis of its times, `calibrated` or `roofline`. A GPU's constants are fitted to training alone."""
        device = self.server.prices.device
        rests_on = ("matmul", "attention", "streaming", "inside")
        return "roofline" if device.kind == "gpu" or device.unfitted_constants(rests_on) else "calibrated"

    def to_json(self) -> dict[str, Any]:
        server, device = self.server, self.server.prices.device
        return {
            "schema": 1, "for": "serve", "device": device.name, "mesh": dict(server.programs.setting.mesh.axes),
            "traffic": asdict(self.traffic), "limits": asdict(self.limits), "share": SHARE,
            "cache": {"blocks": server.room.blocks, "tokens": server.room.blocks * BLOCK_SIZE,
                      "bytes": server.cache_bytes, "requests": self.fitting},
            "at_rate": _json(self.at_rate), "saturated": _json(self.saturated), "highest": _json(self.highest),
            "curve": [_json(f) for f in self.curve], "front": [asdict(point) for point in self.front],
            "refused": list(self.refused), "provenance": self.provenance, "programs": server.programs.listed,
            "host": asdict(server.overhead),
        }  # fmt: skip


def _json(figures: Figures | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    return {"kept" if key == "within_limits" else key: value for key, value in asdict(figures).items()}


def answers(
    recipe: Recipe, traffic: Traffic, limits: TimeLimits, *, curve: int = 0, front: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> ServeAnswers:  # fmt: skip
    """Simulates the recipe's server under the traffic.

    curve: the number of rates up to the maximum. front: whether to try other servers. Raises `Mistakes` (exit 4) where
    the server or a single request does not fit.
    """
    builder = ServerBuilder()
    server = builder.build(recipe)
    each = traffic.prompt + traffic.answer
    if each > server.longest:
        by_model = server.longest == server.programs.setting.max_seq
        raise Mistakes.one(
            f"a request of {each:,} tokens is longer than the {server.longest:,} that "
            f"{'the model is made for' if by_model else 'the cache holds'}",
            exit=Exit.FIT, where=recipe.where("model" if by_model else "serve.cache_mb"),
            fix="fewer tokens: --prompt, --answer" + ("" if by_model else "; or a larger `serve.cache_mb`"),
        )  # fmt: skip

    load = _Load(traffic, limits)
    full = load.saturated(server)
    at_rate = load.figures(server, traffic) if traffic.rate is not None else None
    highest = load.highest(server, full) if limits else None
    drawn = tuple(load.at(server, full.requests_a_second * (i + 1) / curve) for i in range(curve))
    points, refused = _front(recipe, load, builder, note) if front else ((), ())
    return ServeAnswers(server, traffic, limits, at_rate, full, highest, drawn, points, refused)


@dataclass(frozen=True)
class _Load:
    """The load for which servers are simulated."""

    traffic: Traffic
    limits: TimeLimits

    def figures(self, server: PricedServer, traffic: Traffic) -> Figures:
        rehearsal = rehearse(server.room, traffic, server.prices, server.overhead)
        return Figures.of(rehearsal, traffic, self.limits)

    def at(self, server: PricedServer, rate: float) -> Figures:
        """The figures at a rate of requests."""
        return self.figures(server, replace(self.traffic, rate=rate))

    def saturated(self, server: PricedServer) -> Figures:
        """The figures in a closed loop with as many clients as the server runs at once."""
        clients = min(server.room.running, server.room.logit_rows)
        count = max(self.traffic.count, 4 * clients)
        return self.figures(server, replace(self.traffic, rate=None, clients=clients, count=count))

    def highest(self, server: PricedServer, full: Figures) -> Figures | None:
        """The figures at the highest rate within the limits; None if no rate keeps them."""
        low, high, best = 0.0, full.requests_a_second, None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            figures = self.at(server, middle)
            if figures.within_limits:
                low, best = middle, figures
            else:
                high = middle
        return best


def _front(
    recipe: Recipe, load: _Load, builder: ServerBuilder, note: Callable[[str], None]
) -> tuple[tuple[FrontPoint, ...], tuple[str, ...]]:
    """The servers that no other beats (`unbeaten`), over sizes of the mesh's axis and of `serve.requests`.

    Also returns each mesh that was refused, with the reason.
    """
    points: list[FrontPoint] = []
    refused: dict[str, str] = {}
    each = load.traffic.prompt + load.traffic.answer
    for axis, ways in _meshes(recipe):
        mesh = f"{axis} {ways}"
        before = 0
        for requests in FRONT_REQUESTS:
            changes = [f"serve.mesh={{{axis}: {ways}}}", f"serve.requests={requests}"]
            try:
                server = builder.build(loads(recipe.to_yaml(), changes, file=recipe.name))
            except Mistakes as error:
                refused[mesh] = error.diagnostics[0].message
                break
            room = min(requests, server.fitting(each))
            if room <= before or server.longest < each:
                break  # the cache holds no more requests than that
            before = room
            note(f"tried {mesh}, {plural(requests, 'request')} at once")
            full = load.saturated(server)
            best = load.highest(server, full) if load.limits else full
            if best is not None:
                tokens_a_second = best.tokens_a_second / ways
                points.append(FrontPoint(mesh, requests, tokens_a_second, best.tpot_s[0], best.ttft_s[0], best.rate))
    return tuple(sorted(unbeaten(points), key=lambda p: -p.tokens_a_second_a_device)), tuple(
        f"{mesh}: {why}" for mesh, why in refused.items()
    )


def unbeaten(points: Sequence[FrontPoint]) -> Iterator[FrontPoint]:
    """The points that no other beats in both tokens per device and time per token."""
    goodness = [(point.tokens_a_second_a_device, -point.tpot_s) for point in points]
    for point, own in zip(points, goodness):
        if not any(other != own and other[0] >= own[0] and other[1] >= own[1] for other in goodness):
            yield point


def _meshes(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """Pairs (axis, size): powers of two up to the recipe's devices, along the largest axis of its server."""
    axis = max(recipe.serve.mesh, key=lambda name: recipe.serve.mesh[name])
    most = max(recipe.serve.mesh[axis], 1)
    if recipe.cluster is not None:
        most = recipe.cluster.nodes * recipe.cluster.devices_per_node
    yield from ((axis, 2**n) for n in range(most.bit_length()))


# ---- the screen -----------------------------------------------------------------------------------------------------
def screen(answers: ServeAnswers) -> str:
    """The answers as text of 80 columns."""
    server, traffic = answers.server, answers.traffic
    setting, settings = server.programs.setting, server.recipe.serve
    mesh = ", ".join(f"{axis} {size}" for axis, size in setting.mesh.axes.items() if size > 1) or "one device"
    tokens = server.room.blocks * BLOCK_SIZE
    clients = min(server.room.running, server.room.logit_rows)
    lines = [
        f"plan: {server.recipe.name}, a server for prompts of {traffic.prompt:,} tokens and answers of "
        f"{traffic.answer:,}",
        f"  {server.prices.device.name}, {mesh}, {setting.served.dtype}; steps of up to {setting.most:,} tokens, "
        f"{plural(settings.requests, 'request')} at once",
        f"CACHE [exact]  {gib(server.cache_bytes)} on each device, {tokens:,} tokens: "
        f"{plural(answers.fitting, 'request')} at once",
        f"ANSWERS [the server's scheduler, steps {answers.provenance}], medians and 99th percentiles",
        f"{'':<38}{'TTFT':>9}{'99th':>8}{'TPOT':>8}{'99th':>8}{'tokens/s':>9}",
    ]
    if answers.at_rate is not None:
        arrivals = f"{traffic.rate:g} requests/s at random times, seed {traffic.seed}"
        lines += _row(arrivals, answers.at_rate)
        if answers.at_rate.requests_a_second < 0.9 * answers.at_rate.rate:
            lines.append("  ! more requests arrive than the server can answer: the times grow without bound")
        if answers.limits:
            outcome = "kept" if answers.at_rate.within_limits else "not kept"
            lines.append(f"  limits {answers.limits}: {outcome} for 99 of 100 requests")
    lines += _row(f"closed loop of {clients}: {answers.saturated.requests_a_second:.3g} requests/s", answers.saturated)
    if answers.highest is not None:
        lines += _row(f"highest within limits: {answers.highest.rate:.3g} requests/s", answers.highest)
    elif answers.limits:
        lines.append(f"  no rate keeps {answers.limits} for 99 of 100 requests")
    if answers.fitting < settings.requests:
        lines.append(f"  ! the cache holds {answers.fitting} of {settings.requests} such requests: others wait for it")
    if answers.front or answers.refused:
        condition = f", at the highest rate within {answers.limits}" if answers.limits else ", each as fast as it can"
        lines.append(f"FRONT  no other server tried is better in both{condition}")
        lines.append("  mesh     requests   tokens/s a device   TPOT median   TTFT median   requests/s")
        for p in answers.front:
            lines.append(
                f"  {p.mesh:<9}{p.requests:8d}{p.tokens_a_second_a_device:20,.1f}{seconds(p.tpot_s):>14}"
                f"{seconds(p.ttft_s):>14}{p.rate:13.3g}"
            )
        lines += [f"  left out: {one}" for one in answers.refused]
    lines.append(_included(server.overhead))
    return "\n".join(lines) + "\n"


def _included(host: ServingOverhead) -> str:
    """A sentence on which of the host's times the figures include."""
    if host == ServingOverhead():
        return (
            "Only the steps' programs are included: the device file has no `serve_step`\n"
            "(`tpshard doctor --measure` writes it on a CPU), and the network is not priced."
        )
    return (
        f"Included is the host's time: {seconds(host.step_s)} a step, {seconds(host.token_s)} a token of an answer,\n"
        f"{seconds(host.request_s)} a request. The network is not."
    )


def _row(what: str, f: Figures) -> list[str]:
    times = (f.ttft_s[0], f.ttft_s[1], f.tpot_s[0], f.tpot_s[1])
    widths = (9, 8, 8, 8)
    shown = "".join(f"{seconds(t):>{w}}" for t, w in zip(times, widths))
    lines = [f"  {what:<36}{shown}{f.tokens_a_second:9,.0f}"]
    if f.refused or f.preempted:
        lines.append(f"    {plural(f.refused, 'request')} refused, {plural(f.preempted, 'preemption')}")
    return lines
