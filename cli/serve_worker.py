"""A rank of `tpshard serve`, started by it: reads weights wherever they lie, and computes what it is told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tpshard.serve.job import Weights


def open_weights(source: str) -> Weights:
    """The weights in a checkpoint's or a Hugging Face folder, readable by blocks."""
    from tpshard.cli.sources import open_source
    from tpshard.serve.job import Weights

    path = Path(source)
    if (path / "manifest.json").is_file():
        from tpshard.train.restore import open_checkpoint

        return Weights(open_source(source).config, open_checkpoint(path).block)
    from tpshard.models.hf import HFFolder

    folder = HFFolder(path)

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return folder.block(name, starts, sizes)

    if not folder.quantized:
        return Weights(folder.config, block)
    from tpshard.models.hf_quantized import QuantizedParameters

    stored = QuantizedParameters(path, folder.config)
    return Weights(folder.config, block, stored.linear, stored.group)


if __name__ == "__main__":
    from tpshard.serve.worker import main

    sys.exit(main(sys.argv[1:], open_weights))
