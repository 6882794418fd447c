"""The training loop with a tiny engine on one and two ranks: resuming, stopping, and non-finite losses."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.objectives.targets import IGNORE
from tpshard.models.optimizers.adamw import AdamW, Treatment, adamw_update
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.fit.batching import derive
from tpshard.recipes.reading.load import loads
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.data.corpus import open_text
from tpshard.train.data.open_data import Mixture
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.stream import Loader
from tpshard.train.data.tokens import TextTokenizer
from tpshard.train.records.progress import Progress
from tpshard.train.run.loop import TrainingLoop
from tpshard.train.run.outcome import Outcome, StepResult

VOCAB, WIDTH = 256, 8
BYTES = TextTokenizer(Path("bytes"), VOCAB, (), (0,), 0, "bytes", lambda text: list(text.encode()))
RECIPE = """
name: loop
model: {preset: tiny, seq_len: 32}
batch: {global_sequences: 8, per_device: 2}
optimizer: {lr: 0.05}
schedule: {warmup_steps: 0}
train: {steps: 8}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 3}
logging: {every_steps: 1}
"""


class PlainEngine:
    """A bigram model, copied on every rank: gradients and sums are all-reduced."""

    exposed_comm_s = None
    sent_bytes = None
    collectives = None
    flops_per_sequence = 0

    def __init__(self, context: Context, poison: Callable[[int, int], bool] = lambda rank, number: False):
        self.context, self.poison, self.numbers = context, poison, 0
        self.data_rank = context.rank
        self.forget()

    def forget(self) -> None:
        self.grads = [torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH)]
        self.sums: list[torch.Tensor] = []

    def loss(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        params = [p.requires_grad_() for p in self.params]
        logits = torch.nn.functional.linear(params[0][batch["tokens"]], params[1])
        loss, count = cross_entropy_sum(logits, batch["targets"])
        return loss, count, params

    def total(self, *values: torch.Tensor) -> torch.Tensor:
        both = torch.stack([v.detach().double() for v in values])
        dist.all_reduce(both)
        return both

    def accumulate(self, batch: StepBatch, seed: int) -> None:
        loss, count, params = self.loss(batch)
        if self.poison(self.context.rank, self.numbers):
            loss = loss * float("nan")
        for mine, new in zip(self.grads, torch.autograd.grad(loss, params)):
            mine += new
        self.sums.append(self.total(loss, count))

    def update(self, lr: float, number: int) -> StepResult:
        self.numbers += 1
        for grad in self.grads:
            dist.all_reduce(grad)
        losses, counts = torch.stack(self.sums).T
        updated = adamw_update(
            [p.detach() for p in self.params], self.grads, self.exp_avg, self.exp_avg_sq, losses.sum(), counts.sum(),
            torch.tensor(lr), torch.tensor(float(number)), treated=[Treatment(decay=True)] * 2, config=AdamW(),
        )  # fmt: skip
        self.params, self.exp_avg, self.exp_avg_sq = updated.params, updated.exp_avg, updated.exp_avg_sq
        self.forget()
        each = tuple((losses / counts.clamp(min=1)).tolist())
        mean = float(losses.sum() / counts.sum().clamp(min=1))
        return StepResult(each, mean, int(counts.sum()), float(updated.grad_norm), bool(updated.finite))

    def evaluate(self, batch: StepBatch) -> tuple[float, int]:
        loss, count, _ = self.loss(batch)
        both = self.total(loss, count)
        return float(both[0]), int(both[1])

    def named(self) -> dict[str, torch.Tensor]:
        parts = {"": self.params, "optimizer/exp_avg/": self.exp_avg, "optimizer/exp_avg_sq/": self.exp_avg_sq}
        return {f"{prefix}{name}": t.detach() for prefix, ts in parts.items() for name, t in zip("ab", ts)}

    def tensors(self) -> dict[str, Shard]:
        return {name: Shard.whole(t) for name, t in self.named().items()}

    def stored_shapes(self) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        return {name: (t.shape, t.dtype) for name, t in self.named().items()}

    def load(self, read: Callable[..., torch.Tensor]) -> None:
        self.initialize(0)
        values = [read(name, (0, 0), (VOCAB, WIDTH)) for name in self.named()]
        self.params, self.exp_avg, self.exp_avg_sq = values[:2], values[2:4], values[4:]

    def initialize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = [torch.randn(VOCAB, WIDTH, generator=generator) for _ in range(2)]
        self.exp_avg = [torch.zeros(VOCAB, WIDTH) for _ in range(2)]
        self.exp_avg_sq = [torch.zeros(VOCAB, WIDTH) for _ in range(2)]


class Told(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(
    context: Context,
    folder: str,
    overrides: Sequence[str] = (),
    *,
    stop_at: int = 0,
    poison: Any = None,
    targets: bool = True,
    blank: Collection[int] = (),
) -> tuple[Outcome, list[dict[str, Any]], list[str], list[torch.Tensor]]:
    context.stopping.signal = None
    recipe = loads(RECIPE, overrides)
    engine = PlainEngine(context, poison or (lambda rank, number: False))
    engine.initialize(recipe.seed)
    plan = derive(recipe, context.world)
    corpus = open_text(f"{folder}/text")
    options: dict[str, Any] = {"seq_len": 32, "global_sequences": 8}
    loader = Loader(Mixture.of(corpus.train, BYTES), part=plan.rows(engine.data_rank), **options)
    rows: list[dict[str, Any]] = []
    progress = Told()

    def record(row: dict[str, Any]) -> None:
        rows.append(json.loads(json.dumps(row, allow_nan=False)))
        if context.rank == 0 and row["step"] == stop_at:
            context.stopping.signal = signal.SIGTERM

    following_batch, numbers = loader.next, count(1)

    def with_blank_steps() -> StepBatch:
        batch = following_batch()
        none = {"targets": torch.full_like(batch["targets"], IGNORE)} if next(numbers) in blank else {}
        return replace(batch, tensors={**batch.tensors, **none})

    loader.next = with_blank_steps  # type: ignore[method-assign]
    tokens = torch.arange(64).reshape(2, 32)
    following = tokens + 1 if targets else torch.full_like(tokens, IGNORE)
    loop = TrainingLoop(
        recipe, context, engine, loader, plan, folder=Path(folder) / "run", record=record, progress=progress,
        held_out={"text": [StepBatch({"tokens": tokens, "targets": following}, ("", ""))] * 2},
    )  # fmt: skip
    try:
        loop.begin()
        outcome = loop.run()
    finally:
        loader.close()
    return outcome, rows, progress.notes, [p.detach() for p in engine.params]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "text").mkdir()
    words = ["the mesh", "a shard", "one axis", "every rank", "this loop"]
    for name in ("train", "validation"):
        with gzip.open(tmp_path / "text" / f"c4-{name}.00000-of-00001.json.gz", "wt") as file:
            for i in range(300):
                text = " ".join(words[(i * j) % 5] for j in range(2, 30))
                file.write(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n")
    return str(tmp_path)


def interrupt(context: Context, folder: str) -> tuple[list[Any], list[Any], list[bool], list[str]]:
    whole, rows, _, params = train(context, folder, ["checkpoint.every_steps=0"])
    assert whole.exit == 0 and whole.last_loss is not None and whole.first_loss is not None
    assert whole.last_loss < whole.first_loss - 0.3
    first, some, _, _ = train(context, folder, stop_at=3)
    assert first.exit == 75 and first.course.step == 4 and first.saved is not None
    then, rest, notes, again = train(context, folder)
    assert then.exit == 0 and then.course.step == 8
    finished, nothing, _, _ = train(context, folder)
    assert finished.exit == 0 and nothing == [] and finished.course.step == 8
    losses = [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in some + rest]
    expected = [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows]
    return expected, losses, [torch.equal(a, b) for a, b in zip(params, again)], notes


def test_a_stopped_run_continues_with_the_same_losses(pool: Any, folder: str) -> None:
    results = pool.run(interrupt, folder, world=2)
    expected, losses, equal, notes = results[0]
    assert losses == expected and len(losses) == 8 and all(equal)
    assert any("continuing from step 4" in note for note in notes)
    assert results[1][0] == results[1][1] == []  # only rank 0 writes the record
    assert all(results[1][2])


def evaluate_nothing(context: Context, folder: str, step: int) -> tuple[list[Any], list[Any], int]:
    every = "evaluate.every_steps=4"
    _, rows, _, _ = train(context, folder, ["checkpoint.every_steps=0", every])
    first, some, _, _ = train(context, folder, [every], stop_at=step - 1)
    assert first.exit == 75 and first.course.step == step
    then, rest, _, _ = train(context, folder, [every])
    assert then.exit == 0
    result = [
        [(row["step"], row["eval_loss"]) for row in rows_of_run if "eval_loss" in row]
        for rows_of_run in (rows, some + rest)
    ]
    return result[0], result[1], len([row for row in some if "eval_loss" in row])


@pytest.mark.parametrize("step", [4, 8])
def test_an_evaluation_that_a_stop_left_out_is_made_up_for(pool: Any, folder: str, step: int) -> None:
    expected, actual, before = pool.run(evaluate_nothing, folder, step, world=2)[0]
    assert [step for step, _ in expected] == [4, 8] and actual == expected
    assert before == step // 4 - 1


def without_targets(context: Context, folder: str) -> list[str]:
    return train(context, folder, ["checkpoint.every_steps=0", "evaluate.every_steps=4"], targets=False)[2]


def test_a_run_says_that_no_text_is_held_out(pool: Any, folder: str) -> None:
    notes = pool.run(without_targets, folder, world=2)[0]
    said = [note for note in notes if "no document is held out" in note]
    assert [note.partition(":")[0] for note in said] == ["step 4", "step 8"]


def poisoned(context: Context, folder: str, policy: str) -> tuple[Any, ...]:
    overrides = [f"train.on_nonfinite={policy}"]
    bad = {4} if policy != "stop" else {4, 5}

    def poison(rank: int, number: int) -> bool:
        return rank == 1 and number in bad

    try:
        outcome, rows, notes, params = train(context, folder, overrides, poison=poison)
    except Mistakes as stopped:
        return int(stopped.exit), str(stopped), [], [], True
    finite = all(bool(p.isfinite().all()) for p in params)
    return int(outcome.exit), "", [(row["step"], row["loss"]) for row in rows], notes, finite


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_what_is_not_finite_on_one_rank_is_decided_alike_on_all(pool: Any, folder: str, policy: str) -> None:
    results = pool.run(poisoned, folder, policy, world=2)
    accounts = (Path(folder) / "run" / "logs" / "nonfinite.jsonl").read_text().splitlines()
    account = json.loads(accounts[0])
    assert account["step"] == 5 and account["decision"] == policy and account["loss"] is None
    assert len(account["batch"]) == 8 and all("json.gz" in origin for origin in account["batch"])
    assert [r[0] for r in results] == ([8, 8] if policy == "stop" else [0, 0])
    assert all(r[4] for r in results)
    steps = [step for step, _ in results[0][2]]
    if policy == "stop":
        assert "step 5" in results[0][1] and "step 3 is saved" in results[0][1]
    elif policy == "skip":
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8] and dict(results[0][2])[5] is None
    else:
        assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8] and "back to step 3" in results[0][3][0]


def blank(context: Context, folder: str) -> list[Any]:
    outcome, rows, notes, _ = train(context, folder, stop_at=4, blank={3})
    then, rest, later, _ = train(context, folder, blank={1})
    assert (outcome.skipped, then.skipped) == (1, 2) and outcome.exit == 75 and then.exit == 0
    assert (then.course.step, then.course.updates) == (8, 6)
    return [[(row["step"], row["loss"], row["grad_norm"], row["skipped"]) for row in rows + rest], notes + later]


def test_a_step_without_a_target_is_skipped_and_counted(pool: Any, folder: str) -> None:
    rows, notes = pool.run(blank, folder, world=2)[0]
    assert [row[3] for row in rows] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [row[0] for row in rows if row[1] is None or row[2] is None] == [3, 6]
    skipped = [note for note in notes if "no token has a target" in note]
    assert [note.partition(":")[0] for note in skipped] == ["step 3", "step 6"]


def longer(context: Context, folder: str) -> list[list[str]]:
    train(context, folder)
    kept = train(context, folder, ["train.steps=9", "schedule.decay_steps=8"])
    anew = train(context, folder, ["train.steps=12"])
    return [[note for note in notes if "the learning rate of step" in note] for _, _, notes, _ in (kept, anew)]


def test_a_longer_run_shows_both_schedules_where_the_rate_changes(pool: Any, folder: str) -> None:
    kept, (anew,) = pool.run(longer, folder, world=1)[0]
    assert kept == [] and "step 10 was to be 0.005 (cosine" in anew
    assert "from step 8 on" in anew and "from step 12 on" in anew


def unwritable(context: Context, folder: str) -> tuple[Any, ...]:
    run = Path(folder) / "run"
    if context.rank == 0:
        run.mkdir()
        (run / "checkpoints").write_text("a file where a folder should be")
    context.barrier()
    outcome, _, notes, _ = train(context, folder)
    try:
        train(context, folder, ["checkpoint.on_error=stop"])
    except Mistakes as stopped:
        return int(outcome.exit), outcome.course.step, notes, int(stopped.exit)
    return ()


def test_a_checkpoint_that_cannot_be_written_is_a_warning_until_the_end_or_the_end(pool: Any, folder: str) -> None:
    for code, step, notes, stopped in pool.run(unwritable, folder, world=2):
        assert (code, step, stopped) == (7, 8, 7)
        assert any("was not written" in note for note in notes)
