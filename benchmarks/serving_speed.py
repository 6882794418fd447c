"""Compares serving speed with transformers on the same requests: tokens/s, time to first token and between tokens.

    python benchmarks/serving_speed.py [--json] [--layers 8] [--width 1024] [--requests 1,8,64] [--new 32]
        [--threads 2] [--no-compile]

A random Llama is written as a Hugging Face folder, and again with 4-bit weights (groups of 128, rounded to nearest,
rows of `down` in act-order), which are served in bf16 by torch's int4 product. tpshard's engine runs as in the server:
worker processes, batch invariant, an empty cache. transformers generates the same requests as one left-padded batch
with its cache and the same number of threads, eager and compiled; the better one counts. All requests arrive at once,
decoding is greedy, end tokens are ignored. Runs are interleaved; shown is the median of `--repeat`. `ratio` is of
tokens per second; `cpu` of tokens per CPU second of all its processes, for a machine that others use too; `first` of
the time to the first token. Above 1, tpshard is faster than the better of eager and compiled.

The record's name has the vector instructions. Where a CPU has AVX-512, OPENBLAS_CORETYPE=Haswell
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 give the record of AVX2.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_format import write_into
from tpshard.kernels.quantized.gptq_solver import Settings, ordering, round_to_nearest
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models import build, to_hf
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.hf_config import write_config
from tpshard.models.folders.hf_names import hf_tensors
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.job import Job
from tpshard.serve.engine.ranks import Ranks

from record import Record, in_one_line, parser_of

WORKER = [sys.executable, "-m", "tpshard.cli.shared.serve_worker"]
SETTINGS = Settings(bits=4, group_size=128)
"""How weights are quantized."""


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    first_s: float
    """Median time to the first token."""
    between_s: float
    """Median time between two tokens of one answer."""
    cpu_s: float
    """CPU seconds of a token."""

    @property
    def s(self) -> float:
        """Seconds of a token of all requests."""
        return 1 / self.tokens_per_s


def prompts(count: int, vocab: int) -> list[tuple[int, ...]]:
    draw = random.Random(count)
    return [tuple(draw.randrange(vocab) for _ in range(draw.randrange(16, 65))) for _ in range(count)]


def summary(began: float, stamps: list[list[float]], cpu_s: float) -> Measured:
    """The result of a run from its requests' token times. cpu_s: CPU seconds of the whole run."""
    ended = max(times[-1] for times in stamps)
    gaps = [b - a for times in stamps for a, b in pairwise(times)]
    tokens = sum(map(len, stamps))
    first = statistics.median(times[0] - began for times in stamps)
    return Measured(tokens / (ended - began), first, statistics.median(gaps), cpu_s / tokens)


def cpu_seconds() -> float:
    """CPU seconds of this process and of the workers that it started."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def run_engine(ranks: Ranks, requests: list[tuple[int, ...]], new: int) -> Measured:
    engine = Engine(ranks, max_running=64)
    sequences = [Sequence(p, Sampling(temperature=0), new) for p in requests]
    stamps: dict[int, list[float]] = {s.id: [] for s in sequences}
    began, cpu = time.perf_counter(), cpu_seconds()
    for s in sequences:
        engine.add(s)
    while engine.busy:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            stamps[event.sequence.id].append(now)
    return summary(began, list(stamps.values()), cpu_seconds() - cpu)


# ---- transformers, in a process of its own, which shares neither threads nor memory with the engine ------------------
class Clock:
    """Notes the time of each token, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@cache
def peer_model(folder: Path, compiled: bool, threads: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if compiled:
        # torch may take code of other vector instructions from its usual cache, which corrupts memory
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "compiled")
        model.forward = torch.compile(model.forward, dynamic=True)
    return model


def generate(folder: Path, compiled: bool, threads: int, requests: list[tuple[int, ...]], new: int) -> Measured:
    from transformers import StoppingCriteriaList

    model = peer_model(folder, compiled, threads)
    longest = max(map(len, requests))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in requests])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in requests])
    clock = Clock()
    began, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True,
            pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]),
        )  # fmt: skip
    return summary(began, [clock.times] * len(requests), time.process_time() - cpu)


def run_peer(
    process: Executor, folder: Path, compiled: bool, threads: int, requests: list[tuple[int, ...]], new: int
) -> Measured:
    return process.submit(generate, folder, compiled, threads, requests, new).result()


# ---- the models and the comparison -----------------------------------------------------------------------------------
def config_of(layers: int, width: int) -> ModelConfig:
    return ModelConfig(
        family="llama", layers=layers, width=width, heads=width // 64, kv_heads=max(1, width // 256), head_dim=64,
        mlp=width * 11 // 4 // 256 * 256, vocab=8192, max_seq=2048, seq_len=512, dtype="fp32",
    )  # fmt: skip


