"""`tpshard train` in one worker process, from a recipe to a trained model and its records."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.parallelism.runtime import crash
from tpshard.parallelism.runtime.context import Context, connect
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.runtime.step_profile import StepProfile
from tpshard.parallelism.runtime.watchdog import Doing
from tpshard.plan import planner, saved_plan
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms, part_of
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.checkpoints.carried import carry
from tpshard.train.checkpoints.checkpoint import steps as checkpoint_steps
from tpshard.train.checkpoints.store_path import StorePath
from tpshard.train.data.open_data import template_of
from tpshard.train.data.stream import Loader
from tpshard.train.records import profile_report
from tpshard.train.records.progress import Progress
from tpshard.train.records.records import Records, note_saved
from tpshard.train.records.tensorboard_sink import TensorBoardSink
from tpshard.train.records.wandb_sink import WandbSink
from tpshard.train.run.initial_values import begun_from, initial_values
from tpshard.train.run.learning_rate import require_schedule
from tpshard.train.run.loop import Row, TrainingLoop
from tpshard.train.run.outcome import Outcome, ending, summary
from tpshard.train.run.resuming import Changes, changes, kept_recipe, refuse
from tpshard.train.run.run_data import counted, data_of, notes_of
from tpshard.train.run.run_output import display, keep_output, say
from tpshard.train.run.run_plan import PlanOfRun, comparison, peak_flops
from tpshard.train.run.run_store import RunStore, run_place
from tpshard.train.run.rundir import RunDir
from tpshard.train.run.training_engine import TrainingEngine

Receiver = Callable[[Row], None]
"""A function that takes a row of metrics."""

ENOUGH = 6
"""Steps after which the plan is compared with the run at the earliest; it is compared again at the end."""


def work(recipe: Recipe, place: WorkerPlace, plan: PlanOfRun, *, device: str) -> int:
    """Runs one worker and returns the exit code, the same on every rank. device: cpu or cuda.

    Raises:
        Mistakes, WorkerFault: the run ended early; the launcher shows the error of the rank at fault.
    """
    setting = Setting.of(recipe, place.world)
    limits = recipe.timeout_s
    with connect(place, setting.mesh, device=device, start_s=limits.start, step_s=limits.step) as context:
        packages = {f"{name} version": version for name, version in saved_plan.packages().items()}
        context.agree({"recipe": _sha(recipe.to_yaml()), **packages})
        outcome = train(setting, context, plan)
    if place.rank == 0:
        say(ending(outcome, setting))
    if outcome.unsaved:
        raise Mistakes.one(
            outcome.unsaved, exit=Exit.CHECKPOINT, where=recipe.where("run.dir"),
            fix=f"{'make room' if recipe.run.store is None else 'mend what failed'} there, and run the same command "
            "again: it continues from the last checkpoint",
        )  # fmt: skip
    return int(outcome.exit)


def train(setting: Setting, context: Context, plan: PlanOfRun) -> Outcome:
    """Starts or resumes the run of a setting's recipe among connected workers. Every rank calls it."""
    recipe, programs = setting.recipe, None
    folder = recipe.run.folder
    if plan.file is not None:  # before anything is written, so that a refusal leaves no files
        context.watchdog.doing = Doing("reading the planned programs")
        programs, note = plan.read_programs(setting)
        context.agree(programs.fingerprints)
        if context.is_main:
            say(note + "\n", sys.stderr)
    with _run_folder(recipe, folder, context) as (run, changed):
        keep_output(folder, context)
        return _train(setting, programs, context, plan, folder, run, changed)


