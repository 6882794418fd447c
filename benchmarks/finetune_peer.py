"""Compares training with adapters with PEFT and transformers' Trainer: seconds a step, and peak memory.

    python benchmarks/finetune_peer.py [--json] [--record] [--steps 8] [--repeat 3] [--layers 6]
        [--width 512] [--cores 2]

A random Llama with adapters of rank 16 beside all its linear layers but the head, fp32, on this machine's CPU. Both
begin from one PEFT folder and read the same rows in the same order (`tpshard data show` prints them), with AdamW and
clipping of the same settings; so the losses are equal, and the script exits with 1 if they are not. Each runs in
processes of its own with the same threads, in turn, `--repeat` times. tpshard runs as `tpshard train` does, once eager
and once compiled (its default). Seconds are the median over steps, the first two left out; `cpu_s` are the CPU
seconds of a step in all processes, for a machine that others use too; memory is the most that all processes had
together, shared pages counted once (PSS). `ratio` is tpshard by the peer: below 1 tpshard needs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from record import Record, parser_of
from running import COMMAND, tpshard

LR, RANK, SEQ, BATCH = 1e-3, 16, 256, 4
SKIPPED = 2
"""Steps at the start, in which memory is allocated and code compiled."""


def prepare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes the model, its adapters at the start, a text, and the recipe; returns the rows of all steps."""
    from tpshard.models.adapters.adapted_model import AdaptedModel
    from tpshard.models.adapters.lora import Lora
    from tpshard.models.adapters.peft_folder import write_peft
    from tpshard.models.open_model import open_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    width = options.width
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=options.layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, max_position_embeddings=SEQ,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    spec = AdaptedModel(open_model(folder / "base"), Lora(RANK, 2.0 * RANK))

    def begin(name: str) -> torch.Tensor:
        return spec.initial_block(name, [0] * len(spec.shapes[name]), spec.shapes[name], 0)

    write_peft(spec, begin, folder / "adapters", base=str(folder / "base"))
    words = " ".join(f"{i * i % 9973} is the square of {i} in a field of 9973." for i in range(40_000))
    (folder / "text.jsonl").write_text(json.dumps({"text": words}) + "\n")
    (folder / "recipe.yaml").write_text(
        f"name: peer\ncluster: {{device: cpu}}\nmesh: {{}}\nmodel: {{hf: base, seq_len: {SEQ}, dtype: fp32}}\n"
        f"adapters: {{lora: {{rank: {RANK}, alpha: {2 * RANK}}}}}\n"
        "data: {source: text.jsonl, tokenizer: bytes}\n"
        f"batch: {{global_sequences: {BATCH}}}\noptimizer: {{lr: {LR}, weight_decay: 0, betas: [0.9, 0.95]}}\n"
        "schedule: {name: constant, warmup_steps: 0}\ncheckpoint: {every_steps: 100000}\n"
        f"train: {{steps: {options.steps}, init_from: adapters}}\nlogging: {{every_steps: 1, wandb: null}}\n"
    )
    shown = tpshard("data", "show", "recipe.yaml", "-n", str(BATCH * options.steps), "--json", cwd=folder)
    rows = [
        {key: [x for document in row["documents"] for x in document[key]] for key in ("tokens", "targets")}
        for row in json.loads(shown)["sequences"]
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    return rows


def peer(folder: Path, steps: int) -> None:
    """Trains by PEFT and transformers' Trainer, and prints each step's seconds and loss as JSON."""
    import peft
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = json.loads((folder / "rows.json").read_text())
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "adapters", is_trainable=True)

    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            for row in rows:  # all targets count: the class would leave the last token out
                yield {"input_ids": row["tokens"], "labels": row["targets"], "shift_labels": row["targets"]}

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)
            with (folder / "steps.txt").open("a") as log:
                log.write(f"{seconds[-1]}\n")

    seconds: list[float] = []
    arguments = transformers.TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=LR, weight_decay=0.0,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="constant", logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[Clock()])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(json.dumps({"seconds": seconds, "losses": losses}))


