"""The tokenizer of a run, from a Hugging Face folder or from the sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.recipes.diagnostic import Exit, Mistakes, Source

FAST = "tokenizer.json"
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|end|>")
"""Names of end-of-text tokens, tried in this order where no file of the folder names one."""


@dataclass(frozen=True)
class TextTokenizer:
    """Turns documents into token ids. `vocab` is the smallest vocabulary that contains every id."""

    folder: Path
    vocab: int
    begin: int | None
    end: int
    fingerprint: str
    """A hash of the files that decide the ids; a resumed run compares it."""
    encode: Callable[[str], list[int]]
    """Turns text into ids, without special tokens."""

    def document(self, text: str, *, first: bool = True, last: bool = True) -> list[int]:
        """The ids of a document (or of a piece of one): begin token if the tokenizer has one, text, end token."""
        ids = self.encode(text)
        if first and self.begin is not None:
            ids = [self.begin, *ids]
        return [*ids, self.end] if last else ids


def load_tokenizer(folder: Path | str, *, where: Source | None = None) -> TextTokenizer:
    """The tokenizer of a folder; nothing in it is executed.

    Raises:
        Mistakes: exit 6; the folder has no tokenizer, a damaged one, or one without an end-of-text token.
    """
    folder = Path(folder).expanduser()
    paths = tokenizer_files(folder, where)
    try:
        files = {name: path.read_bytes() for name, path in paths.items()}
        vocab, encode, id_of = _fast(files[FAST]) if FAST in files else _by_transformers(folder)
        special = _special_tokens(files)
    except Exception as error:  # the libraries raise bare Exceptions for a damaged file
        raise _unreadable(folder, f"{type(error).__name__}: {error}", where) from error
    named = special.get("eos_token")
    end = next((i for i in map(id_of, END_NAMES if named is None else [named]) if i is not None), None)
    if end is None:
        raise Mistakes.one(
            f"the tokenizer {folder} has no end-of-text token",
            exit=Exit.DATA,
            where=where,
            why="eos_token is missing" if named is None else f"eos_token is {named!r}, not in it",
            fix="name one as eos_token in its tokenizer_config.json",
        )
    begin = id_of(special["bos_token"]) if "bos_token" in special else None
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model"):
        digest.update(files.get(name, b""))
    digest.update(repr((begin, end)).encode())
    return TextTokenizer(folder, vocab, begin, end, digest.hexdigest()[:32], encode)


def tokenizer_files(folder: Path | str, where: Source | None = None) -> dict[str, Path]:
    """The files of a folder that describe its tokenizer, by name. Mistakes (exit 6) where there are none."""
    names = (FAST, "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    try:
        folder = Path(folder).expanduser()
        paths = {name: folder / name for name in names if (folder / name).is_file()}
    except (OSError, RuntimeError) as error:  # a name that is too long, no right to look, no such home
        raise _unreadable(Path(folder), getattr(error, "strerror", None) or str(error), where) from None
    if not paths.keys() & set(names[:3]):
        raise _unreadable(folder, f"no {FAST} in it" if folder.is_dir() else "there is no such folder", where)
    return paths


def _unreadable(folder: Path, why: str, where: Source | None) -> Mistakes:
    return Mistakes.one(
        f"the tokenizer {folder} cannot be read",
        exit=Exit.DATA,
        where=where,
        why=why,
        fix="a folder with tokenizer.json and tokenizer_config.json; `data.source: sample` needs none",
    )


def check_vocab(tokenizer: TextTokenizer, model_vocab: int, *, where: Source | None = None) -> None:
    """Raises if the model has fewer embedding rows than the tokenizer has ids.

    Raises:
        Mistakes: exit 3.
    """
    if tokenizer.vocab > model_vocab:
        raise Mistakes.one(
            f"the tokenizer {tokenizer.folder} has {tokenizer.vocab} tokens, but model.vocab is {model_vocab}",
            exit=Exit.RECIPE,
            where=where,
            fix=f"set model.vocab to {tokenizer.vocab} or more, or use the model's own tokenizer",
        )


def _fast(data: bytes) -> tuple[int, Callable[[str], list[int]], Callable[[str], int | None]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return vocab, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id


def _by_transformers(folder: Path) -> tuple[int, Callable[[str], list[int]], Callable[[str], int | None]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    vocabulary = tokenizer.get_vocab()
    return (
        max(vocabulary.values()) + 1,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        vocabulary.get,
    )


def _special_tokens(files: dict[str, bytes]) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json.loads(files.get(name, b"{}")).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key in ("bos_token", "eos_token") and isinstance(content, str):
                special[key] = content
    return special
