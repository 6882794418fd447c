"""What a worker is told, and how parent and worker speak: frames of plain bytes and JSON over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tpshard.kernels.layouts import Layout
    from tpshard.kernels.quantized import Quantized
    from tpshard.models.config import ModelConfig

_HEAD = struct.Struct("<cI")
_LARGEST = 1 << 28

JOB, READY, STEP, DONE, ERROR, QUIT = (bytes([c]) for c in b"JRSDEQ")


@dataclass(frozen=True)
class Job:
    """Everything that all ranks are told alike. Plain data: it travels as JSON."""

    source: str
    """The folder of weights: a checkpoint of ours, or one in Hugging Face format."""
    vocab: int
    max_seq: int
    tp: int = 1
    dtype: str = "fp32"
    blocks: int = 256
    block_size: int = 16
    rows: tuple[int, ...] = (8, 32, 64)
    """Sizes of the programs under tensor parallelism: a step is padded to the next one."""
    batch_invariant: bool = True
    device: str = "cpu"
    layout: Layout = "tp_aware"
    step_s: float = 60.0
    """A step that takes longer means that a rank hangs."""
    start_s: float = 600.0

    @property
    def max_rows(self) -> int:
        return max(self.rows)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(raw: bytes) -> Job:
        value = json.loads(raw)
        return Job(**{**value, "rows": tuple(value["rows"])})


@dataclass(frozen=True)
class Weights:
    """A model whose parameters can be read by blocks."""

    config: ModelConfig
    block: Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]
    """(name, starts, sizes) -> that block of a parameter."""
    quantized: Callable[[str], Quantized | None] = lambda _name: None
    """A parameter's quantized form, whole; None for one that is dense."""
    group: Callable[[str], torch.Tensor | None] = lambda _name: None
    """Which group each input of a quantized parameter belongs to, int32 [inputs]; None for one that is dense."""


class Closed(OSError):
    """The other side is gone."""


def send(channel: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """One frame. Closed where nobody reads any more, or not within the socket's timeout."""
    try:
        channel.sendall(_HEAD.pack(kind, len(body)) + body)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(channel: socket.socket) -> tuple[bytes, bytes]:
    """One frame: its kind and its body. Closed at the end, ValueError where it is no frame."""
    kind, size = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if kind not in (JOB, READY, STEP, DONE, ERROR, QUIT) or size > _LARGEST:
        raise ValueError(f"a frame of kind {kind!r} and {size} bytes")
    return kind, _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts, got = [], 0
    while got < size:
        try:
            part = channel.recv(min(size - got, 1 << 20))
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("the other side closed the channel")
        parts.append(part)
        got += len(part)
    return b"".join(parts)
