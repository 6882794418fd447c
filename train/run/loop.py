"""The training loop: steps, evaluations, checkpoints, and every way a run ends. It depends on no mesh or graph."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.draws import mix_seeds
from tpshard.parallelism.runtime import messages
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.step_profile import StepProfile
from tpshard.parallelism.runtime.watchdog import Doing
from tpshard.programs.fit.batching import BatchPlan
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.checkpoints.background_save import BackgroundSaver
from tpshard.train.checkpoints.checkpoint import OPTIMIZER
from tpshard.train.checkpoints.restore import SavedCheckpoint, newest
from tpshard.train.checkpoints.store_path import Location
from tpshard.train.checkpoints.verify import Together
from tpshard.train.data.generated_rows import GeneratedRows
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.stream import Loader, merge_states
from tpshard.train.records.progress import Progress
from tpshard.train.run import nonfinite
from tpshard.train.run.expert_balance import balance
from tpshard.train.run.learning_rate import change, described, learning_rate
from tpshard.train.run.nonfinite import number
from tpshard.train.run.outcome import Course, Outcome, StepResult
from tpshard.train.run.resuming import trained
from tpshard.train.run.training_engine import ReadBlock, TrainingEngine

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class TrainingLoop:
    """Trains `engine` on `loader`'s batches as the recipe says.

    Args:
        record: receives each row of metrics.jsonl; called on rank 0 only.
        folder: the run's on this host; reports of non-finite steps go to `logs/`.
        checkpoints: where they are; default: `checkpoints/` of the folder.
        saved: called with the step of each checkpoint and the seconds it took, on rank 0 and beside the steps.
        publishable: called on rank 0 before a checkpoint appears; raises OSError if it must not.
        held_out: this rank's micro-batches of held-out texts by name, equally many on every rank.
        attempt: the number of the run's start, a column of metrics.jsonl.
        restarts: the launcher's restarts after crashes, another column.
        flops_per_s: peak of all devices together, for `mfu`; None where unknown.
        profiled: receives the events of the steps that `train.profile` names; called on rank 0 only.
        model: JSON that describes the model in checkpoints, for readers without the recipe.
        begun: the place that the run began from, for its checkpoints (see `begun_from`).
    """

    def __init__(
        self,
        recipe: Recipe,
        context: Context,
        engine: TrainingEngine,
        loader: Loader | GeneratedRows,
        plan: BatchPlan,
        *,
        folder: Path,
        checkpoints: Location | None = None,
        saved: Callable[[int, float], None] = lambda step, seconds: None,
        publishable: Callable[[], None] = lambda: None,
        record: Callable[[Row], None],
        progress: Progress,
        held_out: Mapping[str, Sequence[StepBatch]] = MappingProxyType({}),
        attempt: int = 1,
        restarts: int = 0,
        flops_per_s: float | None = None,
        peak_memory: Callable[[], int | None] = lambda: None,
        profiled: Callable[[StepProfile], None] = lambda profile: None,
        model: Mapping[str, Any] | None = None,
        begun: str | None = None,
    ):
        self.recipe, self.context, self.engine, self.loader, self.plan = recipe, context, engine, loader, plan
        self.checkpoints = folder / "checkpoints" if checkpoints is None else checkpoints
        self.saved, self.publishable = saved, publishable
        self.folder, self.record, self.progress, self.held_out = folder, record, progress, held_out
        self.attempt, self.restarts = attempt, restarts
        self.flops_per_s, self.peak_memory, self.profiled = flops_per_s, peak_memory, profiled
        self._profile: StepProfile | None = None
        self.model, self.begun = dict(model or {}), begun
        self.course = Course()
        self.guard = nonfinite.Guard(recipe.train.on_nonfinite)
        self.outcome = Outcome(Exit.DONE, self.course, restarts=restarts, steps=recipe.train.steps)
        self._saved_step: int | None = None
        self._saver: BackgroundSaver | None = None
        self._stall_s = 0.0
        """Seconds that steps waited for checkpoints since the last recorded row."""
        self._began = self._step_began = time.monotonic()

    # ---- beginning ----------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Resumes from the newest undamaged checkpoint if the recipe allows and there is one, else starts from the
        seed. Every rank must call it."""
        resumes = self.recipe.resume != "never" or self.restarts > 0
        checkpoint = self._newest() if resumes else None
        if checkpoint is None:
            self.engine.initialize(self.recipe.seed)
            return
        self._restore(checkpoint)
        self.loader.load_state_dict(checkpoint.meta["data"], force=self.recipe.resume == "force")
        self._saved_step = checkpoint.step
        self.progress.note(f"continuing from step {checkpoint.step} ({checkpoint.folder})")
        before, now = checkpoint.meta.get("learning_rate"), described(self.recipe)
        if before is not None and (changed := change(checkpoint.step + 1, before, now)):
            self.progress.note(f"warning: {changed}")

    def _newest(self) -> SavedCheckpoint | None:
        """The newest undamaged checkpoint, verified by all ranks together."""
        with self.context.watchdog.allow(float(self.recipe.timeout_s.start), "reading checkpoints"):
            return newest(self.checkpoints, Together.of(self.context))

    def _restore(self, checkpoint: SavedCheckpoint) -> None:
        """Sets the engine and the course to a checkpoint's. `resume: force` starts the optimizer anew where the
        checkpoint has another's moments."""
        expected, saved = self.engine.stored_shapes(), checkpoint.meta["course"]
        self.course.step, self.course.updates = saved["step"], saved["updates"]
        read: ReadBlock = checkpoint.block
        if self.recipe.resume == "force" and checkpoint.differences(expected):
            model = {name: saved for name, saved in expected.items() if not name.startswith(OPTIMIZER)}
            checkpoint.require(model, dtypes=False, moments=False)
            if not all(checkpoint.holds(name, *expected[name]) for name in expected.keys() - model.keys()):
                read = _zeros_for_moments(read)
                self.course.updates = 0
                self.progress.note("warning: the checkpoint has another optimizer's moments; they start from zero")
        else:
            checkpoint.require(expected)
        self.engine.load(read)
        self.course.tokens, self.course.empty = saved["tokens"], saved.get("empty", 0)
        self.course.evaluated = saved.get("evaluated", saved["step"])

    # ---- running ------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """Runs the remaining steps, or until a stop is requested. The same outcome on every rank.

        Raises:
            Mistakes: exit 8 where loss or gradient is not finite and the policy is `stop`; exit 7 where a checkpoint
                cannot be written and the policy is to stop.
        """
        steps = self.recipe.train.steps
        self._began = self._step_began = time.monotonic()
        code = self.context.stop()
        if not code and self._evaluation_due():
            code = self.evaluate()
        while self.course.step < steps and not code:
            code = self._step(self.course.step + 1)
            if code:
                break
            if self._evaluation_due():
                code = self.evaluate()
            if self.outcome.ended:
                break
            every = self.recipe.checkpoint.every_steps
            if every and self.course.step % every == 0 and self.course.step != self._saved_step:
                self.save()
        self.end_profile()
        self.finish_save()
        if self.recipe.checkpoint.every_steps and self.course.step != self._saved_step and self.course.step:
            self.save()
            self.finish_save()
        return self._finish(code or self.context.stop() if self.remains else 0)

    @property
    def remains(self) -> bool:
        """Whether a step or an evaluation is still to be done."""
        return self.course.step < self.recipe.train.steps or self._evaluation_due()

    def _evaluation_due(self) -> bool:
        """Whether the last step is due for evaluation and not evaluated yet."""
        course, every = self.course, self.recipe.evaluate.every_steps
        if not (self.held_out and every and course.step) or course.evaluated == course.step:
            return False
        return course.step % every == 0 or course.step == self.recipe.train.steps or self.outcome.ended

    def _finish(self, code: int) -> Outcome:
        out = self.outcome
        out.exit = Exit.CHECKPOINT if out.unsaved else Exit(code)
        out.seconds, out.skipped = time.monotonic() - self._began, self.guard.skipped + self.course.empty
        if out.rates:
            out.tokens_per_s = statistics.median_high(out.rates)
        return out

    def _step(self, step: int) -> int:
        """One step, with its evaluation and checkpoint; returns the exit code that all ranks agree on, or 0."""
        watchdog = self.context.watchdog
        watchdog.doing = Doing("reading data")
        batch = self.loader.next()
        lr = learning_rate(step, self.recipe.schedule, peak=self.recipe.optimizer.lr, steps=self.recipe.train.steps)
        seed = mix_seeds(self.recipe.seed, step)
        self._trace(step)
        for i in range(self.plan.micro_batches):
            rows = batch.rows(i * self.plan.per_device, (i + 1) * self.plan.per_device)
            self.engine.accumulate(rows, seed)
        result = self.engine.update(lr, self.course.updates + 1)
        self.outcome.trained = True
        # One small collective per step: did any rank receive a stop signal, or see a value that is not finite?
        agreed = self.context.largest(self.context.stopping.urgency + (0 if result.finite else _NOT_FINITE))
        watchdog.beat(step)
        if self.context.is_main:
            messages.send("step", progress=step, droppable=True)
        watchdog.limit_s = float(self.recipe.timeout_s.step)
        finite = agreed < _NOT_FINITE
        agreed_exit = {0: 0, 1: int(Exit.PREEMPTED), 2: int(Exit.INTERRUPTED)}[agreed % _NOT_FINITE]
        if finite and result.empty and not self.context.any(any(batch.origin)):
            self.outcome.ended = True
            self.progress.note(f"all sources were read as often as the recipe says: the run ends after step {step - 1}")
            return agreed_exit
        self._log(step, result, lr, finite)
        if finite and result.empty:
            self.course.step, self.course.empty = step, self.course.empty + 1
            self.progress.note(f"step {step}: no token has a target; skipped, the parameters are as before")
        elif finite:
            self.guard.fine()
            self.course.step, self.course.updates = step, self.course.updates + 1
            self.course.tokens += result.targets
        else:
            self._not_finite(step, result, batch)
        return agreed_exit

    def _trace(self, step: int) -> None:
        """Starts and ends the record of the steps that `train.profile` names, before `step` runs."""
        named = self.recipe.train.profile
        if named is not None and self._profile is None and named.steps[0] <= step <= named.steps[1]:
            self._profile = StepProfile()
            self.engine.profile(self._profile)
        elif named is not None and self._profile is not None and step > named.steps[1]:
            self.end_profile()

    def end_profile(self) -> None:
        """Ends the record of profiled steps, and passes it on."""
        profile, self._profile = self._profile, None
        if profile is not None:
            self.engine.profile(None)
            if self.context.is_main:
                self.profiled(profile)

    def _log(self, step: int, result: StepResult, lr: float, finite: bool) -> None:
        now = time.monotonic()
        step_s, self._step_began = now - self._step_began, now
        rate = result.targets / step_s
        flops = self.engine.flops_per_sequence * self.plan.global_sequences
        every = self.recipe.logging.every_steps
        counts = finite and not result.empty
        logged = step == 1 or step % every == 0 or step == self.recipe.train.steps or not counts
        row: Row = {
            "step": step, "loss": None if result.empty else number(result.loss),
            "grad_norm": None if result.empty else number(result.grad_norm), "lr": lr,
            "skipped": self.guard.skipped + self.course.empty + (finite and result.empty),
            "tokens": self.course.tokens + (result.targets if finite else 0), "tokens_per_s": rate, "step_s": step_s,
            "mfu": flops / step_s / self.flops_per_s if flops and self.flops_per_s else None,
            "peak_memory_bytes": self.peak_memory() if logged else None,
            "exposed_comm_s": self.engine.exposed_comm_s, "sent_bytes": self.engine.sent_bytes,
            "collectives": self.engine.collectives, "save_stall_s": self._stall_s or None,
            "time": time.time(), "run": self.attempt, "restarts": self.restarts,
        }  # fmt: skip
        experts = balance(result.counted)
        if experts is not None:
            row["experts"] = experts
        if counts:
            self.outcome.last_loss = result.loss
            if self.outcome.first_loss is None:
                self.outcome.first_loss = result.loss
            elif logged:
                self.outcome.rates.append(rate)
        if logged:
            self._stall_s = 0.0
            if self.context.is_main:
                self.record(row)
        self.progress.step(row, logged=logged)

    # ---- evaluating ---------------------------------------------------------------------------------------
    def evaluate(self) -> int:
        """Records the loss on held-out text; returns the agreed exit code if a stop was requested.

        Every rank calls it.
        """
        sums = {name: [0.0, 0] for name in self.held_out}
        batches = [(name, batch) for name, rows in self.held_out.items() for batch in rows]
        for i, (name, batch) in enumerate(batches):
            batch_loss, count = self.engine.evaluate(batch)
            sums[name] = [sums[name][0] + batch_loss, sums[name][1] + count]
            self.context.watchdog.beat()
            if i + 1 < len(batches) and (code := self.context.stop()):
                return code
        self.course.evaluated = self.course.step
        loss_sum, targets = (sum(one[part] for one in sums.values()) for part in (0, 1))
        if targets:
            loss = loss_sum / targets
            self.outcome.eval_loss = loss
            each = {name: total / count for name, (total, count) in sums.items() if count}
            row: Row = {"step": self.course.step, "eval_loss": number(loss), "eval_tokens": int(targets)}
            if len(self.held_out) > 1:
                row["eval_losses"] = {name: number(one) for name, one in each.items()}
            if self.context.is_main:
                self.record({**row, "time": time.time(), "run": self.attempt})
            parts = "".join(f", {name} {one:.4f}" for name, one in each.items()) if len(self.held_out) > 1 else ""
            self.progress.note(f"step {self.course.step}: held-out loss {loss:.4f}{parts}")
        else:
            self.progress.note(f"step {self.course.step}: no held-out loss, because no document is held out")
        return self.context.stop()

    # ---- saving -------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Starts to write a checkpoint of this step in the background, after the one before is written."""
        began = time.monotonic()
        self.finish_save()
        if self._saver is None:
            self._saver = BackgroundSaver(
                self.context, self.checkpoints, self.recipe.checkpoint.keep_last, self.saved, self.publishable
            )  # fmt: skip
        loader_state = self.loader.state_dict()
        parts = self.context.gather(
            {key: loader_state[key] for key in ("step", "global_sequences", "tokenizer", "sums", "lanes")}
        )
        meta = {
            "course": dict(vars(self.course)), "data": {**loader_state, **merge_states(parts)},
            "seed": self.recipe.seed, "name": self.recipe.name, "model": self.model, "trained": trained(self.recipe),
            "mesh": dict(self.context.mesh.axes), "attempt": self.attempt,
            "learning_rate": described(self.recipe), "init_from": self.begun,
        }  # fmt: skip
        with self.context.watchdog.allow(float(self.recipe.timeout_s.step), "copying a checkpoint"):
            self._saver.start(self.course.step, self.engine.tensors(), meta)
        self._stall_s += time.monotonic() - began

    def finish_save(self) -> None:
        """Waits until the checkpoint in flight is written. A failed write is a warning or ends the run
        (`checkpoint.on_error`)."""
        with self.context.watchdog.allow(float(self.recipe.timeout_s.step), "saving a checkpoint"):
            result = self._saver.finish() if self._saver is not None else None
        if result is None:
            return
        if result.error is None:
            self.outcome.saved, self._saved_step, self.outcome.unsaved = result.folder, result.step, ""
            return
        self.outcome.unsaved = self.context.from_main(str(result.error))
        if self.recipe.checkpoint.on_error == "stop":
            raise Mistakes.one(
                str(result.error), exit=Exit.CHECKPOINT, where=self.recipe.where("checkpoint.on_error"),
                fix="make room, or choose another run.dir",
            ) from result.error  # fmt: skip
        self.progress.note(f"warning: {result.error}; older checkpoints are kept, and the run goes on")

    # ---- not finite ---------------------------------------------------------------------------------------
    def _not_finite(self, step: int, result: StepResult, batch: StepBatch) -> None:
        self.finish_save()
        back_to = self._saved_step or 0
        decision, why = self.guard.decide(back_to)
        account = nonfinite.report(
            self.folder, self.context, step, result, decision, batch.origin, self.plan.per_device, self.engine.data_rank
        )  # fmt: skip
        problem = f"step {step}: {nonfinite.describe(result.loss, result.grad_norm)}"
        if decision == "skip":
            self.progress.note(f"warning: {problem}; skipped, the parameters are as before (see {account})")
            self.course.step = step
        elif decision == "rollback":
            checkpoint = self._newest()
            if checkpoint is None:
                self.engine.initialize(self.recipe.seed)
                self.course.step = self.course.updates = self.course.tokens = self.course.empty = 0
            else:
                self._restore(checkpoint)
            self._saved_step = checkpoint.step if checkpoint is not None else None
            self.progress.note(
                f"warning: {problem}; back to step {self.course.step}, going on behind this batch (see {account})"
            )
        else:
            saved = f"step {back_to} is saved" if self._saved_step else "nothing is saved"
            raise Mistakes.one(
                f"{problem}; the run stops before this update is applied",
                exit=Exit.NONFINITE,
                where=self.recipe.where("train.on_nonfinite"),
                why=why or f"the policy is {self.guard.policy}; {saved}; the batch is listed in {account}",
                fix="a lower optimizer.lr or a longer warm-up; train.on_nonfinite: skip or rollback to go on",
            )


def _zeros_for_moments(read: ReadBlock) -> ReadBlock:
    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return torch.zeros(tuple(sizes)) if name.startswith(OPTIMIZER) else read(name, starts, sizes)

    return block


_NOT_FINITE = 4
"""Added to the urgency of a stop (0 to 2), so that one collective agrees on both."""
