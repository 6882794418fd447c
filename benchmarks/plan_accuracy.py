"""Compares predicted memory and step time with published measurements.

    python benchmarks/plan_accuracy.py FILE [--quick] [--write] [--record] [--json]

FILE has the columns of the published runs: each row becomes a recipe, is planned, and is printed with signed errors and
mean absolute percentages. Rows that no recipe can say are listed; the exit code is 1 if one of them names an unknown
model, or if no row was planned. `--write` writes the table to docs/plan_accuracy.md and its summary into the plan's
screen.

Settings that a row does not state are taken from how its source ran. The loss of `tt_2024*` ran eagerly, that of all
others but `kf_*` was compiled apart from the blocks. Of `kf_*` the public code says more than the rows (KempnerForge:
`training/loop.py`, `training/loss.py`, `distributed/tensor_parallel.py`): the loss ran eagerly in the dtype of the
logits, and the loop held these until the next micro-batch had its own; with tensor parallelism every device held the
whole embedding, and norms were sharded over the sequence, which the rows deny. Constants belong to devices; none
belongs to a row.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.sharding import local_shape
from tpshard.plan import planner
from tpshard.plan.step.pricing import StepPart, price_parts
from tpshard.plan.step.step_price import training_parts
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.setting import cluster
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

from record import Record, parser_of

ROOT = Path(__file__).resolve().parents[1]
DEVICES = {"A100-40GB": "a100-40g", "A100-80GB": "a100-80g", "H100-80GB": "h100-sxm-80g", "B200": "b200"}
MODELS = {
    "7B": "preset: llama3-8b",
    "8B": "preset: llama3-8b",
    "llama3-8B": "preset: llama3-8b",
    "13B": "preset: llama3-8b, width: 5120, layers: 40, heads: 40, kv_heads: 8, mlp: 17920",
    "70B": "preset: llama3-70b",
    "405B": "preset: llama3-405b",
}
REMAT = {"none": "none", "full": "full", "sac_op": "[attention, wq, wv, gate, down]", "sac_layer": "{every: 2}"}
FITTED_ON = {
    ("kf_mfu_scaling", "1", "1"), ("kf_mfu_scaling", "1", "2"), ("tt_202412_T1", "8", "1"), ("tt_2024_A100", "64", "1"),
    ("tt_202506_asyncTP", "8", "8"),
}  # fmt: skip
"""(source, fsdp, tp) of the rows to which the shipped constants were fitted; the other rows test them."""


@dataclass(frozen=True)
class Outcome:
    row: dict[str, str]
    memory_gib: float
    step_s: float
    seconds: float

    @property
    def memory_error(self) -> float | None:
        published = float(self.row["mem_gib"] or 0)
        return self.memory_gib / published - 1 if published else None

    @property
    def time_error(self) -> float | None:
        published = float(self.row["step_s"] or 0)
        return self.step_s / published - 1 if published else None

    def to_json(self) -> dict[str, object]:
        planned = {"memory_gib": self.memory_gib, "step_s": self.step_s, "fitted": self.fitted, "seconds": self.seconds}
        return {**self.row, "planned": planned}

    @property
    def fitted(self) -> bool:
        return (self.row["src"], self.row["fsdp"], self.row["tp"]) in FITTED_ON


class UnknownModel(ValueError):
    """A row's model is none of `MODELS`."""


def number(row: dict[str, str], key: str, default: int = 1) -> int:
    return int(float(row.get(key) or default))


def device_of(row: dict[str, str]) -> str:
    """Device of a row; H100s of 96 GB and 500 W and H200s four a host have files of their own."""
    gpu = row["gpu"]
    if gpu.startswith("H100-96GB"):
        return "h100-sxm-96g"
    if gpu.startswith("H200"):
        return "h200-x4" if number(row, "gpus_per_node", 8) == 4 else "h200"
    device = next((name for prefix, name in DEVICES.items() if gpu.startswith(prefix)), None)
    if device is None:
        raise ValueError(f"no device is known as {gpu!r}; known: H100-96GB, H200, {', '.join(DEVICES)}")
    return device


