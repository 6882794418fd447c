"""What a client asked for, and what became of it so far."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from tpshard.serve.blocks import Digest


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; the draws depend on (seed, choice, position) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one; None: no log-probabilities at all."""


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities under the model itself, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Sequence:
    """One answer in the making: the prompt, what was added to it, and where its keys and values lie. Two are never
    equal, though they ask for the same."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    choice: int = 0
    stop_tokens: frozenset[int] = frozenset()
    prompt_logprobs: bool = False
    """Whether log-probabilities of the prompt are wanted as well (echo)."""
    id: int = field(default_factory=itertools.count().__next__)
    arrived: float = field(default_factory=time.monotonic)

    tokens: list[int] = field(default_factory=list)
    """Prompt and answer."""
    computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """Of the full blocks of `tokens`, as far as they were needed."""
    published: int = 0
    finish: str | None = None
    """stop, length, abort or error."""
    prompt_scores: list[Logprob] = field(default_factory=list)
    """Of prompt tokens 1, 2, ..., when wanted."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """Tokens still to be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and not complete."""
        return self.prompt_logprobs and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def done(self) -> bool:
        return self.finish is not None


@dataclass(frozen=True)
class Event:
    """What one step gave one sequence."""

    sequence: Sequence
    token: int | None
    """The new token; None where the event only says how it ended."""
    logprob: Logprob | None = None
    finish: str | None = None
    error: str | None = None
