"""Pipelines between hosts: step times beside FSDP on the same hosts, and beside torch's own pipelines.

    tpshard doctor --measure measured.yaml        this machine's constants, for the predicted times
    python benchmarks/pipeline.py --netlab NETLAB --device measured.yaml --record
    python benchmarks/pipeline.py --netlab NETLAB --hosts 2 --rates 250mbit --schedules 1f1b --rounds 5

The second takes 2 and 4 hosts at 250 Mbit/s and 1 Gbit/s, about ten minutes on a machine that does nothing else; the
third takes one cell, a minute. Hosts are network namespaces of this machine with one process of one thread each; the
script NETLAB makes them (`up HOSTS RATE`, `run 1 -- COMMAND`, `down`) as root. All variants live in the same processes
and take a step each in turn, so that what else the machine does meets them alike. Every variant trains the same model
from the same weights on the same batch, with clipping by the global norm and AdamW, and recomputes nothing; the losses
of the first step have to agree. A step's time is the slowest rank's, from a barrier to the end of its update.

The bubble is the share of the ranks' time in the schedule that they do not compute. Beside it stand that of the table
with the measured times of the tasks (`table`), the same if what a task sends arrives as late as planned (`sends`), and
the plan's own (`plan`). Where there are more hosts than cores, stages that should wait for each other compete for cores
instead: rows say so, and of the three only the plan knows of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tpshard.models.families.rope import rotation
from tpshard.models.family_model import FamilyModel
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.optimizers.adamw import treatments
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pipeline.schedules import StageTask
from tpshard.parallelism.runtime.context import Context, connect
from tpshard.parallelism.runtime.groups import Groups
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.plan import planner
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TASKS
from tpshard.recipes.reading.load import loads
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.run.training_engine import TrainingEngine

from record import Record, parser_of

SEED, RATE = 3, 1e-3
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B"}
RECIPE = """
name: hosts
cluster: {{device: {device}, nodes: 1, devices_per_node: {hosts}}}
mesh: {mesh}
model: {{preset: tiny, layers: 8, width: 256, heads: 8, kv_heads: 8, head_dim: 32, mlp: 704, seq_len: {seq}}}
batch: {{global_sequences: {sequences}{per_device}}}
compile: eager
remat: none
{pipeline}
"""


def setting_of(hosts: int, options: dict[str, Any], schedule: str | None) -> Setting:
    """The recipe of a pipeline; without a schedule that of FSDP, which takes its sequences in one micro-batch."""
    sequences, micros = options["sequences"], options["micro_batches"]
    whole = f", per_device: {sequences // hosts}"
    text = RECIPE.format(
        device=options["device"], hosts=hosts, seq=options["seq_len"], sequences=sequences,
        mesh=f"{{pp: {hosts}, fsdp: 1}}" if schedule else f"{{fsdp: {hosts}}}", per_device="" if schedule else whole,
        pipeline=f"pipeline: {{schedule: {schedule}, micro_batches: {micros}}}" if schedule else "",
    )  # fmt: skip
    return Setting.of(loads(text))


def batch_of(options: dict[str, Any]) -> StepBatch:
    generator = torch.Generator().manual_seed(SEED)
    rows, length = options["sequences"], options["seq_len"]
    tokens = torch.randint(0, 2048, (rows, length + 1), generator=generator)
    positions = torch.arange(length).expand(rows, length).contiguous()
    tensors = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous(),
               "documents": torch.zeros_like(positions), "positions": positions}  # fmt: skip
    return StepBatch(tensors, ("",) * rows)


# ---- tpshard --------------------------------------------------------------------------------------------------------
class TpshardVariant:
    """An engine of tpshard; `step` returns the loss, the norm, and of a pipeline what it computed and waited."""

    def __init__(self, context: Context, setting: Setting, batch: StepBatch):
        self.programs = training.build(setting)
        context.agree(self.programs.fingerprints)
        self.engine: Any = TrainingEngine(self.programs, context, spec_of(setting).initial_block)
        assert isinstance(self.engine, TrainingEngine)
        self.engine.initialize(SEED)
        self.rows, plan = setting.batch, setting.batch
        mine = plan.rows(self.engine.data_rank)
        whole = batch.rows(mine.start, mine.stop)
        self.micros = [whole.rows(i * plan.per_device, (i + 1) * plan.per_device) for i in range(plan.micro_batches)]
        self.number = 0
        self.waited = self.computed = self.walked = 0.0
        self.taken: dict[tuple[str, int], list[float]] = {}
        if self.programs.pipeline is not None:
            self.engine.mail.wait = self._timed(self.engine.mail.wait, self._wait)
            self.engine._call = self._timed(self.engine._call, self._compute)
            self.engine._do = self._timed(self.engine._do, self._walk)

    def step(self) -> tuple[float, float]:
        self.number += 1
        self.waited = self.computed = self.walked = 0.0
        for micro in self.micros:
            self.engine.accumulate(micro, seed=0)
        result = self.engine.update(RATE, self.number)
        return result.loss, result.grad_norm

    def _timed(self, function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def measure_time(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            note(time.perf_counter() - start, *args)
            return result

        return measure_time

    def _wait(self, seconds: float, *args: Any) -> None:
        self.waited += seconds

    def _walk(self, seconds: float, *args: Any) -> None:
        self.walked += seconds

    def _compute(self, seconds: float, program: Any, task: StageTask, inputs: Any) -> None:
        self.taken.setdefault((task.kind, task.stage), []).append(seconds - self.waited)
        self.computed += seconds - self.waited
        self.waited = 0.0


def spec_of(setting: Setting) -> FamilyModel:
    return FamilyModel.of_preset("tiny", setting.recipe.model.overrides())


# ---- torch ----------------------------------------------------------------------------------------------------------
class PeerStage(nn.Module):
    """Some layers of the same model, with the embedding before the first and the head behind the last."""

    def __init__(self, model: nn.Module, start: int, end: int, last: bool, length: int):
        super().__init__()
        whole: Any = model
        self.tok_embed = whole.tok_embed if start == 0 else None
        self.layers = whole.layers[start:end]
        self.norm, self.output = (whole.norm, whole.output) if last else (None, None)
        c = whole.config
        positions = torch.arange(length).unsqueeze(0)
        self.turn = rotation(positions, c.head_dim, c.rope_theta, c.rope_scaling, torch.float32)
        self.documents = torch.zeros(1, length, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embed is None else self.tok_embed(x)
        documents = self.documents.expand(x.shape[0], -1)
        for layer in self.layers:
            x = layer(x, self.turn, documents)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


class TorchVariant:
    """A schedule of torch.distributed.pipelining on the same split, with AdamW and clipping by the global norm."""

    def __init__(self, context: Context, setting: Setting, schedule: str, split: Sequence[int], batch: StepBatch):
        from torch.distributed import pipelining

        rank, world, stages = context.rank, context.world, len(split)
        ends = list(itertools.accumulate(split))
        model = spec_of(setting).build(device="cpu", seed=SEED)
        micros, count = setting.batch.micro_batches, batch["targets"].numel()
        mine = []
        for i in range(rank, stages, world):
            part = PeerStage(model, ends[i] - split[i], ends[i], i == stages - 1, setting.seq_len)
            mine.append(pipelining.PipelineStage(part, i, stages, torch.device("cpu")))

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy_sum(logits, targets)[0] / count  # type: ignore[no-any-return]

        kind: Any = getattr(pipelining, SCHEDULES[schedule])
        self.schedule = kind(mine if world < stages else mine[0], micros, loss_fn=loss_of, scale_grads=False)
        named = {f"{i}.{n}": p for i, stage in enumerate(mine) for n, p in stage.submod.named_parameters()}
        treated = treatments({n: tuple(p.shape) for n, p in named.items()}, {})
        decayed = [p for n, p in named.items() if p.dim() > 1]
        rest = [p for n, p in named.items() if p.dim() <= 1]
        assert len(treated) == len(named)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.params = [*decayed, *rest]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
        self.first, self.last = rank == 0, (stages - 1) % world == rank
        self.batch = batch

    def step(self) -> tuple[float, float]:
        losses: list[Tensor] = []
        inputs = (self.batch["tokens"],) if self.first else ()
        target = {"target": self.batch["targets"], "losses": losses} if self.last else {}
        self.schedule.step(*inputs, **target)
        squares = torch.stack([p.grad.square().sum() for p in self.params if p.grad is not None]).sum()
        both = torch.stack([squares, torch.stack(losses).sum().detach() if losses else torch.zeros(())])
        dist.all_reduce(both)
        norm = both[0].sqrt()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for p in self.params:
            assert p.grad is not None
            p.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(both[1]), float(norm)


# ---- a rank ---------------------------------------------------------------------------------------------------------
def worker(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp:{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    place = WorkerPlace(rank, world, 0, 1, address, "tpshard")
    batch = batch_of(options)
    with connect(place, Mesh({"pp": world, "dp": 1, "fsdp": 1, "tp": 1}), watch=False) as context:
        flat = replace(context, groups=Groups(Mesh({"dp": 1, "fsdp": world, "tp": 1})))
        variants: dict[str, Any] = {"fsdp": TpshardVariant(flat, setting_of(world, options, None), batch)}
        for schedule in options["schedules"]:
            setting = setting_of(world, options, schedule)
            ours = variants[schedule] = TpshardVariant(context, setting, batch)
            pipeline = ours.programs.pipeline
            assert pipeline is not None
            variants[f"torch {schedule}"] = TorchVariant(context, setting, schedule, pipeline.layers, batch)
        times: dict[str, list[float]] = {name: [] for name in variants}
        bubbles: dict[str, list[float]] = {schedule: [] for schedule in options["schedules"]}
        first: dict[str, tuple[float, float]] = {}
        for turn in range(options["warmup"] + options["rounds"]):
            names = list(variants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if turn == options["warmup"] and isinstance(variants[name], TpshardVariant):
                    variants[name].taken.clear()
                context.barrier()
                start = time.perf_counter()
                result = variants[name].step()
                step_s = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(step_s, dist.ReduceOp.MAX)
                first.setdefault(name, result)
                if turn >= options["warmup"]:
                    times[name].append(float(step_s))
                    if name in bubbles:
                        idle = 1.0 - variants[name].computed / variants[name].walked
                        bubbles[name].append(statistics.mean(context.gather(idle)))
        measured = {"times": times, "bubbles": bubbles, "first": first, "split": {}, "tasks": {}, "planned": {},
                    "bubbles_of_table": {}}  # fmt: skip
        for schedule in options["schedules"]:
            engine = variants[schedule]
            mean = {key: statistics.median(values) for key, values in engine.taken.items()}
            every = {tuple(key): value for part in context.gather([*mean.items()]) for key, value in part}
            pipeline, price = engine.programs.pipeline, planner.price_training(engine.programs)
            late = max(stage.late_s for stage in price.pipeline.stages)
            table, seconds = pipeline.table, lambda task, every=every: every[task.kind, task.stage]
            measured["bubbles_of_table"][schedule] = [
                table.bubble(table.timetable(seconds)),
                table.bubble(table.timetable(seconds, lambda task, late=late: late)),
            ]
            measured["planned"][schedule] = [price.step_s, price.pipeline.bubble]
            measured["tasks"][schedule] = [
                [kind, stage, task_s, price.pipeline.stages[stage].seconds[TASKS[kind]]]
                for (kind, stage), task_s in sorted(every.items())
            ]
            measured["split"][schedule] = list(pipeline.layers)
        measured["planned"]["fsdp"] = planner.price_training(variants["fsdp"].programs).step_s
        expected = first["fsdp"]
        for name, (loss, norm) in first.items():
            if abs(loss / expected[0] - 1) > 1e-4 or abs(norm / expected[1] - 1) > 1e-3:
                raise SystemExit(f"{name} trains something else: loss {loss}, norm {norm}, where FSDP has {expected}")
        if context.is_main:
            Path(options["out"]).write_text(json.dumps(measured))


# ---- the hosts ------------------------------------------------------------------------------------------------------
@contextmanager
def links(netlab: str, hosts: int, rate: str) -> Iterator[None]:
    subprocess.run([netlab, "up", str(hosts), rate], check=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run([netlab, "down"], check=True)


def device_with(file: str, rate: str, folder: str) -> str:
    """A device file of this machine with links of a rate between its processes; "cpu" if none is given.

    The hosts share the machine's cores, so they are priced as processes of one host, which contend as measured, but
    with a link each. Sending takes the cores' time by the byte, so a slower link keeps fewer of them busy.
    """
    if not file:
        return "cpu"
    link = float(re.sub(r"[a-z]", "", rate)) * (1e9 if "g" in rate else 1e6) / 8

    def linked(match: re.Match[str]) -> str:
        before, sent, between, busy = match.groups()
        share = float(busy) * min(1.0, link / (float(sent) * 1e9))
        return f"{before}{link / 1e9:g} GB/s{between}{share:.3g}"

    crowd = r"(?m)^(    \d+: \{.*bandwidth: )([\d.e+-]+) GB/s(.*slowdown: )([\d.e+-]+)"
    text, times = re.subn(crowd, linked, Path(file).read_text())
    if not times:
        raise SystemExit(f"{file} has no `crowds` with `bandwidth` and `slowdown`, which `doctor --measure` writes")
    measured = Path(folder) / f"measured_{rate}.yaml"
    measured.write_text(text)
    return str(measured)


def measure(arguments: argparse.Namespace, hosts: int, rate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, links(arguments.netlab, hosts, rate):
        settings = {
            "worker": True, "out": f"{folder}/measured.json", "device": device_with(arguments.device, rate, folder),
            "rounds": arguments.rounds, "warmup": arguments.warmup, "schedules": arguments.schedules,
            "sequences": arguments.sequences, "seq_len": arguments.seq_len, "micro_batches": arguments.micro_batches,
        }  # fmt: skip
        command = [sys.executable, __file__, "--worker", json.dumps(settings)]
        subprocess.run([arguments.netlab, "run", "1", "--", *command], check=True)
        measured: dict[str, Any] = json.loads(Path(settings["out"]).read_text())
    return measured


def rows_of(measured: dict[str, Any], hosts: int, rate: str) -> Iterator[dict[str, Any]]:
    times = measured["times"]
    for schedule in measured["tasks"]:
        ratio = partial(_ratios, times[schedule])
        yield {
            "hosts": hosts, "rate": rate, "schedule": schedule, "split": measured["split"][schedule],
            "step_s": statistics.median(times[schedule]), "fsdp_s": statistics.median(times["fsdp"]),
            "torch_s": statistics.median(times[f"torch {schedule}"]), "of_fsdp": ratio(times["fsdp"]),
            "of_torch": ratio(times[f"torch {schedule}"]), "bubble": statistics.median(measured["bubbles"][schedule]),
            "bubble_of_table": measured["bubbles_of_table"][schedule][0],
            "bubble_with_sends": measured["bubbles_of_table"][schedule][1],
            "bubble_planned": measured["planned"][schedule][1], "predicted_s": measured["planned"][schedule][0],
            "fsdp_predicted_s": measured["planned"]["fsdp"],
            "tasks": measured["tasks"][schedule],  # kind, stage, seconds measured, seconds planned
            "more_ranks_than_cores": hosts > len(os.sched_getaffinity(0)),
        }  # fmt: skip


def _ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of steps that were taken in the same turn."""
    return [a / b for a, b in zip(mine, others, strict=True)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--netlab", default="netlab", help="the script that makes hosts")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["250mbit", "1gbit"])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=11, help="steps of every variant")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--device", default="", help="a file of `tpshard doctor --measure`, for predicted step times")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    record = Record("pipeline", quiet=arguments.json)
    heads = ("torch", "FSDP", "/torch", "/FSDP", "bubble", "table", "sends", "plan")
    record.say(f"hosts     link schedule             step {' '.join(head.rjust(7) for head in heads)} predicted")
    for hosts, rate in itertools.product(arguments.hosts, arguments.rates):
        for row in rows_of(measure(arguments, hosts, rate), hosts, rate):
            name = f"{hosts}.{rate}.{row['schedule']}"
            torch_, fsdp = (record.figure(f"{name}.of_{k}", row.pop(f"of_{k}"), "times") for k in ("torch", "fsdp"))
            record.rows.append(row)
            record.say(
                f"{hosts:>5} {rate:>8} {row['schedule']:<17} {row['step_s']:>7.3f} {row['torch_s']:>7.3f} "
                f"{row['fsdp_s']:>7.3f} {torch_.median:>7.2f} {fsdp.median:>7.2f} {row['bubble']:>7.2f} "
                f"{row['bubble_of_table']:>7.2f} {row['bubble_with_sends']:>7.2f} {row['bubble_planned']:>7.2f} "
                f"{row['predicted_s']:>9.3f}" + (" more ranks than cores" if row["more_ranks_than_cores"] else "")
            )
    record.close(write=arguments.record, as_json=arguments.json)


if __name__ == "__main__":
    main()
