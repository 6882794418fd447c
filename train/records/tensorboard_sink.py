"""TensorBoard's event files, written without its package, which brings a web server and protobuf for four fields.

A file is a sequence of TFRecords: length (uint64), its masked CRC-32C, the data, and the data's. The data are messages
`Event` of tensorboard/compat/proto/event.proto: wall_time = 1, step = 2, file_version = 3, summary = 5, whose values
(1) have tag = 1 and simple_value = 2.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SKIPPED = ("step", "time", "run")
"""Keys of rows that are not curves."""


class TensorBoardSink:
    """Appends the numbers of rows to an event file in `folder`. A failing disk gives one warning."""

    def __init__(self, folder: Path):
        self.path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.time_ns() % 10**9}"
        self._warned = False
        self._append(_event(time.time(), 0, version="brain.Event:2"))

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Writes the numbers of a row of metrics.jsonl as curves over the steps."""
        values = {
            key: float(value)
            for key, value in row.items()
            if key not in SKIPPED and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if values:
            self._append(_event(float(row.get("time") or time.time()), int(row.get("step") or 0), values))

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(record)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s cannot be written (%s); metrics.jsonl has everything", self.path, error)


def _event(wall_time: float, step: int, values: Mapping[str, float] | None = None, version: str = "") -> bytes:
    event = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
    if version:
        event += _field(3, version.encode())
    summary = b"".join(
        _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in (values or {}).items()
    )
    return event + (_field(5, summary) if summary else b"")


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _masked(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of data, rotated and shifted as TFRecords have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()
