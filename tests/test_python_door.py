"""`import tpshard` offers the commands' work on values, with the same mistakes."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

import pytest
import tpshard
from commands import environment
from forked import python
from tpshard.plan import planner
from tpshard.plan.report.screen import screen

SMALL = (
    "model={preset: tiny, layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 16, vocab: 2048, seq_len: 8}"
)


def test_importing_loading_and_starting_workers_need_no_torch() -> None:
    """The process that starts them stays beside them, with its memory."""
    code = """
import sys, tpshard
from tpshard.cli import train
from tpshard.parallelism.runtime import launcher
launcher.launch = lambda *_, **__: 0
train.start("quickstart", ["cluster.device=cpu", "mesh={fsdp: 2}"], None)
recipe = tpshard.load("llama3-8b", "mesh={fsdp: 16, tp: 2}")
tpshard.open_model(recipe.model).sizes
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_values_are_those_of_the_commands() -> None:
    recipe = tpshard.load("quickstart", SMALL, "mesh={fsdp: 2}")
    report, programs = tpshard.plan(recipe), tpshard.build(recipe)
    assert report.to_json() == planner.report(recipe, recipe.file).to_json()
    assert programs.micro.fingerprint == report.fingerprint
    assert tpshard.open_model(recipe.model).shapes.keys() == {port.name for port in programs.micro.inputs
                                                              if port.kind == "parameter"}  # fmt: skip
    assert tpshard.plan(recipe, "decode").job.what == "decode"
    assert html.unescape(report._repr_html_()) == f"<pre>{screen(report)}</pre>"
    assert "layers.0.mlp.up.weight.used[M_tp, E]" in tpshard.stage(recipe, "shardings", "layers.0.mlp.up")
    assert tpshard.stage(recipe, "partition", "layers.0.mlp.up", what="decode").startswith("decode of ")


def test_what_load_takes_can_be_planned_at_once(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(f"schema: 1\nname: small\n{SMALL.replace('model=', 'model: ')}\n", encoding="utf-8")
    assert tpshard.plan(file).to_json() == tpshard.plan(tpshard.load(file)).to_json()
    with pytest.raises(tpshard.Mistakes, match="there is no recipe"):
        tpshard.build("quickstrat")


def test_mistakes_are_one_exception_with_data(tmp_path: Path) -> None:
    with pytest.raises(tpshard.Mistakes) as caught:
        tpshard.load("quickstart", "mesh.tpp=2", "train.steps=none")
    assert caught.value.exit == 3 and len(caught.value.diagnostics) == 2
    with pytest.raises(tpshard.Mistakes, match=r"holds no config\.json"):
        tpshard.open_model(tmp_path)
    with pytest.raises(tpshard.Mistakes, match="does not fit 32 devices"):
        tpshard.load("llama3-8b", "mesh.tp=2")
    with pytest.raises(tpshard.Mistakes, match="divide") as caught:
        tpshard.plan(tpshard.load("quickstart", "mesh={tp: 3}"))
    assert caught.value.exit == 4
    with pytest.warns(tpshard.RecipeWarning, match="positions"):
        tpshard.plan(tpshard.load("quickstart", SMALL, "model.max_seq=4", "mesh={fsdp: 1}"))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tpshard.nothing  # noqa: B018


TRAINING = f"""
import tpshard
from pathlib import Path
Path("text.txt").write_text("words of a text\\n" * 40)
recipe = tpshard.load("quickstart", "{SMALL}", "model.vocab=260", "mesh={{fsdp: 1}}", "train.steps=1", "run.dir=run",
                      "data.source=text.txt", "data.tokenizer=bytes", "evaluate.every_steps=0")
assert tpshard.train(recipe) == Path("run") and Path("run/metrics.jsonl").read_text().count('"loss"') == 1
Path("text.txt").unlink()
try:
    tpshard.train(tpshard.load("run", "run.dir=other", "data.source=text.txt"))
except tpshard.Mistakes as mistakes:
    assert mistakes.exit == 6 and "exit code 6" in str(mistakes)
    print("refused")
"""


def test_training_ends_with_the_runs_folder_or_a_mistake(tmp_path: Path) -> None:
    done = python(TRAINING, environment=environment(), folder=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("refused\n"), done.stderr
