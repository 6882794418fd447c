"""Measures a server on the GPUs of one host over HTTP: time to the first token, between tokens, and tokens per second.

    python benchmarks/gpu_serving.py FOLDER [--clients 1,16,64] [--prompt 128] [--new 128] [--dtype bf16] [--tp 1]

FOLDER is a Hugging Face folder, dense or GPTQ (`random_llama.py` writes one). `tpshard serve` runs as a user runs it.
All clients ask at once, each with random ids of its own, greedily, without an end; a round before it warms the server.
`step_ms` is the time from an answer's first token to its last over the tokens between, the median of all answers.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Record, parser_of
from running import COMMAND, read_streams, serving

RECIPE = """
name: served
cluster: {device: DEVICE, devices_per_node: RANKS}
model: {hf: FOLDER}
serve: {checkpoint: FOLDER, mesh: {tp: RANKS}, dtype: DTYPE, port: 0}
"""


def together(url: str, clients: int, length: int, new: int, seed: int, vocab: int) -> dict[str, Any]:
    """One round of `clients` requests at once."""
    draw = random.Random(seed)
    body = {"model": "served", "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    prompts = [[draw.randrange(vocab) for _ in range(length)] for _ in range(clients)]
    began = time.perf_counter()
    answers = read_streams(f"{url}/completions", [body | {"prompt": prompt} for prompt in prompts])
    seconds = time.perf_counter() - began
    return {
        "clients": clients, "first_ms": 1e3 * statistics.median(one.first_s for one in answers),
        "step_ms": 1e3 * statistics.median((one.last_s - one.first_s) / (new - 1) for one in answers),
        "tokens_per_s": clients * new / seconds, "events": sum(one.events for one in answers),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="h100-sxm-80g")
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    record = Record("gpu_serving", quiet=options.json)
    vocab = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "recipe.yaml"
        text = RECIPE.replace("FOLDER", str(options.folder.resolve())).replace("DTYPE", options.dtype)
        recipe.write_text(text.replace("DEVICE", options.device).replace("RANKS", str(options.tp)))
        began = time.perf_counter()
        with serving([*COMMAND, "serve", str(recipe)]) as url:
            record.say(f"ready after {time.perf_counter() - began:.0f} s")
            for clients in options.clients:
                for seed in (0, 1):  # the first warms: graphs are captured at the first step of their size
                    row = together(url, clients, options.prompt, options.new, seed, vocab)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                record.rows.append(row)
    for row in record.rows:
        record.figure(f"step.{row['clients']}", row["step_ms"], "ms")
        record.figure(f"first.{row['clients']}", row["first_ms"], "ms")
        record.figure(f"tokens.{row['clients']}", row["tokens_per_s"], "tokens/s")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
