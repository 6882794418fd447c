"""A run that trains its tokenizer: once, the same everywhere, and kept with the run and its exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tpshard.cli.main import run
from tpshard.cli.shared.arguments import carried_files
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.folders.folder_files import carried
from tpshard.parallelism.runtime.context import Context
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads
from tpshard.train.data import made_tokenizer
from tpshard.train.data.corpus import open_text
from tpshard.train.data.tokens import load_tokenizer
from tpshard.train.run.resuming import kept_recipe
from tpshard.train.run.run_data import opened_data
from training_cases import train_recipe

RECIPE = """
name: mine
cluster: {device: cpu}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 48, vocab: 304, seq_len: 32}
data: {source: %s, tokenizer: {train: 300}}
batch: {global_sequences: 4}
compile: eager
train: {steps: 2}
evaluate: {every_steps: 0}
checkpoint: {every_steps: 1}
logging: {every_steps: 1, wandb: null}
"""
TEXT = "\n\n".join(f"Chapter {i}: the naïve fox number {i * i} jumps over the lazy dog, again." for i in range(80))
SAID = "def f(x):\n\treturn 'naïve — 数学 \x00 🙂'\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, which is the working directory."""
    (tmp_path / "mine.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPSHARD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def ids(context: Context, folder: str) -> tuple[str, list[int]]:
    """The fingerprint of the run's tokenizer and the ids of a text, on this rank; the cache of each is its own."""
    made_tokenizer.cache_dir = lambda: Path(folder, f"host-{context.world}-{context.rank}")  # type: ignore[assignment]
    recipe = loads(RECIPE % f"{folder}/mine.txt", ["mesh.fsdp=-1"])
    tokenizer = opened_data(Setting.of(recipe, context.world), Path(folder, "none"), context).tokenizer
    assert tokenizer.folder.is_relative_to(Path(folder, f"host-{context.world}-{context.rank}"))
    return tokenizer.fingerprint, tokenizer.document(SAID)


def test_ranks_that_share_no_disk_have_the_same_ids(place: Path, pool: Any) -> None:
    one = pool.run(ids, str(place), world=1)
    two = pool.run(ids, str(place), world=2, mesh={"dp": 1, "fsdp": 2, "tp": 1})
    assert one == two[:1] == two[1:]


def start(context: Context, folder: str, *overrides: str) -> str:
    """Trains or resumes; returns the messages of its mistakes, "" if there are none."""
    made_tokenizer.cache_dir = lambda: Path(folder, "cache")  # type: ignore[assignment]
    recipe = loads(RECIPE % f"{folder}/mine.txt", [f"run.dir={folder}/run", *overrides])
    try:
        train_recipe(context, recipe)
    except Mistakes as mistakes:
        return f"{mistakes.exit}\n{mistakes}"
    return ""


def test_a_run_keeps_its_tokenizer(place: Path, pool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    assert pool.run(start, str(place), world=1) == [""]
    folder = place / "run"
    own = carried(folder) / "tokenizer.json"
    before = own.read_bytes()
    shutil.rmtree(place / "cache")
    assert pool.run(start, str(place), "train.steps=3", world=1) == [""], "resumed"
    assert not (place / "cache").exists(), "a resumed run reads its own"
    (place / "mine.txt").write_text("Something else. " * 400)
    (refusal,) = pool.run(start, str(place), "train.steps=4", world=1)
    assert "mine.txt has changed" in refusal and "the tokenizer" not in refusal
    (refusal,) = pool.run(start, str(place), "data.tokenizer.train=301", world=1)
    assert "1 key of the recipe changed, data.tokenizer.train" in refusal
    assert pool.run(start, str(place), "train.steps=4", "resume=force", world=1) == [""]
    assert own.read_bytes() == before, "another text changes nothing"

    assert run(["convert", "run", "out"]) == Exit.DONE, capsys.readouterr().err
    theirs: Any = AutoTokenizer.from_pretrained("out")
    mine = load_tokenizer(carried(folder), eos="tokenizer")
    for text in (TEXT, SAID):
        assert theirs(text)["input_ids"] == mine.document(text)
        assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
    assert mine.vocab == len(theirs) == 300
    assert open_source("run").tokenizer == carried(folder.absolute())
    assert carried_files(str(folder), []) == [f"data.tokenizer={carried(folder).absolute()}"], "evaluate reads it too"
    assert carried_files(str(folder), ["data.tokenizer.train=300"]) == []
    assert run(["convert", "run/recipe.yaml", "out2", "data.tokenizer.train=300"]) == Exit.USAGE
    assert "only `train` trains a tokenizer" in capsys.readouterr().err
    own.unlink()
    with pytest.raises(Mistakes, match="only `train` trains one"):
        opened_data(Setting.of(loads(RECIPE % "mine.txt")), folder)


def test_bytes_are_a_tokenizer_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    recipe = loads(RECIPE % "mine.txt", ["data.tokenizer=bytes"])
    tokenizer = opened_data(Setting.of(recipe), Path("none")).tokenizer
    assert (tokenizer.vocab, tokenizer.begin, tokenizer.after) == (258, (0,), (1,))
    assert len(tokenizer.encode(SAID)) == len(SAID.encode())
    theirs: Any = AutoTokenizer.from_pretrained(str(tokenizer.folder))
    assert theirs(SAID)["input_ids"] == tokenizer.document(SAID, last=False)
    assert theirs.decode(tokenizer.encode(SAID)) == SAID
    Path("bytes").mkdir()
    assert loads(kept_recipe(recipe)).data.tokenizer == "bytes", "a folder of that name is ./bytes"


def test_it_is_trained_on_the_training_text_of_all_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "texts").mkdir()
    for name in ("a", "b", "c-held_out"):
        (place / f"texts/{name}.jsonl").write_text(json.dumps({"text": f"doc {name}"}) + "\n[1]\n")
    text = open_text("texts/*.jsonl").train
    assert list(made_tokenizer._first(text)) == ["doc a", "doc b"]
    monkeypatch.setattr(made_tokenizer, "MOST", 7)
    assert list(made_tokenizer._first(text)) == ["doc a", "do"]


def test_a_short_text_gives_fewer_tokens_which_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tpshard.parallelism.runtime.context import alone

    (place / "mine.txt").write_text("ab ab")
    tokenizer = opened_data(Setting.of(loads(RECIPE % "mine.txt")), Path("none"), alone()).tokenizer
    assert 258 < tokenizer.vocab < 300
    assert (
        f"trained a tokenizer of {tokenizer.vocab} tokens on mine.txt: the text is too short" in capsys.readouterr().err
    )


def test_validate_knows_its_size_and_trains_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "mine.yaml").write_text(RECIPE % "mine.txt")

    def refused(*overrides: str) -> str:
        assert run(["validate", "mine.yaml", *overrides]) == Exit.RECIPE
        return capsys.readouterr().err

    assert run(["validate", "mine.yaml"]) == run(["validate", "mine.yaml", "data.tokenizer=bytes"]) == Exit.DONE
    assert run(["plan", "mine.yaml", "--dry-run"]) == Exit.DONE
    assert not list(place.glob("cache/tokenizer*"))
    capsys.readouterr()
    assert "model.vocab: 384, or data.tokenizer: {train: 304}" in refused("data.tokenizer.train=305")
    assert "model.vocab: 384\n" in refused("data.tokenizer=bytes", "model.vocab=256")
    assert "must be at least 258 and at most 1,048,576" in refused("data.tokenizer.train=257")
    assert "write a map: {train: 8192}" in refused("data.tokenizer=8192")


@pytest.mark.parametrize("overrides", [[], ["data.tokenizer=nowhere"]])
def test_the_error_that_asks_for_a_tokenizer_offers_both(
    overrides: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TOKENIZER_DIR", raising=False)
    assert run(["validate", "tiny", "data.source=mine.txt", *overrides]) == Exit.DATA
    assert "{train: 8192} trains one on the text; bytes needs no training" in capsys.readouterr().err
