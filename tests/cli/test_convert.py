"""`tpshard convert` writes a folder with the same logits for any SOURCE; a refusal leaves no files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from torch import nn
from tpshard.cli.main import run
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models import build, from_hf, to_hf
from tpshard.models.families.presets import preset
from tpshard.models.family_model import FamilyModel
from tpshard.models.open_model import open_model
from tpshard.recipes.reading.load import loads
from tpshard.train.checkpoints.checkpoint import save
from tpshard.train.checkpoints.shards import Shard

SMALL = {"layers": 1, "width": 32, "mlp": 24, "vocab": 300, "kv_heads": 2}
IDS = torch.arange(14).view(2, 7)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENIZER_DIR", raising=False)
    return tmp_path


def tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "<end>"}]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def recipe(folder: Path, name: str = "r.yaml") -> Path:
    """A recipe whose runs lie in `folder`."""
    path = folder / name
    numbers = ", ".join(f"{key}: {value}" for key, value in SMALL.items())
    path.write_text(
        f"schema: 1\nname: mine\nmodel: {{preset: tiny, {numbers}}}\n"
        f"data: {{source: {folder}/none, tokenizer: {folder / 'tok'}}}\nrun: {{dir: {folder / 'runs'}}}\n"
    )
    return path


def checkpoint(folder: Path, step: int, model: nn.Module, meta: dict[str, Any]) -> Path:
    """As a run leaves it, with state of the optimizer beside the weights."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    values |= {f"optimizer/exp_avg/{name}": torch.zeros_like(p) for name, p in list(values.items())}
    return save(folder, step, {name: Shard.whole(p) for name, p in values.items()}, meta)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS)
    return result


def test_a_recipe_takes_its_latest_checkpoint(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer(workdir / "tok")
    first, last = (build(preset("tiny", SMALL), device="cpu", seed=seed) for seed in (1, 2))
    checkpoint(workdir / "runs" / "checkpoints", 5, first, {})
    newest = checkpoint(workdir / "runs" / "checkpoints", 10, last, {})
    assert run(["convert", str(recipe(workdir)), "out"]) == Exit.DONE
    assert capsys.readouterr().out == "out\n"
    assert torch.equal(logits(from_hf("out")), logits(last))
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == 5
    assert Path("out/tokenizer.json").exists()
    data = next(newest.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])  # damaged: the one before it
    assert run(["convert", str(recipe(workdir)), "before"]) == Exit.DONE
    assert torch.equal(logits(from_hf("before")), logits(first))


@pytest.mark.parametrize("source", ["by the checkpoint", "by the run's recipe"])
def test_a_checkpoint(source: str, workdir: Path) -> None:
    spec = FamilyModel.of_preset("tiny", SMALL)
    model = spec.build(device="cpu", seed=3)
    meta = {"model": spec.to_json()} if source == "by the checkpoint" else {}
    folder = checkpoint(workdir / "runs" / "checkpoints", 5, model, meta)
    if not meta:
        recipe(workdir / "runs", "recipe.yaml")
    assert run(["convert", str(folder), "out", "--dtype", "bf16"]) == Exit.DONE
    assert torch.equal(logits(from_hf("out")), logits(model.bfloat16()))


@pytest.mark.parametrize("kind", ["tiny", "granite-tiny"])
def test_a_folder(kind: str, workdir: Path) -> None:
    model = build(preset(kind, {"layers": 1}), device="cpu", seed=4)
    to_hf(model, "in", tokenizer=tokenizer(workdir / "tok"), shard_bytes=100_000)
    assert run(["convert", "in", "new/out"]) == Exit.DONE
    assert torch.equal(logits(from_hf("new/out")), logits(model))
    assert json.loads(Path("new/out/config.json").read_text())["eos_token_id"] == 5
    assert (workdir / "new/out/tokenizer_config.json").read_text() == (
        workdir / "tok/tokenizer_config.json"
    ).read_text()


def test_a_model_of_transformers_leaves_as_it_came(workdir: Path) -> None:
    folder = architectures.folder(workdir / "in", "qwen2_moe", weights=True)
    spec = open_model(str(folder))
    model = spec.build(device="cpu")
    source = checkpoint(workdir / "runs" / "checkpoints", 5, model, {"model": spec.to_json()})
    assert run(["convert", str(source), "out"]) == Exit.DONE
    assert spec.architecture is not None
    actual = dict(spec.architecture.cls.from_pretrained("out").named_parameters())
    assert all(torch.equal(actual[name], value) for name, value in architectures.values("qwen2_moe").items())
    assert run(["convert", "out", "again", "--dtype", "bf16"]) == Exit.DONE
    assert json.loads(Path("again/config.json").read_text())["dtype"] == "bfloat16"


