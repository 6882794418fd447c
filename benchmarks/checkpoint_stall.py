"""Measures what a step waits for a checkpoint: written at once, and in the background.

    python benchmarks/checkpoint_stall.py [--folder DIR]

The state is that of a Llama of 33 million parameters (8 layers of width 512) with AdamW's moments in fp32, on one
process. While a background save runs, the process multiplies matrices, as steps do. Prints the medians and
their ratio.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from tpshard.models.families.presets import preset
from tpshard.parallelism.runtime.context import alone
from tpshard.parallelism.runtime.heap import keep_freed_memory
from tpshard.train.checkpoints.background_save import BackgroundSaver
from tpshard.train.checkpoints.checkpoint import OPTIMIZER, save
from tpshard.train.checkpoints.shards import Shard

from record import Record, parser_of

SAVES = 5
SAMPLE = {"layers": 8, "width": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "mlp": 1856, "vocab": 2048}


def state() -> dict[str, Shard]:
    """Parameters and moments by their names in checkpoints."""
    shapes = preset("tiny", SAMPLE).shapes
    prefixes = ("", f"{OPTIMIZER}exp_avg/", f"{OPTIMIZER}exp_avg_sq/")
    return {prefix + name: Shard.whole(torch.randn(shape)) for prefix in prefixes for name, shape in shapes.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    options = parser.parse_args()
    record = Record("checkpoint_stall", quiet=options.json)
    keep_freed_memory()  # as workers do
    tensors = state()
    size = sum(shard.tensor.numel() * 4 for shard in tensors.values())
    record.figure("parameters", size / 12e6, "million")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        at_once, stalls, writing = [], [], []
        saver = BackgroundSaver(alone(), Path(name) / "background", keep_last=1)
        for step in range(1, SAVES + 1):  # in turn, so that what else the machine does is alike for both
            began = time.perf_counter()
            save(Path(name) / "at-once", step, tensors, {}, keep_last=1)
            at_once.append(time.perf_counter() - began)
            began = time.perf_counter()
            saver.start(step, tensors, {})
            stalls.append(time.perf_counter() - began)
            until = time.perf_counter() + at_once[-1]
            while time.perf_counter() < until:
                torch.mm(torch.randn(512, 512), torch.randn(512, 512))
            result = saver.finish()
            assert result is not None and result.error is None
            writing.append(result.seconds)
    record.figure("wait.at-once", at_once, "s")
    record.figure("wait.background", stalls, "s")
    record.figure("written.background", writing, "s")
    record.figure("ratio", statistics.median(stalls) / statistics.median(at_once), "times")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
