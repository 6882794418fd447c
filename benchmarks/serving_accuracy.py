"""Compares predicted times of servers with published measurements.

    python benchmarks/serving_accuracy.py published_serving_2026.csv [--only PATTERN] [--write] [--record] [--json]

A row becomes a recipe and its traffic: equal requests in a closed loop of `concurrency` clients, all at once where it
is a static `batch`, at random times where it has a `rate_rps`. tpshard's own scheduler serves them on simulated
programs (`tpshard plan --for serve`), and its times are compared in the row's own statistic. A row at maximum load
(TensorRT-LLM's) has a loop of 512 clients. No constant is fitted to these rows: `test` and `fit` tell what may be.
`--write` writes the table into docs/serving_accuracy.md (which then needs a place in zensical.toml).
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.plan.server.rehearse import rehearse
from tpshard.plan.server.server_prices import ServerBuilder
from tpshard.plan.server.traffic import Rehearsal, Traffic, quantile
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

from plan_accuracy import spread
from published_models import keys_of
from published_rows import Missing
from record import ROOT, Record, parser_of

DEVICES = {"A100-SXM-40GB": "a100-40g", "A100-SXM-80GB": "a100-80g", "H100-SXM-80GB": "h100-sxm-80g",
           "H200-SXM-141GB": "h200", "B200-SXM-180GB": "b200"}  # fmt: skip
FIGURES = ("ttft", "tpot", "tokens/s")
MOST = 512
"""Clients of a load that the source calls the maximum."""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean, "p50": statistics.median, "median of per-minute p50": statistics.median,
    "p95": lambda values: quantile(values, 0.95),
}  # fmt: skip


@dataclass(frozen=True)
class ServedRow:
    """A published server as a recipe, its traffic, and what was measured."""

    name: str
    recipe: Recipe
    traffic: Traffic
    device: str
    engine: str
    fitted: bool
    measured: Mapping[str, tuple[str, float]]
    """For each of `FIGURES` that the row has, the statistic and the value, in seconds and tokens per second."""


@dataclass(frozen=True)
class ServedOutcome:
    """A row with its planned figures."""

    row: ServedRow
    planned: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """The signed errors, as shares of what was measured."""
        return {name: self.planned[name] / value - 1 for name, (_, value) in self.row.measured.items()}

    def to_json(self) -> dict[str, object]:
        row = {key: value for key, value in vars(self.row).items() if key not in ("recipe", "traffic")}
        return {**row, "traffic": asdict(self.row.traffic), "planned": dict(self.planned)}


def row_of(row: dict[str, str]) -> ServedRow:
    """Reads a row. Missing, with everything that a recipe lacks to say it."""
    model, device, missing = keys_of(row["model"]), DEVICES.get(row["gpu"]), dict[str, str]()
    if model is None:
        missing["model"] = row["model"]
    if device is None:
        missing["cluster.device"] = row["gpu"]
    if row["weights"] not in ("bf16", "fp16") or row["kv_dtype"] not in ("bf16", "fp16", ""):
        missing["weights"] = row["weights"]
    if {row["pp"], row["ep"], row["dp"]} != {"1"}:
        missing["serve.mesh"] = f"pp {row['pp']}, ep {row['ep']}, dp {row['dp']}"
    if missing:
        raise Missing(missing)
    prompt, answer, tp = int(row["input_len"]), int(row["output_len"]), int(row["tp"])
    batch, rate = row["batch"], None if row["rate_rps"] in ("", "inf") else float(row["rate_rps"])
    clients = int(batch or row["concurrency"] or MOST)
    traffic = Traffic(prompt, answer, rate, clients, clients if batch else max(16, 5 * clients))
    recipe = loads(
        f"""
