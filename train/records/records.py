"""The metrics of a run: metrics.jsonl, one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STEP_KEYS = {
    "step": "optimizer steps done",
    "loss": "mean loss per target token of the step, in nats",
    "grad_norm": "global norm of the gradients, before clipping",
    "lr": "learning rate of the step",
    "tokens": "target tokens of all updates since the run began",
    "tokens_per_s": "target tokens per second of all devices, in this step",
    "step_s": "seconds of this step",
    "mfu": "model FLOPs / (peak FLOP/s of all devices x time); null on a CPU",
    "peak_memory_bytes": "peak memory allocated on a rank; null where it is not measured",
    "exposed_comm_s": "seconds of this step that a rank waited for collectives; null where not measured",
    "sent_bytes": "bytes that a rank sends in a step, counted in the second one",
    "collectives": "collectives that a rank issues in a step, counted in the second one",
    "save_stall_s": "seconds that steps waited for a checkpoint since the row before; null where none was saved",
    "time": "Unix time, in seconds",
    "run": "number of times that the run was started or resumed",
    "restarts": "restarts after a worker crashed, since the command was given",
    "skipped": "steps of the run so far that changed nothing: without a target, or not finite and skipped",
}
"""The keys of a training step's row, and their meaning; null where unknown. Evaluation rows have `eval_loss` and no
`loss`."""


class Records:
    """Appends rows to metrics.jsonl, one write each, so that readers never see half a row.

    If the disk fails there is one warning; the rows wait in memory and are written when it works again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[bytes] = []
        self._warned = False
        with self._tolerant():
            _mend(path)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Writes a row. Numbers that are not finite, which JSON cannot hold, become null."""
        if "loss" in row:
            row = {**dict.fromkeys(STEP_KEYS), **row}
        self._waiting.append(json.dumps({k: _finite(v) for k, v in row.items()}, allow_nan=False).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Writes the waiting rows, as far as the disk accepts them."""
        with self._tolerant():
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                while self._waiting:
                    written = os.write(handle, self._waiting[0])
                    if written < len(self._waiting[0]):  # a full disk accepts a part: keep the rest
                        self._waiting[0] = self._waiting[0][written:]
                    else:
                        self._waiting.pop(0)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s cannot be written (%s); its rows wait in memory", self.path, error)


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a record that another process may be writing: one write, and a line of their own."""
    text = as_lines(rows)
    try:
        cut = path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        with path.open("ab", buffering=0) as file:
            file.write((b"\n" if cut else b"") + text.encode())
    except OSError as error:
        logger.warning("%s cannot be written (%s); it lacks this evaluation", path, error)


def as_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as lines of JSON; numbers that are not finite become null."""
    return "".join(json.dumps({k: _finite(v) for k, v in row.items()}, allow_nan=False) + "\n" for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows, in order, without a truncated last line.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def last_attempt(path: Path) -> int:
    """The number of earlier starts of the run, from its rows; 0 without any."""
    try:
        return max((int(row.get("run") or 0) for row in read_rows(path)), default=0)
    except (OSError, ValueError, TypeError):
        return 0


def note_saved(folder: Path, step: int, seconds: float) -> None:
    """Appends a row to the run's logs/checkpoints.jsonl: a checkpoint of `step` was saved, in `seconds`."""
    row = {"step": step, "seconds": seconds, "time": time.time()}
    with contextlib.suppress(OSError), (folder / "logs" / "checkpoints.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def last_saved(folder: Path) -> int | None:
    """The step of the last checkpoint that the run has saved, whether or not it still exists; None without any."""
    try:
        return max((int(row["step"]) for row in read_rows(folder / "logs" / "checkpoints.jsonl")), default=None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mend(path: Path) -> None:
    """Removes a truncated last line of a killed run; the next row would be appended to it."""
    if path.is_file():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
