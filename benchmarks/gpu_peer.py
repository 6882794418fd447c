"""Times transformers on one GPU at what `first_lease.py` gives tpshard: a training step and greedy decoding.

    python benchmarks/gpu_peer.py train [--layers 16] [--seq 4096] [--steps 8]
    python benchmarks/gpu_peer.py serve FOLDER [--clients 1,16,64] [--prompt 128] [--new 64]

train: Llama 3.2 1B with random weights, four micro-batches of one sequence, fp32 parameters, bf16 autocast, torch's
attention and fused AdamW, eager and compiled. serve: `generate` in bf16, one batch of random ids. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tpshard.models.families.presets import PRESETS
from tpshard.models.folders.hf_config import write_config


def model_of(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**write_config(PRESETS["llama3-1b"], "fp32"), "num_hidden_layers": layers})
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of a step and peak bytes, eager and compiled, with and without recomputation."""
    rows: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = model_of(options.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if name == "compiled" else model
        seconds = []
        for _ in range(options.steps):
            ids = torch.randint(0, 256, (4, options.seq), device="cuda")
            torch.cuda.synchronize()
            began = time.perf_counter()
            for row in ids.split(1):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = run(input_ids=row, labels=row).loss / 4
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rows[name] = {"step_s": statistics.median(seconds[3:]), "peak_bytes": torch.cuda.max_memory_allocated()}
        del model, optimizer, run, loss
    return rows


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a decode step for so many sequences: two lengths of answers, whose difference has no prefill."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16, device_map="cuda").eval()
    rows = {}
    for clients in options.clients:
        ids = torch.randint(0, model.config.vocab_size, (clients, options.prompt), device="cuda")

        def seconds(new: int, ids: torch.Tensor = ids) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            with torch.inference_mode():
                model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        seconds(4)
        short, long = seconds(2), seconds(2 + options.new)
        rows[clients] = {"step_ms": 1e3 * (long - short) / options.new, "first_ms": 1e3 * short}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "serve"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    print(json.dumps(train(options) if options.what == "train" else serve(options)))


if __name__ == "__main__":
    main()
