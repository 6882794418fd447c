"""Event files are read back by the rules of TFRecords and protobuf."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tpshard.train.records.tensorboard_sink import TensorBoardSink, _masked


def fields(data: bytes) -> list[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            value: Any = varint()
        elif kind == 2:
            length = varint()
            value, at = data[at : at + length], at + length
        else:
            size, form = (8, "<d") if kind == 1 else (4, "<f")
            (value,), at = struct.unpack(form, data[at : at + size]), at + size
        found.append((key >> 3, value))
    return found


def records(path: Path) -> list[list[tuple[int, Any]]]:
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        assert struct.unpack("<I", data[at + 8 : at + 12]) == (_masked(data[at : at + 8]),)
        event = data[at + 12 : at + 12 + length]
        assert struct.unpack("<I", data[at + 12 + length : at + 16 + length]) == (_masked(event),)
        events.append(fields(event))
        at += 16 + length
    return events


def test_the_sum_is_castagnolis() -> None:
    """The check value of CRC-32C, and the mask of the TFRecord format."""
    crc = 0xE3069283
    assert _masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_rows_are_curves_over_the_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink({"step": 300, "loss": 2.5, "grad_norm": None, "time": 12.5, "run": 1})
    sink({"step": 300, "eval_loss": 3.25, "eval_tokens": 100, "time": 13.0, "run": 1})
    sink({"step": 301, "changed": {"a": [1, 2]}, "forced": True, "time": 14.0})
    first, *rows = records(sink.path)
    assert dict(first)[3] == b"brain.Event:2" and len(rows) == 2
    told = []
    for row in rows:
        event = dict(row)
        values = [dict(fields(value)) for _, value in fields(event[5])]
        told.append((event[1], event[2], {value[1].decode(): value[2] for value in values}))
    assert told == [(12.5, 300, {"loss": 2.5}), (13.0, 300, {"eval_loss": 3.25, "eval_tokens": 100.0})]


def test_a_failing_disk_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    sink = TensorBoardSink(tmp_path / "file")
    sink({"step": 1, "loss": 1.0})
    assert len(caplog.records) == 1 and "metrics.jsonl has everything" in caplog.text
