"""A run carries what it began from; names of files in a recipe count from its file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tpshard.cli.evaluate import recipe_of
from tpshard.cli.main import run
from tpshard.cli.preflight.preflight import load_checked
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models import from_hf, to_hf
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders.folder_files import carried
from tpshard.models.open_model import open_model
from tpshard.programs.fit.recipe_model import model_of
from tpshard.recipes.reading.load import load
from tpshard.train.checkpoints.carried import carry
from tpshard.train.checkpoints.checkpoint import save
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.run.initial_values import begun_from, initial_values
from tpshard.train.run.resuming import changes, kept_recipe

SMALL = {"layers": 1, "width": 32, "mlp": 24, "vocab": 300, "kv_heads": 2}
RECIPE = (
    "name: mine\nmodel: {hf: base, seq_len: 32}\ndata: {source: texts/*.txt, tokenizer: base}\n"
    "cluster: {device: cpu}\nmesh: {fsdp: 1}\nrun: {dir: %s}\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a recipe, a model, its tokenizer and text."""
    place = tmp_path / "project"
    place.mkdir()
    to_hf(FamilyModel.of_preset("tiny", SMALL).build(device="cpu", seed=1), place / "base")
    raw = json.loads((place / "base/config.json").read_text())
    raw |= {"eos_token_id": [2, 7], "pad_token_id": 3, "attention_dropout": 0.1}
    (place / "base/config.json").write_text(json.dumps(raw))
    (place / "base/tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "<end>"}]}))
    (place / "base/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (place / "base/chat_template.jinja").write_text("{{ messages }}")
    (place / "base/generation_config.json").write_text('{"temperature": 0.5}')
    (place / "texts").mkdir()
    (place / "texts/a.txt").write_text("text")
    (place / "recipe.yaml").write_text(RECIPE % (place / "runs"))
    return place


def trained(project: Path) -> Path:
    """The folder of a run that began from the recipe."""
    recipe = load(project / "recipe.yaml")
    spec = open_model(recipe.model.hf)
    values = {name: p.detach() for name, p in spec.build(device="cpu").named_parameters()}
    folder = Path(recipe.run.dir)
    shards = {name: Shard.whole(value) for name, value in values.items()}
    save(folder / "checkpoints", 5, shards, {"model": spec.to_json()})
    (folder / "recipe.yaml").write_text(kept_recipe(recipe))
    carry(folder, Path(recipe.model.hf), Path(recipe.data.tokenizer or ""))
    return folder


def test_names_of_files_count_from_the_recipes_file(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load("project/recipe.yaml")
    assert recipe.model.hf == recipe.data.tokenizer == str(project / "base")
    assert recipe.data.source == str(project / "texts/*.txt")
    (project / "over.yaml").write_text("extends: recipe.yaml\n")
    (tmp_path / "other").mkdir()
    assert load("project/over.yaml").model.hf == str(project / "base")
    changed = load("project/recipe.yaml", ["model.hf=other", "run.dir=there"])
    assert (changed.model.hf, changed.run.dir) == ("other", "there"), "the command line counts from where it is typed"
    shutil.move(project / "base", tmp_path / "base")
    assert load("project/recipe.yaml").model.hf == "base", "else from the working directory, as before"
    monkeypatch.chdir(project)
    assert load("recipe.yaml").data.source == "texts/*.txt"


def test_a_run_goes_on_in_the_folder_that_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe's `run.dir` counts from the working directory, and says where the run was when it began."""
    monkeypatch.chdir(project)
    (project / "recipe.yaml").write_text(RECIPE % "runs/mine")
    folder = trained(project)
    assert load(folder).run.dir == "runs/mine"
    for name in ("plan.json", "metrics.jsonl"):
        (folder / name).write_text("")
    monkeypatch.chdir(project.parent)
    assert load("project/runs/mine").run.dir == "project/runs/mine"
    assert load("project/recipe.yaml").run.dir == "runs/mine"
    shutil.move("project/runs/mine", "a: new place")
    for source in ("a: new place", "a: new place/recipe.yaml"):
        assert load(source).run.dir == "a: new place" and load(source).name == "mine"
        assert load(source, ["run.dir=other"]).run.dir == "other"


def test_a_run_is_exported_where_its_base_has_moved(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    folder = trained(project)
    expected = from_hf(project / "base")
    kept = load(folder / "recipe.yaml")
    assert kept.model.hf == str(project / "base"), "the run's recipe names it from everywhere"
    assert kept.data.source == str(project / "texts/*.txt")
    shutil.move(project / "base", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    for number, source in enumerate((folder, folder / "checkpoints/step-000005", project / "recipe.yaml")):
        out = tmp_path / f"out-{number}"
        assert run(["convert", str(source), str(out)]) == Exit.DONE, capsys.readouterr().err
        raw = json.loads((out / "config.json").read_text())
        assert (raw["eos_token_id"], raw["pad_token_id"], raw["attention_dropout"]) == ([2, 7], 3, 0.1)
        names = {path.name for path in out.iterdir()}
        assert names >= {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
        written = from_hf(out)
        assert all(torch.equal(p, written.get_parameter(name)) for name, p in expected.named_parameters())
    assert run(["serve", str(folder), "--check", "serve.mesh.tp=1"]) == Exit.DONE, capsys.readouterr().err
    model = open_source(str(folder))
    assert model.tokenizer == model.base == carried(folder.absolute())


def test_a_checkpoint_without_its_manifest_is_not_taken_for_its_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    checkpoint = trained(project) / "checkpoints/step-000005"
    (checkpoint / "recipe.yaml").write_text((project / "recipe.yaml").read_text())
    (checkpoint / "manifest.json").rename(checkpoint / "gone.json")
    with pytest.raises(Mistakes, match="is no whole checkpoint") as wrong:
        open_source(str(checkpoint))
    assert wrong.value.exit == Exit.CHECKPOINT


def test_a_run_goes_on_where_its_base_has_moved(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the recipe has changed, and no weights of the folder are asked for, unless no checkpoint has them."""
    monkeypatch.chdir(project)
    folder = trained(project)
    shutil.move(project / "base", project / "moved")
    for source in (folder, project / "recipe.yaml"):
        recipe, warnings = load_checked(str(source))
        assert not warnings and not changes(folder, folder / "checkpoints", recipe)
        spec = model_of(recipe)
        assert spec.source.folder == carried(folder)
        block = initial_values(recipe, spec, None)
        with pytest.raises(Mistakes, match="base is gone, and no checkpoint of the run has its weights"):
            block("norm.weight", (0,), (32,), seed=0)


def test_a_checkpoint_copied_out_of_its_run_has_what_it_needs(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    folder = trained(project)
    values = open_model("base").build(device="cpu").named_parameters()
    spec = open_model("base")
    save(folder / "checkpoints", 6, {n: Shard.whole(p.detach()) for n, p in values}, {"model": spec.to_json()})
    assert os.stat(folder / "checkpoints/step-000006/model/tokenizer.json").st_nlink == 2, "it takes no room"
    alone = tmp_path / "far/alone"
    shutil.copytree(folder / "checkpoints/step-000006", alone)
    shutil.rmtree(project / "runs")
    shutil.rmtree(project / "base")
    monkeypatch.chdir(alone.parent)
    for command in (["convert", "alone", "out"], ["serve", "alone", "--check", "serve.mesh.tp=1"]):
        assert run(command) == Exit.DONE, capsys.readouterr().err
    assert {path.name for path in Path("out").iterdir()} >= {"tokenizer.json", "generation_config.json"}
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == [2, 7]
    recipe = recipe_of("alone", [])
    assert recipe.data.tokenizer == str(carried(alone)) and model_of(recipe).source.folder == carried(alone)


def test_what_a_run_carries_is_written_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    folder = trained(project)
    (project / "base/generation_config.json").write_text('{"temperature": 0.9}')
    recipe = load("recipe.yaml")
    carry(folder, Path(recipe.model.hf), project / "base")
    assert json.loads((carried(folder) / "generation_config.json").read_text()) == {"temperature": 0.5}
    carry(folder, Path(recipe.model.hf), project / "base", again=True)
    assert json.loads((carried(folder) / "generation_config.json").read_text()) == {"temperature": 0.9}


def test_an_error_says_where_it_looked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project / "base")
    monkeypatch.chdir(tmp_path)
    assert run(["validate", "project/recipe.yaml"]) == Exit.RECIPE
    said = capsys.readouterr().err
    assert f"{project / 'base'}" in said and f"{tmp_path / 'base'}" in said


def test_a_checkpoint_is_no_recipe_to_train(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its recipe would lead to the run's newest one, or from another working directory to a run from nothing."""
    checkpoint = next((trained(project) / "checkpoints").iterdir())
    assert run(["train", str(checkpoint)]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "is a checkpoint" in said and f"train.init_from={checkpoint}" in said


def test_a_recipe_is_fine_whose_run_carries_the_tokenizer_that_has_moved(project: Path) -> None:
    folder = trained(project)
    (project / "base").rename(project / "moved")
    for name in (project / "recipe.yaml", folder / "recipe.yaml"):
        assert load_checked(str(name), text=True)[1] == [], name
    shutil.rmtree(carried(folder))
    with pytest.raises(Mistakes):
        load_checked(str(project / "recipe.yaml"), text=True)


def test_a_run_stands_for_its_newest_checkpoint(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    folder = trained(project)
    command = ["serve", "tiny", f"serve.checkpoint={folder}", "--check", "serve.mesh.tp=1"]
    assert run(command) == Exit.DONE
    assert f"reading {folder}/checkpoints/step-000005" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints/step-000005")
    assert run(command) == Exit.CHECKPOINT
    assert "neither a checkpoint nor a Hugging Face folder" in capsys.readouterr().err


class OneRank:
    is_main = True

    def from_main(self, value: object) -> object:
        return value


def test_a_run_keeps_the_checkpoint_that_it_began_from(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run may go on meanwhile; a run with adapters reads its base from there again."""
    monkeypatch.chdir(project)
    first = trained(project) / "checkpoints/step-000005"
    spec = open_model("base")
    values = {name: Shard.whole(p.detach()) for name, p in spec.build(device="cpu").named_parameters()}
    recipe = load("recipe.yaml", [f"train.init_from={first.parent.parent}"])

    def begun() -> str | None:
        return begun_from(recipe, Path("next/checkpoints"), OneRank())  # type: ignore[arg-type]

    assert begun() == str(first)
    save(Path("next/checkpoints"), 1, values, {"init_from": begun()})
    save(first.parent, 6, values, {"model": spec.to_json()})
    assert begun() == str(first)
    shutil.rmtree("next")
    assert begun() == str(first.parent / "step-000006")


def test_a_run_that_goes_on_needs_no_values_to_begin_from(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    recipe = load("recipe.yaml", ["train.init_from=gone"])
    block = initial_values(recipe, model_of(recipe), "gone")
    with pytest.raises(Mistakes, match="a run cannot begin from gone"):
        block("norm.weight", (0,), (32,), seed=0)