def watched(command: list[str], folder: Path, log: Path, cores: int) -> dict[str, Any]:
    """Runs a command that writes a line into `log` after each step: its processes' CPU seconds between the lines, and
    the most memory that they had at once, in MiB."""
    peak, marks = 0.0, dict[int, float]()
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        process = psutil.Popen(command, stdout=out, stderr=err, cwd=folder)
        process.cpu_affinity(range(cores))
        while process.poll() is None:
            held = cpu = 0.0
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    times = one.cpu_times()
                    held, cpu = held + one.memory_full_info().pss, cpu + times.user + times.system
            peak = max(peak, held / 2**20)
            if log.exists():
                marks.setdefault(log.read_text().count("\n"), cpu)
            time.sleep(0.1)
    if process.returncode:
        sys.exit((folder / "err.txt").read_text()[-4000:])
    steps = sorted(step for step in marks if step >= SKIPPED)
    return {"peak_mib": peak, "cpu_s": (marks[steps[-1]] - marks[steps[0]]) / (steps[-1] - steps[0])}


def by_tpshard(folder: Path, how: str, cores: int) -> dict[str, Any]:
    run = f"runs/{how}-{time.monotonic_ns()}"
    command = [*COMMAND, "train", "recipe.yaml", f"compile={how}", f"run.dir={run}"]
    metrics = folder / run / "metrics.jsonl"
    measured = watched(command, folder, metrics, cores)
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row]
    return measured | {"seconds": [row["step_s"] for row in rows], "losses": [row["loss"] for row in rows]}


def by_peer(folder: Path, steps: int, cores: int) -> dict[str, Any]:
    (folder / "steps.txt").unlink(missing_ok=True)
    command = [sys.executable, __file__, "--peer", str(folder), "--steps", str(steps)]
    measured = watched(command, folder, folder / "steps.txt", cores)
    return measured | json.loads((folder / "out.txt").read_text().splitlines()[-1])


def main() -> None:
    parser = parser_of(__doc__)
    for name, default in (("steps", 8), ("repeat", 3), ("layers", 6), ("width", 512), ("cores", os.cpu_count())):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(options.peer, options.steps)
        return
    record = Record("finetune_peer", "peft", "accelerate", quiet=options.json)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder, options)
        for _ in range(options.repeat):
            for how in ("peft", "eager", "inductor"):
                theirs, cores = how == "peft", options.cores
                row = by_peer(folder, options.steps, cores) if theirs else by_tpshard(folder, how, cores)
                record.rows.append({"how": how, **row})
                seconds = statistics.median(row["seconds"][SKIPPED:])
                record.say(
                    f"{how:10} {seconds:.3f} s a step, {row['cpu_s']:.3f} s of CPU, {row['peak_mib']:,.0f} MiB, "
                    f"losses {row['losses'][0]:.5f} to {row['losses'][-1]:.5f}"
                )
    close(record, options)


def close(record: Record, options: argparse.Namespace) -> None:
    def of(how: str, key: str) -> list[float]:
        rows = [row for row in record.rows if row["how"] == how]
        return [row[key] for row in rows] if key != "seconds" else [s for row in rows for s in row[key][SKIPPED:]]

    for key, unit in (("seconds", "s"), ("cpu_s", "s"), ("peak_mib", "MiB")):
        theirs = record.figure(f"peft.{key}", of("peft", key), unit)
        for how in ("eager", "inductor"):
            own = record.figure(f"{how}.{key}", of(how, key), unit)
            record.figure(f"{how}.{key}.ratio", own.median / theirs.median, "times")
    expected = record.rows[0]["losses"]
    apart = max(abs(a - b) for row in record.rows for a, b in zip(row["losses"], expected, strict=True))
    record.figure("losses.apart", apart, "nats")
    record.close(write=options.record, as_json=options.json)
    sys.exit(int(apart > 2e-3))


if __name__ == "__main__":
    main()
