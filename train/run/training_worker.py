"""`tpshard train` in one worker process, from a recipe to a trained model and its records."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import logging
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.models.folders.folder_files import carried
from tpshard.models.folders.folder_tokenizer import tokenizer_files
from tpshard.models.model_spec import ModelSpec
from tpshard.models.objectives.loss import IGNORE
from tpshard.parallelism.runtime import crash, messages
from tpshard.parallelism.runtime.context import Context, connect
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.runtime.step_profile import StepProfile
from tpshard.parallelism.runtime.watchdog import Doing
from tpshard.plan import planner, saved_plan
from tpshard.programs.fit.recipe_model import carried_instead
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.programs.step.training_step import TrainingPrograms, part_of
from tpshard.recipes.keys.data_keys import TokenizerTraining
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.text.other_tools import MADE_TOKENIZERS
from tpshard.train.checkpoints.checkpoint import steps as checkpoint_steps
from tpshard.train.checkpoints.store_path import Location, StorePath, location
from tpshard.train.data.carried import carry
from tpshard.train.data.conversations import AnswerTokenizer
from tpshard.train.data.corpus import Corpus, TextSource
from tpshard.train.data.generated_rows import GeneratedRows, held_out_rows
from tpshard.train.data.made_tokenizer import byte_tokenizer, trained_tokenizer
from tpshard.train.data.open_data import OpenedData, open_data, template_of
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.stream import Loader, held_out_batch
from tpshard.train.data.tokens import TextTokenizer, load_tokenizer
from tpshard.train.records import profile_report
from tpshard.train.records.progress import Progress, duration, progress_for, short
from tpshard.train.records.records import Records, note_saved
from tpshard.train.records.tensorboard_sink import TensorBoardSink
from tpshard.train.records.wandb_sink import WandbSink
from tpshard.train.run.learning_rate import learning_rate
from tpshard.train.run.loop import Outcome, Row, TrainingLoop, summary
from tpshard.train.run.resuming import Changes, changes, kept_recipe, refuse
from tpshard.train.run.run_plan import PlanOfRun, comparison, peak_flops
from tpshard.train.run.run_store import RunStore
from tpshard.train.run.rundir import RunDir
from tpshard.train.run.training_engine import InitialBlock, TrainingEngine

Receiver = Callable[[Row], None]
"""A function that takes a row of metrics."""

HeldOut = Mapping[str, Sequence[StepBatch]]
"""This rank's micro-batches of held-out rows, by the name of their text."""

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
        _say(ending(outcome, setting))
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
            _say(note + "\n", sys.stderr)
    with _run_folder(recipe, folder, context) as (run, changed):
        _keep_output(folder, context)
        return _train(setting, programs, context, plan, folder, run, changed)


def _train(
    setting: Setting, programs: TrainingPrograms | None, context: Context, plan: PlanOfRun, folder: Path,
    run: RunDir | None, changed: Changes,
) -> Outcome:  # fmt: skip
    recipe = setting.recipe
    context.watchdog.stacks_to = folder / "logs"
    place = _place(recipe)
    # Data first: errors in it are common and show in a second, while building the programs takes longer.
    context.watchdog.doing = Doing("opening the data")
    _require_schedule(recipe)
    data_rank = context.mesh.linear_index(setting.data_axes, context.rank)
    loader, checked = _data(setting, data_rank, folder, context)
    programs = programs or _build_programs(setting, context)
    planner.check_limit(programs)
    engine = TrainingEngine(programs, context, _initial_block(recipe, setting.spec))
    assert engine.data_rank == data_rank, "the program shards its batch over the axes that the recipe names"
    attempt = context.from_main(run.attempt if run is not None else 0)
    if run is not None:
        for line in [plan.shardings(programs), str(setting.batch)]:
            _say(line + "\n" if line else "", sys.stderr)
        for warning in [*programs.micro.warnings, *loader.warnings]:
            _say(f"warning: {warning}\n", sys.stderr)
    receivers: list[Receiver] = []
    sink: WandbSink | None = None
    compared: _PlanComparison | None = None
    with _display(recipe, context) as progress:
        loop = TrainingLoop(
            recipe, context, engine, loader, setting.batch, folder=folder, checkpoints=place / "checkpoints",
            saved=partial(_saved, run), publishable=(lambda: None) if run is None else run.check_lock,
            record=partial(_send, receivers),
            progress=progress, held_out=checked, attempt=attempt, restarts=crash.restarts(),
            flops_per_s=peak_flops(programs),
            peak_memory=partial(_peak_memory, context, engine), model=setting.spec.to_json(),
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
            for note in _notes_of(loader, context, data_rank):
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


def _place(recipe: Recipe) -> Location:
    """Where the run is: its folder, or its place in an object store."""
    return recipe.run.folder if recipe.run.store is None else location(recipe.run.store)


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
    place = _place(recipe)
    store = place if isinstance(place, StorePath) else None
    if not context.is_main:
        if store is not None and context.local_rank == 0:  # another host's first worker
            RunStore(store, folder).pull()
        context.barrier()
        yield None, {}
        return
    with RunDir(folder, store=store, where=where, say=lambda text: _say(text + "\n", sys.stderr)) as run:
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
                why=f"step {step} was saved, and {run.checkpoints} is empty; a start at step 1 would write a second "
                f"course into {run.metrics}",
                fix="put the checkpoints back there, or choose another run.dir to start anew",
            )
        changed = changes(folder, run.checkpoints, recipe) if exists else {}
        if recipe.resume == "auto" and saved:
            refuse(place, recipe, changed)
        context.barrier()
        yield run, changed


