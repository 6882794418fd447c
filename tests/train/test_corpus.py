"""Every source of text is read, and every kind of bad text is a named error, or counted and skipped."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import re
from pathlib import Path

import pytest
from c4_files import bytes_tokenizer, folder_of, packed, texts
from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.train.data import corpus as text_module
from tpshard.train.data import text_formats
from tpshard.train.data.bad_rows import BadRows, check
from tpshard.train.data.corpus import Corpus, TextFile, open_text, pieces, rows
from tpshard.train.data.open_data import Mixture
from tpshard.train.data.stream import Loader
from tpshard.train.data.tokens import load_tokenizer


def all_rows(corpus: Corpus) -> list[text_formats.TextRow]:
    return [row for file in corpus.train.files for row in rows(corpus.train, file)]


def train_one_file(folder: Path, data: bytes) -> Corpus:
    folder.mkdir(exist_ok=True)
    (folder / "c4-train.00000-of-00001.json.gz").write_bytes(data)
    (folder / "c4-validation.00000-of-00001.json.gz").write_bytes(packed(texts(3)))
    return open_text(str(folder))


def test_a_directory_a_glob_and_a_file_are_the_same_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c4")
    by_directory = open_text(str(folder))
    by_glob = open_text(str(folder / "c4-*.json.gz"))
    assert [f.name for f in by_directory.train.files] == [f.name for f in by_glob.train.files]
    assert [f.name for f in by_directory.held_out.files] == ["c4-validation.00000-of-00001.json.gz"]
    one = open_text(str(folder / "c4-train.00001-of-00003.json.gz"))
    assert [row.text for file in one.train.files for row in rows(one.train, file)] == [t["text"] for t in texts(40, 1)]


def test_a_relative_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "c4")
    monkeypatch.chdir(tmp_path)
    assert len(open_text("c4/*train*.gz").train.files) == 3


@pytest.mark.parametrize("source", ["nowhere", "nowhere/*.json.gz", "empty"])
def test_what_is_not_there_is_named_with_its_place(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    where = Source("recipe.yaml", 7, 11, f"  source: {source}")
    with pytest.raises(Mistakes) as caught:
        open_text(source, where=where, key="data.sources.1.source")
    assert caught.value.exit == Exit.DATA and str(caught.value).startswith("error: data.sources.1.source: ")
    assert source in str(caught.value) and "recipe.yaml:7:11" in str(caught.value)


def test_without_a_held_out_file_documents_are_held_out_by_their_hash(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(packed(texts(2000)))
    corpus = open_text(str(tmp_path))
    train = {row.text for row in all_rows(corpus) if row.text and corpus.train.keeps(row.text)}
    held_out = {row.text for row in all_rows(corpus) if row.text and corpus.held_out.keeps(row.text)}
    assert len(train) + len(held_out) == 2000 and not train & held_out
    assert 50 < len(held_out) < 150


BAD = [
    (b"{not json", "not JSON"),
    (b'{"text": "cut', "not JSON"),
    (b'{"text": "a", "more": {"b": 1, "b": 2}}', 'an object has the key "b" twice'),
    (b'[{"text": "a"}]', 'a list, not an object with a "text"'),
    (b'{"url": "no text"}', 'no "text"'),
    (b'{"text": ""}', "empty"),
    (b'{"text": " \\n "}', "empty"),
    (b'{"text": 17}', "a number"),
    (b'{"text": null}', "null"),
    (b'{"text": "\xff\xfe"}', "UTF-8"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b"[" * 100_000, "not JSON"),
    (b"9" * 10_000, "not JSON"),
]


def test_bad_rows_are_told_apart_and_the_good_ones_around_them_kept(tmp_path: Path) -> None:
    good = texts(len(BAD) + 1)
    mixed: list[object] = [good[0]]
    for (bad, _), row in zip(BAD, good[1:]):
        mixed += [bad, b"", row]
    actual = all_rows(train_one_file(tmp_path, packed(mixed)))
    assert [row.text for row in actual if row.text is not None] == [row["text"] for row in good]
    faults = [row.fault for row in actual if row.text is None]
    assert len(faults) == len(BAD)
    for fault, (_, expected) in zip(faults, BAD):
        assert expected in fault


def test_a_row_too_long_to_hold_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "LONGEST_ROW", 500)
    rows_ = [{"text": "before"}, {"text": "x" * 5000}, {"text": "after"}]
    actual = all_rows(train_one_file(tmp_path, packed(rows_)))
    assert [row.text for row in actual] == ["before", None, "after"]


def test_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    data = gzip.compress(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}')
    assert [row.text for row in all_rows(train_one_file(tmp_path, data))] == ["one", "two"]


def test_a_giant_document_is_cut_and_nothing_of_it_lost(tmp_path: Path) -> None:
    giant = "".join(f"word{i} " for i in range(150_000))
    parts = list(pieces(giant))
    assert "".join(parts) == giant and len(parts) > 4
    assert all(len(part) <= text_module.PIECE and part.endswith(" ") for part in parts)
    unbroken = "x" * (2 * text_module.PIECE + 5)
    assert [len(part) for part in pieces(unbroken)] == [text_module.PIECE, text_module.PIECE, 5]


@pytest.mark.parametrize("part", ["truncated", "garbage", "flipped"])
def test_a_damaged_file_is_an_error_that_names_it_and_how_far_it_was_good(part: str, tmp_path: Path) -> None:
    data = packed(texts(300))
    if part == "truncated":
        data = data[: len(data) // 2]
    elif part == "garbage":
        data = b"this is no gzip at all"
    else:
        data = data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    corpus = train_one_file(tmp_path, data)
    with pytest.raises(Mistakes) as caught:
        Loader(Mixture.of(corpus.train, bytes_tokenizer()), seq_len=16, global_sequences=2)
    assert caught.value.exit == Exit.DATA
    assert "c4-train.00000-of-00001.json.gz" in str(caught.value)
    good = re.search(r"after (\d+) rows", str(caught.value))
    assert good is not None
    assert int(good[1]) in {"truncated": range(100, 200), "garbage": [0], "flipped": [300]}[part]


def test_too_many_bad_rows_stop_the_run_and_few_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loader(bad: int, good: int, limit: float) -> Loader:
        data = packed([*texts(good), *[b"{bad"] * bad])
        corpus = train_one_file(tmp_path, data)
        return Loader(Mixture.of(corpus.train, bytes_tokenizer()), seq_len=16, global_sequences=2, bad_rows=limit)

    with caplog.at_level(logging.WARNING):
        some = loader(2, 398, 0.01)
        for _ in range(2000):
            some.next()
            if some.epoch > 1:
                break
    assert some.readers[0].bad.bad == 2, "each bad row counts once, however often the text is read"
    assert caplog.text.count("line 399") == 1
    for limit, output in ((0.01, "6 of 400 rows"), (0.0, "1 of 395 rows")):
        with pytest.raises(Mistakes) as caught:
            loader(6, 394, limit)
        assert caught.value.exit == Exit.DATA
        assert output in str(caught.value) and "line 395" in str(caught.value)
    assert loader(6, 394, 0.02)


def test_a_file_of_garbage_is_given_up_long_before_its_end(tmp_path: Path) -> None:
    corpus = train_one_file(tmp_path, packed([b"{bad"] * 5000))
    counter = BadRows(corpus.train, 0.01)
    with pytest.raises(Mistakes):
        for row in all_rows(corpus):
            counter.see(corpus.train.files[0], row)
    assert counter.rows_read < 20


def test_no_readable_row_at_all(tmp_path: Path) -> None:
    for data in (packed([]), b""):
        with pytest.raises(Mistakes, match="no readable row"):
            check(train_one_file(tmp_path, data).train, 0.01)


def test_tokenizer_folders(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"a": 0, "b": 1, "[UNK]": 2, "</s>": 3, "<s>": 9}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"

    config.write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.document("a b a") == [0, 1, 0, 3], "a folder's truncation must not cut documents"
    assert loaded.document("a", last=False) == [0]
    assert loaded.vocab == 10, "ids have holes; what counts is the largest"
    assert load_tokenizer(tmp_path, rows=10).vocab == 10
    with pytest.raises(Mistakes) as caught:
        load_tokenizer(tmp_path, rows=9)
    assert caught.value.exit == Exit.RECIPE
    always = load_tokenizer(tmp_path, bos="always")
    assert always.document("a") == [9, 0, 3] and always.document("a", first=False) == [0, 3]
    assert load_tokenizer(tmp_path, eos="tokenizer").document("a") == [0]
    assert load_tokenizer(tmp_path, bos="always", eos="never").document("a") == [9, 0]
    assert always.fingerprint != loaded.fingerprint
    assert loaded.others[always.fingerprint] == "data.bos: always, data.eos: always"

    config.unlink()
    assert load_tokenizer(tmp_path).document("b") == [1, 3], "a well-known name will do"
    with pytest.raises(Mistakes, match="names no bos_token") as caught:
        load_tokenizer(tmp_path, bos="always")
    assert caught.value.exit == Exit.DATA
    config.write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(Mistakes, match="no end-of-text token") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit == Exit.DATA


@pytest.mark.parametrize("state", ["missing", "empty", "damaged"])
def test_no_tokenizer_there(state: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    if state != "missing":
        folder.mkdir()
    if state == "damaged":
        (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(Mistakes, match="cannot be read") as caught:
        load_tokenizer(folder)
    assert caught.value.exit == Exit.DATA


def test_a_limit_on_open_files_is_not_blamed_on_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a text")
    corpus = open_text(str(tmp_path))

    def limited(self: TextFile) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(TextFile, "open", limited)
    with pytest.raises(OSError, match="Too many open files"):
        list(rows(corpus.train, corpus.train.files[0]))
