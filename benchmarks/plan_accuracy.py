"""Compares predicted memory and step time with published measurements.

    python benchmarks/plan_accuracy.py FILE... [--only PATTERN] [--fit DEVICE] [--write] [--record] [--json]

The rows of published_runs.csv and published_runs_2026.csv become recipes (`dense_rows`, `published_rows`), are planned,
and are printed with signed errors; then their mean and worst by device, model and parallelism, beside what other
simulators claim of the same rows. With `--only` the record's figures stay for all other rows. What a recipe cannot say
is counted by the key that is missing. The exit code is 1 if no row was planned, or if a row of the older file names an
unknown model.

`--fit` prints the constants of devices that fit their rows for fitting best, by least squares of the logarithms of step
times (`device_fit`); constants that these rows do not tell apart keep their ratios. `--write` writes the table to
docs/plan_accuracy.md and its summary into the plan's screen. Constants belong to devices; none belongs to a row.
"""

from __future__ import annotations

import csv
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tpshard.devices.read import device as read_device
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.liveness import Lifetime
from tpshard.parallelism.sharding import local_shape
from tpshard.plan.step.pricing import Pricing, memory_of, peak_of
from tpshard.plan.step.reserve import Replay, Turn
from tpshard.plan.step.step_price import price_step
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.setting import cluster
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.programs.step.variants import Variants

import dense_rows
import device_fit
import published_rows
from published_rows import Missing, PublishedRun
from record import Record, load, parser_of

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """A published run with its planned memory (of the run's own kind) and step."""

    run: PublishedRun
    memory_gib: float
    step_s: float
    seconds: float
    """Seconds that planning took."""

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """The signed errors of memory and step time, as shares of what was measured."""
        return (
            self.memory_gib / self.run.memory_gib - 1 if self.run.memory_gib else None,
            self.step_s / self.run.step_s - 1 if self.run.step_s else None,
        )

    def to_json(self) -> dict[str, object]:
        shown = {f.name: getattr(self.run, f.name) for f in fields(self.run) if f.name != "recipe"}
        return {**shown, "planned": {"memory_gib": self.memory_gib, "step_s": self.step_s, "seconds": self.seconds}}


def read(file: Path) -> Iterator[PublishedRun | Missing]:
    """Yields each row's run, or what a recipe lacks to say it."""
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            try:
                yield (published_rows if "use" in row else dense_rows).run_of(row)
            except Missing as missing:
                yield missing


def chosen(run: PublishedRun, pattern: str) -> bool:
    """Whether the run's device, model or name has the pattern."""
    return re.search(pattern, f"{run.device} {run.model} {run.name}") is not None


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a run, or its row of the record, from the others."""
    return row["name"], row["model"], row["parallelism"]


def recorded() -> dict[tuple[str, ...], list[dict[str, float]]]:
    """What the written record planned for each run, in order where several have one name."""
    planned: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in load("plan_accuracy")["rows"]:
        planned.setdefault(key_of(row), []).append(row["planned"])
    return planned


def priced(run: PublishedRun, programs: TrainingPrograms, device: Device | None = None) -> Pricing:
    """The price of a run's step on its device, or on a `device` with other constants."""
    own, _, per_host = cluster.device_of(run.recipe)
    compiled = run.compiled or compiled_by(run.recipe)
    device = device_fit.at_rates(device or own, published_rows.STREAMING[run.stack], run.attention)
    pricing = price_step(programs, device, per_host, compiled)
    if not run.held_logits:
        return pricing
    logits = programs.micro.records["logits"]
    held = {"logits_and_loss": math.prod(local_shape(logits.shape, logits.layout)) * run.held_logits}
    first, *rest = pricing.parts
    assert first.part.name == "micro-batch"
    part = replace(first.part, always={**first.part.always, **held})
    first = replace(first, part=part, memory=memory_of(part, first.priced, pricing.device))
    replay = pricing.replay and _with_held_logits(pricing.replay, *held.values())
    return replace(pricing, parts=[first, *rest], worst=peak_of([first, *rest]), replay=replay)