def write_models(folder: Path, config: ModelConfig) -> tuple[Path, Path]:
    """(dense, quantized) folders of one random model."""
    model = build(config, device="cpu", seed=3)
    dense, quantized = folder / "dense", folder / "quantized"
    to_hf(model, dense)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tensors, linears = {}, {}
    for stored, ((name, _),) in hf_tensors(config, list(parameters)).items():
        if ".attention.w" in name or ".mlp." in name:
            act_order = name.endswith(".down.weight")
            linears[stored.removesuffix(".weight")] = nearest(parameters[name], act_order)
        else:
            tensors[stored] = parameters[name].half()
    how = GPTQConfig(bits=SETTINGS.bits, group_size=SETTINGS.group_size, desc_act=True)
    quantized.mkdir()
    write_into(quantized, write_config(config, "fp16"), linears.items(), tensors.items(), how)
    return dense, quantized


def nearest(weight: torch.Tensor, act_order: bool) -> Quantized:
    """weight [outputs, inputs] in 4 bits; with `act_order` the rows of a group lie apart."""
    importance = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(1))
    return round_to_nearest(weight, SETTINGS, ordering(importance, SETTINGS, "global" if act_order else "none"))


def job(folder: Path, *overrides: str) -> Job:
    text = "name: served\ncluster: {device: cpu}\nmodel: {preset: tiny}\n"
    recipe = loads(text, [f"serve.checkpoint={folder}", "timeout_s.step=600", *overrides])
    return Job.of(build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu")), str(folder), 1024)


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    config = config_of(options.layers, options.width)
    torch.set_num_threads(1)  # as `tpshard serve` does: idle threads would spin on the cores that the ranks compute on
    dense, quantized = write_models(folder, config)
    ours = {
        f"tpshard tp {tp} {label}": job(source, f"serve.mesh.tp={tp}", f"serve.dtype={dtype}")
        for tp in options.tp
        for label, source, dtype in (("fp32", dense, "fp32"), ("4-bit", quantized, "bf16"))
    }
    peers = {"transformers eager": False} | ({} if options.no_compile else {"transformers compiled": True})
    results: dict[tuple[str, int], list[Measured]] = {}
    with ExitStack() as opened:
        ways: dict[str, Callable[[list[tuple[int, ...]], int], Measured]] = {}
        for name, compiled in peers.items():
            process = opened.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            ways[name] = partial(run_peer, process, dense, compiled, options.threads)
        for name, served in ours.items():
            os.environ["OMP_NUM_THREADS"] = str(max(1, options.threads // served.world))  # of each rank
            ways[name] = partial(run_engine, opened.enter_context(closing(Ranks(WORKER, served))))
        for count in options.requests:
            requests = prompts(count, config.vocab)
            for name, run in list(ways.items()):
                try:
                    run(requests, 4)
                except Exception as error:
                    print(f"{name}, {count} requests: {in_one_line(error)}", file=sys.stderr)
                    del ways[name]
            for _ in range(options.repeat):  # in turns: a machine whose speed drifts is as fast for all
                for name, run in ways.items():
                    results.setdefault((name, count), []).append(run(requests, options.new))
    for (name, count), runs in results.items():
        middle = sorted(runs, key=lambda m: m.tokens_per_s)[len(runs) // 2]
        beside = [results[other, count] for other in peers if (other, count) in results]
        ratios = {
            label: [min(getattr(other[i], of) for other in beside) / getattr(run, of) for i, run in enumerate(runs)]
            for label, of in (("ratio", "s"), ("cpu", "cpu_s"), ("first", "first_s"))
        }
        yield {"engine": name, "requests": count, **asdict(middle), "runs": list(map(asdict, runs)), "ratios": ratios}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each engine")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    record = Record(f"serving_{torch.backends.cpu.get_cpu_capability().lower()}", quiet=options.json)
    with tempfile.TemporaryDirectory() as folder:
        record.rows += measure(options, Path(folder))
    record.say(f"{options.layers} layers of width {options.width}, prompts of 16 to 64 tokens, {options.new} new ones")
    heads = "".join(f"{label:>7}" for label in ("ratio", "cpu", "first"))
    record.say(f"{'engine':<24}{'requests':>9}{'tokens/s':>10}{'first s':>9}{'between s':>11}{heads}")
    for row in record.rows:
        ratios = {label: statistics.median(values) for label, values in row["ratios"].items()}
        record.say(
            f"{row['engine']:<24}{row['requests']:>9}{row['tokens_per_s']:>10.1f}{row['first_s']:>9.3f}"
            f"{row['between_s']:>11.4f}" + "".join(f"{ratio:>7.2f}" for ratio in ratios.values())
        )
        if row["engine"].startswith("tpshard"):
            for label, values in row["ratios"].items():
                record.figure(f"{row['engine']}.{row['requests']}.{label}".replace(" ", "-"), values, "times")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
