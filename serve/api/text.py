"""Text that grows token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tpshard.models.folders.folder_tokenizer import FolderTokenizer

_CONTEXT = 6
"""Prompt tokens decoded together with an answer's first ones: more than a character spans."""


@dataclass
class Writer:
    """Turns the tokens of an answer into text as they come; returns only text that can no longer change.

    A character of several tokens waits for its last byte. Text that may begin a stop string is held back until further
    text decides, so that no part of a stop string is ever sent. `context`: the tokens that the text continues; some
    decoders strip the space that a text begins with. `least`: tokens whose text no stop string ends.
    """

    tokenizer: FolderTokenizer
    stop: Sequence[str] = ()
    context: Sequence[int] = ()
    least: int = 0
    text: str = ""
    """The text returned so far."""
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    _pending: str = ""
    _start: int = 0
    """The first token of the window that is decoded together with the newest."""
    _read: int = 0
    _first: int = 0
    """The first token that was added."""

    def __post_init__(self) -> None:
        before = list(self.context[-_CONTEXT:])
        if not self.tokenizer.decode(before).endswith("�"):  # half a character would swallow the first tokens
            self.tokens, self._read = before, len(before)
        self._first = len(self.tokens)

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
        pending = self._pending + new
        places = [place for place in (pending.find(s) for s in self.stop) if place >= 0]
        if places and len(self.tokens) - self._first > self.least:
            self.stopped, self._pending = True, ""
            out = pending[: min(places)]
        else:
            keep = 0 if last else max((_overlap(pending, s) for s in self.stop), default=0)
            out, self._pending = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += out
        return out


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