def _with_held_logits(replay: Replay, size: int) -> Replay:
    """The replay where a loop holds the logits, of `size` bytes, until the next micro-batch has its own."""
    memories = [turn.memory for turn in replay.turns if turn.memory is replay.turns[0].memory]
    (n, spans), joined = (len(memories[0].curve), memories[0].spans), list[Lifetime]()
    at = next((i for i, span in enumerate(spans) if span.bytes == size), None)
    if at is None:
        return replace(replay, static=[*replay.static, size])
    for k in range(len(memories)):
        end = (k + 1) * n + spans[at].start + 1
        ends = [end if i == at else span.end + k * n for i, span in enumerate(spans)]
        joined += [Lifetime(k * n + span.start, end, span.bytes) for span, end in zip(spans, ends)]
    whole = replace(memories[0], spans=joined, taken=[], curve=[0] * (n * len(memories)))
    rest = replay.turns[len(memories) :]
    return replace(replay, turns=[Turn(whole, len(rest)), *(turn._replace(until=len(rest)) for turn in rest)])


def predict(run: PublishedRun, build: Callable[[Setting], TrainingPrograms]) -> Outcome:
    """The planned memory and time of a run."""
    begun = time.perf_counter()
    setting = Setting.of(run.recipe)
    price = priced(run, build(setting))
    memory = price.reserved_bytes if run.reserved else price.peak_bytes
    issued_s = run.host_s * setting.layers * setting.batch.micro_batches if run.host_s else 0.0
    return Outcome(run, memory / 2**30, max(price.step_s, issued_s) + run.idle_s, time.perf_counter() - begun)


def spread(errors: Sequence[float | None]) -> str:
    """The mean signed, mean and worst of errors as percentages."""
    known = [100 * error for error in errors if error is not None]
    if not known:
        return "-"
    return f"{sum(known) / len(known):+.1f}, {sum(map(abs, known)) / len(known):.1f}, {max(map(abs, known)):.1f}"


