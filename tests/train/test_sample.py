"""The sample text is created once, the same everywhere, complete or not at all."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from patience import PATIENCE, until
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.train.data import corpus, sample
from tpshard.train.data.row_columns import Columns
from tpshard.train.data.tokens import load_tokenizer

MAKE = "from tpshard.train.data.sample import ensure_sample; print(ensure_sample().directory)"


def make(cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "TPSHARD_CACHE": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, "-c", MAKE], env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def fresh_sample(tmp_path_factory: pytest.TempPathFactory) -> sample.Sample:
    """One sample, made by two processes at once, one of three having been killed while it made it."""
    cache = tmp_path_factory.mktemp("cache")
    killed = make(cache)
    until(lambda: list(cache.glob(".sample-*")), "a half-made sample", every=0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list(cache.glob("sample-*")), "a killed process left something that looks finished"
    both = [make(cache) for _ in range(2)]
    folders = {process.communicate(timeout=PATIENCE)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = folders
    return sample.Sample(Path(folder), Path(folder) / "tokenizer")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_the_sample_is_c4_format_with_held_out_text_apart(fresh_sample: sample.Sample) -> None:
    train = [row for path in sorted(fresh_sample.directory.glob("c4-train.*.json.gz")) for row in rows(path)]
    held_out = [row for path in fresh_sample.directory.glob("c4-validation.*.json.gz") for row in rows(path)]
    assert all(set(row) == {"text", "timestamp", "url", "messages"} for row in train + held_out)
    assert sum(len(row["text"]) for row in train) > 1_000_000
    assert len({row["text"] for row in train + held_out}) == len(train) + len(held_out), "a document is there twice"
    assert 0.02 < len(held_out) / len(train) < 0.1
    assert any("pydoc_data.topics" in row["url"] for row in train)


@pytest.mark.slow
def test_a_damaged_sample_is_made_again_by_another_process_with_the_same_bytes(
    fresh_sample: sample.Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPSHARD_CACHE", str(fresh_sample.directory.parent))
    before = {path: path.read_bytes() for path in fresh_sample.directory.rglob("*") if path.is_file()}
    victim = fresh_sample.directory / "c4-train.00001-of-00004.json.gz"
    victim.write_bytes(before[victim][:-100])
    (fresh_sample.tokenizer / "tokenizer.json").unlink()
    assert sample.ensure_sample().directory == fresh_sample.directory
    assert {path: path.read_bytes() for path in fresh_sample.directory.rglob("*") if path.is_file()} == before
    assert len(before) == 8


def test_its_tokenizer_has_2048_tokens_and_loses_nothing(fresh_sample: sample.Sample) -> None:
    from tokenizers import Tokenizer

    tokenizer = load_tokenizer(fresh_sample.tokenizer)
    assert (tokenizer.vocab, tokenizer.begin, tokenizer.end) == (2048, (0,), 1)
    text = "def f(x):\n\treturn 'naïve — 数学 \x00 🙂'\n"
    raw = Tokenizer.from_file(str(fresh_sample.tokenizer / "tokenizer.json"))
    assert raw.decode(tokenizer.encode(text)) == text
    ids = tokenizer.document(text)
    assert ids[0] == 0 and ids[-1] == 1 and not {0, 1} & set(ids[1:-1])


def test_its_chat_template_renders(fresh_sample: sample.Sample) -> None:
    import jinja2

    config = json.loads((fresh_sample.tokenizer / "tokenizer_config.json").read_text())
    messages = [{"role": "user", "content": "What is a list?"}]
    text = jinja2.Template(config["chat_template"]).render(
        messages=messages, add_generation_prompt=True, bos_token=config["bos_token"]
    )
    assert text == "<|begin|>User:\nWhat is a list?\n\nAssistant:\n"


def test_sources_are_read_and_never_imported(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(f'"""A docstring."""\nopen({str(tmp_path / "ran")!r}, "w")\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "odd.py").write_bytes(
        b"# coding: latin-1\n'''Caf\xe9'''\nclass A:\n  '''B'''\n  def f(self, x=1): '''C'''\n"
    )
    actual = {where: text for text, where in sample.documents(tmp_path)}
    assert actual == {
        "trap": "trap\n\nA docstring.",
        "odd": "odd\n\nCafé",
        "odd.A": "class odd.A\n\nB\n\nA.f(self, x=1)\n\nC",
    }
    assert not (tmp_path / "ran").exists()


def test_where_the_cache_cannot_be_written_the_run_keeps_it(
    fresh_sample: sample.Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TPSHARD_CACHE", str(blocked / "cache"))
    assert sample.ensure_sample(fallback=fresh_sample.directory.parent).directory == fresh_sample.directory
    with pytest.raises(Mistakes) as caught:
        sample.ensure_sample()
    assert caught.value.exit == 6


def test_rows_hold_conversations_that_end_with_the_end_token(fresh_sample: sample.Sample) -> None:
    columns = Columns("text", "messages", None, None, {})
    with mock.patch.object(corpus, "ensure_sample", lambda fallback: fresh_sample):
        texts = corpus.open_text("sample", columns)
    row = next(corpus.rows(texts.train, texts.train.files[0], 0))
    question, answer = json.loads(row.text)["messages"]
    assert question["content"].startswith("What is ") and answer["content"].startswith("In short: ")
    tokenizer = load_tokenizer(fresh_sample.tokenizer)
    config = json.loads((fresh_sample.tokenizer / "tokenizer_config.json").read_text())
    assert "eos_token" in config["chat_template"] and tokenizer is not None
