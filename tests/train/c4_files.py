"""Small C4-format files for tests of the data path, and a tokenizer of bytes that needs no file."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

from tpshard.train.data.tokens import TextTokenizer

END = 256


def bytes_tokenizer() -> TextTokenizer:
    """Ids are UTF-8 bytes, 256 ends a document."""
    return TextTokenizer(Path("bytes"), 257, (), (END,), END, "bytes", lambda text: list(text.encode()))


def packed(rows: Iterable[object]) -> bytes:
    """A *.json.gz file of these rows; a row of bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return gzip.compress(b"".join(line + b"\n" for line in lines), mtime=0)


def texts(count: int, seed: int = 0, longest: int = 120) -> list[dict[str, str]]:
    """Rows whose texts are all different: their number, then letters."""
    chance = random.Random(seed)
    return [
        {"text": f"<{seed}.{i}>" + "".join(chance.choices("abcdefgh ", k=chance.randrange(1, longest))), "url": "u"}
        for i in range(count)
    ]


def folder_of(path: Path, files: int = 3, documents: int = 40) -> Path:
    """A folder of training files and one validation file."""
    path.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        (path / f"c4-train.{i:05d}-of-{files:05d}.json.gz").write_bytes(packed(texts(documents, i)))
    (path / "c4-validation.00000-of-00001.json.gz").write_bytes(packed(texts(documents, 1000)))
    return path
