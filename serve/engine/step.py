"""The input of one engine step as plain data, which travels to every rank as bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from tpshard.diagnostics.exits import Exit
from tpshard.serve.engine.picks import Picked, Picks

_HEAD = struct.Struct("<4sIIIIII")
_MAGIC = b"tps1"


@dataclass(frozen=True)
class StepInput:
    """Rows (tokens) of several sequences; every array is int64."""

    tokens: np.ndarray
    """[rows]"""
    positions: np.ndarray
    """[rows]"""
    slots: np.ndarray
    """[rows]: block * block_size + offset of the row's key and value."""
    sequences: np.ndarray
    """[rows]: the row of `tables` with the blocks of its sequence."""
    tables: np.ndarray
    """[sequences, blocks], padded with 0."""
    logit_rows: np.ndarray
    """[logit_rows]: the rows whose logits are needed."""
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[sequences]: the state of each sequence in the pools of recurrent layers; [0] for a model without such."""
    adapters: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[rows]: the slot of each row's adapter, -1 for none; [0] for a server without adapters."""

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if not (len(self.positions) == len(self.slots) == len(self.sequences) == rows):
            raise ValueError("a step's tokens, positions, slots and sequences differ in length")

    def encode(self) -> bytes:
        """The step as bytes, for the workers' channel."""
        rows, (m, w) = len(self.tokens), self.tables.shape
        parts = (self.tokens, self.positions, self.slots, self.sequences, self.tables, self.logit_rows, self.states,
                 self.adapters)  # fmt: skip
        head = _HEAD.pack(_MAGIC, rows, m, w, len(self.logit_rows), len(self.states), len(self.adapters))
        return head + b"".join(np.ascontiguousarray(part, dtype="<i8").tobytes() for part in parts)

    @staticmethod
    def decode(message: bytes) -> StepInput:
        """The step in a message. ValueError unless the bytes are exactly one step."""
        if len(message) < _HEAD.size:
            raise ValueError("a step's message ends within its header")
        magic, rows, m, w, logit_rows, states, adapters = _HEAD.unpack_from(message)
        if magic != _MAGIC or len(message) != _HEAD.size + 8 * (4 * rows + m * w + logit_rows + states + adapters):
            raise ValueError(f"a step's message of {len(message)} bytes does not match its header")
        flat = np.frombuffer(message, dtype="<i8", offset=_HEAD.size)
        sizes = [rows, rows, rows, rows, m * w, logit_rows, states]
        t, p, s, q, tables, last, state, adapter = np.split(flat, np.cumsum(sizes))
        return StepInput(t, p, s, q, tables.reshape(m, w), last, state, adapter)

    @property
    def is_chunk(self) -> bool:
        """Whether it is several tokens of one sequence for a model with recurrent layers."""
        return len(self.states) == 1 and len(self.tokens) > 1

    def arguments(self, chunk: bool) -> dict[str, np.ndarray]:
        """The inputs of a step's program by name; of a chunk's, one state."""
        rows = {name: getattr(self, name)[None] for name in ("tokens", "positions", "slots", "sequences")}
        rows |= {"adapters": self.adapters[None]} if len(self.adapters) else {}
        whole = {"tables": self.tables, "logit_rows": self.logit_rows}
        if not len(self.states):
            return rows | whole
        return rows | whole | {"states": self.states[:1] if chunk else self.states[self.sequences]}

    def pad(self, rows: int, logit_rows: int) -> StepInput:
        """The step padded to more rows; padding writes to block 0 and attends only to itself."""
        more = rows - len(self.tokens)
        fill = np.zeros(more, dtype=np.int64)
        tables = np.concatenate([self.tables, np.zeros((1, self.tables.shape[1]), dtype=np.int64)])
        return StepInput(
            np.concatenate([self.tokens, fill]),
            np.concatenate([self.positions, fill]),
            np.concatenate([self.slots, fill]),
            np.concatenate([self.sequences, fill + len(self.tables)]),
            tables,
            np.concatenate([self.logit_rows, np.zeros(logit_rows - len(self.logit_rows), dtype=np.int64)]),
            np.concatenate([self.states, np.zeros(min(1, len(self.states)), dtype=np.int64)]),
            np.concatenate([self.adapters, fill[: len(self.adapters) and more] - 1]),
        )


class WorkerLost(RuntimeError):
    """A rank of the runner has died, hangs, or failed; the message says which and why.

    `exit`: the exit code of a command that does not go on without the rank.
    """

    def __init__(self, message: str, exit: int = Exit.WORKER_LOST) -> None:
        super().__init__(message)
        self.exit = exit


class Runner(Protocol):
    """The interface of a runner, which computes steps for the engine on any number of ranks."""

    blocks: int
    """Usable cache blocks."""
    block_size: int
    max_rows: int
    """Maximal rows of a step."""
    max_logit_rows: int
    """Maximal rows of a step with logits."""
    vocab: int
    max_seq: int
    chunks: tuple[int, ...] | None
    """The numbers of tokens of one prompt that a step computes if the model has recurrent layers; None without."""
    slots: int
    """The number of adapters that it holds."""

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        """The tokens and log-probabilities that are asked of each row with logits. Raises WorkerLost if a rank is
        gone."""
        ...

    def adapt(self, slot: int, folder: str) -> None:
        """Loads the adapter in a folder into a slot. ValueError where it cannot be loaded; the slot then holds
        what it held."""
        ...

    def check(self) -> None:
        """Raises WorkerLost if a rank is gone, between steps."""
        ...

    def close(self) -> None: ...
