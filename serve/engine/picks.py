"""What a step's logits are asked for, and the answer, as plain data: logits stay on the device that has them.

A draw is a function of (seed, choice, position), not of a generator's state: a request that was preempted, batched
differently or sent again with its seed gets the same tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from tpshard.programs.scheduling.request import Logprob, Sequence

CHOOSE, NOTHING = -1, -2
"""In place of a row's token to score: the next token is chosen; or the row is not needed."""
_HEAD = struct.Struct("<4sIIII")
_MAGIC = b"tpp2"


RESET, SEEN, ANSWERED, BIAS = range(4)
"""What a row of `Picks.told` says: its slot is of another sequence now; a token is in the prompt; it came once more in
the answer; or its bias."""


@dataclass(frozen=True)
class Picks:
    """The requests of a step's rows with logits."""

    settings: np.ndarray
    """[rows, 5] float64: temperature, top-k (0: none), top-p, min-p, and a uniform number in [0, 1)."""
    wanted: np.ndarray
    """[rows, 2] int64: the token to score, CHOOSE or NOTHING; and how many of the likeliest tokens to report, -1
    without log-probabilities."""
    changed: np.ndarray
    """[changed rows, 5] float64: a row whose logits change by what its slot was told, the slot, and the penalties for
    repetition, presence and frequency."""
    told: np.ndarray
    """[facts, 4] float64: a slot, one of the four kinds, a token and a bias. Slots keep what they were told."""
    barred: np.ndarray
    """[tokens, 2] int64: a row, and a token that may not come there in this step."""

    @property
    def most(self) -> int:
        """The largest number of likeliest tokens that a row asks for."""
        return max(0, int(self.wanted[:, 1].max(initial=0)))

    def encode(self) -> bytes:
        parts = (self.settings, self.wanted, self.changed, self.told, self.barred)
        head = _HEAD.pack(_MAGIC, *(len(part) for part in parts[1:]))
        return head + b"".join(part.astype(f"<{part.dtype.kind}8").tobytes() for part in parts)

    @staticmethod
    def decode(message: bytes) -> Picks:
        """The requests in a message. ValueError unless the bytes are exactly that."""
        magic, rows, *others = _HEAD.unpack_from(message.ljust(_HEAD.size, b"\0"))
        lengths, widths = (rows, rows, *others), (5, 2, 5, 4, 2)
        sizes = [length * width for length, width in zip(lengths, widths)]
        if magic != _MAGIC or len(message) != _HEAD.size + 8 * sum(sizes):
            raise ValueError(f"a message of {len(message)} bytes is no request of tokens")
        flat = np.split(np.frombuffer(message, dtype="<f8", offset=_HEAD.size), np.cumsum(sizes[:-1]))
        settings, wanted, changed, told, barred = (x.reshape(-1, width) for x, width in zip(flat, widths))
        return Picks(settings, wanted.view("<i8"), changed, told, barred.view("<i8"))


@dataclass(frozen=True)
class Picked:
    """The answer: one row of numbers per row of logits."""

    table: np.ndarray
    """[rows, 3 + 2k] float64: 1 where all logits are finite; the token; its log-probability; the k likeliest tokens;
    their log-probabilities."""

    @cached_property
    def _rows(self) -> list[list[float]]:
        return self.table.tolist()  # type: ignore[no-any-return]

    def sound(self, row: int) -> bool:
        """Whether all logits of a row are finite."""
        return bool(self._rows[row][0])

    def token(self, row: int) -> int:
        return int(self._rows[row][1])

    def logprob(self, row: int, top: int) -> Logprob:
        """The model's log-probability of the row's token and of the `top` likeliest ones."""
        _, token, logprob, *likeliest = self._rows[row]
        half = len(likeliest) // 2
        return Logprob(int(token), logprob, tuple(zip(map(int, likeliest[:top]), likeliest[half : half + top])))

    def encode(self) -> bytes:
        return struct.pack("<II", *self.table.shape) + self.table.astype("<f8").tobytes()

    @staticmethod
    def decode(message: bytes) -> Picked:
        return Picked(np.frombuffer(message, dtype="<f8", offset=8).reshape(struct.unpack_from("<II", message)))