def _train(
    setting: Setting, programs: TrainingPrograms | None, context: Context, plan: PlanOfRun, folder: Path,
    run: RunDir | None, changed: Changes,
) -> Outcome:  # fmt: skip
    recipe = setting.recipe
    context.watchdog.stacks_to = folder / "logs"
    place = run_place(recipe)
    # Data first: errors in it are common and show in a second, while building the programs takes longer.
    context.watchdog.doing = Doing("opening the data")
    data_rank = context.mesh.linear_index(setting.data_axes, context.rank)
    loader, checked = data_of(setting, data_rank, folder, context)
    recipe = counted(recipe, loader, context, data_rank, setting.batch.data_ranks)
    require_schedule(recipe)
    attempt = context.from_main(run.attempt if run is not None else 0)
    if attempt == 1 and isinstance(loader, Loader):  # later starts read from a checkpoint's position on
        with context.watchdog.allow(float(recipe.timeout_s.start), "reading the first batch"):
            loader.read_first()
    programs = programs or _build_programs(setting, context)
    planner.check_limit(programs)
    begun = begun_from(recipe, place / "checkpoints", context)
    engine = TrainingEngine(programs, context, initial_values(recipe, setting.spec, begun))
    assert engine.data_rank == data_rank, "the program shards its batch over the axes that the recipe names"
    if run is not None:
        for line in [plan.shardings(programs), str(setting.batch)]:
            say(line + "\n" if line else "", sys.stderr)
        for warning in [*programs.micro.warnings, *loader.warnings]:
            say(f"warning: {warning}\n", sys.stderr)
    receivers: list[Receiver] = []
    sink: WandbSink | None = None
    compared: _PlanComparison | None = None
    with display(recipe, context) as progress:
        loop = TrainingLoop(
            recipe, context, engine, loader, setting.batch, folder=folder, checkpoints=place / "checkpoints",
            saved=partial(_saved, run), publishable=(lambda: None) if run is None else run.check_lock,
            record=partial(_send, receivers),
            progress=progress, held_out=checked, attempt=attempt, restarts=crash.restarts(),
            flops_per_s=peak_flops(programs),
            peak_memory=partial(_peak_memory, context, engine), model=setting.spec.to_json(), begun=begun,
            profiled=partial(_profiled, programs, plan, folder, progress),
        )  # fmt: skip
        code = 1
        try:
            loop.begin()
            if run is not None and loop.remains:  # from here on nothing is refused: before, no file of a run changes
                run.write("recipe.yaml", kept_recipe(recipe))
                carry(
                    folder,
                    setting.spec.source.folder,
                    loader.tokenizer.folder if isinstance(loader, Loader) else None,
                    again=bool(changed),
                    template=template_of(recipe),
                )
                run.write("plan.json", plan.text(programs))
                run.push()
                sinks, sink = _sinks(recipe, run)
                compared = _PlanComparison(folder, progress, recipe.logging.every_steps)
                receivers += [*sinks, compared]
                if changed:
                    row = {"step": loop.course.step, "changed": dict(changed), "forced": recipe.resume == "force"}
                    _send(receivers, {**row, "time": time.time(), "run": attempt})
            outcome = loop.run()
            for note in notes_of(loader, context, data_rank):
                progress.note(note)
            if compared is not None and outcome.trained:
                compared.show()
            code = int(outcome.exit)
        finally:
            loader.close()
            if sink is not None:
                sink.close(summary(loop.outcome, recipe, folder), exit_code=code)
                loop.outcome.wandb = sink.where
    return outcome


def _saved(run: RunDir | None, step: int, seconds: float) -> None:
    """Notes a checkpoint in the run's records, and copies them to the store of a run in one."""
    if run is not None:
        note_saved(run.path, step, seconds)
        run.push()


