"""Compares the log-probabilities that the training program and the server give the same tokens of the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SPREAD = 4.0
"""How many times the training program's rounding the server may be off: sums in another order round differently."""


class TokenScore(NamedTuple):
    """A target token of a row, and its log-probability in nats."""

    position: int
    """That of the token before it, whose logits predict it."""
    token: int
    logprob: float
    exact: float
    """The same by the same program in float64."""


class PromptedPart(NamedTuple):
    """A document's part of a row, which a server gets as a prompt."""

    row: int
    prompt: tuple[int, ...]
    """Its tokens, and behind the last one its target, if it has one."""
    start: int
    """The position of its first token in the row."""


@dataclass(frozen=True)
class ScoredRow:
    """A held-out row with the log-probabilities of its targets by the training program."""

    tokens: Sequence[int]
    documents: Sequence[int]
    scores: Sequence[TokenScore]

    def parts(self, row: int, longest: int) -> Iterator[PromptedPart]:
        """Its documents, cut to `longest` tokens."""
        last = {score.position: score.token for score in self.scores}
        starts = [i for i, own in enumerate(self.documents) if i == 0 or self.documents[i - 1] != own]
        for start, stop in zip(starts, [*starts[1:], len(self.tokens)]):
            beyond = [last[stop - 1]] if stop - 1 in last else []
            prompt = (*self.tokens[start:stop], *beyond)[:longest]
            if len(prompt) > 1:
                yield PromptedPart(row, prompt, start)


@dataclass(frozen=True)
class TokenDifference:
    """A token whose log-probabilities differ by more than rounding explains."""

    row: int
    position: int
    token: int
    training: float
    server: float


@dataclass
class Agreement:
    """The comparison of all target tokens of some rows."""

    rows: int
    tokens: int = 0
    left_out: int = 0
    """Targets that were not compared: they lie beyond the longest prompt that the server takes."""
    largest: float = 0.0
    mean: float = 0.0
    bound: float = 0.0
    """The most that a token may be off."""
    mean_bound: float = 0.0
    """The most that tokens may be off on average: the better test where a rounding sends a token to other experts."""
    equal_bits: int = 0
    """Tokens whose log-probabilities are the same number."""
    beyond: list[TokenDifference] = field(default_factory=list)
    """The tokens above the bound, in order."""

    @property
    def agrees(self) -> bool:
        return self.tokens > 0 and not self.beyond and self.mean <= self.mean_bound

    @staticmethod
    def of(rows: Sequence[ScoredRow], server: dict[tuple[int, int], float]) -> Agreement:
        """server: the server's log-probability of the target at each (row, position). The bounds are `SPREAD` times the
        training program's own distance from itself in float64."""
        result = Agreement(len(rows))
        pairs = [(row, score) for row, one in enumerate(rows) for score in one.scores]
        roundings = [abs(score.logprob - score.exact) for _, score in pairs]
        result.bound, result.mean_bound = SPREAD * max(roundings, default=0.0), SPREAD * _mean(roundings)
        compared = [(row, s, server[row, s.position]) for row, s in pairs if (row, s.position) in server]
        result.tokens, result.left_out = len(compared), len(pairs) - len(compared)
        gaps = [abs(score.logprob - other) for _, score, other in compared]
        result.largest, result.mean = max(gaps, default=math.nan), _mean(gaps)
        result.equal_bits = sum(score.logprob == other for _, score, other in compared)
        result.beyond = [
            TokenDifference(row, score.position, score.token, score.logprob, other)
            for (row, score, other), gap in zip(compared, gaps) if not gap <= result.bound
        ]  # fmt: skip
        return result

    def to_json(self) -> dict[str, Any]:
        first = self.beyond[0] if self.beyond else None
        return {
            "agrees": self.agrees, "rows": self.rows, "tokens": self.tokens, "left_out": self.left_out,
            "largest": self.largest, "bound": self.bound, "mean": self.mean, "mean_bound": self.mean_bound,
            "equal_bits": self.equal_bits, "beyond": len(self.beyond),
            "first_difference": None if first is None else vars(first),
        }  # fmt: skip

    def __str__(self) -> str:
        most = [f"{x:.2e}" for x in (self.largest, self.bound, self.mean, self.mean_bound)]
        titles = ("rows", "tokens", "largest", "bound", "mean", "bound", "equal bits")
        figures = (f"{self.rows:,}", f"{self.tokens:,}", *most, f"{self.equal_bits:,}")
        lines = ["".join(f"{cell:>11}" for cell in line) for line in (titles, figures)]
        if self.left_out:
            lines.append(f"{self.left_out:,} tokens lie beyond the longest prompt that the server takes")
        if self.agrees:
            lines.append(f"They agree: {SPREAD:g} times the training program's own rounding explains every difference.")
        elif not self.tokens:
            lines.append("No token was compared.")
        elif not self.beyond:
            lines.append("They differ: on average tokens are off by more than rounding explains.")
        else:
            first = self.beyond[0]
            lines += [
                f"They differ: {len(self.beyond):,} tokens are off by more than rounding explains.",
                f"The first is token {first.token} behind position {first.position} of row {first.row}: "
                f"{first.training:.6f} in training, {first.server:.6f} in the server.",
            ]
        return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