def recipe_of(row: dict[str, str]) -> Recipe:
    """The recipe of a row. UnknownModel; ValueError for settings that recipes lack (context parallelism, ...)."""
    if row["model"] not in MODELS:
        raise UnknownModel(f"no model is known as {row['model']!r}; known: {', '.join(MODELS)}")
    unsupported = [key for key in ("pp", "cp", "ep") if number(row, key) > 1]
    if unsupported:
        raise ValueError(f"{', '.join(unsupported)} above 1: not in a recipe")
    quant = row.get("quant") or "none"
    if quant != "none" and not quant.startswith(("fp8", "float8")):
        raise ValueError(f"quant {quant}: not in a recipe")
    dtype = "bf16" if quant == "none" else "fp8"
    per_node, gpus = number(row, "gpus_per_node", 8), number(row, "gpus")
    ranks, times, tp = number(row, "dp_rep") * number(row, "fsdp"), number(row, "grad_accum"), number(row, "tp")
    rules, annotate, pins = "", "", []
    if row.get("seq_parallel") == "1" or (tp > 1 and holds_logits(row)):
        rules = "rules: {batch: [dp, fsdp], vocab: tp, heads: tp, mlp: tp, seq_sp: tp}"
        annotate = 'annotate: {"layers.*.residual": [batch, seq_sp, embed]}'
    if tp > 1 and row.get("loss_parallel") != "1":
        pins.append('"logits": [[dp, fsdp], null, null]')
    if tp > 1 and holds_logits(row):
        pins += ['"tok_embed.weight": [null, null]', '"embedded": [[dp, fsdp], null, null]']
    sharding = ", ".join(part for part in (rules, annotate, f"pin: {{{', '.join(pins)}}}" if pins else "") if part)
    wrap = "[layers.*, [tok_embed, norm, output]]" if holds_logits(row) else "[layers.*, [tok_embed], [norm, output]]"
    reduce = "last" if row.get("accumulate_unsharded") == "1" and times > 1 else "each"
    device = device_of(row)
    return loads(
        f"""
name: {row["src"]}
cluster: {{device: {device}, nodes: {max(1, gpus // per_node)}, devices_per_node: {min(gpus, per_node)}}}
mesh: {{dp: {number(row, "dp_rep")}, fsdp: {number(row, "fsdp")}, tp: {tp}}}
model: {{{MODELS[row["model"]]}, seq_len: {number(row, "seq")}, dtype: {dtype}}}
task: {"torch_loss:TorchCrossEntropy" if holds_logits(row) else "lm"}
sharding: {{{sharding}}}
fsdp:
  bucket: wrap
  wrap: {wrap}
  master_dtype: {row["master_dtype"]}
  param_dtype: {row["gather_dtype"]}
  reduce_dtype: {row["reduce_dtype"]}
  accumulate: {{reduce: {reduce}}}
remat: {REMAT[row["ac"]]}
compile: {"eager" if row["compile"] == "0" else "blocks" if eager_loss(row) else "inductor"}
batch: {{global_sequences: {number(row, "local_bs") * ranks * times}, per_device: {number(row, "local_bs")}}}
""",
        file=row["src"],
    )


def eager_loss(row: dict[str, str]) -> bool:
    return row["src"].startswith(("tt_2024", "kf_"))


def holds_logits(row: dict[str, str]) -> bool:
    """Whether the training loop holds the logits of a micro-batch until the next one has its own."""
    return row["src"].startswith("kf_")


def parts_of(row: dict[str, str], programs: TrainingPrograms) -> list[StepPart]:
    """The parts of a step as the source ran them, where recipes cannot say it."""
    apart = row["compile"] == "0" and not eager_loss(row)
    parts = training_parts(programs, "rest" if apart else compiled_by(programs.setting.recipe))
    if not holds_logits(row):
        return parts
    logits = programs.micro.records["logits"]
    held = {"logits_and_loss": math.prod(local_shape(logits.shape, logits.layout)) * logits.dtype.itemsize}
    assert parts[0].name == "micro-batch"
    return [replace(parts[0], always={**parts[0].always, **held}), *parts[1:]]


def figures(row: dict[str, str], recipe: Recipe, quick: bool) -> tuple[float, float]:
    """(GiB in the row's measure of memory, seconds of a step)."""
    build = Variants().for_prices if quick else planner.build_programs
    parts, (device, _, per_host) = parts_of(row, build(Setting.of(recipe))), cluster.device_of(recipe)
    pricing = price_parts(parts, device, per_host, trains=True)
    memory = pricing.reserved_bytes if row.get("mem_kind") == "reserved_peak" else pricing.peak_bytes
    return memory / 2**30, pricing.step_s