# ---- the parts ------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _run_folder(recipe: Recipe, folder: Path, context: Context) -> Iterator[tuple[RunDir | None, Changes]]:
    """Creates and locks the folder on rank 0, and finds what the recipe changes of its run; the others wait."""
    where = recipe.where("run.dir")
    place = run_place(recipe)
    store = place if isinstance(place, StorePath) else None
    if not context.is_main:
        if store is not None and context.local_rank == 0:  # another host's first worker
            RunStore(store, folder).pull()
        context.barrier()
        yield None, {}
        return
    with RunDir(folder, store=store, where=where, say=lambda text: say(text + "\n", sys.stderr)) as run:
        saved = checkpoint_steps(run.checkpoints)
        exists = run.attempt > 1 or bool(saved)
        if recipe.resume == "never" and exists and not crash.restarts():
            raise Mistakes.one(
                f"{place} already contains a run",
                exit=Exit.CHECKPOINT,
                where=recipe.where("resume" if recipe.where("resume").line else "checkpoint.resume"),
                why="`resume: never` does not continue an existing run",
                fix="choose another run.dir, or resume=auto to continue it",
            )
        if (step := run.lost_step) is not None:
            raise Mistakes.one(
                f"the checkpoints of {place} are gone",
                exit=Exit.CHECKPOINT,
                where=where,
                why=f"step {step} was saved, and {run.checkpoints} has none; a start at step 1 would write a second "
                f"course into {run.metrics}",
                fix="put the checkpoints back there, or choose another run.dir to start anew",
            )
        changed = changes(folder, run.checkpoints, recipe) if exists else {}
        if recipe.resume == "auto" and saved:
            refuse(place, recipe, changed)
        context.barrier()
        yield run, changed


def _build_programs(setting: Setting, context: Context) -> TrainingPrograms:
    """The programs of this run, the same on all ranks."""
    context.watchdog.doing = Doing("building the programs")
    if context.is_main:
        say(f"building the programs for {plural(context.world, 'device')}\n", sys.stderr)
    programs = training.build(setting)
    context.agree(programs.fingerprints)
    return programs


def _send(receivers: Sequence[Receiver], row: Row) -> None:
    for receive in receivers:
        receive(row)


def _sinks(recipe: Recipe, run: RunDir | None) -> tuple[list[Receiver], WandbSink | None]:
    """The receivers of metrics on rank 0: metrics.jsonl, TensorBoard and wandb if enabled."""
    if run is None:
        return [], None
    receivers: list[Receiver] = [Records(run.metrics)]
    if recipe.logging.tensorboard:
        receivers.append(TensorBoardSink(run.path / "tensorboard"))
    options = recipe.logging.wandb
    if options is None or options.mode == "disabled":
        return receivers, None
    import yaml

    config: Mapping[str, Any] = yaml.safe_load(recipe.to_yaml())
    sink = WandbSink(run.path, options, name=recipe.name, config=config, run_id=run.wandb_id)
    return [*receivers, sink], sink


class _PlanComparison:
    """A receiver of metrics that compares plan and run, and shows the comparison once: at the end of the first interval
    between logged steps, or of the run."""

    def __init__(self, folder: Path, progress: Progress, every_steps: int):
        self.folder, self.progress = folder, progress
        self.first = max(ENOUGH, every_steps)
        self.begun: int | None = None
        self.shown = False

    def __call__(self, row: Row) -> None:
        if row.get("loss") is None or self.shown:
            return
        self.begun = row["step"] if self.begun is None else self.begun
        if row["step"] >= self.begun - 1 + self.first:
            self.show()

    def show(self) -> None:
        """Compares again; shows the result unless it was shown."""
        text = comparison(self.folder)
        if text and not self.shown:
            self.shown = True
            self.progress.note(text)


def _profiled(
    programs: TrainingPrograms, plan: PlanOfRun, folder: Path, progress: Progress, profile: StepProfile
) -> None:
    """Writes the profiled steps beside the planned one, and shows their largest differences."""
    named = programs.setting.recipe.train.profile
    assert named is not None, "steps were named"
    steps = named.steps
    count = steps[1] - steps[0] + 1
    table = programs.table
    tasks = (part_of(kind, stage) for kind in table.kinds for stage in range(table.stages))
    runs = dict.fromkeys(tasks, count * table.micro_batches) | dict.fromkeys(programs.devices[0].by_role, count)
    try:
        progress.note(profile_report.write(folder, steps, profile.events, runs, plan.trace(programs)))
    except OSError as error:
        progress.note(f"warning: the profile was not written: {error}")


def _peak_memory(context: Context, engine: TrainingEngine) -> int | None:
    """Peak bytes of tensors, from the device's allocator, or as counted in one step on a CPU."""
    if context.device.type != "cuda":
        return engine.peak_bytes
    return int(torch.cuda.max_memory_allocated(context.device))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
