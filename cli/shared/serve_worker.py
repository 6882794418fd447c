"""A rank of `tpshard serve`, started by it: reads its weights, and runs the steps it receives."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpshard.cli.shared.source_model import SourceModel
    from tpshard.programs.server.serving import ServingPrograms
    from tpshard.serve.engine.job import Job
    from tpshard.serve.engine.weights import Weights


def stored_weights(model: SourceModel) -> Weights:
    """The weights of a checkpoint or a Hugging Face folder, readable by blocks."""
    from tpshard.serve.engine.weights import Weights

    if not model.quantized:
        return Weights(model.spec.shapes, model.block)
    coded = model.spec.quantized_modules(Path(model.name))
    return Weights(model.spec.shapes, model.block, coded.linear, coded.group, coded.expert)


def prepare(job: Job) -> tuple[ServingPrograms, Weights]:
    """The programs of a job, equal to those of the process that sent it, and their weights."""
    from tpshard.cli.serve import stored_model
    from tpshard.cli.shared.sources import open_source
    from tpshard.programs.server.serving import ServeSetting, build_serving
    from tpshard.recipes.reading.load import loads

    recipe = loads(job.recipe)
    model = open_source(job.source, modules=True, trusted=recipe)
    kind = "cpu" if job.device == "cpu" else "gpu"
    setting = ServeSetting.of(recipe, stored_model(recipe, model), kind, job.slots)  # type: ignore[arg-type]
    return build_serving(setting), stored_weights(model)


def main() -> None:
    from tpshard.parallelism.runtime.workers import follow

    follow()
    from tpshard.cli.shared import streams
    from tpshard.parallelism.runtime.place import find
    from tpshard.parallelism.runtime.worker import run_worker
    from tpshard.serve.engine.server_worker import describe, work

    streams.prepare()
    place = find(os.environ)
    if place is None:
        sys.exit("this is a worker of `tpshard serve`, which starts it")
    run_worker(lambda: work(place, prepare), place, describe)


if __name__ == "__main__":
    main()
