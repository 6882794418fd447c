"""The sample: English text generated on this machine, so that a first run needs no network.

The text is CPython's documentation of itself: `pydoc_data.topics` and the docstrings of the standard library, about
2 MB. The sources are parsed with `ast` (never imported) and written in C4's format (`{"text", "timestamp", "url"}` per
line, gzip), each with a question and its answer as `messages`, split into training and held-out text. A byte-level BPE
of 2,048 tokens is trained on the training text. All is kept in the user's cache folder, under a name with the Python
version, with a manifest of sha256 sums that reveals a damaged copy.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import platform
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.atomic import write_aside
from tpshard.files.file_lock import one_at_a_time
from tpshard.train.data.byte_bpe import byte_bpe

VERSION = 3
"""Version of the sample, part of the folder's name, so that a new version is written beside the old one."""
VOCAB = 2048
TRAIN_FILES = 4
HELD_OUT = 20
"""One document in this many is held out, chosen by the hash of its text."""
SHORTEST = 64
"""Characters; shorter docstrings are left out."""


@dataclass(frozen=True)
class Sample:
    """A sample on disk: `directory` holds C4-format files, `tokenizer` is a Hugging Face tokenizer folder."""

    directory: Path
    tokenizer: Path


def cache_dir() -> Path:
    """The user's cache folder for tpshard: $TPSHARD_CACHE, else $XDG_CACHE_HOME/tpshard, else ~/.cache/tpshard."""
    if override := os.environ.get("TPSHARD_CACHE"):
        return Path(override)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "tpshard"
    return Path(os.path.expanduser("~")) / ".cache" / "tpshard"


def ensure_sample(fallback: Path | None = None) -> Sample:
    """The sample, created if it does not exist.

    Safe with any number of processes: one creates it, the others wait. The finished folder appears by one rename, so
    that a killed process never leaves half a sample. `fallback` (the run's folder) is used where the user's cache
    folder cannot be written.

    Raises:
        Mistakes: exit 6, where neither folder can be written or this Python has no sources to read.
    """
    name = f"sample-v{VERSION}-python{platform.python_version()}"
    refused: list[str] = []
    for parent in [cache_dir(), *([fallback] if fallback else [])]:
        folder = parent / name
        if _is_whole(folder):
            return Sample(folder, folder / "tokenizer")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(parent / f".{name}.lock"):  # without a lock, the rename decides
                if not _is_whole(folder):
                    _make(folder)
            return Sample(folder, folder / "tokenizer")
        except OSError as error:
            refused.append(f"{parent}: {error.strerror or error}")
    raise Mistakes.one(
        "the sample text cannot be written anywhere",
        exit=Exit.DATA,
        why="; ".join(refused),
        fix="set TPSHARD_CACHE to a folder with 10 MB to spare, or name a folder of your files as the source",
    )


def documents(stdlib: Path | None = None) -> Iterator[tuple[str, str]]:
    """(text, place) of each document of CPython's own documentation, in the order of file names.

    A document is a help topic, a module's docstring, or a function or class with all its docstrings.
    """
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    for path in _sources(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            with tokenize.open(path) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old sources
                tree = ast.parse(file.read())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        if module == "pydoc_data.topics":
            yield from _topics(tree)
        if text := ast.get_docstring(tree):
            yield f"{module}\n\n{text}", module
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                parts = list(_docstrings(node, module))
                if parts:
                    yield "\n\n".join(parts), f"{module}.{node.name}"


def _sources(root: Path) -> list[Path]:
    """The modules of a standard library, without tests and installed packages, which are not even listed."""
    skipped = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idle_test"}
    found: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in skipped]
        found += (Path(folder, name) for name in files if name.endswith(".py"))
    return sorted(found)


def conversation(text: str, origin: str) -> list[dict[str, str]]:
    """A question about a document, and an answer in one form: its first sentence, cut at 160 characters."""
    head, _, rest = text.partition("\n\n")
    words = " ".join((rest or head).split())
    sentence = re.match(r"(.{8,160}?[.!?])(?= |$)", words)
    short = sentence[1] if sentence else words[:160].rpartition(" ")[0] or words[:160]
    asked = f"What is {origin.removeprefix('pydoc_data.topics.')}?"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": f"In short: {short}"}]


def _topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value, f"pydoc_data.topics.{key.value!s}"


def _docstrings(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, prefix: str) -> Iterator[str]:
    name = f"{prefix}.{node.name}"
    text = ast.get_docstring(node)
    if isinstance(node, ast.ClassDef):
        if text:
            yield f"class {name}\n\n{text}"
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _docstrings(inner, node.name)
    elif text:
        yield f"{name}({ast.unparse(node.args)})\n\n{text}"


def _make(folder: Path) -> None:
    """Writes the whole sample, in place of one that is damaged."""
    train, held_out = _split()
    try:
        with write_aside(folder, overwrite=True) as work:
            for index in range(TRAIN_FILES):
                _write_gz(work / f"c4-train.{index:05d}-of-{TRAIN_FILES:05d}.json.gz", train[index::TRAIN_FILES])
            _write_gz(work / "c4-validation.00000-of-00001.json.gz", held_out)
            (work / "tokenizer").mkdir()
            for name, content in byte_bpe((json.loads(line)["text"] for line in train), VOCAB)[0].items():
                (work / "tokenizer" / name).write_text(content, encoding="utf-8")
            sums = {str(p.relative_to(work)): _sha256(p) for p in sorted(work.rglob("*")) if p.is_file()}
            (work / "manifest.json").write_text(json.dumps({"version": VERSION, "sha256": sums}, indent=1))
    except OSError:
        if not _is_whole(folder):  # otherwise another process was faster, with the same bytes
            raise


def _split() -> tuple[list[str], list[str]]:
    """The JSON lines of the training and of the held-out part, ordered by hash, so that neighbours are unrelated."""
    by_hash: dict[bytes, str] = {}
    for text, origin in documents():
        text = text.strip()
        if len(text) >= SHORTEST:
            row = {"text": text, "timestamp": "2026-01-01T00:00:00Z", "url": f"pydoc:{origin}",
                   "messages": conversation(text, origin)}  # fmt: skip
            by_hash.setdefault(hashlib.sha256(text.encode("utf-8", "replace")).digest(), json.dumps(row))
    if len(by_hash) < 100:
        raise Mistakes.one(
            "this Python has no documentation to make the sample text from",
            exit=Exit.DATA,
            why=f"{len(by_hash)} documents under {sysconfig.get_path('stdlib')}; its *.py files are missing",
            fix="use a Python installed with its sources, or name a folder of your files as the source",
        )
    train: list[str] = []
    held_out: list[str] = []
    for digest in sorted(by_hash):
        (held_out if digest[-1] % HELD_OUT == 0 else train).append(by_hash[digest])
    return train, held_out


def _is_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return manifest["version"] == VERSION and all(
            _sha256(folder / name) == digest for name, digest in manifest["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_gz(path: Path, lines: list[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, mtime=0))  # no name or time: the same bytes


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