def _keep_output(folder: Path, context: Context) -> None:
    """Redirects the output of ranks other than 0, C libraries included, to a log file per rank; rank 0 logs to its
    file.

    Stacks of crashes go to these files too. The launcher is told their names.
    """
    handler: logging.Handler
    path = (folder / "logs" / f"rank-{context.rank}.log").resolve()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        messages.send("log", text=str(path), progress=os.fstat(descriptor).st_size)
        if context.is_main:
            faulthandler.enable(descriptor)  # the descriptor stays open for it
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
    handler = _QuietFile(path, delay=True) if context.is_main else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("tpshard")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)


class _QuietFile(logging.FileHandler):
    """A log file that ignores a full disk, which other parts of the run report."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Notes(logging.Handler):
    """Shows warnings and the run's own log messages above the progress bar."""

    def __init__(self, progress: Progress):
        super().__init__(logging.INFO)
        self.progress = progress

    def emit(self, entry: logging.LogRecord) -> None:
        prefix = "warning: " if entry.levelno >= logging.WARNING else ""
        self.progress.note(prefix + entry.getMessage())


@contextlib.contextmanager
def _display(recipe: Recipe, context: Context) -> Iterator[Progress]:
    progress = progress_for(recipe.train.steps, main=context.is_main)
    notes = _Notes(progress)
    logging.getLogger("tpshard").addHandler(notes)
    try:
        yield progress
    finally:
        logging.getLogger("tpshard").removeHandler(notes)
        progress.close()


def _tokenizer(recipe: Recipe, corpus: Corpus, setting: Setting, run: Path, context: Context | None) -> TextTokenizer:
    named = recipe.data.tokenizer
    where = recipe.where("data.tokenizer")
    if isinstance(named, TokenizerTraining):
        if context is None:
            raise Mistakes.one(
                "there is no tokenizer: only `train` trains one", exit=Exit.DATA, where=where,
                why=f"no tokenizer in {carried(run)}", fix="name the model's own in `data.tokenizer`",
            )  # fmt: skip
        context.watchdog.doing = Doing("training the tokenizer")
        folder: Path | None = trained_tokenizer(recipe, corpus.train, run, context, partial(_say, stream=sys.stderr))
    elif named == "bytes":
        folder = byte_tokenizer(run)
    else:
        folder = corpus.tokenizer if named is None else Path(named)
    if folder is None:
        raise Mistakes.one(
            "`data.tokenizer` names no tokenizer", exit=Exit.DATA, where=where,
            fix=f"the folder of a Hugging Face tokenizer; {MADE_TOKENIZERS}",
        )  # fmt: skip
    data, rows = recipe.data, setting.spec.sizes.vocab
    if not folder.is_dir() and tokenizer_files(carried(run)):
        folder = carried(run)  # the folder has moved since the run began
    tokenizer = load_tokenizer(folder, bos=data.bos, eos=data.eos, rows=rows, where=where)
    for note in tokenizer.notes:
        logging.getLogger(__name__).warning(note)
    return tokenizer


def _initial_block(recipe: Recipe, spec: ModelSpec) -> InitialBlock:
    """`spec.initial_block`, whose errors are mistakes of the recipe's model; the weights are opened at once.

    A run that goes on needs no weights of the folder that it began from, which may be gone.
    """
    gone = carried_instead(recipe) is not None

    def block(*args: Any, **options: Any) -> torch.Tensor:
        if gone:
            why = f"{getattr(recipe.model, spec.source.key)} is gone, and no checkpoint of the run has its weights"
            raise wrong_model(recipe, ValueError(why))
        try:
            return spec.initial_block(*args, **options)
        except ValueError as error:
            raise wrong_model(recipe, error) from error

    try:
        gone or spec.weights  # noqa: B018 (raises)
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from error
    return block


