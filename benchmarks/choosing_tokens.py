"""Choosing a step's tokens: the time of each setting, on the server's front and on the rank that has the logits.

    python benchmarks/choosing_tokens.py [--rows 64] [--vocab 128256] [--repeat 5] [--record]

The front's time is that of saying what a step asks for, as bytes, for sequences of 2,200 tokens that it has told of
before (`picks.Told`). The rank chooses from logits of a Gaussian distribution: of deviation 3 for `flat`, where top-p
0.95 takes thousands of tokens, and otherwise of 6. Both are CPU seconds of one thread, the least of some. Beside them
stands a step of `--step` with random weights in fp32, one token for each row, computed with one layer and with two and
continued to all of them: `share` is the rank's part of both. Exits with 1 if a front takes over 1.5 ms or a share is
more than 5%.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.presets import preset
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.runtime.context import alone
from tpshard.parallelism.runtime.heap import keep_freed_memory
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server.serve_setting import ServeSetting
from tpshard.programs.server.served import Served
from tpshard.programs.server.serving import BLOCK_SIZE, build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.picks import CHOOSE, Picks, Told, picks_of
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.sampling import Recalled, pick
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Weights

from record import Record, parser_of

FRONT_MS, SHARE = 1.5, 0.05
SETTINGS = {
    "greedy": Sampling(temperature=0),
    "temperature": Sampling(temperature=0.8),
    "min_p": Sampling(min_p=0.05),
    "top_k": Sampling(top_k=50),
    "top_p": Sampling(top_p=0.95),
    "top_p, flat": Sampling(top_p=0.95),
    "penalties": Sampling(0.8, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1),
    "bias of 300": Sampling(temperature=0, logit_bias=tuple((7 * i, 0.5) for i in range(300))),
    "20 logprobs": Sampling(temperature=0, logprobs=20),
}


def least_ms(run: Callable[[], object], repeat: int) -> float:
    """The least CPU milliseconds of some runs."""
    times = []
    for _ in range(repeat):
        began = time.process_time()
        run()
        times.append(1e3 * (time.process_time() - began))
    return min(times)


def measure(sampling: Sampling, logits: torch.Tensor, repeat: int) -> tuple[float, float]:
    """The milliseconds of the front and of the rank, for as many sequences as there are rows of logits."""
    count, vocab = logits.shape
    random = np.random.default_rng(0)
    prompts = random.integers(vocab, size=(count, 2000)).tolist()
    sequences = [Sequence(tuple(prompt), sampling, 500, choice=i) for i, prompt in enumerate(prompts)]
    rows = [(sequence, CHOOSE) for sequence in sequences]
    told, recalled = Told(count), Recalled(0, vocab, count, logits.device)
    messages: list[bytes] = []

    def go_on(tokens: int = 1) -> None:
        for sequence in sequences:
            sequence.tokens += random.integers(vocab, size=tokens).tolist()

    def front() -> None:
        messages.append(picks_of(rows, told).encode())

    go_on(200)
    front()
    times = []
    for _ in range(repeat):
        go_on()
        times.append(least_ms(front, 1))
    for message in messages[:-1]:
        recalled.recall(Picks.decode(message).told)
    last = Picks.decode(messages[-1])
    return min(times), least_ms(lambda: pick(logits, last, recalled), repeat)


def step_ms(config: ModelConfig, rows: int, repeat: int) -> float:
    """CPU milliseconds of a server's step of one token for each of some sequences."""
    recipe = loads(f"serve: {{mesh: {{tp: 1}}, requests: {rows}, step_tokens: {rows}}}\nmodel: {{preset: tiny}}\n")
    setting = ServeSetting.of(recipe, Served(FamilyModel(config), "fp32"), "cpu")
    programs = build_serving(setting, [setting.fitting(rows)])
    shapes = {name: tuple(p.shape) for name, p in setting.model.named_parameters()}
    weights = Weights(shapes, lambda _name, _starts, sizes: torch.randn(*sizes) * 0.02)
    runner = ProgramRunner(alone(torch.device("cpu")), programs, weights, rows + 1)
    each, table = np.arange(rows), np.arange(1, rows + 1)[:, None]
    batch = StepInput(each, each * 0, table[:, 0] * BLOCK_SIZE, each, table, each)
    runner.logits(batch)
    return least_ms(lambda: runner.logits(batch), repeat)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--step", default="llama3-8b")
    parser.add_argument("--repeat", type=int, default=5)
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    record = Record("choosing_tokens", quiet=options.json)
    config = replace(preset(options.step), vocab=options.vocab, max_seq=64)
    one, two = (step_ms(replace(config, layers=layers), options.rows, 2) for layers in (1, 2))
    step = one + (config.layers - 1) * (two - one)
    record.say(f"a step of {options.rows} rows of {options.step}: {step / 1e3:.2f} s")
    record.say(f"{'':<14}{'front ms':>9}{'rank ms':>9}{'share':>8}")
    worst = False
    for name, sampling in SETTINGS.items():
        spread = 3 if "flat" in name else 6
        logits = torch.randn(options.rows, options.vocab, generator=torch.Generator().manual_seed(0)) * spread
        front, rank = measure(sampling, logits, options.repeat)
        share = rank / (step + rank)
        worst |= front > FRONT_MS or share > SHARE
        record.rows.append({"setting": name, "front_ms": front, "rank_ms": rank, "step_ms": step, "share": share})
        record.say(f"{name:<14}{front:>9.2f}{rank:>9.1f}{share:>8.2%}")
    record.figure("front", max(row["front_ms"] for row in record.rows), "ms")
    record.figure("share", 100 * max(row["share"] for row in record.rows), "%")
    record.close(write=options.record, as_json=options.json)
    sys.exit(int(worst))


if __name__ == "__main__":
    main()
