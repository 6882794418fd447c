"""How far a run is, how it ended, and what it says at its end."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpshard.diagnostics.diagnostic import Exit
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.checkpoints.store_path import Location
from tpshard.train.records.progress import duration, short
from tpshard.train.run.learning_rate import learning_rate
from tpshard.train.run.run_store import run_place


@dataclass
class Course:
    """A run's progress (steps, updates, tokens), saved with every checkpoint."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Steps that changed the parameters; Adam's bias correction counts these."""
    empty: int = 0
    """Steps without a target, which changed nothing."""
    tokens: int = 0
    """Target tokens so far, over all ranks."""
    evaluated: int = 0
    """The last step whose evaluation finished. An evaluation that a stop interrupted is repeated on resuming."""


@dataclass
class Outcome:
    """The result of a run."""

    exit: Exit
    course: Course
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    """Median of the logged steps without the first, which includes one-time work."""
    skipped: int = 0
    restarts: int = 0
    """Restarts after workers crashed, since the command was given."""
    saved: Location | None = None
    """The last checkpoint."""
    unsaved: str = ""
    """Why the last attempt to save failed, if it did."""
    rates: list[float] = field(default_factory=list)
    trained: bool = False
    """Whether this start did a step."""
    ended: bool = False
    """Whether no source had anything left to read."""
    steps: int = 0
    """The steps of the whole run."""
    wandb: str = ""
    """The address of wandb's run, or its folder where it is offline; "" without wandb."""


def summary(outcome: Outcome, recipe: Recipe, folder: Path) -> Mapping[str, Any]:
    """The result of a run as JSON values, for wandb's summary."""
    return {
        "exit": int(outcome.exit), "steps": outcome.course.step, "tokens": outcome.course.tokens,
        "first_loss": outcome.first_loss, "loss": outcome.last_loss, "eval_loss": outcome.eval_loss,
        "seconds": outcome.seconds, "tokens_per_s": outcome.tokens_per_s, "skipped": outcome.skipped,
        "restarts": outcome.restarts, "name": recipe.name, "folder": str(folder),
    }  # fmt: skip


def ending(outcome: Outcome, setting: Setting) -> str:
    """The summary of a run and its next commands, for stdout."""
    course, recipe = outcome.course, setting.recipe
    folder = run_place(recipe)
    lines = []
    if outcome.last_loss is None and outcome.exit == Exit.DONE:
        lines.append(f"{folder} has all its {course.step} steps; for more: tpshard train {folder} train.steps=...")
    else:
        how_ended = {Exit.PREEMPTED: "stopped, as asked,", Exit.INTERRUPTED: "interrupted"}.get(outcome.exit, "done")
        lines.append(f"{how_ended} after step {course.step} of {outcome.steps}, {duration(outcome.seconds)}")
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
            taken = f"tpshard convert {folder} {recipe.run.folder}"
            merged = [(f"{taken}-adapters", "take the adapters away in PEFT's format")] * bool(setting.spec.added)
            merge = " --merge" if setting.spec.added else ""
            nexts += [*merged, (f"{taken}-hf{merge}", "take it away as a Hugging Face folder")]
        nexts += [] if outcome.ended else _continuations(recipe, folder)
    width = max(len(command) for command, _ in nexts)
    lines += ["next:", *(f"  {command:<{width}}   {why}" for command, why in nexts)]
    return "\n".join(lines) + "\n"


def _continuations(recipe: Recipe, folder: Location) -> Iterator[tuple[str, str]]:
    """Yields the commands that train a finished run on, each with what it does to the learning rate."""
    if recipe.data.epochs is not None:
        yield f"tpshard train {folder} data.epochs={2 * recipe.data.epochs}", "read the text as often again"
        return
    last, peak = recipe.train.steps, recipe.optimizer.lr
    command = f"tpshard train {folder} train.steps={2 * last}"
    rate = learning_rate(last + 1, recipe.schedule, peak=peak, steps=last)
    yield command, f"train on at a learning rate of {rate:.3g}"
    if recipe.schedule.name in ("cosine", "linear", "wsd") and not recipe.schedule.stages:
        schedule = replace(recipe.schedule, decay_steps=2 * last)
        rate = learning_rate(last + 1, schedule, peak=peak, steps=2 * last)
        yield f"{command} schedule.decay_steps={2 * last}", f"train on, from {rate:.3g} down again"


def _offline(place: str) -> str | None:
    """How a run that wandb keeps on this disk is sent; None for no place."""
    return f"offline; `wandb sync {shlex.quote(place)}` sends it" if place else None


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    losses: tuple[float, ...]
    """Loss of each micro-batch in nats per token, over all data ranks."""
    loss: float
    """Loss of the whole step, in nats per token."""
    targets: int
    """Target tokens."""
    grad_norm: float
    """Global norm of the gradients, before clipping."""
    updated: bool
    """False where loss or gradient was not finite, or there was no target."""
    counted: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The model's counters over the whole step and all data ranks, by path and label."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return self.updated or (self.empty and math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    @property
    def empty(self) -> bool:
        """Whether no token of the step has a target, on any rank: such a step changes nothing."""
        return self.targets == 0