def _build_programs(setting: Setting, context: Context) -> TrainingPrograms:
    """The programs of this run, the same on all ranks."""
    context.watchdog.doing = Doing("building the programs")
    if context.is_main:
        _say(f"building the programs for {plural(context.world, 'device')}\n", sys.stderr)
    programs = training.build(setting)
    context.agree(programs.fingerprints)
    return programs


def _data(setting: Setting, data_rank: int, folder: Path, context: Context) -> tuple[Loader | GeneratedRows, HeldOut]:
    """This rank's rows of every step, and its micro-batches of held-out rows by the names of their texts."""
    recipe, plan = setting.recipe, setting.batch
    evaluates = bool(recipe.evaluate.every_steps)
    if not setting.task.text:
        rows = GeneratedRows(setting.task, recipe, plan.rows(data_rank))
        return rows, {recipe.task: list(held_out(setting, data_rank))} if evaluates else {}
    data = opened_data(setting, folder, context)
    context.agree({"tokenizer": " ".join(share.tokenizer.fingerprint for share in data.mixture.shares)})
    loader = Loader(
        data.mixture, seq_len=setting.seq_len, global_sequences=plan.global_sequences, part=plan.rows(data_rank),
        seed=recipe.seed, bad_rows=recipe.data.bad_rows,
    )  # fmt: skip
    return loader, {t.name: list(held_out(setting, data_rank, (t, tok))) for t, tok in data.held_out if evaluates}


def _require_schedule(recipe: Recipe) -> None:
    """Raises Mistakes (exit 3) for a user's schedule that cannot be called."""
    schedule, steps = recipe.schedule, recipe.train.steps
    try:
        for step in {min(schedule.warmup_steps + 1, steps), steps}:
            learning_rate(step, schedule, peak=recipe.optimizer.lr, steps=steps)
    except Exception as error:  # the function's own
        why = "" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        message = str(error) if not why else f"`schedule.name: {schedule.name}` failed"
        fix = "a function of one SchedulePoint that returns a number from 0 on"
        where = recipe.where("schedule.name")
        raise Mistakes.one(message, exit=Exit.RECIPE, where=where, why=why, fix=fix) from error


def _notes_of(loader: Loader | GeneratedRows, context: Context, data_rank: int) -> list[str]:
    """What was done to documents that were not taken as they are, over all ranks. Every rank calls it."""
    own = loader.notes if isinstance(loader, Loader) else Counter()
    of_ranks = dict(context.gather((data_rank, dict(own))))  # ranks that read the same rows count once
    total: Counter[str] = sum(map(Counter, of_ranks.values()), Counter())
    return [f"{count:,} rows were {note}" for note, count in total.items()]


def opened_data(setting: Setting, folder: Path, context: Context | None = None) -> OpenedData:
    """The recipe's sources with their tokenizers. folder: the run's, where the sample is kept if the cache cannot be
    written. context: the workers of a run, which may train a tokenizer; every rank calls it then."""
    recipe = setting.recipe
    return open_data(
        recipe, setting.seq_len, lambda corpus: _tokenizer(recipe, corpus, setting, folder, context), folder
    )


