"""Every format gives the same documents, from any row on, and tells what is wrong with a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow
import pytest
from c4_files import bytes_tokenizer, packed, texts
from pyarrow import parquet
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.train.data import text_formats
from tpshard.train.data.corpus import Corpus, open_text, rows
from tpshard.train.data.open_data import Mixture
from tpshard.train.data.row_columns import Columns
from tpshard.train.data.stream import Loader
from tpshard.train.data.text_formats import TextRow, format_of

DOCUMENTS = [row["text"] for row in texts(100)]


def write(path: Path, documents: list[object], column: str = "text") -> Path:
    """A file in the format that its name tells."""
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(documents))), column: documents})
        parquet.write_table(table, path, row_group_size=30)
    elif path.name.endswith(".gz"):
        path.write_bytes(packed({column: text} for text in documents))
    else:
        path.write_text("\n".join(json.dumps({column: text}) for text in documents))
    return path


def read(corpus: Corpus, start: int = 0) -> list[TextRow]:
    return [row for file in corpus.train.files for row in rows(corpus.train, file, start)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.json", "a.parquet", "A.PARQUET"])
def test_formats_give_the_same_documents_from_any_row_on(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [*DOCUMENTS]) if name.islower() else tmp_path / name
    if not name.islower():
        write(tmp_path / "a.parquet", [*DOCUMENTS]).rename(path)
    corpus = open_text(str(path))
    assert [row.text for row in read(corpus)] == DOCUMENTS
    for start in (1, 29, 30, 31, 99, 100, 150):
        assert read(corpus, start) == read(corpus)[start:]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_text_may_have_another_column(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, [*DOCUMENTS], column="body")
    assert [row.text for row in read(open_text(str(tmp_path), Columns("body")))] == DOCUMENTS
    with pytest.raises(Mistakes, match=r"data\.column") as caught:
        Loader(Mixture.of(open_text(str(tmp_path)).train, bytes_tokenizer()), seq_len=8, global_sequences=2)
    assert caught.value.exit == Exit.DATA


def test_a_resumed_run_names_another_column(tmp_path: Path) -> None:
    table = pyarrow.table({"text": DOCUMENTS, "body": DOCUMENTS[::-1]})
    parquet.write_table(table, tmp_path / "a.parquet")

    def loader(column: str) -> Loader:
        return Loader(
            Mixture.of(open_text(str(tmp_path), Columns(column)).train, bytes_tokenizer()),
            seq_len=8,
            global_sequences=2,
        )

    before = loader("text")
    before.next()
    loader("text").load_state_dict(before.state_dict())
    with pytest.raises(Mistakes, match=r"the columns read were text, are body"):
        loader("body").load_state_dict(before.state_dict())
    without = {key: value for key, value in before.state_dict().items() if key != "column"}
    loader("text").load_state_dict(without)  # as saved before there were columns


def test_rows_of_parquet_without_text_are_bad_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["one", None, " ", "two"])
    assert [(row.number, row.text, row.fault) for row in read(open_text(str(tmp_path)))] == [
        (0, "one", ""), (1, None, '"text" is null, not a string'), (2, None, '"text" is empty'), (3, "two", ""),
    ]  # fmt: skip
    parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert [row.fault for row in read(open_text(str(tmp_path)))] == ['"text" is a number, not a string'] * 2


@pytest.mark.parametrize("kept", [4, 2000])
def test_a_damaged_parquet_file_is_an_error_that_names_it(kept: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*DOCUMENTS])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(Mistakes, match=r"a\.parquet of .* cannot be read") as caught:
        read(open_text(str(path)))
    assert caught.value.exit == Exit.DATA


def test_plain_text_is_cut_at_blank_lines_and_none_of_it_is_lost(tmp_path: Path) -> None:
    paragraphs = [f"{i} " + "word " * (i % 40) + "\nsecond line\n\n" for i in range(2000)]
    (tmp_path / "book.txt").write_text("".join(paragraphs))
    documents = [row.text or "" for row in read(open_text(str(tmp_path)))]
    assert "".join(documents) == "".join(paragraphs) and len(documents) > 4
    assert all(text.endswith("\n\n") for text in documents)
    assert all(text_formats.DOCUMENT <= len(text) < 2 * text_formats.DOCUMENT for text in documents[:-1])
    corpus = open_text(str(tmp_path))
    assert read(corpus, 3) == read(corpus)[3:]


@pytest.mark.parametrize("letter", ["x", "é", "€", "🦊"])
@pytest.mark.parametrize("shift", range(4))
def test_plain_text_without_lines_is_cut_between_characters(letter: str, shift: int) -> None:
    text = "-" * shift + letter * (3 * text_formats.DOCUMENT)
    plain = format_of("a.txt")
    assert plain is not None
    parts = [row.text or "" for row in plain.rows(io.BytesIO(text.encode()), "text", 0)]
    assert "".join(parts) == text and len(parts) > 1


def test_plain_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffgood".encode() + b"\n" * text_formats.DOCUMENT + b"bad \xff" + b" end")
    first, second = read(open_text(str(tmp_path)))
    assert first.text is not None and first.text.strip() == "good"
    assert second.text is None and f"invalid UTF-8 at byte {7 + text_formats.DOCUMENT + 4}" in second.fault


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [*DOCUMENTS])
    (tmp_path / "dataset_infos.json").write_text("{}")  # describes the data
    (tmp_path / "README.md").write_text("# data")
    assert [file.name for file in open_text(str(tmp_path)).train.files] == ["a.parquet"]
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(Mistakes, match="several formats") as caught:
        open_text(str(tmp_path))
    assert "1 of Parquet, 1 of plain text" in str(caught.value)
    assert len(open_text(f"{tmp_path}/*.parquet").train.files) == 1


@pytest.mark.parametrize("name", ["a.csv", "a.json.zst", "a"])
def test_a_file_of_no_known_format_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(Mistakes, match="has no known format") as caught:
        open_text(str(tmp_path / name))
    assert caught.value.exit == Exit.DATA
