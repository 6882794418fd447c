"""`tpshard evaluate` gives training's own held-out loss, on every mesh and for every form of the model."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from forked import python
from tpshard.cli import evaluate as command
from tpshard.cli.evaluate import recipe_of, result_of, table
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models import from_hf
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads
from tpshard.train.records.records import read_rows
from training_cases import shared_builds, train_recipe

RECIPE = """
name: judged
cluster: {device: cpu}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, seq_len: 64}
batch: {global_sequences: 4}
compile: eager
train: {steps: 2}
evaluate: {every_steps: 2, sequences: 10}
logging: {every_steps: 1, wandb: null}
"""
ALIKE = ["compile=eager", "evaluate.sequences=10", "model.seq_len=64"]
"""What a folder does not say of the run that it comes from."""


FEW = ["serve.port=0", "serve.requests=8", "serve.step_tokens=8"]
"""Changes that leave a server few programs to build."""


def train(context: Context, folder: str) -> None:
    recipe = loads(RECIPE, [f"run.dir={folder}/judged"])
    train_recipe(context, recipe)


def measure(context: Context, source: str, overrides: list[str], texts: list[str]) -> dict[str, Any]:
    with shared_builds():
        return result_of(source, Setting.of(recipe_of(source, overrides), context.world), context, texts)


@pytest.fixture(scope="module")
def trained(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    pool.run(train, str(folder), world=1)
    return folder / "judged"


def loss_of_training(run_folder: Path) -> tuple[float, int]:
    rows = [row for row in read_rows(run_folder / "metrics.jsonl") if "eval_loss" in row]
    return rows[0]["eval_loss"], rows[0]["eval_tokens"]


@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2}, {"dp": 1, "tp": 2}, {"fsdp": 3, "dp": 1}])
def test_the_loss_is_trainings_own_on_every_mesh(mesh: dict[str, int], trained: Path, pool: Any) -> None:
    loss, tokens = loss_of_training(trained)
    world = max(mesh.values())
    axes = {"dp": 1, "fsdp": 1, "tp": 1} | mesh
    changes = [f"mesh.{axis}={size}" for axis, size in axes.items()]
    checkpoint = trained / "checkpoints" / "step-000002"
    for source in (trained, checkpoint) if world == 1 else (checkpoint,):
        results = pool.run(measure, str(source), changes, [], world=world, mesh=axes)
        assert all(r["loss"] == pytest.approx(loss, abs=1e-6) and r["tokens"] == tokens for r in results)
    row = read_rows(trained / "metrics.jsonl")[-1]
    assert row["eval_loss"] == results[0]["loss"] and row["eval_data"] == "sample" and row["step"] == 2
    assert "loss" not in row and str(results[0]["tokens"]) in table(results[0])


def test_convert_and_quantize_keep_to_the_same_sequences(
    trained: Path, tmp_path: Path, pool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, tokens = loss_of_training(trained)
    dense, quantized = tmp_path / "dense", tmp_path / "quantized"
    assert run(["convert", str(trained), str(dense)]) == 0
    few = ["quantize.group_size=32", "quantize.calibration.sequences=2"]
    capsys.readouterr()
    assert run(["quantize", str(trained), str(quantized), *few, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["held_out_tokens"] == tokens and report["loss_before"] == pytest.approx(loss, abs=1e-6)
    for folder, expected in ((dense, loss), (quantized, report["loss_after"])):
        (result,) = pool.run(measure, str(folder), ALIKE, [], world=1)
        assert result["loss"] == pytest.approx(expected, abs=1e-6) and result["tokens"] == tokens
        assert result["step"] is None
    (result,) = pool.run(measure, str(trained), [f"serve.checkpoint={quantized}"], [], world=1)
    assert result["loss"] == pytest.approx(report["loss_after"], abs=1e-6) and result["model"] == str(quantized)
    row = read_rows(trained / "metrics.jsonl")[-1]
    assert row["eval_loss"] != result["loss"], "the run's record is of its own checkpoints"


def test_the_folder_of_a_recipes_command_is_checked(trained: Path, tmp_path: Path) -> None:
    recipe = recipe_of(str(trained), [f"serve.checkpoint={tmp_path}"])
    with pytest.raises(Mistakes, match="holds no model") as caught:
        command.stored_place(str(trained), recipe)
    assert caught.value.exit == Exit.CHECKPOINT
    architectures.folder(tmp_path, "gpt2", weights=True)
    alone: Any = None
    with pytest.raises(Mistakes, match=r"is another model than the recipe's[\s\S]*`embed` is missing there"):
        command.open_stored(str(trained), recipe, alone, {"embed": ((4, 4), "float32")})


def test_named_texts_count_wholly(trained: Path, tmp_path: Path, pool: Any) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    texts[0].write_text("One line of text.\n" * 40)
    texts[1].write_text('{"text": "a document"}\n' * 30)
    (result,) = pool.run(measure, str(trained), [], list(map(str, texts)), world=1)
    assert [Path(one["data"]).name for one in result["results"]] == ["a.txt", "b.jsonl"]
    assert result["tokens"] == sum(one["tokens"] for one in result["results"])
    each = {Path(one["data"]).name: one for one in result["results"]}
    assert each["b.jsonl"]["tokens"] % 30 == 0 and each["a.txt"]["tokens"] > 200


@pytest.mark.parametrize("key", ["model.layers=2", "optimizer.lr=1", "train.steps=3", "quantize.bits=8"])
def test_what_is_stored_is_not_overridden(key: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(trained), key]) == Exit.USAGE
    assert f"`evaluate` does not obey `{key.partition('=')[0]}`" in capsys.readouterr().err


def test_a_run_without_checkpoints_is_refused_before_workers_start(tmp_path: Path) -> None:
    recipe = loads(RECIPE, [f"run.dir={tmp_path}/none"])
    with pytest.raises(Mistakes) as caught:
        command.stored_place(str(tmp_path), recipe)
    assert caught.value.exit == Exit.CHECKPOINT


class Stub:
    """lm-eval as far as `evaluate` uses it: a base class, and a function that asks a model."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        package, api, model = (types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"))
        package.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
        model.LM = type("LM", (), {})  # type: ignore[attr-defined]
        package.simple_evaluate = self.simple_evaluate  # type: ignore[attr-defined]
        for module in (package, api, model):
            sys.modules[module.__name__] = module

    def simple_evaluate(self, model: Any, tasks: list[str], limit: int | None, bootstrap_iters: int) -> dict[str, Any]:
        def ask(*arguments: Any) -> Any:
            return types.SimpleNamespace(args=arguments)

        pairs = [ask("The return value", " of the call"), ask("", "a list"), ask("with spaces  ", "x" * 60)]
        self.answers["pairs"] = model.loglikelihood(pairs)
        self.answers["rolling"] = model.loglikelihood_rolling([ask("a text " * 100), ask("short")])
        until = {"until": ["\n"], "max_gen_toks": 6}
        self.answers["texts"] = model.generate_until(
            [ask("def f", until), ask("The", {"until": "e", "max_gen_toks": 6})]
        )
        return {"results": {name: {"acc,none": 0.5, "alias": name} for name in tasks}}


