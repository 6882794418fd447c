"""Compares log-likelihoods of lm-eval through a tpshard server with those of `--model hf` on the same weights.

    pip install "lm-eval[api,hf]"                   # into an environment that has tpshard
    python benchmarks/lm_eval_likelihoods.py [--model HF_FOLDER]

Writes a task of 24 items (a context, two continuations) from CPython's documentation, serves the model (by default a
small random one with the sample's tokenizer) on a free port, runs both, and prints the largest difference. Exits with 1
if it is above 1e-4 per continuation plus 2e-6 of its size, the precision of fp32.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tpshard.models import build, to_hf
from tpshard.models.families.presets import preset
from tpshard.train.data.sample import ensure_sample

from record import Record, parser_of
from running import COMMAND, serving

TASK = """\
task: tpshard_likelihoods
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
BEGIN = "add_bos_token=True"
"""By default only one of lm-eval's two models starts a text with the tokenizer's begin token."""
RECIPE = """\
name: served
cluster: {device: cpu}
model: {preset: tiny}
serve: {mesh: {tp: 1}, port: 0}
"""


def write_task(folder: Path) -> None:
    """Writes 24 pieces of text, each with its own continuation and that of the next."""
    texts = sorted(pydoc_data.topics.topics.values(), key=len)[-24:]
    pieces = [(" ".join(text.split()[:30]), " " + " ".join(text.split()[30:36])) for text in texts]
    rows = [
        {"context": context, "choices": [own, pieces[(i + 1) % len(pieces)][1]]}
        for i, (context, own) in enumerate(pieces)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK % (folder / "items.jsonl"))


def likelihoods(folder: Path, label: str, model: str, arguments: str) -> list[float]:
    """The log-likelihoods of all items of the task, in order, as lm-eval logs them."""
    out = folder / label
    subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", "tpshard_likelihoods",
         "--include_path", str(folder), "--batch_size", "1", "--log_samples", "--output_path", str(out)],
        check=True, stdout=sys.stderr,
    )  # fmt: skip
    (samples,) = out.rglob("samples_*.jsonl")
    rows: list[Any] = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda r: r["doc_id"])
    return [float(answer[0][0] if isinstance(answer[0], list) else answer[0]) for r in rows for answer in r["resps"]]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    record = Record("lm_eval_likelihoods", "lm_eval", quiet=options.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        model = options.model or folder / "model"
        if options.model is None:
            to_hf(build(preset("tiny"), device="cpu", seed=5), model, tokenizer=ensure_sample().tokenizer)
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE)
        with serving([*COMMAND, "serve", str(recipe), f"serve.checkpoint={model}"], cwd=folder) as address:
            client = f"model=served,base_url={address}/completions,tokenizer={model},tokenizer_backend=huggingface"
            served = likelihoods(folder, "served", "local-completions", f"{client},num_concurrent=4,{BEGIN}")
        expected = likelihoods(folder, "hf", "hf", f"pretrained={model},dtype=float32,{BEGIN}")
    difference = torch.tensor(served, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)
    allowed = 1e-4 + 2e-6 * torch.tensor(expected, dtype=torch.float64).abs()
    record.figure("continuations", len(served), "continuations")
    record.figure("difference", float(difference.abs().max()), "nats at most")
    record.close(write=options.record, as_json=options.json)
    return 0 if len(served) == len(expected) == 48 and bool((difference.abs() <= allowed).all()) else 1


if __name__ == "__main__":
    sys.exit(main())