def _part(total: int, setting: Setting, data_rank: int) -> tuple[range, int]:
    """This rank's part of `total` held-out rows, and the number of rows per rank, padding included."""
    each = -(-total // setting.batch.data_ranks)
    return range(min(data_rank * each, total), min((data_rank + 1) * each, total)), each


def held_out(
    setting: Setting, data_rank: int, text: tuple[TextSource, TextTokenizer | AnswerTokenizer] | None = None,
    sequences: int | None = None,
) -> Iterator[StepBatch]:  # fmt: skip
    """This rank's micro-batches of held-out sequences; equally many on every rank, the same sequences on any mesh.

    text: the held-out text with its tokenizer; None for a task that makes its rows. sequences: how many, by default as
    the recipe says; 0 for all.
    """
    recipe = setting.recipe
    asked = recipe.evaluate.sequences if sequences is None else sequences
    if text is None:
        numbers, each = _part(asked, setting, data_rank)
        yield from held_out_rows(setting.task, recipe, numbers, each, setting.batch.per_device)
        return
    source, tokenizer = text
    batch = held_out_batch(
        source, tokenizer, seq_len=setting.seq_len, sequences=asked, bad_rows=recipe.data.bad_rows
    )  # fmt: skip
    count = len(batch.origin)
    if count < asked and data_rank == 0 and (recipe.evaluate.every_steps or sequences is not None):
        known = plural(sum(map(bool, batch.origin)), "sequence")
        _say(f"{asked} held-out sequences were asked for; {source.name} has {known}, which count\n", sys.stderr)
    rows, each = _part(count, setting, data_rank)
    zeros = torch.zeros(setting.seq_len, dtype=torch.int64)
    blank = {"tokens": zeros, "targets": zeros + IGNORE, "documents": zeros, "positions": torch.arange(len(zeros))}
    yield from batch.rows(rows.start, rows.stop).micro_batches(blank, each, setting.batch.per_device)


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


def _say(text: str, stream: Any = None) -> None:
    with contextlib.suppress(OSError, ValueError):  # stdout is closed, as by `| head`.
        print(text, end="", file=stream or sys.stdout, flush=True)


def _offline(place: str) -> str | None:
    """How a run that wandb keeps on this disk is sent; None for no place."""
    return f"offline; `wandb sync {shlex.quote(place)}` sends it" if place else None


# ---- the end --------------------------------------------------------------------------------------------------
def ending(outcome: Outcome, setting: Setting) -> str:
    """The summary of a run and its next commands, for stdout."""
    course, recipe = outcome.course, setting.recipe
    folder = _place(recipe)
    lines = []
    if outcome.last_loss is None and outcome.exit == Exit.DONE:
        lines.append(f"{folder} has all its {course.step} steps; for more: tpshard train {folder} train.steps=...")
    else:
        how_ended = {Exit.PREEMPTED: "stopped, as asked,", Exit.INTERRUPTED: "interrupted"}.get(outcome.exit, "done")
        lines.append(f"{how_ended} after step {course.step} of {recipe.train.steps}, {duration(outcome.seconds)}")
    facts: Sequence[tuple[str, str | None]] = (
        ("loss", None if outcome.last_loss is None else f"{outcome.first_loss:.4f} -> {outcome.last_loss:.4f}"),
        ("held-out loss", None if outcome.eval_loss is None else f"{outcome.eval_loss:.4f}"),
        ("speed", f"{short(outcome.tokens_per_s)} tokens/s" if outcome.tokens_per_s else None),
        ("tokens", f"{course.tokens:,}"),
        ("skipped steps", str(outcome.skipped) if outcome.skipped else None),
        ("restarts", f"{outcome.restarts}, after a worker crashed" if outcome.restarts else None),
        ("checkpoint", str(outcome.saved) if outcome.saved else None),
        ("not saved", outcome.unsaved or None),
        ("record", str(folder / "metrics.jsonl")),
        ("wandb", outcome.wandb if "://" in outcome.wandb else _offline(outcome.wandb)),
    )
    lines += [f"  {name:<14}{value}" for name, value in facts if value is not None]
    saved = outcome.saved or outcome.exit == Exit.DONE
    if outcome.exit in (Exit.PREEMPTED, Exit.INTERRUPTED, Exit.CHECKPOINT):
        nexts = [(f"tpshard train {folder}", "continue from here" if saved else "begin again")]
    else:
        nexts = [(f"tpshard plan {folder}", "what it does: shardings, collectives, memory, time")]
        if recipe.task == "lm" and not setting.spec.refusal("serve"):
            nexts.append((f"tpshard serve {folder}", "serve it over HTTP"))
        if not setting.spec.refusal("write"):
            nexts.append((f"tpshard convert {folder} {recipe.run.folder}-hf", "take it away as a Hugging Face folder"))
        nexts += [] if outcome.ended else _continuations(recipe, folder)
    width = max(len(command) for command, _ in nexts)
    lines += ["next:", *(f"  {command:<{width}}   {why}" for command, why in nexts)]
    return "\n".join(lines) + "\n"


def _continuations(recipe: Recipe, folder: Location) -> Iterator[tuple[str, str]]:
    """Yields the commands that train a finished run on, each with what it does to the learning rate."""
    last, peak = recipe.train.steps, recipe.optimizer.lr
    command = f"tpshard train {folder} train.steps={2 * last}"
    rate = learning_rate(last + 1, recipe.schedule, peak=peak, steps=last)
    yield command, f"train on at a learning rate of {rate:.3g}"
    if recipe.schedule.name in ("cosine", "linear", "wsd"):
        schedule = replace(recipe.schedule, decay_steps=2 * last)
        rate = learning_rate(last + 1, schedule, peak=peak, steps=2 * last)
        yield f"{command} schedule.decay_steps={2 * last}", f"train on, from {rate:.3g} down again"
