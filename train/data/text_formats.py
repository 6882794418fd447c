"""Formats of text files: JSON lines, Parquet and plain text. Each is read row by row, and a row is one document.

`datasets` finds the files of a data set and streams their bytes; its readers are not used, because they drop a whole
file for one bad row.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from tpshard.train.data.row_columns import Columns, TextRow

LONGEST_ROW = 1 << 28
"""Bytes; a longer line is a bad row and never held in memory."""
DOCUMENT = 1 << 15
"""Bytes after which plain text is cut into documents, at the next blank line, or at twice as many bytes."""
BATCH = 64
"""Rows of a Parquet file that are decoded at once."""


@dataclass(frozen=True)
class TextFormat:
    """A format of text files, recognized by the suffix of a file's name."""

    name: str
    suffixes: tuple[str, ...]
    unit: str
    """What a row is in the file, for errors."""
    rows: Callable[[BinaryIO, Columns, int], Iterator[TextRow]]
    """Yields the rows of a file's bytes from a number on, as its columns say."""
    from_start: bool = True
    """Whether the bytes are read one after the other from the first on, whatever the number."""


class NoColumn(Exception):
    """A file has no column of the name that the recipe gives."""

    def __init__(self, column: str, columns: list[str]):
        self.column = column
        super().__init__(f"it has no column `{column}`; its columns are {', '.join(columns)}")


def format_of(name: str) -> TextFormat | None:
    """The format of a file by its name; None if no format has such a suffix."""
    return next((one for one in FORMATS if name.lower().endswith(one.suffixes)), None)


def open_decompressed(name: str, file: BinaryIO) -> BinaryIO:
    """The bytes of an open file, decompressed if its name ends in `.gz`."""
    return cast(BinaryIO, _Gzip(file)) if name.lower().endswith(".gz") else file


class _Gzip(gzip.GzipFile):
    """A gzip reader that also closes the underlying file, and returns all readable bytes before an error."""

    def __init__(self, file: BinaryIO):
        super().__init__(fileobj=file, mode="rb")
        self._file = file

    def close(self) -> None:
        super().close()
        self._file.close()


# ---- JSON lines -----------------------------------------------------------------------------------------------------
def _json_rows(file: BinaryIO, columns: Columns, start: int) -> Iterator[TextRow]:
    for number, raw in enumerate(_lines(file)):
        row = _json_row(number, raw, columns) if number >= start and (raw is None or raw.strip()) else None
        if row is not None:
            yield row


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines without their ends; None for one longer than LONGEST_ROW."""
    while raw := file.readline(LONGEST_ROW):
        if len(raw) == LONGEST_ROW and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(1 << 20)
            yield None
        else:
            yield raw


class RepeatedKey(ValueError):
    """An object of JSON has a key twice, of which a reader would take either."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises RepeatedKey."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RepeatedKey(f'an object has the key "{twice}" twice')
    return found


def _json_row(number: int, raw: bytes | None, columns: Columns) -> TextRow | None:
    if raw is None:
        return TextRow(number, None, f"longer than {LONGEST_ROW} bytes")
    try:
        value = json.loads(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        why = "a compressed file, whose name must end in .gz" if raw[:2] == b"\x1f\x8b" else error.reason
        return TextRow(number, None, f"invalid UTF-8: {why}")
    except RepeatedKey as error:
        return TextRow(number, None, str(error))
    except (ValueError, RecursionError) as error:
        if number == 0 and raw.strip() == b"[":
            return TextRow(number, None, "one list of JSON, not an object a line (`jq -c '.[]' FILE > FILE.jsonl`)")
        return TextRow(number, None, f"not JSON: {error}")
    return columns.row(number, value)


# ---- Parquet --------------------------------------------------------------------------------------------------------
def _parquet_rows(file: BinaryIO, columns: Columns, start: int) -> Iterator[TextRow]:
    """Yields the rows of a Parquet file from number `start` on, without reading earlier groups of rows."""
    import pyarrow
    from pyarrow import parquet

    if not file.seek(0, io.SEEK_END):  # empty, as a writer that had no rows may leave it
        return
    try:
        table = parquet.ParquetFile(file)
        names = list(table.schema_arrow.names)
        if missing := next((column for column in columns.required if column not in names), None):
            raise NoColumn(missing, names)
        read = [*columns.required, *(column for column in columns.optional if column in names)]
        number = 0
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            if number + count <= start:
                number += count
                continue
            for batch in table.iter_batches(BATCH, row_groups=[group], columns=read):
                for value in batch.to_pylist():
                    if number >= start and (row := columns.row(number, value)) is not None:
                        yield row
                    number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise OSError(str(error)) from error


# ---- plain text -----------------------------------------------------------------------------------------------------
def _plain_rows(file: BinaryIO, columns: Columns, start: int) -> Iterator[TextRow]:
    """Yields a plain text as rows, cut where a blank line ends a paragraph, so that no row is larger than memory."""
    number, at, held = 0, 0, bytearray()  # bytes would be copied for each line
    while raw := file.readline(DOCUMENT):
        held += raw
        if (len(held) >= DOCUMENT and not raw.strip()) or len(held) >= 2 * DOCUMENT:
            end = _last_character(held)
            if number >= start:
                yield from _plain_row(number, bytes(held[:end]), at)
            number, at, held = number + 1, at + end, held[end:]
    if number >= start:
        yield from _plain_row(number, bytes(held), at)


def _plain_row(number: int, raw: bytes, at: int) -> Iterator[TextRow]:
    """The row of these bytes, which begin at byte `at` of the file; none if they are blank."""
    if not raw.strip():
        return
    try:
        yield TextRow(number, raw.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        yield TextRow(number, None, f"invalid UTF-8 at byte {at + error.start}: {error.reason}")


def _last_character(raw: bytes | bytearray) -> int:
    """The length of `raw` without a character of UTF-8 that is cut at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(raw)
    return len(raw) - len(decoder.getstate()[0])


FORMATS = (
    TextFormat("JSON lines", (".jsonl", ".jsonl.gz", ".json.gz", ".json"), "line", _json_rows),
    TextFormat("Parquet", (".parquet",), "row", _parquet_rows, from_start=False),
    TextFormat("plain text", (".txt", ".txt.gz"), "part", _plain_rows),
)
