"""The keys of a training run: batch, optimizer, loop, checkpoints and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tpshard.recipes.keys.constraints import (
    ALONE,
    Count,
    CountOrZero,
    Dtype,
    NonNegative,
    Positive,
    Share,
    form,
    limits,
)
from tpshard.recipes.keys.stores import is_url, local_folder
from tpshard.recipes.text.section import Section, derived


class Batch(Section):
    """The batch of a step. The number of micro-batches follows from it."""

    global_sequences: Annotated[int, limits(least=1, most=2**30)] = 128
    """Sequences per step, over all devices."""
    per_device: Annotated[int, limits(least=1, most=2**20)] | None = None
    """Sequences of one micro-batch on one data rank. Default: the largest divisor of global_sequences / data ranks up
    to 8."""


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    match: Annotated[tuple[str, ...], ALONE]
    """Patterns of their names, or of modules, such as layers.*.mlp, "*norm*" or lora_B, which may stand anywhere in a
    name; by tpshard's names or the folder's."""
    lr: NonNegative | None = None
    """Their peak learning rate; null: optimizer.lr. All follow the schedule."""
    weight_decay: NonNegative | None = None
    """Their decoupled decay, also of norms and biases; null: as others of their kind."""


class Optimizer(Section):
    """The optimizer and its settings."""

    name: Literal["adamw", "lion", "muon"] = "adamw"
    """The algorithm. adamw keeps two moments of each parameter, lion one; muon keeps one of the layers' matrices and
    updates all other parameters as adamw does."""
    lr: NonNegative = 3.0e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, limits(least=0, below=1)], Annotated[float, limits(least=0, below=1)]] = (0.9, 0.95)
    """Decay of the first and second moments; of lion: in the update and in the moment; of muon: for parameters that are
    no matrices of a layer."""
    momentum: Annotated[float, limits(least=0, below=1)] = 0.95
    """Decay of muon's moment of matrices; adamw and lion have `betas` only."""
    orthogonal: Mapping[str, bool] = field(default_factory=dict)
    """Whether muon moves the matrices of a name or pattern, such as `"layers.*.router": false`, as in `groups`, of
    which the last that matches counts; default: those of repeated layers, without tables of embeddings."""
    eps: Positive = 1.0e-8
    """Added to the root of the second moment; lion has none."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of matrices; norms and biases are not decayed."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with settings of their own, such as [{match: tok_embed, lr: 1.0e-4}]; the last that matches counts."""
    state_dtype: Dtype = derived(default="fsdp.master_dtype")
    """Type of the moments at rest; they are computed in fp32."""


SCHEDULES = ("cosine", "linear", "constant", "inverse_sqrt", "wsd")
"""The shapes of schedules that have a name."""


class ScheduleStage(Section):
    """A part of a schedule of stages; one of `steps` and `tokens` says how long it is."""

    steps: Count | None = None
    """Its steps."""
    tokens: Count | None = None
    """Its tokens, of batch.global_sequences x model.seq_len a step."""
    name: Annotated[
        str,
        form(
            r"linear|cosine|sqrt|exponential|constant|[\w.]+:[\w.]+",
            "linear, cosine, sqrt, exponential, constant or package:function",
        ),
    ] = "linear"
    """How it goes from the end of the stage before, at first the peak, to `to`: in a line, half a cosine, the root of
    the part that is done (fast at first) or halving, or it is there throughout; or your own function of the part of its
    steps that is done, which returns the part of the way."""
    to: Share = 1.0
    """The rate at its end, as a share of the peak."""


class Schedule(Section):
    """The learning rate schedule."""

    name: Annotated[
        str, form(rf"{'|'.join(SCHEDULES)}|[\w.]+:[\w.]+", f"{', '.join(SCHEDULES)} or package:function")
    ] = "cosine"
    """Shape after the warm-up: half a cosine or a line down to the lowest rate; the peak throughout; the peak times
    the root of warmup_steps / step (inverse_sqrt); the peak and then down over the last decay_over steps (wsd);
    or your own function of a `tpshard.train.run.learning_rate.SchedulePoint`, which returns a share of the peak."""
    warmup_steps: CountOrZero = derived(default="min(2000, train.steps / 10)")
    """Steps of linear warm-up."""
    decay_steps: Count = derived(default="train.steps")
    """Step at which cosine, linear and wsd reach the lowest rate, at which later steps stay."""
    decay_over: Count = derived(default="schedule.decay_steps / 10", saved=False)
    """Steps of the fall of wsd, which end at decay_steps."""
    fall: Literal["linear", "cosine", "sqrt", "exponential"] = "linear"
    """How wsd falls: in a line, half a cosine, 1 less the root of the part that is done, or 2 x 0.5^part less 1."""
    min_lr_ratio: Share = 0.1
    """The lowest learning rate, as a share of the peak."""
    stages: tuple[ScheduleStage, ...] = ()
    """Stages after the warm-up in place of one shape, such as [{steps: 800, to: 1.0}, {steps: 200, to: 0.0}]; the last
    one's rate stays."""


