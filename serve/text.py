"""Conversion between text and tokens: a tokenizer folder, text that grows token by token, stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Rust

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_CONTEXT = 6
"""Prompt tokens decoded together with an answer's first ones: more than a character spans."""


def _byte_names() -> dict[str, int]:
    """The names of bytes in byte-level BPE vocabularies: printable ones as themselves, others from U+0100 (GPT-2)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printed]
    return {chr(b): b for b in printed} | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_names()


class Tokenizer:
    """A Hugging Face tokenizer folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

    Nothing in the folder is executed (the chat template runs sandboxed, see chat.py). ValueError if the folder has no
    readable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{folder} holds no tokenizer.json")
        try:
            self._rust = Rust.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} cannot be read: {error}") from error
        config = _json(folder / "tokenizer_config.json")
        self.special: dict[str, str] = {}
        for key in _TOKENS:
            value = config.get(key)
            self.special[key] = str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
        self.chat_template = _template(folder, config)
        self.size = self._rust.get_vocab_size(with_added_tokens=True)
        self._longest = max((len(token) for token in self._rust.get_vocab()), default=1)
        self.stop_tokens = frozenset(self._stop_tokens(folder))
        self._plain = self.encode("a", special=False)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text; with `special` also the tokens that start a document."""
        return list(self._rust.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._rust.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text, possibly a part of a character; a special token's name."""
        name = self._rust.id_to_token(token) or ""
        plain = self.decode(self._plain)  # a decoder may strip the space that a text begins with
        text = self.decode([*self._plain, token])[len(plain) :] or name
        if "�" not in text:
            return text.encode()
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):  # SentencePiece's bytes
            return bytes([int(name[3:5], 16)])
        return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else text.encode()

    def token_text(self, token: int) -> str:
        """The text of a token beside its log-probability; part of a character as `bytes:\\xe2\\x82`."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def too_long(self, text: str, tokens: int) -> bool:
        """Whether the text certainly has more than this many tokens, judged by its length."""
        return len(text) > tokens * max(self._longest, 1)

    def _stop_tokens(self, folder: Path) -> set[int]:
        ids = _json(folder / "generation_config.json").get("eos_token_id")
        ids_that_stop = {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int) and i >= 0}
        if self.special["eos_token"]:
            token = self._rust.token_to_id(self.special["eos_token"])
            ids_that_stop |= {token} if token is not None else set()
        return ids_that_stop


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return value


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


@dataclass
class Writer:
    """Turns the tokens of an answer into text as they come; returns only text that can no longer change.

    A character of several tokens waits for its last byte. Text that may begin a stop string is held back until further
    text decides, so that no part of a stop string is ever sent. `context`: the tokens that the text continues; some
    decoders strip the space that a text begins with.
    """

    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    context: Sequence[int] = ()
    text: str = ""
    """The text returned so far."""
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    _held: str = ""
    _start: int = 0
    """The first token of the window that is decoded together with the newest."""
    _read: int = 0

    def __post_init__(self) -> None:
        before = list(self.context[-_CONTEXT:])
        if not self.tokenizer.decode(before).endswith("�"):  # half a character would swallow the first tokens
            self.tokens, self._read = before, len(before)

    def add(self, token: int, last: bool = False) -> str:
        """Adds a token and returns the text that became final; with `last`, all remaining text."""
        self.tokens.append(token)
        return self._give(self._new_text(last), last)

    def end(self) -> str:
        """Returns the text that was held back, after the last token."""
        return self._give(self._new_text(True), True)

    def _new_text(self, last: bool) -> str:
        written = self.tokenizer.decode(self.tokens[self._start : self._read])
        whole = self.tokenizer.decode(self.tokens[self._start :])
        if len(whole) <= len(written) or (whole.endswith("�") and not last and len(self.tokens) - self._read < 8):
            return whole[len(written) :] if last else ""
        self._start, self._read = self._read, len(self.tokens)
        return whole[len(written) :]

    def _give(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        places = [place for place in (held.find(s) for s in self.stop) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            out = held[: min(places)]
        else:
            keep = 0 if last else max((_overlap(held, s) for s in self.stop), default=0)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += out
        return out


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
