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
    stopped: bool = False
    _window: list[int] = field(default_factory=list)
    """The tokens that gave the text before, and those whose text waits; the former only where they change the latter's.
    """
    _read: int = 0
    """How many of these gave their text."""
    _count: int = 0
    """Tokens that were added."""
    _pending: str = ""

    def __post_init__(self) -> None:
        before = list(self.context[-_CONTEXT:])
        if not self.tokenizer.decode(before).endswith("�"):  # half a character would swallow the first tokens
            self._window, self._read = before, len(before)

    def add(self, token: int, last: bool = False) -> str:
        """Adds a token and returns the text that became final; with `last`, all remaining text."""
        self._count += 1
        if token not in self.tokenizer.special_ids:  # these have no text
            self._window.append(token)
        return self._give(self._new_text(last), last)

    def end(self) -> str:
        """Returns the text that was held back, after the last token."""
        return self._give(self._new_text(True), True)

    def _new_text(self, last: bool) -> str:
        decode, window = self.tokenizer.decode, self._window
        written, whole = decode(window[: self._read]), decode(window)
        new = whole[len(written) :]
        if not new or (whole.endswith("�") and not last and len(window) - self._read < 8):
            return new if last else ""
        del window[: len(window) if self.tokenizer.is_concatenative else self._read]
        self._read = len(window)
        return new

    def _give(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        if not self.stop:
            return new
        pending = self._pending + new
        places = [place for place in (pending.find(s) for s in self.stop) if place >= 0]
        if places and self._count > self.least:
            self.stopped, self._pending = True, ""
            return pending[: min(places)]
        keep = 0 if last else max(_overlap(pending, s) for s in self.stop)
        self._pending = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