def draw(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 bits."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Told:
    """What the ranks were told of sequences whose logits change: each has a slot, and only news of it travels.

    slots: their number, at least that of a step's rows. The slot that is longest unused goes to the next sequence.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._of: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """By sequence its slot, and how many of its tokens were told; the one used last is the last."""

    def news(self, sequence: Sequence) -> tuple[int, Iterator[np.ndarray]]:
        """A sequence's slot, and what the ranks do not know of it yet, as rows of `Picks.told`."""
        slot, told = self._of.pop(sequence.id, (-1, 0))
        is_new = slot < 0
        if is_new:
            full = len(self._of) >= self.slots
            slot = self._of.popitem(last=False)[1][0] if full else len(self._of)
        self._of[sequence.id] = slot, len(sequence.tokens)
        return slot, self._facts(sequence, slot, is_new, max(told, len(sequence.prompt)))

    def _facts(self, sequence: Sequence, slot: int, is_new: bool, since: int) -> Iterator[np.ndarray]:
        s = sequence.sampling
        if is_new:
            yield _facts(slot, RESET, [0])
            if s.repetition_penalty != 1:
                yield _facts(slot, SEEN, np.unique(sequence.prompt))
            if s.logit_bias:
                tokens, biases = zip(*s.logit_bias)
                yield _facts(slot, BIAS, tokens, biases)
            if single := [word[0] for word in s.excluded if len(word) == 1]:
                yield _facts(slot, BIAS, single, -np.inf)
        if s.penalizes and since < len(sequence.tokens):
            yield _facts(slot, ANSWERED, sequence.tokens[since:])


def picks_of(rows: Iterable[tuple[Sequence, int]], known: Told | None = None) -> Picks:
    """The requests of logits' rows, each of a sequence: a token of its prompt to score, CHOOSE, or NOTHING.

    known: what the ranks were told in steps before; None: nothing, and this is the only step.
    """
    rows = list(rows)
    known = known or Told(len(rows))
    settings, wanted, changed, barred = [], [], [], list[tuple[int, int]]()
    facts = [np.zeros((0, 4))]
    for row, (sequence, token) in enumerate(rows):
        s = sequence.sampling
        drawing = token == CHOOSE and s.temperature > 0
        number = draw(s.seed, sequence.choice, len(sequence.tokens)) if drawing else 0.0
        settings.append((s.temperature if drawing else 0.0, s.top_k, s.top_p, s.min_p, number))
        without = token == NOTHING or (token == CHOOSE and s.logprobs is None)
        wanted.append((token, -1 if without else s.logprobs or 0))
        if token == CHOOSE and not s.is_plain:
            barred += ((row, one) for one in _barred(sequence))
            if s.penalizes or s.logit_bias or s.excluded:
                slot, news = known.news(sequence)
                facts += news
                changed.append((row, slot, s.repetition_penalty, s.presence_penalty, s.frequency_penalty))
    return Picks(
        np.array(settings, dtype=np.float64).reshape(-1, 5), np.array(wanted, dtype=np.int64).reshape(-1, 2),
        np.array(changed, dtype=np.float64).reshape(-1, 5), np.concatenate(facts),
        np.array(barred, dtype=np.int64).reshape(-1, 2),
    )  # fmt: skip


def _barred(sequence: Sequence) -> Iterator[int]:
    """Tokens that may not come next, for other reasons than that they never may."""
    s = sequence.sampling
    yield from (word[-1] for word in s.excluded if len(word) > 1 and _ends_with(sequence.tokens, word[:-1]))
    yield from () if sequence.may_end else sequence.stop_tokens
    yield from s.not_first if len(sequence.tokens) == len(sequence.prompt) else ()


def _facts(slot: int, kind: int, tokens: ArrayLike, bias: ArrayLike = 0.0) -> np.ndarray:
    tokens = np.asarray(tokens, dtype=np.float64)
    columns = np.empty((len(tokens), 4))
    columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3] = slot, kind, tokens, np.asarray(bias)
    return columns


def _ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    return tuple(tokens[-len(end) :]) == end