def line(outcome: Outcome) -> str:
    """A row beside its measurement."""
    run, (memory, step) = outcome.run, outcome.errors
    words = [f"{'fit ' if run.fitted else 'test'} {run.name}: {run.device}, {run.model}, {run.parallelism}"]
    if memory is not None:
        words.append(f"memory {outcome.memory_gib:.1f} of {run.memory_gib:.1f} GiB, {100 * memory:+.1f}%")
    if step is not None:
        words.append(f"step {outcome.step_s:.3f} of {run.step_s:.3f} s, {100 * step:+.1f}%")
    return "; ".join(words) + f" ({outcome.seconds:.0f} s)"


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The errors by device, model, parallelism and use; then by device and use, and by use alone."""
    head = (
        "device",
        "model",
        "parallelism",
        "use",
        "rows",
        "memory, %",
        "step time, %",
        "another simulator's: memory, time",
    )
    groups: dict[tuple[str, str, str, str], list[Outcome]] = {}
    for o in sorted(outcomes, key=lambda o: (o.run.device, o.run.model, o.run.parallelism, o.run.fitted)):
        run, use = o.run, "fit" if o.run.fitted else "test"
        for device, model, parallelism in (
            (run.device, run.model, run.parallelism),
            (run.device, "all", ""),
            ("all", "", ""),
        ):
            groups.setdefault((device, model, parallelism, use), []).append(o)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for names, members in sorted(groups.items(), key=lambda group: (group[0][0] == "all", group[0][1] == "all")):
        claims = [o.run.claim for o in members if o.run.claim is not None]
        theirs = "; ".join(spread(side) for side in zip(*claims)) if claims else ""
        memory, step = (spread(side) for side in zip(*(o.errors for o in members)))
        lines.append(f"| {' | '.join((*names, str(len(members)), memory, step, theirs))} |")
    return lines


def missing_lines(missing: Sequence[Missing]) -> list[str]:
    """What recipes lack to say rows: each key with the rows that miss it, and those that miss nothing else."""
    rows = Counter(key for one in missing for key in one.keys)
    alone = Counter(next(iter(one.keys)) for one in missing if len(one.keys) == 1)
    lines = ["| left out for want of | rows | of these, for nothing else |", "|---|---|---|"]
    return lines + [f"| {key} | {count} | {alone[key]} |" for key, count in rows.most_common()] if rows else []


def accuracy_line(outcomes: Sequence[Outcome]) -> str:
    """The sentence in which plans of GPUs state their accuracy, measured on rows that nothing was fitted on."""
    parts = []
    for name, side in zip(("memory", "step time"), zip(*(o.errors for o in outcomes if not o.run.fitted))):
        if errors := [100 * abs(error) for error in side if error is not None]:
            mean = sum(errors) / len(errors)
            parts.append(f"{name} off by {mean:.1f}% on average, {max(errors):.1f}% at worst (of {len(errors)})")
    return f"published training runs on GPUs that no constant was fitted on: {'; '.join(parts)}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="plan the rows whose device, model or name has this (regex); of others the record's figures stay",
    )
    parser.add_argument("--fit", default="", metavar="DEVICE,...", help="print the constants that fit devices' rows")
    parser.add_argument("--write", action="store_true", help="write docs/plan_accuracy.md and the plan's accuracy line")
    options = parser.parse_args()
    record = Record("plan_accuracy", quiet=options.json)
    rows = [row for file in options.files for row in read(file)]
    missing = [row for row in rows if isinstance(row, Missing)]
    runs = [run for run in rows if isinstance(run, PublishedRun)]
    build, before = Variants().for_prices, recorded() if options.only else {}
    if options.fit:
        names = [read_device(name).name for name in options.fit.split(",")]
        own = [run for run in runs if run.device in names and run.fitted and run.step_s]
        own = [run for run in own if run.recipe.pipeline is None and chosen(run, options.only)]
        if not own:
            sys.exit(f"no row is for fitting {', '.join(names)}")
        constants, left = device_fit.fit(own, build, lambda run, programs: priced(run, programs).step_s)
        for name, value in constants.items():
            record.say(f"{name}: {value:.3f}")
        record.say(f"# {len(own)} rows, {100 * left:.1f}% off on average")
        return
    outcomes: list[Outcome] = []
    for run in runs:
        if not chosen(run, options.only):
            if planned := before.get(key_of(vars(run))):
                outcomes.append(Outcome(run, **planned.pop(0)))
                record.rows.append(outcomes[-1].to_json())
            continue
        try:
            outcomes.append(predict(run, build))
        except Mistakes as error:
            missing.append(Missing({f"refused: {error.diagnostics[0].message}": run.name}))
            continue
        record.say(line(outcomes[-1]))
        record.rows.append(outcomes[-1].to_json())
    lines = [*table(outcomes), "", *missing_lines(missing)]
    record.say("\n".join([*lines, *(f"left out: {one}" for one in missing if "unsaid: remat" not in one.keys)]))
    groups = {"all": outcomes, "held_out": [o for o in outcomes if not o.run.fitted]}
    for name in sorted({o.run.device for o in outcomes}):
        groups[name] = [o for o in groups["held_out"] if o.run.device == name]
    for title, members in groups.items():
        for what, side in zip(("memory", "time"), zip(*(o.errors for o in members))):
            if errors := [100 * error for error in side if error is not None]:
                record.figure(f"{title}.{what}.mean", sum(map(abs, errors)) / len(errors), "% off")
                record.figure(f"{title}.{what}.worst", max(map(abs, errors)), "% off")
                record.figure(f"{title}.{what}.bias", sum(errors) / len(errors), "% off")
    if options.write:
        command = " ".join(file.name for file in options.files)
        head = f"""# How far the plan is from what others measured

Written by `python benchmarks/plan_accuracy.py {command} --write`. Errors of the plan beside published runs, in percent:
the signed mean, the mean, the worst. `fit`: rows on which a device's constants may be fitted; `test`: nothing was.

"""
        (ROOT / "docs" / "plan_accuracy.md").write_text(head + "\n".join(lines) + "\n")
        (ROOT / "plan" / "accuracy.txt").write_text(accuracy_line(outcomes) + "\n")
    record.close(write=options.record, as_json=options.json)
    unknown = any("model" in one.keys for one in missing) and all(
        file.name == "published_runs.csv" for file in options.files
    )
    sys.exit(0 if outcomes and not unknown else 1)


if __name__ == "__main__":
    main()