def expected_scores(folder: Path) -> tuple[list[tuple[float, bool]], list[float]]:
    """The same log-likelihoods by the dense model, one window at a time."""
    tokenizer, model = FolderTokenizer(folder), from_hf(folder)
    begin, longest = [*tokenizer.encode(""), *tokenizer.stop_tokens][0], 256 - 1

    def score(context: list[int], predicted: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([[*context, *predicted][-longest:]])
        with torch.no_grad():
            chances = model(ids)[0].log_softmax(-1)
        rows, targets = chances[-len(predicted) - 1 : -1], torch.tensor(predicted)
        return float(rows.gather(-1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    pairs = []
    for context, continuation in (
        ("The return value", " of the call"),
        ("", "a list"),
        ("with spaces", "  " + "x" * 60),
    ):
        before = ids(context)
        whole = ids(context + continuation)
        pairs.append(score(before or [begin], whole[len(before) :]))
    rolling = []
    for text in ("a text " * 100, "short"):
        tokens, total, size = ids(text), 0.0, longest - 1
        for start in range(0, len(tokens), size):
            predicted = tokens[start : start + size]
            context = tokens[max(0, start + len(predicted) - longest) : start] if start else [begin]
            total += score(context, predicted)[0]
        rolling.append(total)
    return pairs, rolling


STUBBED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from test_evaluate import Stub, run
stub = Stub()
code = run(sys.argv[2:])
print(json.dumps(stub.answers))
sys.exit(code)
"""


def test_tasks_are_asked_of_the_engine(trained: Path, tmp_path: Path) -> None:
    assert run(["convert", str(trained), str(tmp_path / "dense")]) == 0
    tests = Path(__file__).parent
    line = ["evaluate", str(trained), "--tasks", "one,two", "mesh.tp=2", *FEW, "--json"]
    done = python(STUBBED, json.dumps([str(tests), str(tests.parent)]), *line)
    assert done.returncode == 0, done.stderr
    *result, answered = done.stdout.splitlines()
    printed, answers = json.loads("".join(result)), json.loads(answered)
    assert printed["tasks"] == {"one": {"acc": 0.5}, "two": {"acc": 0.5}} and printed["step"] == 2
    pairs, rolling = expected_scores(tmp_path / "dense")
    assert [greedy for _, greedy in answers["pairs"]] == [greedy for _, greedy in pairs]
    assert [value for value, _ in answers["pairs"]] == pytest.approx([value for value, _ in pairs], rel=1e-5)
    assert answers["rolling"] == pytest.approx(rolling, rel=1e-5)
    assert "\n" not in answers["texts"][0] and "e" not in answers["texts"][1]
    assert read_rows(trained / "metrics.jsonl")[-1]["eval_tasks"] == printed["tasks"]


def test_tasks_need_lm_eval(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run(["evaluate", str(trained), "--tasks", "one"]) == Exit.MACHINE
    assert "pip install lm-eval" in capsys.readouterr().err
