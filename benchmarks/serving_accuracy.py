"""Compares predicted times of servers with published measurements.

    python benchmarks/serving_accuracy.py published_serving_2026.csv [--only PATTERN] [--fit] [--write] [--record]

Each row becomes what its engine's steps compute on its device (`published_servers`): tpshard's programs for the model
and mesh, priced as that engine runs them (`engines.engine_steps`), under the row's traffic: a closed loop,
a rate, or all at once. Figures are compared in the row's own statistic. A row above the admission limit, the requests
of its lengths that the cache holds at once, is saturated: its TTFT is time in a queue, and is counted by itself.

`--fit` prints the constants of engines, kernels and devices that fit the rows marked `fit` best (`engine_fit`); no
constant is fitted to a row marked `test`, and none belongs to a row. `--write` writes docs/serving_accuracy.md.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tpshard.diagnostics.diagnostic import Mistakes

import engine_fit
from engines.engine_traffic import EngineRun, serve_traffic
from plan_accuracy import spread
from published_rows import Missing
from published_servers import FIGURES, NONE, STATISTICS, Constants, ServedRow, row_of
from record import ROOT, Record, parser_of

USES = ("fit", "test")
SIDES = ("TTFT below the limit", "TTFT above it", "TPOT", "tokens/s")
GOALS = {"TTFT below the limit": 25, "TPOT": 15, "tokens/s": 15}
"""The mean errors that are wanted, in percent."""
PAGE = """# How far plans of servers are from what others measured

Written by `python benchmarks/serving_accuracy.py {command} --write`.

Published rows of vLLM, SGLang, TensorRT-LLM and TurboMind beside what their engines' steps cost by tpshard's cost
model: the kernels and bytes of tpshard's programs for the same model and mesh, priced as that engine runs them, with
the engine's own way of forming steps and its host's times, under the row's traffic. Errors are in percent: the signed
mean, the mean, the worst. `fit`: rows on which the few constants of engines, kernels and devices were fitted; `test`:
nothing was. On the rows for testing:

{goals}

**What this does not say.** The rows measure other engines, so they judge the cost model (bytes, FLOPs, all-reduces,
launches) and not tpshard's own server, of which nobody has published a row: it pads its steps to fixed sizes and
replays graphs of up to 128 rows (see [serving](serving.md)). `plan --for serve` plans that server, from the same
kernels. The constants were fitted on rows for fitting alone, but the ways of the engines were written down by people
who had seen all rows.

**The admission limit.** Of `requests, limit` in the last table, the limit is how many requests of these lengths a
server holds at once: what weights and activations leave of the device's memory, divided by prompt and answer, and at
most what the engine runs. A server that admits no more than this never sends a request back. Rows that send more are
saturated; their TTFT is time in a queue and stands in a column of its own.

