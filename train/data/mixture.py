"""What a run reads: its sources with their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.train.data.conversations import AnswerTokenizer
from tpshard.train.data.corpus import TextSource
from tpshard.train.data.tokens import TextTokenizer


@dataclass(frozen=True)
class Share:
    """One source of a mixture."""

    text: TextSource
    tokenizer: TextTokenizer | AnswerTokenizer
    weight: float = 1.0
    epochs: int | None = None
    """How often it is read; None: as often as the run asks."""


@dataclass(frozen=True)
class Mixture:
    """What a run reads: its sources with their weights, which count documents or their tokens."""

    shares: tuple[Share, ...]
    by: Literal["rows", "tokens"] = "rows"
    window: int = 1
    """Documents of a chain that are shuffled among each other; 1: they come in the order of the files."""
    epochs: int | None = None
    """How many whole epochs a run has; None: it reads on and on."""

    @staticmethod
    def of(text: TextSource, tokenizer: TextTokenizer | AnswerTokenizer, epochs: int | None = None) -> Mixture:
        """A single source, in the order of its files."""
        return Mixture((Share(text, tokenizer, epochs=epochs),))

    @property
    def name(self) -> str:
        """The names of the sources."""
        return ", ".join(share.text.name for share in self.shares)

    @property
    def tokenizer(self) -> TextTokenizer | AnswerTokenizer:
        """The tokenizer of the first source; those of others differ in what they do with a row."""
        return self.shares[0].tokenizer

    def mistake(self, message: str, *, why: str = "", fix: str = "") -> Mistakes:
        """An error (exit 6) at the place of the recipe that names the first source."""
        return self.shares[0].text.mistake(message, why=why, fix=fix)
