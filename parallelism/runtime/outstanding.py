"""The waits that a device has not yet come to: its host issues them long before, so that no call of it hangs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A mark in a device's queue, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Puts the mark behind what was issued so far."""
        ...

    def query(self) -> bool:
        """Whether the device has come to the mark."""
        ...


class Outstanding:
    """The waits of a device in the order of their issue; the first that is not over names what hangs.

    A watchdog's thread may ask at any time.
    """

    def __init__(self, make: Callable[[], DeviceEvent] = torch.cuda.Event):
        self._make = make
        self._waits: deque[tuple[DeviceEvent, object]] = deque()
        self._free: list[DeviceEvent] = []
        self._lock = threading.Lock()
        self.over = 0
        """The number of waits that are over."""

    def add(self, wait: object) -> None:
        """Marks that a wait, which `watchdog.describe` turns into words, was issued; not while a graph is captured,
        whose marks nobody may ask."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            self._retire()
            event = self._free.pop() if self._free else self._make()
            event.record()
            self._waits.append((event, wait))

    def first(self) -> object | None:
        """The wait that the device is at, or before; None if all are over."""
        with self._lock:
            self._retire()
            return self._waits[0][1] if self._waits else None

    def _retire(self) -> None:
        while self._waits and self._waits[0][0].query():
            self._free.append(self._waits.popleft()[0])
            self.over += 1
