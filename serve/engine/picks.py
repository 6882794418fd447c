"""What a step's logits are asked for, and the answer, as plain data: logits stay on the device that has them.

A draw is a function of (seed, choice, position), not of a generator's state: a request that was preempted, batched
differently or sent again with its seed gets the same tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tpshard.programs.scheduling.request import Logprob, Sequence

CHOOSE, NOTHING = -1, -2
"""In place of a row's token to score: the next token is chosen; or the row is not needed."""
_HEAD = struct.Struct("<4sII")
_MAGIC = b"tpp1"


@dataclass(frozen=True)
class Picks:
    """The requests of a step's rows with logits."""

    settings: np.ndarray
    """[rows, 5] float64: temperature, top-k (0: none), top-p, min-p, and a uniform number in [0, 1)."""
    wanted: np.ndarray
    """[rows, 2] int64: the token to score, CHOOSE or NOTHING; and how many of the likeliest tokens to report, -1
    without log-probabilities."""
    changes: np.ndarray
    """[changes, 4] float64: a row, a token, and the factor and the summand of its logit. A positive logit is divided
    by the factor, a negative one multiplied; summands come after. A token of a row has one of each at most."""

    @property
    def most(self) -> int:
        """The largest number of likeliest tokens that a row asks for."""
        return max(0, int(self.wanted[:, 1].max(initial=0)))

    def encode(self) -> bytes:
        head = _HEAD.pack(_MAGIC, len(self.wanted), len(self.changes))
        parts = (self.settings.astype("<f8"), self.wanted.astype("<i8"), self.changes.astype("<f8"))
        return head + b"".join(part.tobytes() for part in parts)

    @staticmethod
    def decode(message: bytes) -> Picks:
        """The requests in a message. ValueError unless the bytes are exactly that."""
        magic, rows, changes = _HEAD.unpack_from(message.ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC or len(message) != _HEAD.size + 8 * (7 * rows + 4 * changes):
            raise ValueError(f"a message of {len(message)} bytes is no request of tokens")
        numbers = np.frombuffer(message, dtype="<f8", offset=_HEAD.size)
        settings, wanted, rest = np.split(numbers, np.cumsum([5 * rows, 2 * rows]))
        return Picks(settings.reshape(rows, 5), wanted.view("<i8").reshape(rows, 2), rest.reshape(changes, 4))


@dataclass(frozen=True)
class Picked:
    """The answer: one row of numbers per row of logits."""

    table: np.ndarray
    """[rows, 3 + 2k] float64: 1 where all logits are finite; the token; its log-probability; the k likeliest tokens;
    their log-probabilities."""

    def sound(self, row: int) -> bool:
        """Whether all logits of a row are finite."""
        return bool(self.table[row, 0])

    def token(self, row: int) -> int:
        return int(self.table[row, 1])

    def logprob(self, row: int, top: int) -> Logprob:
        """The model's log-probability of the row's token and of the `top` likeliest ones."""
        tokens, values = np.split(self.table[row, 3:], 2)
        likeliest = zip(tokens[:top].astype(int).tolist(), values[:top].tolist())
        return Logprob(self.token(row), float(self.table[row, 2]), tuple(likeliest))

    def encode(self) -> bytes:
        return struct.pack("<II", *self.table.shape) + self.table.astype("<f8").tobytes()

    @staticmethod
    def decode(message: bytes) -> Picked:
        return Picked(np.frombuffer(message, dtype="<f8", offset=8).reshape(struct.unpack_from("<II", message)))


def draw(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 bits."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def picks_of(rows: Iterable[tuple[Sequence, int]]) -> Picks:
    """The requests of logits' rows, each of a sequence: a token of its prompt to score, CHOOSE, or NOTHING."""
    settings, wanted, changes = [], [], [np.zeros((0, 4))]
    for row, (sequence, token) in enumerate(rows):
        s = sequence.sampling
        drawing = token == CHOOSE and s.temperature > 0
        number = draw(s.seed, sequence.choice, len(sequence.tokens)) if drawing else 0.0
        settings.append((s.temperature if drawing else 0.0, s.top_k, s.top_p, s.min_p, number))
        without = token == NOTHING or (token == CHOOSE and s.logprobs is None)
        wanted.append((token, -1 if without else s.logprobs or 0))
        if token == CHOOSE:
            changes += (np.column_stack([np.full(len(one), row), one]) for one in _changes(sequence))
    return Picks(
        np.array(settings, dtype=np.float64).reshape(-1, 5), np.array(wanted, dtype=np.int64).reshape(-1, 2),
        np.concatenate(changes),
    )  # fmt: skip


def _changes(sequence: Sequence) -> Iterator[np.ndarray]:
    """The changes [tokens, 3] of a sequence's next logits: token, factor, summand; tokens that may not come get -inf.

    Repetition counts prompt and answer; presence and frequency count the answer.
    """
    s, counts, summands = sequence.sampling, sequence.counts, dict[int, float]()
    for token, bias in s.logit_bias:
        summands[token] = summands.get(token, 0.0) + bias
    barred = [word[-1] for word in s.excluded if _ends_with(sequence.tokens, word[:-1])]
    barred += () if sequence.may_end else sequence.stop_tokens
    barred += s.not_first if len(sequence.tokens) == len(sequence.prompt) else ()
    summands |= dict.fromkeys(barred, -np.inf)
    if s.repetition_penalty != 1:
        counts.update(sequence)
        yield _columns(np.array(counts.distinct), s.repetition_penalty, 0.0)
    if s.presence_penalty or s.frequency_penalty:
        counts.update(sequence)
        answered = counts.answered
        tokens, times = (np.fromiter(x, np.int64, len(answered)) for x in (answered.keys(), answered.values()))
        own = np.array([summands.pop(token, 0.0) for token in answered]) if summands else 0.0
        yield _columns(tokens, 1.0, own - (s.presence_penalty + s.frequency_penalty * times))
    if summands:
        yield np.array([(token, 1.0, summand) for token, summand in summands.items()])


def _columns(tokens: np.ndarray, factor: float, summand: np.ndarray | float) -> np.ndarray:
    columns = np.empty((len(tokens), 3))
    columns[:, 0], columns[:, 1], columns[:, 2] = tokens, factor, summand
    return columns


def _ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == end
