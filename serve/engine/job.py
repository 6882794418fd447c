"""The protocol between server and workers: the job as JSON, then frames of bytes over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tpshard.models.adapters.slotted_model import Slots

if TYPE_CHECKING:
    from tpshard.programs.server.serving import ServingPrograms

_HEAD = struct.Struct("<cI")
_LARGEST = 1 << 28

CHANNEL = "TPSHARD_CHANNEL"
"""The environment variable with the descriptor of a worker's socket."""


class Frame(Enum):
    """The kinds of frames, by their byte on the channel."""

    JOB = b"J"
    """The job, as the first frame to a rank."""
    LOADING = b"L"
    """A rank still reads weights."""
    READY = b"R"
    """A rank waits for steps."""
    STEP = b"S"
    """A step; the next frame says what it is asked for."""
    PICK = b"P"
    """What a step is asked for."""
    ADAPT = b"A"
    """The folder of an adapter, to be read."""
    PUT = b"U"
    """The slot into which the adapter that was read goes."""
    DONE = b"D"
    """The answer to a step or to an adapter's frame."""
    QUIT = b"Q"
    """There is no further frame."""


@dataclass(frozen=True)
class Job:
    """The job that all ranks receive, as plain data that travels as JSON."""

    recipe: str
    """The complete recipe as text."""
    source: str
    """The folder of the weights: a checkpoint or a Hugging Face folder."""
    programs: tuple[dict[str, Any], ...]
    """Rows and fingerprint of every program; the ranks' programs must match."""
    world: int
    blocks: int
    vocab: int
    max_seq: int
    max_rows: int
    max_logit_rows: int
    chunks: tuple[int, ...] | None = None
    slots: Slots | None = None
    """The room for adapters."""
    device: str = "cpu"
    step_s: float = 60.0
    """Seconds after which a rank that computes a step counts as hung."""
    start_s: float = 600.0

    @staticmethod
    def of(programs: ServingPrograms, source: str, blocks: int) -> Job:
        """The job for the ranks of a server that runs these programs with the weights of the folder `source`."""
        setting = programs.setting
        timeouts, most = setting.recipe.timeout_s, setting.most
        return Job(
            recipe=setting.recipe.to_yaml(), source=source, programs=tuple(programs.listed),
            world=setting.mesh.ranks, blocks=blocks, vocab=programs.vocab, max_seq=setting.max_seq, max_rows=most,
            max_logit_rows=setting.logit_rows(most), chunks=setting.chunks if setting.states else None,
            slots=setting.slots, device="cpu" if setting.kind == "cpu" else "cuda", step_s=timeouts.step,
            start_s=timeouts.start,
        )  # fmt: skip

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(raw: bytes) -> Job:
        value = json.loads(raw)
        chunks = None if value["chunks"] is None else tuple(value["chunks"])
        slots = value["slots"] and Slots(**{**value["slots"], "layers": tuple(value["slots"]["layers"])})
        return Job(**{**value, "programs": tuple(value["programs"]), "chunks": chunks, "slots": slots})


class Closed(OSError):
    """The other side has closed the channel."""


def send(channel: socket.socket, kind: Frame, body: bytes = b"") -> None:
    """Sends one frame. Raises Closed if the other side does not read within the socket's timeout."""
    try:
        channel.sendall(_HEAD.pack(kind.value, len(body)) + body)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(channel: socket.socket) -> tuple[Frame, bytes]:
    """Receives one frame: its kind and body. Raises Closed at the end, ValueError for an invalid frame."""
    letter, size = _HEAD.unpack(_exactly(channel, _HEAD.size))
    kind = Frame(letter)
    if size > _LARGEST:
        raise ValueError(f"a frame of {size} bytes, {kind.name}")
    return kind, _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts, received = [], 0
    while received < size:
        try:
            part = channel.recv(min(size - received, 1 << 20))
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("the other side closed the channel")
        parts.append(part)
        received += len(part)
    return b"".join(parts)
