"""Keeping the values that a rank is sending in memory until their sends are complete."""

from __future__ import annotations

import queue
import threading
from typing import Any

from torch import Tensor


class Outbox:
    """A holder of the values that are being sent, which frees each one once its send is complete.

    gloo reports a send as complete only to a caller that waits for it, so with `waits=True` a separate thread waits;
    otherwise the values of all sends of a step would stay in memory. Other libraries are asked at the next send.
    """

    def __init__(self, *, waits: bool):
        self._polled: list[tuple[Any, Tensor]] = []
        self._awaited: queue.Queue[tuple[Any, Tensor]] | None = queue.Queue() if waits else None
        self._error: BaseException | None = None
        if waits:
            threading.Thread(target=self._wait, name="sends", daemon=True).start()

    def keep(self, work: Any, value: Tensor) -> None:
        """Keeps a value until `work`, its send, is complete."""
        if self._awaited is not None:
            self._awaited.put((work, value))
            return
        self._polled = [(other, sent) for other, sent in self._polled if not other.is_completed()]
        self._polled.append((work, value))

    def empty(self) -> None:
        """Waits until all sends are complete. Raises the error of one that failed."""
        if self._awaited is not None:
            self._awaited.join()
        for work, _ in self._polled:
            work.wait()
        self._polled.clear()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        assert self._awaited is not None
        while True:
            work, value = self._awaited.get()
            try:
                work.wait()
            except BaseException as error:  # the training loop's thread raises it
                self._error = self._error or error
            del work, value
            self._awaited.task_done()
