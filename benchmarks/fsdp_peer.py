"""A training step of FSDP between hosts, beside torch's FSDP2 (`fully_shard`) and DDP on the same hosts.

    python benchmarks/fsdp_peer.py --netlab NETLAB [--hosts 2 4] [--rates 500mbit 2gbit] [--record]

Hosts are network namespaces of this machine with one process of one thread each; the script NETLAB makes them (`up
HOSTS RATE`, `run 1 -- COMMAND`, `down`) as root. All variants train one model in fp32 from the same weights on the same
batch, with clipping by the global norm and AdamW, and recompute nothing. They live in the same processes and take a
step each in turn, so that what else the machine does meets them alike; the first losses and gradients' norms have to
agree. A step is the slowest rank's, from a barrier to the end of its update. `planned` is the plan's step on a file of
`tpshard doctor --measure` with links of that rate (`--device`). About two minutes a cell on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tpshard.models.families.rope import rotation
from tpshard.models.family_model import FamilyModel
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.runtime.context import connect
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.plan import planner
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads
from tpshard.train.data.step_batch import StepBatch

from pipeline import RATE, SEED, TpshardVariant, batch_of, device_with, links
from record import Record, parser_of

RECIPE = """
name: hosts
cluster: {{device: {device}, nodes: 1, devices_per_node: {hosts}}}
mesh: {{fsdp: {hosts}}}
model: {{preset: tiny, layers: {layers}, width: {width}, heads: 8, kv_heads: 8, head_dim: {head_dim}, mlp: {mlp},
        seq_len: {seq_len}}}
batch: {{global_sequences: {sequences}, per_device: {per_device}}}
compile: eager
remat: none
"""


def setting_of(hosts: int, options: dict[str, Any]) -> Setting:
    width = options["width"]
    sizes = {"head_dim": width // 8, "mlp": 11 * width // 4, "per_device": options["sequences"] // hosts}
    return Setting.of(loads(RECIPE.format(hosts=hosts, **sizes, **options)))


class Whole(nn.Module):
    """The model as a module of torch: the sum of the rows' losses over the tokens of the whole batch."""

    def __init__(self, model: nn.Module, length: int):
        super().__init__()
        self.model = model
        config: Any = model.config
        positions = torch.arange(length).unsqueeze(0)
        self.turn = rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling, torch.float32)

    def forward(self, batch: StepBatch) -> Tensor:
        whole: Any = self.model
        x = whole.tok_embed(batch["tokens"])
        for layer in whole.layers:
            x = layer(x, self.turn, batch["documents"])
        return cross_entropy_sum(whole.output(whole.norm(x)), batch["targets"])[0]


class TorchVariant:
    """FSDP2 with every layer, and the rest, as a unit; or DDP. AdamW and clipping by the global norm are torch's."""

    def __init__(self, setting: Setting, batch: StepBatch, tokens: int, *, shard: bool):
        spec = setting.spec
        assert isinstance(spec, FamilyModel)
        model: Any = spec.build(device="cpu", seed=SEED)
        whole: Any = Whole(model, setting.seq_len)
        if shard:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(whole)
        self.params = list(whole.parameters())
        groups = [{"params": [p for p in self.params if p.dim() > 1], "weight_decay": 0.1},
                  {"params": [p for p in self.params if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
        self.run = whole if shard else DistributedDataParallel(whole)
        self.batch, self.scale = batch, dist.get_world_size() / tokens  # both divide gradients by the ranks

    def step(self) -> tuple[float, float]:
        loss = self.run(self.batch) * self.scale
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size(), float(norm)


def worker(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # an embedding's view, which nothing changes
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp:{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with connect(
        WorkerPlace(rank, world, 0, 1, address, "tpshard"), Mesh({"dp": 1, "fsdp": world, "tp": 1}), watch=False
    ) as context:
        setting, batch = setting_of(world, options["recipe"]), batch_of(options["recipe"])
        tokens, each = batch["targets"].numel(), len(batch["tokens"]) // world
        mine = batch.rows(rank * each, (rank + 1) * each)
        ours = TpshardVariant(context, setting, batch)
        variants: dict[str, Any] = {"tpshard": ours, "fsdp2": TorchVariant(setting, mine, tokens, shard=True),
                                    "ddp": TorchVariant(setting, mine, tokens, shard=False)}  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in variants}
        first: dict[str, tuple[float, float]] = {}
        for turn in range(options["warmup"] + options["rounds"]):
            names = list(variants)
            for name in names[turn % 3 :] + names[: turn % 3]:
                context.barrier()
                start = time.perf_counter()
                result = variants[name].step()
                step_s = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(step_s, dist.ReduceOp.MAX)
                first.setdefault(name, result)
                if turn >= options["warmup"]:
                    times[name].append(float(step_s))
        for name, (loss, norm) in first.items():
            if abs(loss / first["tpshard"][0] - 1) > 1e-4 or abs(norm / first["tpshard"][1] - 1) > 1e-3:
                raise SystemExit(f"{name} trains something else: loss {loss}, norm {norm}, not {first['tpshard']}")
        if context.is_main:
            planned = planner.price_training(ours.programs).step_s
            Path(options["out"]).write_text(json.dumps({"times": times, "planned_s": planned}))
        context.barrier()


def measure(options: argparse.Namespace, hosts: int, rate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, links(options.netlab, hosts, rate):
        recipe = {key: getattr(options, key) for key in ("layers", "width", "sequences", "seq_len")}
        recipe["device"] = device_with(options.device, rate, folder)
        settings = {"recipe": recipe, "out": f"{folder}/measured.json", "rounds": options.rounds,
                    "warmup": options.warmup}  # fmt: skip
        command = [sys.executable, __file__, "--worker", json.dumps(settings)]
        subprocess.run([options.netlab, "run", "1", "--", *command], check=True)
        measured: dict[str, Any] = json.loads(Path(settings["out"]).read_text())
    return measured


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--netlab", default="netlab", help="the script that makes hosts")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2])
    parser.add_argument("--rates", nargs="+", default=["500mbit", "2gbit"])
    parser.add_argument("--rounds", type=int, default=9, help="steps of every variant")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--device", default="", help="a file of `tpshard doctor --measure`, for planned step times")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return
    record = Record("fsdp_peer", quiet=options.json)
    record.say("hosts     rate  tpshard    fsdp2      ddp  /fsdp2   /ddp  planned")
    for hosts, rate in itertools.product(options.hosts, options.rates):
        measured = measure(options, hosts, rate)
        times = measured["times"]
        of = {peer: [a / b for a, b in zip(times["tpshard"], times[peer], strict=True)] for peer in ("fsdp2", "ddp")}
        figures = {peer: record.figure(f"{hosts}.{rate}.of_{peer}", of[peer], "times its step") for peer in of}
        row = {"hosts": hosts, "rate": rate, **{f"{name}_s": statistics.median(s) for name, s in times.items()},
               "planned_s": measured["planned_s"]}  # fmt: skip
        record.rows.append(row)
        record.say(
            f"{hosts:>5} {rate:>8} {row['tpshard_s']:>8.3f} {row['fsdp2_s']:>8.3f} {row['ddp_s']:>8.3f} "
            f"{figures['fsdp2'].median:>7.2f} {figures['ddp'].median:>6.2f} {row['planned_s']:>8.3f}"
        )
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
