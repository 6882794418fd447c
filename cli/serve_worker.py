"""A rank of `tpshard serve`, started by it: reads its weights, and runs the steps it receives."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tpshard.programs.serving import ServingPrograms
    from tpshard.serve.job import Job
    from tpshard.serve.weights import Weights


def open_weights(source: str) -> Weights:
    """The weights in a checkpoint or a Hugging Face folder, readable by blocks."""
    from tpshard.cli.sources import open_source
    from tpshard.serve.weights import Weights

    path = Path(source)
    if (path / "manifest.json").is_file():
        from tpshard.train.restore import open_checkpoint

        return Weights(open_source(source, modules=True).blueprint.shapes, open_checkpoint(path).block)
    from tpshard.models.hf import HFFolder
    from tpshard.models.hf_config import computes
    from tpshard.models.hf_quantized import QuantizedModules, QuantizedParameters

    if not computes(path):
        blueprint = open_source(source, modules=True).blueprint
        assert blueprint.weights is not None, "a folder that is opened has weights"
        if not blueprint.weights.quantized:
            return Weights(blueprint.shapes, blueprint.weights.block)
        coded = QuantizedModules(path, blueprint.weights.module_of, blueprint.weights.stack_of)
        return Weights(blueprint.shapes, blueprint.weights.block, coded.linear, coded.group, coded.expert)
    folder = HFFolder(path)

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return folder.block(name, starts, sizes)

    if not folder.quantized:
        return Weights(folder.config.shapes, block)
    stored = QuantizedParameters(path, folder.config)
    return Weights(folder.config.shapes, block, stored.linear, stored.group, stored.expert)


def prepare(job: Job) -> tuple[ServingPrograms, Weights]:
    """The programs of a job, equal to those of the process that sent it, and their weights."""
    from tpshard.cli.serve import stored_model
    from tpshard.cli.sources import open_source
    from tpshard.programs.serving import ServeSetting, build_serving
    from tpshard.recipes.load import loads

    recipe = loads(job.recipe)
    kind = "cpu" if job.device == "cpu" else "gpu"
    setting = ServeSetting.of(recipe, stored_model(recipe, open_source(job.source, modules=True)), kind)  # type: ignore[arg-type]
    return build_serving(setting), open_weights(job.source)


def main() -> None:
    from tpshard.parallelism.runtime.workers import follow

    follow()
    from tpshard.parallelism.runtime.place import find
    from tpshard.parallelism.runtime.worker import run_worker
    from tpshard.serve.server_worker import describe, work

    place = find(os.environ)
    if place is None:
        sys.exit("this is a worker of `tpshard serve`, which starts it")
    run_worker(lambda: work(place, prepare), place, describe)


if __name__ == "__main__":
    main()