name: row
cluster: {{device: {device}, nodes: 1, devices_per_node: {tp}}}
mesh: {{tp: {tp}}}
model: {{{model}, dtype: {row["weights"]}}}
serve: {{mesh: {{tp: {tp}}}, requests: {max(8, clients)}, queue: 100000}}
""",
        file=row["id"],
    )
    measured = {
        name: (row[f"{name}_stat"], float(row[f"{name}_ms"]) / 1000)
        for name in FIGURES[:2] if row[f"{name}_ms"] and row[f"{name}_stat"] in STATISTICS
    }  # fmt: skip
    if row["output_tok_s_total"]:
        measured["tokens/s"] = ("", float(row["output_tok_s_total"]))
    return ServedRow(row["id"], recipe, traffic, device or "", row["engine"], row["use"] == "fit", measured)


def figures(row: ServedRow, rehearsal: Rehearsal) -> dict[str, float]:
    """The planned figures in the row's statistics. Of a batch all answers count, else those after the start."""
    at_once = row.traffic.count == row.traffic.clients
    answers = rehearsal.answers if at_once else rehearsal.after_start
    values = {"ttft": [one.ttft for one in answers], "tpot": [one.tpot for one in answers]}
    planned = {name: STATISTICS[row.measured[name][0]](values[name]) for name in values if name in row.measured}
    a_second = len(answers) / rehearsal.seconds if at_once else rehearsal.requests_a_second
    return {**planned, "tokens/s": a_second * row.traffic.answer}


def table(outcomes: Sequence[ServedOutcome]) -> Iterator[str]:
    """The errors by device, engine and use; then by use alone."""
    yield "| device | engine | use | rows | TTFT, % | TPOT, % | tokens/s, % |"
    yield "|---" * 7 + "|"
    groups: dict[tuple[str, str, str], list[ServedOutcome]] = {}
    for one in sorted(outcomes, key=lambda one: (one.row.device, one.row.engine, one.row.fitted)):
        use = "fit" if one.row.fitted else "test"
        for device, engine in ((one.row.device, one.row.engine), ("all", "")):
            groups.setdefault((device, engine, use), []).append(one)
    for names, members in sorted(groups.items(), key=lambda group: group[0][0] == "all"):
        sides = (spread([one.errors.get(name) for one in members]) for name in FIGURES)
        yield f"| {' | '.join((*names, str(len(members)), *sides))} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose device, engine or name has this")
    parser.add_argument("--write", action="store_true", help="write docs/serving_accuracy.md")
    options = parser.parse_args()
    record = Record("serving_accuracy", quiet=options.json)
    builders: dict[str, ServerBuilder] = {}  # one shares the steps of one model's servers
    outcomes: list[ServedOutcome] = []
    missing: Counter[str] = Counter()
    for file in options.files:
        for line in csv.DictReader(file.read_text().splitlines()):
            try:
                row = row_of(line)
                if not re.search(options.only, f"{row.device} {row.engine} {row.name}"):
                    continue
                server = builders.setdefault(line["model"], ServerBuilder()).build(row.recipe)
                done = rehearse(server.room, row.traffic, server.prices, server.overhead)
            except Missing as error:
                missing.update(list(error.keys))
                continue
            except (Mistakes, ValueError) as error:
                missing[f"refused: {str(error).splitlines()[0]}"] += 1
                continue
            outcomes.append(ServedOutcome(row, figures(row, done)))
            shown = ", ".join(f"{name} {100 * error:+.0f}%" for name, error in outcomes[-1].errors.items())
            record.say(f"{'fit ' if row.fitted else 'test'} {row.name}: {shown}")
            record.rows.append(outcomes[-1].to_json())
    lines = [*table(outcomes), "", "| left out for want of | rows |", "|---|---|"]
    lines += [f"| {key} | {count} |" for key, count in missing.most_common()]
    record.say("\n".join(lines))
    tested = [one for one in outcomes if not one.row.fitted]
    for name in FIGURES:
        if errors := [100 * abs(one.errors[name]) for one in tested if name in one.errors]:
            record.figure(f"{name.partition('/')[0]}.mean", sum(errors) / len(errors), "% off")
            record.figure(f"{name.partition('/')[0]}.worst", max(errors), "% off")
    if options.write:
        head = f"""# How far a server's plan is from what others measured

Written by `python benchmarks/serving_accuracy.py {" ".join(file.name for file in options.files)} --write`. Errors of
`tpshard plan --for serve` beside published runs of other engines, in percent: the signed mean, the mean, the worst.
Each row is compared in its own statistic. `fit`: rows on which constants may be fitted (none is); `test`: nothing may.

"""
        (ROOT / "docs" / "serving_accuracy.md").write_text(head + "\n".join(lines) + "\n")
    record.close(write=options.record, as_json=options.json)
    sys.exit(0 if outcomes else 1)


if __name__ == "__main__":
    main()
