"""The plan of the programs that a run executes, as the run shows and records it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.plan import plan_cache, planner, saved_plan
from tpshard.plan.questions import plan_error
from tpshard.plan.report import screen_tables
from tpshard.plan.views import trace
from tpshard.programs.setting import cluster

if TYPE_CHECKING:
    from tpshard.plan.report.planned import Planned
    from tpshard.programs.setting.setting import Setting
    from tpshard.programs.step.training_step import TrainingPrograms


class PlanOfRun:
    """The plan of a run, computed once, or read from a plan file, whose programs the run then executes."""

    def __init__(self, path: str | None = None) -> None:
        """Raises Mistakes where the file at `path` cannot be read."""
        self._planned: Planned | None = None
        self.file = None if path is None else saved_plan.read(path)
        self.own = self.file is not None and plan_cache.is_own(self.file.text)

    def read_programs(self, setting: Setting) -> tuple[TrainingPrograms, str]:
        """The programs of the plan file, with a line that says whether they were planned again."""
        assert self.file is not None
        programs = planner.read_programs(self.file, setting)
        if self.own:
            return programs, "running the programs of the saved plan: nothing is planned again"
        return programs, "the plan was not saved by this account here: planned again, with the same programs"

    def planned(self, programs: TrainingPrograms) -> Planned:
        if self._planned is None:
            self._planned = planner.planned_training(programs)
        return self._planned

    def shardings(self, programs: TrainingPrograms) -> str:
        """The shardings of all values as text, with the numbers of annotated and inferred ones, and what is trained."""
        report = self.planned(programs).report
        trained = [] if report.trained is None else report.trained.rows()
        return "\n".join([str(report.annotations), *screen_tables.shardings(report), *trained])

    def trace(self, programs: TrainingPrograms) -> str:
        """The planned step as a trace; "" for a pipeline, whose plan has none of single operations."""
        if programs.pipeline is not None:
            return ""
        planned = self.planned(programs)
        return trace.trace(planned.report, planned.drawing)

    def text(self, programs: TrainingPrograms) -> str:
        """The contents of the run's plan.json: an own plan, or one without programs for those that were built."""
        if self.file is not None and self.own:
            return self.file.text
        return saved_plan.dumps(self.planned(programs), programs.setting.recipe, with_programs=False)


def comparison(folder: Path) -> str:
    """The comparison of plan and run, also written to the run's folder. A failing disk does not end the training."""
    try:
        return plan_error.record(folder)
    except (OSError, Mistakes) as error:
        return f"warning: the plan was not compared with the run: {str(error).splitlines()[0]}"


def peak_flops(programs: TrainingPrograms) -> float | None:
    """Peak FLOP/s of all devices if they are GPUs; None for a CPU, whose device file describes another machine."""
    device, nodes, per_host = cluster.device_of(programs.setting.recipe)
    rate = device.rates.get(programs.setting.recipe.model.dtype)
    return rate * nodes * per_host if device.kind == "gpu" and rate else None