class Loss(Section):
    """How the loss of `task` is computed."""

    chunks: Count = 1
    """Parts of a sequence's tokens whose logits are computed one after another, with their gradients in the forward
    pass, so that those of all tokens are never in memory: a step's peak falls where the vocabulary is large. The loss
    is the same. For lm and mlm."""
    label_smoothing: Annotated[float, limits(least=0, below=1)] = 0.0
    """Share of each target that all tokens of the vocabulary have alike. Evaluations leave it out, and z_loss."""
    z_loss: NonNegative = 0.0
    """Times the squared logarithm of the sum of the logits' exponentials, added to a target's loss; PaLM has 1.0e-4."""


class Profile(Section):
    """A trace of real steps, written beside the planned one to `profile/` of the run's folder, with the largest
    differences."""

    steps: tuple[Count, Count]
    """The first and the last step that are traced; they run operation by operation, and somewhat slower."""


class Train(Section):
    """The training loop."""

    paths: ClassVar[tuple[str, ...]] = ("init_from",)
    folders: ClassVar[tuple[str, ...]] = ("init_from",)

    steps: Count = derived(default="what train.tokens or data.epochs makes, else 200000", saved=False)
    """Optimizer steps. Of `steps`, `tokens` and `data.epochs` one is given; a later layer's counts."""
    tokens: Count | None = None
    """Tokens to train on, in place of `steps`: steps of batch.global_sequences x model.seq_len tokens, until there are
    so many."""
    init_from: str | None = None
    """A run or a checkpoint, a Hugging Face folder or one with PEFT adapters, from whose values a new run begins, with
    its own data and a fresh optimizer; null: those of the model."""
    freeze: Annotated[tuple[str, ...], ALONE] = ()
    """Parameters that are not trained, by patterns as in `optimizer.groups`, such as tok_embed or layers.*.mlp."""
    clip_grad_norm: Positive | None = 1.0
    """Global norm to which gradients are clipped; null: off."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What happens if a loss or gradient is not finite; decided on all ranks alike, before any update."""
    profile: Profile | None = None
    """Steps to trace, such as {steps: [10, 12]}; null: none."""


class Evaluate(Section):
    """Loss on held-out text."""

    every_steps: CountOrZero = 500
    """Steps between evaluations; 0: never. A run also evaluates at its end."""
    sequences: Count = 64
    """Held-out sequences per evaluation."""


class Timeout(Section):
    """Seconds after which a worker that does not answer counts as lost."""

    start: Positive = 600
    """Seconds without progress until the first step is done; each part of a file that is read is progress."""
    step: Positive = 600
    """Between steps."""


class Launch(Section):
    """The workers that `train` starts on one host."""

    restarts: Annotated[int, limits(least=0, most=1000)] = 1
    """How often workers are restarted from the last checkpoint after one crashed (SIGSEGV, SIGABRT, SIGBUS), at least
    100 steps after the previous crash."""


class Run(Section):
    """The folder in which a run writes its files."""

    paths: ClassVar[tuple[str, ...]] = ("dir",)

    dir: str = "runs/${name}"
    """Folder of the run, relative to the working directory; ${name} is the recipe's name, ~ and $NAME are expanded as
    by a shell. Or a place in an object store, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""

    @property
    def store(self) -> str | None:
        """The run's place in an object store; None for a folder."""
        return self.dir if is_url(self.dir) else None

    @property
    def folder(self) -> Path:
        """The run's folder on this host."""
        return local_folder(self.dir) if is_url(self.dir) else Path(self.dir)


class Checkpoint(Section):
    """Saving checkpoints and resuming from them."""

    every_steps: CountOrZero = 500
    """Steps between checkpoints; 0: none are saved."""
    keep_last: Count = 3
    """Number of checkpoints kept."""
    resume: Literal["auto", "never", "force"] = "auto"
    """auto resumes a stopped run unless the recipe makes it another run, force resumes it nevertheless, never refuses
    to continue an existing run."""
    on_error: Literal["warn", "stop"] = "warn"
    """What happens if a checkpoint cannot be written."""


class Wandb(Section):
    """Weights & Biases; its failures never stop a run."""

    project: str = "tpshard"
    """Project of the run."""
    entity: str | None = None
    """Team or user; null: the login's default."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online with a login and offline without."""


class Logging(Section):
    """What a run logs. The first and the last step are always logged."""

    every_steps: Count = 10
    """Steps between rows of metrics.jsonl."""
    wandb: Wandb | None = field(default_factory=Wandb)
    """Weights & Biases; null: off."""
    tensorboard: bool = False
    """Whether the same rows are written for TensorBoard, to `tensorboard/` of the run's folder."""
