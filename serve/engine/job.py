"""The protocol between server and workers: the job as JSON, then frames of bytes over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tpshard.models.adapters.slotted_model import Slots

if TYPE_CHECKING:
    from tpshard.programs.server.serving import ServingPrograms

_HEAD = struct.Struct("<cI")
_LARGEST = 1 << 28

JOB, LOADING, READY, STEP, PICK, ADAPT, PUT, DONE, QUIT = KINDS = [bytes([c]) for c in b"JLRSPAUDQ"]
CHANNEL = "TPSHARD_CHANNEL"
"""The environment variable with the descriptor of a worker's socket."""


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


def send(channel: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Sends one frame. Raises Closed if the other side does not read within the socket's timeout."""
    try:
        channel.sendall(_HEAD.pack(kind, len(body)) + body)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(channel: socket.socket) -> tuple[bytes, bytes]:
    """Receives one frame: its kind and body. Raises Closed at the end, ValueError for an invalid frame."""
    kind, size = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if kind not in KINDS or size > _LARGEST:
        raise ValueError(f"a frame of kind {kind!r} and {size} bytes")
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
