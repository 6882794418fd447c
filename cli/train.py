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
from tpshard.diagnostics.diagnostic import Mistakes, plural

if TYPE_CHECKING:
    from tpshard.parallelism.runtime.place import WorkerPlace
    from tpshard.plan.report.report import Report
    from tpshard.programs.setting.setting import Setting
    from tpshard.programs.step.training import TrainingPrograms


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
    from tpshard.cli.shared.worker_errors import place_of_environment

    place = place_of_environment()
    changes = on_device(overrides, device) if OVERRIDES not in os.environ else json.loads(os.environ.pop(OVERRIDES))
    return start(recipe, changes, plan) if place is None else _work(recipe, changes, place, plan)


def start(recipe: str, overrides: Sequence[str], plan: str | None) -> int:
    """Starts a recipe's workers on this host, and returns the run's exit code."""
    from tpshard.cli.shared.worker_errors import device_kind, workers_of
    from tpshard.devices import machine
    from tpshard.parallelism.runtime.cores import sharing_note
    from tpshard.parallelism.runtime.launcher import Nodes, launch
    from tpshard.plan import saved_plan
    from tpshard.train.checkpoints.store_path import StorePath, require_store
    from tpshard.train.data import hub

    loaded = load(recipe, overrides)
    saved = None if plan is None else saved_plan.read(plan)
    machine.require(loaded)
    source = loaded.data.source
    if hub.is_on(source):  # before workers take seconds to start
        hub.require(source.removeprefix(hub.PREFIX), loaded.where("data.source"))
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
    command = [sys.executable, "-m", "tpshard.cli.main", "train", recipe, *chosen]
    env = {OVERRIDES: json.dumps(overrides)}
    return launch(command, world=world, nodes=nodes, restarts=loaded.launch.restarts, env=env)


def _work(recipe: str, overrides: Sequence[str], place: WorkerPlace, plan_file: str | None) -> NoReturn:
    from tpshard.cli.shared.worker_errors import describe
    from tpshard.parallelism.runtime.worker import run_worker

    def body() -> int:
        from tpshard.cli.main import version
        from tpshard.cli.shared.preflight import load_checked
        from tpshard.cli.shared.worker_errors import device_kind
        from tpshard.plan import saved_plan
        from tpshard.plan.planner import check_limit
        from tpshard.train.run.training_worker import Surroundings, work

        # The launcher of tpshard has shown the warnings already; under another one rank 0 shows them.
        quiet = place.launcher == "tpshard" or place.rank != 0
        loaded = load_checked(recipe, overrides)[0] if quiet else load(recipe, overrides)
        plan = _Plan(plan_file)
        if plan.file is not None:
            saved_plan.check(plan.file, loaded, place.world)
        planned = plan.programs if plan.file is not None else None
        around = Surroundings(
            version(),
            device_kind(loaded),
            planned,
            check_limit,
            plan.screen,
            plan.plan_text,
            plan.trace,
            _comparison,
            _peak,
        )
        return work(loaded, place, around)

    run_worker(body, place, describe)


class _Plan:
    """The plan of the programs that this run executes, computed once or read from a file."""

    def __init__(self, path: str | None = None) -> None:
        from tpshard.plan import plan_cache, saved_plan

        self._report: Report | None = None
        self.file = None if path is None else saved_plan.read(path)
        self.own = self.file is not None and plan_cache.is_own(self.file.text)

    def _of(self, programs: TrainingPrograms) -> Report:
        from tpshard.plan import planner

        if self._report is None:
            self._report = planner.report_of_training(programs)
        return self._report

    def programs(self, setting: Setting) -> tuple[TrainingPrograms, str]:
        """The programs of the plan file, with a line that says whether they were planned again."""
        from tpshard.plan import planner

        assert self.file is not None
        programs = planner.read_programs(self.file, setting)
        if self.own:
            return programs, "running the programs of the saved plan: nothing is planned again"
        return programs, "the plan was not saved by this account here: planned again, with the same programs"

    def screen(self, programs: TrainingPrograms) -> str:
        """The shardings of all values as text, with the numbers of annotated and inferred ones."""
        from tpshard.plan.views import screen

        report = self._of(programs)
        head = f"{report.annotated} values annotated (*), {report.inferred} inferred"
        return "\n".join([head, *screen.shardings(report)])

    def trace(self, programs: TrainingPrograms) -> str:
        """The planned step as a trace."""
        from tpshard.plan.views import trace

        return trace.trace(self._of(programs))

    def plan_text(self, programs: TrainingPrograms) -> str:
        """The contents of the run's plan.json: an own plan, or one without programs for those that were built."""
        from tpshard.plan import saved_plan

        if self.file is not None and self.own:
            return self.file.text
        return saved_plan.dumps(self._of(programs), programs.setting.recipe, with_programs=False)


def _comparison(folder: Path) -> str:
    """The comparison of plan and run, also written to the run's folder. A failing disk does not end the training."""
    from tpshard.plan.questions import plan_error

    try:
        return plan_error.record(folder)
    except (OSError, Mistakes) as error:
        return f"warning: the plan was not compared with the run: {str(error).splitlines()[0]}"


def _peak(programs: TrainingPrograms) -> float | None:
    """Peak FLOP/s of all devices if they are GPUs; None for a CPU, whose device file describes another machine."""
    from tpshard.programs.setting import cluster

    device, nodes, per_host = cluster.device_of(programs.setting.recipe)
    rate = device.rates.get(programs.setting.recipe.model.dtype)
    return rate * nodes * per_host if device.kind == "gpu" and rate else None
