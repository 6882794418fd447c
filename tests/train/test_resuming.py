"""A run is resumed as it was, refused with every changed key, or continued with the changes on purpose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.runtime.context import Context
from tpshard.recipes.reading.load import load, loads
from tpshard.train.run.resuming import FREE, UNTOLD, trained
from training_cases import train_recipe

RECIPE = """
name: mine
cluster: {device: cpu}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 48, seq_len: 64}
batch: {global_sequences: 4}
compile: eager
train: {steps: 3}
evaluate: {every_steps: 3, sequences: 3}
checkpoint: {every_steps: 2}
logging: {every_steps: 1, wandb: null}
"""


def start(context: Context, folder: str, *overrides: str) -> str:
    """Trains or resumes; returns the messages of its mistakes, "" if there are none."""
    recipe = loads(RECIPE, [f"run.dir={folder}/mine", *overrides])
    try:
        train_recipe(context, recipe)
    except Mistakes as mistakes:
        return f"{mistakes.exit}\n{mistakes}"
    return ""


def test_a_run_on_two_ranks_begins_from_another_runs_newest_checkpoint(
    finished: Path, tmp_path: Path, pool: Any
) -> None:
    """And from a checkpoint that is named itself; workers open it one by one."""
    whole = finished / "mine"
    expected = rows(finished)[-1]["step"]
    for number, place in enumerate((whole, whole / "checkpoints" / f"step-{expected:06d}")):
        more = [
            f"train.init_from={place}",
            "train.steps=1",
            "optimizer.lr=1e-9",
            "schedule.warmup_steps=0",
            "mesh.fsdp=2",
        ]
        assert pool.run(start, str(tmp_path / str(number)), *more, world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1}) == [
            "",
            "",
        ]
    first, other = (rows(tmp_path / str(number)) for number in (0, 1))
    losses = [[row["loss"] for row in each if "loss" in row] for each in (rows(finished), first, other)]
    assert losses[1] == losses[2] and losses[1][0] < losses[0][0] - 0.01, losses


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "mine" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert pool.run(start, str(folder), world=1) == [""]
    return folder


CHANGES = {
    "optimizer.name": "lion", "optimizer.lr": "0.1", "optimizer.weight_decay": "0.2", "optimizer.betas": "[0.8, 0.9]",
    "schedule.name": "constant", "schedule.min_lr_ratio": "0.5", "schedule.warmup_steps": "1", "seed": "7",
    "train.clip_grad_norm": "null", "batch.global_sequences": "8", "model.seq_len": "32", "model.layers": "2",
    "data.source": "other.jsonl", "data.column": "body", "task": "mlm",
}  # fmt: skip


@pytest.mark.parametrize("steps", ["3", "5"])
def test_a_refused_resume_names_every_changed_key_and_changes_no_file(finished: Path, steps: str, pool: Any) -> None:
    before = contents(finished)
    for key, value in CHANGES.items():
        (refusal,) = pool.run(start, str(finished), f"{key}={value}", f"train.steps={steps}", world=1)
        assert refusal.startswith(f"{int(Exit.CHECKPOINT)}\n"), (key, refusal)
        assert f"`{key}: " in refusal and "trained with" in refusal and "resume=force" in refusal, refusal
        assert contents(finished) == before, key
    every = [f"{key}={value}" for key, value in CHANGES.items()]
    (refusal,) = pool.run(start, str(finished), *every, world=1)
    assert all(f"`{key}: " in refusal for key in CHANGES), refusal


def test_a_key_is_free_or_refused_or_says_nothing_of_a_step() -> None:
    """Keys that are new to the recipe are refused until somebody lists them as free."""
    plain = loads(RECIPE)
    keys = {key for key in trained(plain) if not any(key == free or key.startswith(free + ".") for free in FREE)}
    assert {key.partition(".")[0] for key in keys} == {
        "seed", "model", "adapters", "task", "loss", "data", "batch", "optimizer", "schedule", "train"
    }  # fmt: skip
    assert not {key.partition(".")[0] for key in trained(plain)} & set(UNTOLD)


@pytest.mark.parametrize("change", ["mesh.dp=1", "fsdp.prefetch=2", "checkpoint.keep_last=1", "evaluate.sequences=5"])
def test_a_finished_run_is_not_rewritten(finished: Path, change: str, pool: Any) -> None:
    before = contents(finished)
    assert pool.run(start, str(finished), change, world=1) == [""]
    assert contents(finished) == before


def test_a_plan_of_a_run_leaves_the_plan_of_the_run(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    before = contents(finished)
    for what in ("train", "decode"):
        assert run(["plan", "mine", "run.dir=mine", "--for", what]) == 0
    after = contents(finished)
    assert {name: after[name] for name in before} == before
    added = {name.removeprefix("mine/plans/") for name in after.keys() - before.keys()}
    assert added == {f"{w}/{f}" for w in ("train", "decode") for f in ("plan.json", "plan.html", "plan.trace.json")}


def test_forced_changes_are_a_row_of_the_record_and_are_then_the_runs_own(pool: Any, tmp_path: Path) -> None:
    assert pool.run(start, str(tmp_path), world=1) == [""]
    forced = ["optimizer.name=lion", "optimizer.lr=0.001", "resume=force", "train.steps=4"]
    assert pool.run(start, str(tmp_path), *forced, world=1) == [""]
    (row,) = [row for row in rows(tmp_path) if "changed" in row]
    assert row["forced"] and row["step"] == 3 and row["run"] == 2 and "loss" not in row
    assert row["changed"]["optimizer.name"] == ["adamw", "lion"] and row["changed"]["optimizer.lr"] == [3e-4, 0.001]
    assert row["changed"]["train.steps"] == [3, 4]
    assert rows(tmp_path)[-1]["step"] == 4
    text = (tmp_path / "mine" / "recipe.yaml").read_text()
    assert "name: lion" in text and "resume: auto" in text, "force was meant once"
    assert pool.run(start, str(tmp_path), *forced[:2], "train.steps=5", world=1) == [""]
    (refusal,) = pool.run(start, str(tmp_path), "train.steps=6", world=1)
    assert "`optimizer.name: adamw`, trained with lion" in refusal
    assert rows(tmp_path)[-1]["step"] == 5


@pytest.mark.slow
def test_a_mixture_resumes_bit_for_bit_though_tokens_find_no_slot(pool: Any, tmp_path: Path) -> None:
    mixture, mesh = [
        "model={preset: tiny-moe, experts: 8, top_k: 1, layers: 1, width: 32, heads: 4, mlp: 16, seq_len: 64}",
        "mesh={ep: 2}", "sharding.dropless={form: all_to_all, slack: 1}", "train.steps=4",
    ], {"dp": 1, "fsdp": 1, "ep": 2, "tp": 1}  # fmt: skip
    assert pool.run(start, str(tmp_path / "whole"), *mixture, world=2, mesh=mesh) == ["", ""]
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "mine" / "checkpoints" / "step-000004")
    assert pool.run(start, str(tmp_path / "again"), *mixture, world=2, mesh=mesh) == ["", ""]
    whole, again = ([row for row in rows(tmp_path / name) if row.get("step") == 4 and "loss" in row]
                    for name in ("whole", "again"))  # fmt: skip
    keys = ("loss", "grad_norm", "experts")
    assert [again[-1][key] for key in keys] == [whole[-1][key] for key in keys]
    assert again[-1]["run"] == 2 and again[-1]["experts"]["gathered"] > 0


def test_force_refuses_another_model(finished: Path, pool: Any) -> None:
    before = contents(finished)
    (refusal,) = pool.run(start, str(finished), "model.layers=2", "resume=force", "train.steps=9", world=1)
    assert "checkpoint of another model" in refusal and "layers.1." in refusal
    assert contents(finished) == before


def test_sources_that_stop_end_the_run_and_are_found_from_anywhere(pool: Any, tmp_path: Path) -> None:
    """Names count from the recipe's file; a resume by the run's own recipe has read everything already."""
    for name, word in (("one", "few words "), ("two", "other words ")):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{word * 9}{i}"}}\n' for i in range(12)))
    mixture = "data: {sources: [{source: one.jsonl, exhausted: stop}, {source: two.jsonl, exhausted: stop}],"
    text = f"{RECIPE}{mixture} tokenizer: bytes, bad_rows: 0.1%}}\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    loaded = load(str(recipe))
    assert [one.source for one in loaded.data.sources] == [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    assert loaded.data.bad_rows == 0.001
    overrides = [f"run.dir={tmp_path}/mine", "train.steps=50", "logging.every_steps=1", "mesh.fsdp=2"]
    counts = []
    for source in (str(recipe), str(tmp_path / "mine")):
        pool.run(start_file, source, *overrides, world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1})
        counts.append((len([row for row in rows(tmp_path) if "eval_loss" not in row]), rows(tmp_path)[-1]["step"]))
    assert counts[0] == counts[1] and counts[0][0] == counts[0][1] < 50
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row][-1] == counts[0][1]
    assert loads((tmp_path / "mine" / "recipe.yaml").read_text()).data.sources[0].source == str(tmp_path / "one.jsonl")


def test_epochs_end_with_a_short_step_that_is_the_same_on_any_mesh_and_after_a_resume(
    pool: Any, tmp_path: Path
) -> None:
    """Its loss is per labelled token, however few rows each rank has of it."""
    (tmp_path / "talk.jsonl").write_text("".join(f'{{"text": "{"word " * (i % 7)}{i}"}}\n' for i in range(60)))
    text = RECIPE.replace("train: {steps: 3}", "schedule: {warmup_steps: 0, decay_steps: 9}")
    data = "data: {source: talk.jsonl, tokenizer: bytes, epochs: 2, shuffle: 9}"
    (tmp_path / "recipe.yaml").write_text(f"{text}{data}\nmesh: {{fsdp: 1}}\n")
    two = {"dp": 1, "fsdp": 2, "tp": 1}
    courses = []
    for name, starts in (("a", [("", 1)]), ("b", [("data.epochs=1", 1), ("", 2)])):
        for change, world in starts:
            place = [f"run.dir={tmp_path}/{name}/mine", f"mesh.fsdp={world}", *filter(None, [change])]
            pool.run(start_file, str(tmp_path / "recipe.yaml"), *place, world=world, mesh=two if world == 2 else None)
        courses.append([row for row in rows(tmp_path / name) if "loss" in row])
    one, other = courses
    assert len(one) == len(other) > 4 and one[-1]["tokens"] - one[-2]["tokens"] < one[0]["tokens"] * 0.8
    for a, b in zip(one, other):
        assert a["tokens"] == b["tokens"] and a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["lr"] == b["lr"] and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    kept = load(str(tmp_path / "a" / "mine"))
    assert (kept.data.epochs, kept.where("train.steps").line, kept.where("data.epochs").line > 0) == (2, 0, True)


def start_file(context: Context, recipe: str, *overrides: str) -> None:
    train_recipe(context, load(recipe, overrides))
