"""A client's request: its sampling settings, its sequences, and the events of their steps."""

from __future__ import annotations

import itertools
import time
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tpshard.programs.scheduling.blocks import Digest


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of a sequence. Temperature 0 is greedy; draws depend only on (seed, choice, position)."""

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
    min_tokens: int = 0
    """Tokens of the answer before which it does not end."""
    excluded: tuple[tuple[int, ...], ...] = ()
    """Tokens in a row of which the last is never chosen after the others; one alone is never chosen."""
    not_first: tuple[int, ...] = ()
    """Tokens that do not begin the answer."""
    seed: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens to report besides the chosen one; None: no log-probabilities."""

    @cached_property
    def penalizes(self) -> bool:
        """Whether tokens that came before change what comes next."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @cached_property
    def is_plain(self) -> bool:
        """Whether tokens are chosen by the model's own logits, and any may come."""
        return not (self.penalizes or self.logit_bias or self.excluded or self.not_first or self.min_tokens)


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities of the model itself, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that a server holds; the same folder loaded again is another one."""

    name: str
    """The model that requests ask for."""
    folder: str
    slot: int
    root: Digest
    """What the digests of its cached blocks begin with: no other adapter's, and not those of the model alone."""


@dataclass(eq=False)
class Sequence:
    """One answer being generated: its prompt, its tokens, and its cache blocks.

    Two sequences are never equal, even for the same request.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    choice: int = 0
    stop_tokens: frozenset[int] = frozenset()
    prompt_logprobs: bool = False
    """Whether to score the prompt too (echo)."""
    adapter: LoadedAdapter | None = None
    """The adapter with which it is computed; None: the model alone."""
    id: int = field(default_factory=itertools.count().__next__)
    arrived: float = field(default_factory=time.monotonic)

    tokens: list[int] = field(default_factory=list)
    """Tokens of prompt and answer."""
    computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    cached: int | None = None
    """Tokens of the prompt that the cache had when the sequence was first scheduled; None before that."""
    blocks: array[int] = field(default_factory=lambda: array("q"))
    digests: list[Digest] = field(default_factory=list)
    """Digests of the full blocks of `tokens`, as far as needed."""
    published: int = 0
    state: int = 0
    """The index of its state in the pools of recurrent layers; 0 while it has none."""
    finish: str | None = None
    """Why it ended: stop, length, abort or error."""
    prompt_scores: list[Logprob] = field(default_factory=list)
    """Log-probabilities of prompt tokens 1, 2, ..., if requested."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def generated(self) -> int:
        """How many these are."""
        return len(self.tokens) - len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def needs_scores(self) -> bool:
        """Whether prompt scores are requested and incomplete."""
        return self.prompt_logprobs and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def may_end(self) -> bool:
        """Whether the next token may end the answer."""
        return self.generated >= self.sampling.min_tokens

    @property
    def done(self) -> bool:
        """Whether the sequence is finished."""
        return self.finish is not None


class Event(NamedTuple):
    """The result of one step for one sequence."""

    sequence: Sequence
    token: int | None
    """The new token; None if the event only ends the sequence."""
    logprob: Logprob | None = None
    finish: str | None = None
    error: str | None = None
