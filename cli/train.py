"""`tpshard train`: starts this host's workers, or runs as one of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from tpshard.cli.shared.arguments import Device, Overrides, RecipeArgument, load, on_device
from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural

if TYPE_CHECKING:
    from tpshard.parallelism.runtime.place import WorkerPlace

PlanFile = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="Run the programs of this saved plan (plan.json).")
]
OVERRIDES = "TPSHARD_OVERRIDES"
"""The environment variable with the overrides of a run's workers: every user can read an argument list, and an override
may hold a secret."""


def train(recipe: RecipeArgument, overrides: Overrides = None, plan: PlanFile = None, device: Device = None) -> int:
    """Train a recipe's model.

    Starts one worker on this host for each device of the mesh; under torchrun, or as a task of an srun step, it is one
    worker itself. A stopped run continues from its last checkpoint. With --plan it runs the programs that a plan saved
    without planning again, and refuses (exit 4) if the recipe, the number of devices or the versions differ. The
    programs of a plan that another account or machine saved are compared (exit 3) with those of the recipe.
    """
    from tpshard.parallelism.runtime import stop

    with stop.stoppable():
        from tpshard.cli.shared.worker_errors import place_of_environment

        place = place_of_environment()
        refuse_checkpoint(recipe)
        changes = on_device(overrides, device) if OVERRIDES not in os.environ else json.loads(os.environ.pop(OVERRIDES))
        if place is None:
            return start(recipe, changes, plan)
        stop.hold()
        return _work(recipe, changes, place, plan)


def refuse_checkpoint(recipe: str) -> None:
    """Raises `Mistakes` (exit 2) for a checkpoint's folder.

    Its recipe leads to the newest checkpoint of its run, or from another working directory to a run from nothing.
    """
    place = Path(recipe)
    if (place / "manifest.json").is_file():
        run = place.absolute().parent.parent
        goes_on = f"`tpshard train {run}` continues its run; " if (run / "recipe.yaml").is_file() else ""
        raise Mistakes.one(
            f"{recipe} is a checkpoint, and `train` wants a recipe or a run", exit=Exit.USAGE,
            fix=f"{goes_on}`tpshard train {place / 'recipe.yaml'} train.init_from={place.absolute()} run.dir=DIR` "
            "begins another from its parameters",
        )  # fmt: skip


def start(recipe: str, overrides: Sequence[str], plan: str | None) -> int:
    """Starts a recipe's workers on this host, and returns the run's exit code."""
    from tpshard.cli.preflight.model_checks import require_beginning, require_weights
    from tpshard.cli.shared.worker_errors import device_kind, workers_of
    from tpshard.devices import machine
    from tpshard.parallelism.runtime.cores import sharing_note
    from tpshard.parallelism.runtime.launcher import Nodes, launch
    from tpshard.plan import saved_plan
    from tpshard.train.checkpoints.store_path import StorePath, require_store
    from tpshard.train.data import hub

    loaded = load(recipe, overrides)
    saved = None if plan is None else saved_plan.read(plan)
    require_weights(loaded)  # before workers take seconds to start, as what else is read
    require_beginning(loaded)
    machine.require(loaded)
    for number, one in enumerate(loaded.data.all_sources):
        if hub.is_on(one.source):
            hub.place_of(one.source, loaded.source_place(number))
    if loaded.run.store is not None:
        require_store(StorePath(loaded.run.store), loaded.where("run.dir"))
    nodes = Nodes.of(os.environ)
    world = workers_of(loaded, nodes)
    if saved is not None:
        saved_plan.check(saved, loaded, world)
    local_workers = world // nodes.count
    print(f"starting {plural(local_workers, 'worker')} on this host", file=sys.stderr, flush=True)
    if device_kind(loaded) == "cpu" and (note := sharing_note(local_workers)):
        print(f"note: {note}", file=sys.stderr, flush=True)
    chosen = [] if plan is None else ["--plan", plan]
    command = [sys.executable, "-P", "-m", "tpshard.cli.main", "train", recipe, *chosen]
    env = {OVERRIDES: json.dumps(overrides)}
    return launch(command, world=world, nodes=nodes, restarts=loaded.launch.restarts, env=env)


def _work(recipe: str, overrides: Sequence[str], place: WorkerPlace, plan_file: str | None) -> NoReturn:
    from tpshard.cli.shared.worker_errors import describe
    from tpshard.parallelism.runtime.worker import run_worker

    def body() -> int:
        from tpshard.cli.preflight.preflight import load_checked
        from tpshard.cli.shared.worker_errors import device_of_worker
        from tpshard.plan import saved_plan
        from tpshard.train.run.run_plan import PlanOfRun
        from tpshard.train.run.training_worker import work

        # The launcher of tpshard has shown the warnings already; under another one rank 0 shows them.
        quiet = place.launcher == "tpshard" or place.rank != 0
        loaded = load_checked(recipe, overrides)[0] if quiet else load(recipe, overrides)
        plan = PlanOfRun(plan_file)
        if plan.file is not None:
            saved_plan.check(plan.file, loaded, place.world)
        return work(loaded, place, plan, device=device_of_worker(loaded, place))

    run_worker(body, place, describe)