**Where it falls short.** TTFT of short prompts with tensor parallelism on engines that launch a prompt's kernels from
Python, which is a matter of their host. A thousand streams at once (GPUStack's rows), where one process sends all
tokens: up to twice too fast. Very long prompts in chunks under vLLM 0.6, whose kernel for cached prefixes is slow.
Mixtures of many small experts in 8 bits, up to half too fast. A prompt that was sent before: prefix caches are not
simulated. Three rows shard attention over the batch, which no mesh of a server does.
"""

CONSTANTS = (
    "## Constants",
    "",
    "Times of a host per step (`host`), per sequence (`row`), per step on several devices (`peers`), per request and",
    "per launch outside of graphs; of kernels, shares of a device's rates, the seconds that each takes besides (`gap`)",
    "and the latencies of a link that an all-reduce takes (`hops`); of devices, the share of the bandwidth at which",
    "weights are read. Those that no row tells apart are as usual for such kernels: of devices, only the H20's were",
    "fitted. See `benchmarks/published_servers.py`.",
    "",
)


@dataclass(frozen=True)
class ServedOutcome:
    """A row with its planned figures."""

    row: ServedRow
    planned: Mapping[str, float]
    limit: int
    """The admission limit: requests of this traffic that the server holds at once."""
    sent: float
    """Requests that are sent at once; with a rate, the mean number in a step."""

    @property
    def saturated(self) -> bool:
        """Whether more requests are sent at once than the server should admit."""
        return self.sent > self.limit

    @property
    def use(self) -> str:
        return "fit" if self.row.fitted else "test"

    @property
    def errors(self) -> dict[str, float]:
        """The signed errors by `SIDES`, as shares of what was measured."""
        names = {"ttft": SIDES[1] if self.saturated else SIDES[0], "tpot": "TPOT", "tokens/s": "tokens/s"}
        return {names[name]: self.planned[name] / value - 1 for name, (_, value) in self.row.measured.items()}

    def to_json(self) -> dict[str, object]:
        row = {key: value for key, value in vars(self.row).items() if key not in ("traffic", "weights")}
        more = {"engine": self.row.engine.name, "weights": asdict(self.row.weights)}
        return {**row, **more, "traffic": asdict(self.row.traffic), "planned": dict(self.planned), "limit": self.limit}


def figures(row: ServedRow, run: EngineRun) -> dict[str, float]:
    """The planned figures in the row's statistics: of a steady run without its start, else of all answers."""
    done = run.rehearsal
    answers = done.after_start if row.steady else done.answers
    planned: dict[str, float] = {}
    for name in FIGURES[:2]:
        if name in row.measured:
            statistic = row.measured[name][0]
            of_gaps = statistic == "ITL p50"
            planned[name] = _median_gap(run) if of_gaps else STATISTICS[statistic]([getattr(a, name) for a in answers])
    a_second = done.requests_a_second if row.steady else len(answers) / done.seconds
    return {**planned, "tokens/s": a_second * row.traffic.answer}


def _median_gap(run: EngineRun) -> float:
    """The median seconds between tokens, over steps without prompts."""
    steps = run.gaps[np.argsort(run.gaps[:, 0])]
    tokens = np.cumsum(steps[:, 1])
    return float(steps[np.searchsorted(tokens, tokens[-1] / 2), 0])


def outcome_of(row: ServedRow, constants: Constants = NONE) -> ServedOutcome:
    """The planned figures of a row, with other constants than those of the engine and the device."""
    run = serve_traffic(row.steps(constants), row.traffic, row.varied)
    sent = row.traffic.clients if row.traffic.rate is None else run.rehearsal.mean_running
    return ServedOutcome(row, figures(row, run), run.limit, sent)


GROUPS: dict[str, Callable[[ServedRow], str]] = {
    "all": lambda row: "all", "device": lambda row: row.device, "engine": lambda row: row.engine.name,
    "model": lambda row: row.model, "tp": lambda row: f"tp {row.tp}",
    "weights": lambda row: f"{4 if row.weights.bytes < 0.9 else 8 if row.weights.bytes < 1.9 else 16} bits",
}  # fmt: skip


def tables(outcomes: Sequence[ServedOutcome]) -> Iterator[str]:
    """The errors by each of `GROUPS` and by use."""
    for title, name_of in GROUPS.items():
        groups: dict[tuple[str, str], list[ServedOutcome]] = {}
        for one in sorted(outcomes, key=lambda one: (name_of(one.row), one.row.fitted)):
            groups.setdefault((name_of(one.row), one.use), []).append(one)
        yield from (f"| {title} | use | rows | {', % | '.join(SIDES)}, % |", "|---" * (3 + len(SIDES)) + "|")
        for names, members in groups.items():
            sides = (spread([one.errors.get(side) for one in members]) for side in SIDES)
            yield f"| {' | '.join((*names, str(len(members)), *sides))} |"
        yield ""


def left_out(missing: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """The rows that were not planned, and the key or the reason for which."""
    if missing:
        yield from ("| left out | for want of |", "|---|---|")
        yield from (
            f"| {row} | {'; '.join(f'{key}: {value}' for key, value in keys.items())} |" for row, keys in missing
        )
        yield ""


def goals(outcomes: Sequence[ServedOutcome]) -> str:
    """For each of `GOALS` how near the rows on which nothing was fitted come."""
    parts = []
    for side, goal in GOALS.items():
        if errors := [100 * abs(one.errors[side]) for one in outcomes if one.use == "test" and side in one.errors]:
            mean, within = sum(errors) / len(errors), sum(error <= goal for error in errors)
            parts.append(
                f"- {side}: {mean:.1f}% off on average (goal {goal}%), {within} of {len(errors)} rows within it"
            )
    return "\n".join(parts)


def constants_table(rows: Sequence[ServedRow]) -> Iterator[str]:
    """What is fitted for each engine, for all kernels and each device, and on how many rows."""
    of: dict[str, list[str]] = {}
    for key, value in engine_fit.constants_of(rows).items():
        owner, _, name = key.partition("/")
        of.setdefault(owner, []).append(
            f"{name[:-2]} {1e3 * value:.3g} ms" if name.endswith("_s") else f"{name} {value:.3g}"
        )
    yield from ("| of | constants | rows for fitting |", "|---|---|---|")
    for owner, values in of.items():
        count = sum(row.fitted and owner in ("kernels", row.device, row.engine.name) for row in rows)
        yield f"| {owner} | {', '.join(values)} | {count} |"


def rows_table(outcomes: Sequence[ServedOutcome]) -> Iterator[str]:
    """Every row beside its measurement."""
    yield "| row | use | requests, limit | TTFT, ms | TPOT, ms | tokens/s |"
    yield "|---" * 6 + "|"
    for one in outcomes:
        cells = []
        for name, scale in zip(FIGURES, (1e3, 1e3, 1.0)):
            if name not in one.row.measured:
                cells.append("")
                continue
            value, planned = one.row.measured[name][1], one.planned[name]
            cells.append(f"{scale * planned:.4g} of {scale * value:.4g}, {100 * (planned / value - 1):+.0f}%")
        yield f"| {one.row.name} | {one.use} | {one.sent:.0f}, {one.limit} | {' | '.join(cells)} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose device, engine or name has this")
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="print constants that fit the rows better")
    parser.add_argument("--write", action="store_true", help="write docs/serving_accuracy.md")
    options = parser.parse_args()
    record = Record("serving_accuracy", quiet=options.json)
    rows: list[ServedRow] = []
    missing: list[tuple[str, Mapping[str, str]]] = []
    for line in [line for file in options.files for line in csv.DictReader(file.read_text().splitlines())]:
        try:
            row = row_of(line)
            if re.search(options.only, f"{row.device} {row.engine.name} {row.name}"):
                row.steps()
                rows.append(row)
        except Missing as error:
            missing.append((line["id"], error.keys))
        except (Mistakes, ValueError) as error:
            missing.append((line["id"], {"refused": str(error).splitlines()[0]}))
    if options.fit:
        own = [row for row in rows if row.fitted]
        constants = engine_fit.fit(own, outcome_of, options.fit, record.say)
        record.say("\n".join(f"{name}: {value:.3g}" for name, value in constants.items()))
        return
    outcomes: list[ServedOutcome] = []
    for row in rows:
        try:
            outcomes.append(outcome_of(row))
        except ValueError as error:
            missing.append((row.name, {"refused": str(error)}))
    lines = [*tables(outcomes), *left_out(missing)]
    each = list(rows_table(outcomes))
    record.rows = [one.to_json() for one in outcomes]
    record.say("\n".join([*each, "", *lines]))
    for use in USES:
        for side in SIDES:
            of = [one for one in outcomes if one.use == use and side in one.errors]
            if errors := [100 * one.errors[side] for one in of]:
                name = f"{use}.{side.replace(' ', '_').replace('/', '_a_')}"
                record.figure(f"{name}.mean", sum(map(abs, errors)) / len(errors), "% off")
                record.figure(f"{name}.worst", max(map(abs, errors)), "% off")
                record.figure(f"{name}.bias", sum(errors) / len(errors), "% off")
    if options.write:
        text = PAGE.format(command=" ".join(file.name for file in options.files), goals=goals(outcomes))
        page = ROOT / "docs" / "serving_accuracy.md"
        page.write_text(
            "\n".join([text, *lines, *CONSTANTS, *constants_table(rows), "", "## Every row", "", *each, ""]),
            encoding="utf-8",
        )
    record.close(write=options.record, as_json=options.json)
    sys.exit(0 if outcomes else 1)


if __name__ == "__main__":
    main()
