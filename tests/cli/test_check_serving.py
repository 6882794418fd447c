"""`tpshard check --serving`: training and server give a run's tokens the same log-probabilities; faults are found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tpshard.cli import check_serving, serve
from tpshard.cli.evaluate import recipe_of
from tpshard.cli.main import run
from tpshard.cli.shared import sources
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.diagnostics.diagnostic import Exit
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.runtime.context import Context, alone
from tpshard.programs.compare.token_scores import Agreement, ScoredRow, TokenScore
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads
from tpshard.serve.api.metrics import Metrics
from tpshard.serve.api.service import Limits, Service
from tpshard.serve.engine.runner import ProgramRunner
from training_cases import train_recipe

RECIPE = """
name: judged
cluster: {device: cpu}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, seq_len: 32}
batch: {global_sequences: 4}
compile: eager
train: {steps: 1}
logging: {wandb: null}
"""
AS_CHECKED = ["evaluate.sequences=3", *check_serving.AS_SERVED]
SERVED = ["serve.mesh.tp=1", "serve.step_tokens=8", "serve.requests=8"]


def scored(context: Context, folder: str, changes: list[str]) -> list[Any]:
    """Trains a step, and scores held-out rows by the training program, among the workers of the pool."""
    train_recipe(context, loads(RECIPE, [*changes, f"run.dir={folder}"]))
    rows = check_serving.scores_of(folder, Setting.of(recipe_of(folder, AS_CHECKED), context.world), context)
    return [[row.tokens, row.documents, row.scores] for row in rows]


@pytest.fixture(scope="module")
def trained(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[ScoredRow]]:
    folder = str(tmp_path_factory.mktemp("judged"))
    axes = {"dp": 1, "fsdp": 1, "tp": 2}
    of_ranks = pool.run(scored, folder, ["mesh.tp=2"], world=2, mesh=axes)
    return folder, rows_of(of_ranks[0])


def rows_of(parts: list[Any]) -> list[ScoredRow]:
    return [ScoredRow(t, d, [TokenScore(*score) for score in scores]) for t, d, scores in parts]


Block = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]


def agreement(
    folder: str, rows: list[ScoredRow], monkeypatch: pytest.MonkeyPatch, edit: Callable[[Block], Block] = lambda b: b
) -> Agreement:
    """The comparison with a server in this process, whose weights are read by an edited function."""

    def start(loaded: Any, model: Any, need: Any) -> Service:
        weights = stored_weights(replace(model, block=edit(model.block)))
        service = Service(lambda: ProgramRunner(alone(), need.programs, weights, 16), Limits(), Metrics(), {})
        service.start()
        return service

    monkeypatch.setattr(serve, "start_service", start)
    return check_serving.compare_with_server(folder, recipe_of(folder, [*AS_CHECKED, *SERVED]), rows)[0]


def test_training_and_server_agree(trained: tuple[str, list[ScoredRow]], monkeypatch: pytest.MonkeyPatch) -> None:
    result = agreement(*trained, monkeypatch)
    assert result.agrees and result.rows == 3 and result.tokens > 80 and not result.left_out
    assert 0 < result.largest <= result.bound < 1e-4
    assert "They agree" in str(result)


def test_bf16_experts_with_a_capacity_and_adapters_agree(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["model.preset=tiny-moe", "model.kv_heads=4", "model.dtype=bf16", "model.capacity=1",
               "adapters={lora: {rank: 2, targets: [wq, wv]}}"]  # fmt: skip
    (parts,) = pool.run(scored, str(tmp_path / "run"), changes, world=1)
    result = agreement(str(tmp_path / "run"), rows_of(parts), monkeypatch)
    assert result.agrees and result.bound > 1e-4


def swapped_heads(block: Block) -> Block:
    def read(name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        value = block(name, starts, sizes)
        return value.roll(8, 0) if name.endswith("wq.weight") else value

    return read


def test_a_swapped_head_is_found(trained: tuple[str, list[ScoredRow]], monkeypatch: pytest.MonkeyPatch) -> None:
    result = agreement(*trained, monkeypatch, swapped_heads)
    assert not result.agrees and result.beyond[0].row == 0
    assert f"behind position {result.beyond[0].position} of row 0" in str(result)


def test_another_rope_base_is_found(trained: tuple[str, list[ScoredRow]], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = sources.open_source

    def other_base(*args: Any, **kwargs: Any) -> Any:
        model = opened(*args, **kwargs)
        assert isinstance(model.spec, FamilyModel)
        return replace(model, spec=replace(model.spec, config=replace(model.spec.config, rope_theta=10100.0)))

    monkeypatch.setattr(sources, "open_source", other_base)
    result = agreement(*trained, monkeypatch)
    first = result.beyond[0]
    assert first.position > 0, "the first token is not turned"
    assert result.to_json()["first_difference"] == vars(first)


def test_what_lies_beyond_the_servers_length_is_counted() -> None:
    row = ScoredRow([5, 6, 7, 8], [0, 0, 1, 1], [TokenScore(0, 6, -1.0, -1.1), TokenScore(3, 9, -2.0, -2.0)])
    assert [part.prompt for part in row.parts(4, 8)] == [(5, 6), (7, 8, 9)]
    assert [(part.row, part.start) for part in row.parts(4, 2)] == [(4, 0), (4, 2)]
    result = Agreement.of([row], {(0, 0): -1.0})
    assert (result.tokens, result.left_out, result.equal_bits) == (1, 1, 1)
    assert math.isclose(result.bound, 0.4) and result.agrees
    assert not Agreement.of([row], {}).agrees
    assert not Agreement.of([row], {(0, 0): math.nan}).agrees


def test_another_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "encoder", "--serving"]) == Exit.FIT
    assert "--serving is for task: lm" in capsys.readouterr().err
    assert run(["check", "tiny", "--serving", "--against", "mesh.tp=2"]) == Exit.USAGE