def test_out_must_not_exist(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(preset("tiny", SMALL), device="cpu", seed=4)
    to_hf(model, "in")
    Path("file").write_text("mine")
    Path("full").mkdir()
    Path("full/mine").write_text("mine")
    for out in ("file", "full", "in"):
        assert run(["convert", "in", out]) == Exit.USAGE
        assert f"{out} exists" in capsys.readouterr().err
    assert run(["convert", "in", "file", "--overwrite"]) == run(["convert", "in", ".", "--overwrite"]) == Exit.USAGE
    assert "or --overwrite" not in capsys.readouterr().err  # which would not help
    assert run(["convert", "in", "full", "--overwrite"]) == Exit.DONE
    assert torch.equal(logits(from_hf("full")), logits(model)) and not Path("full/mine").exists()
    assert run(["convert", "in", "in", "--overwrite"]) == Exit.DONE  # onto itself
    assert torch.equal(logits(from_hf("in")), logits(model))


def test_refusals_say_what_is_wrong(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = FamilyModel.of_preset("tiny", SMALL)
    model = spec.build(device="cpu", seed=3)
    to_hf(model, "in")
    raw = json.loads(Path("in/config.json").read_text())
    Path("evil").mkdir()
    Path("evil/config.json").write_text(json.dumps({**raw, "auto_map": {"AutoModel": "evil.Model"}}))
    Path("evil/model.safetensors").write_bytes(Path("in/model.safetensors").read_bytes())
    wide = FamilyModel.of_preset("tiny", {**SMALL, "mlp": 25})
    other = checkpoint(workdir / "a", 1, model, {"model": wide.to_json()})
    users = checkpoint(workdir / "b", 1, model, {"model": {"module": "package:Class", "args": {}}})
    untold = checkpoint(workdir / "c", 1, model, {})
    awkward = FamilyModel.of_preset("tiny", {**SMALL, "width": 20})
    formless = checkpoint(workdir / "d", 1, awkward.build(device="cpu"), {"model": awkward.to_json()})
    damaged = checkpoint(workdir / "e", 1, model, {"model": spec.to_json()})
    next(damaged.glob("*.safetensors")).unlink()
    cases = [
        (["evil"], Exit.CHECKPOINT, "auto_map"),
        ([str(other)], Exit.CHECKPOINT, "mlp"),
        ([str(users)], Exit.FIT, "package:Class"),
        ([str(untold)], Exit.CHECKPOINT, "names no model"),
        ([str(formless)], Exit.FIT, "heads to divide"),
        ([str(damaged)], Exit.CHECKPOINT, "missing"),
        ([str(recipe(workdir))], Exit.CHECKPOINT, "no checkpoint in"),
        (["nothing"], Exit.USAGE, "no recipe `nothing`"),
        (["in", "model.layers=3"], Exit.USAGE, "model.layers=3"),
        (["in", "--tokenizer", "in/nothing"], Exit.USAGE, "in/nothing"),
    ]
    for number, ((source, *rest), code, output) in enumerate(cases):
        assert run(["convert", source, f"out-{number}", *rest]) == code, source
        assert output in capsys.readouterr().err
    assert not list(workdir.glob("out-*")) and not list(workdir.glob(".out-*"))


def test_a_module_is_imported_for_a_recipe_and_never_for_a_checkpoint(workdir: Path) -> None:
    """A checkpoint may come from anybody; a recipe that names its module says that the module is trusted."""
    (workdir / "planted_by_checkpoint.py").write_text("raise SystemExit('imported')")
    model = FamilyModel.of_preset("tiny", SMALL).build(device="cpu", seed=3)
    named = {"module": "planted_by_checkpoint:Class", "args": {}}
    saved = str(checkpoint(workdir / "a", 1, model, {"model": named}))
    for trusted in (None, loads("model: {preset: tiny}"), loads("model: {module: 'other:Class'}")):
        with pytest.raises(Mistakes, match="names the module planted_by_checkpoint:Class, which no recipe names") as no:
            open_source(saved, modules=True, trusted=trusted)
        assert no.value.exit == Exit.CHECKPOINT
    with pytest.raises(SystemExit, match="imported"):
        open_source(saved, modules=True, trusted=loads("model: {module: 'planted_by_checkpoint:Class'}"))


def test_weights_that_are_not_numbers_are_named(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder as in a checkpoint; an infinity is a value, by which some biases exclude tokens."""
    spec = FamilyModel.of_preset("tiny", SMALL)
    model = spec.build(device="cpu", seed=3)
    for value, code in ((float("nan"), Exit.CHECKPOINT), (float("-inf"), Exit.DONE)):
        with torch.no_grad():
            model.get_parameter("layers.0.mlp.up.weight")[1, 2] = value
        to_hf(model, f"in {value}")
        saved = checkpoint(workdir / f"{value}", 1, model, {"model": spec.to_json()})
        for number, source in enumerate((f"in {value}", str(saved))):
            capsys.readouterr()
            assert run(["convert", source, f"out {value} {number}"]) == code
            assert code == Exit.DONE or "mlp.up" in (said := capsys.readouterr().err) or "up_proj" in said
