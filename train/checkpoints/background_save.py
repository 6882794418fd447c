"""Checkpoints written beside the training steps: a step waits for the copy to the host, a thread does the rest."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpshard.parallelism.runtime.context import Context
from tpshard.train.checkpoints.checkpoint import SaveFailed, block_of, owned, save
from tpshard.train.checkpoints.shards import Shard
from tpshard.train.checkpoints.store_path import Location


@dataclass(frozen=True)
class SaveResult:
    """A finished save: the checkpoint's folder, or why it failed; the same on every rank."""

    step: int
    folder: Location | None
    error: SaveFailed | None
    seconds: float
    """From the copy to the end of writing."""


class BackgroundSaver:
    """Writes a run's checkpoints in a thread, one at a time. Every rank calls its methods at the same steps."""

    def __init__(
        self, context: Context, folder: Location, keep_last: int,
        note: Callable[[int, float], None] = lambda step, seconds: None, guard: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """note: called on rank 0 with each written checkpoint's step and the seconds it took. guard: as of `save`."""
        self.context, self.folder, self.keep_last, self.note, self.guard = context, folder, keep_last, note, guard
        self._gather = context.gather_beside()
        self._own: frozenset[str] | None = None
        self._thread: threading.Thread | None = None
        self._result: SaveResult | BaseException | None = None

    def start(self, step: int, tensors: Mapping[str, Shard], meta: Mapping[str, Any]) -> None:
        """Copies this rank's part to the host and starts to write it; no other save may be in flight."""
        assert self._thread is None, "the save before is finished first"
        if self._own is None:
            self._own = self._part(tensors)
        began = time.monotonic()
        copies = {
            name: replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True))
            for name, shard in tensors.items()
            if name in self._own
        }
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, dict(meta), began), name="save", daemon=True
        )  # fmt: skip
        self._thread.start()

    def finish(self) -> SaveResult | None:
        """Waits for the save in flight, and returns its result; None if there is none."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, result, self._result = None, self._result, None
        if isinstance(result, BaseException):
            raise result
        return result

    def _write(self, step: int, tensors: Mapping[str, Shard], meta: Mapping[str, Any], began: float) -> None:
        try:
            folder, error = None, None
            try:
                folder = save(
                    self.folder, step, tensors, meta, rank=self.context.rank, world=self.context.world,
                    gather=self._gather, keep_last=self.keep_last, guard=self.guard,
                )  # fmt: skip
            except SaveFailed as failed:
                error = failed
            seconds = time.monotonic() - began
            if folder is not None and self.context.is_main:
                self.note(step, seconds)
            self._result = SaveResult(step, folder, error, seconds)
        except BaseException as error:  # raised again in the thread that waits
            self._result = error

    def _part(self, tensors: Mapping[str, Shard]) -> frozenset[str]:
        """The names of the blocks that this rank writes: its own, and a share of those that several ranks hold."""
        mine = {name: json.dumps(block_of(shard)) for name, shard in tensors.items()}
        return frozenset(owned(mine, self.context.gather(mine), self.context.rank))