def predict(row: dict[str, str], quick: bool) -> Outcome:
    """The planned memory and time. `quick` builds equal layers once, with the same figures."""
    begun = time.perf_counter()
    memory, step = figures(row, recipe_of(row), quick)
    return Outcome(row, memory, step, time.perf_counter() - begun)


def mean(errors: list[float]) -> str:
    if not errors:
        return "-"
    return f"{100 * sum(map(abs, errors)) / len(errors):.1f}%, worst {100 * max(map(abs, errors)):.1f}%"


def table(outcomes: list[Outcome]) -> list[str]:
    head = (
        "source", "model", "device", "dp x fsdp x tp", "remat", "compile", "memory GiB", "published", "error", "step s",
        "published", "error", "fitted on",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for o in outcomes:
        r = o.row
        memory = f"{100 * o.memory_error:+.1f}%" if o.memory_error is not None else ""
        step = f"{100 * o.time_error:+.1f}%" if o.time_error is not None else ""
        lines.append(
            f"| {r['src']} | {r['model']} | {device_of(r)} x{r['gpus']} | {r['dp_rep']} x {r['fsdp']} x {r['tp']} | "
            f"{r['ac']} | {r['compile'] or '?'} | {o.memory_gib:.1f} | {r['mem_gib']} | {memory} | {o.step_s:.3f} | "
            f"{r['step_s']} | {step} | {'yes' if o.fitted else ''} |"
        )
    return lines


def summary(outcomes: list[Outcome]) -> list[str]:
    lines = []
    for title, chosen in (
        ("all rows", outcomes),
        ("rows that fitted nothing", [o for o in outcomes if not o.fitted]),
    ):
        memory = [o.memory_error for o in chosen if o.memory_error is not None]
        step = [o.time_error for o in chosen if o.time_error is not None]
        lines.append(f"{title} ({len(chosen)}): memory {mean(memory)}; step time {mean(step)}")
    return lines


def accuracy_line(outcomes: list[Outcome]) -> str:
    """The sentence in which plans of GPUs state their accuracy, measured on rows that nothing was fitted on."""
    parts = []
    for what, name in (("memory", "memory"), ("time", "step time")):
        errors = [abs(e) for o in outcomes if not o.fitted and (e := getattr(o, f"{what}_error")) is not None]
        if errors:
            mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
            parts.append(f"{name} off by {mean:.1f}% on average, {worst:.1f}% at worst (of {len(errors)})")
    return f"published training runs on GPUs that no constant was fitted on: {'; '.join(parts)}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="write docs/plan_accuracy.md and the plan's accuracy line")
    parser.add_argument("--quick", action="store_true", help="make layers that are alike once")
    options = parser.parse_args()
    record = Record("plan_accuracy", quiet=options.json)
    outcomes: list[Outcome] = []
    left_out: list[str] = []
    unknown = False
    with options.file.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                outcomes.append(predict(row, options.quick))
                record.say(f"{table(outcomes[-1:])[2]} ({outcomes[-1].seconds:.0f} s)")
                record.rows.append(outcomes[-1].to_json())
            except (ValueError, KeyError, Mistakes) as error:
                left_out.append(f"{row['src']} ({row['model']}, {row['gpus']} devices): {str(error).splitlines()[0]}")
                unknown |= isinstance(error, UnknownModel)
    lines = [*table(outcomes), "", *summary(outcomes), *(f"left out: {words}" for words in left_out)]
    record.say("\n".join(lines))
    for title, chosen in (("all", outcomes), ("held_out", [o for o in outcomes if not o.fitted])):
        for what in ("memory", "time"):
            errors = [100 * abs(e) for o in chosen if (e := getattr(o, f"{what}_error")) is not None]
            if errors:
                record.figure(f"{title}.{what}.mean", sum(errors) / len(errors), "% off")
                record.figure(f"{title}.{what}.worst", max(errors), "% off")
    if options.write:
        head = "# How far the plan is from what others measured\n\n"
        head += f"Written by `python benchmarks/plan_accuracy.py FILE{' --quick' * options.quick} --write`.\n\n"
        (ROOT / "docs" / "plan_accuracy.md").write_text(head + "\n".join(lines) + "\n")
        (ROOT / "plan" / "accuracy.txt").write_text(accuracy_line(outcomes) + "\n")
    record.close(write=options.record, as_json=options.json)
    sys.exit(0 if outcomes and not unknown else 1)


if __name__ == "__main__":
    main()
