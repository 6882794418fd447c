"""The lock of a run in an object store: an object that its holder renews; one that stands still is a dead run's.

A store releases nothing when a process ends. On the machine of the holder its end is known at once; elsewhere a start
watches the object for a while. No clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from tpshard.train.checkpoints.store_path import StorePath
from tpshard.train.run.run_lock import Holder, Taken

BEAT_S = 15.0
"""Seconds between renewals."""
PATIENCE_S = 90.0
"""Seconds after which a lock that was not renewed counts as left."""


class StoreLock:
    """A lock, held and renewed until `close`.

    Raises `Taken`, and OSError where the store fails.
    """

    def __init__(
        self, place: StorePath, *, say: Callable[[str], None] = lambda text: None,
        wait: Callable[[float], None] = time.sleep,
    ):  # fmt: skip
        """say: receives a line before a wait. wait: waits so many seconds."""
        self.place = place
        self._token, self._beats = secrets.token_hex(8), 0
        self._lost = False
        while not self._create():
            _await_end(place, say, wait)
            place.unlink()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="store-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises OSError if another run has taken the lock, as after a stop of this process."""
        content = _read(self.place)
        if self._lost or content is None or content.get("token") != self._token:
            self._lost = True
            raise OSError(f"another run has taken {self.place} since this one began")

    def close(self) -> None:
        """Releases the lock, unless it is another's by now."""
        self._closing.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self.check()
            self.place.unlink()

    def _create(self) -> bool:
        if self.place.is_file():  # asked for before, since some stores write over what must be new
            return False
        try:
            self.place.write_bytes(self._content(), new=True)
        except FileExistsError:
            return False
        return True

    def _content(self) -> bytes:
        return json.dumps(vars(Holder.this()) | {"token": self._token, "beats": self._beats}).encode()

    def _renew(self) -> None:
        while not self._closing.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next one may succeed
                content = _read(self.place)
                if content is not None and content.get("token") != self._token:
                    self._lost = True
                    return
                self._beats += 1
                self.place.write_bytes(self._content())


def _await_end(place: StorePath, say: Callable[[str], None], wait: Callable[[float], None]) -> None:
    """Returns when the holder of a lock has ended. Raises `Taken` when it has not."""
    first = _read(place)
    if first is None:
        return
    holder = Holder(*(str(first.get(key, "")) for key in ("pid", "host", "started", "processes")))  # type: ignore[arg-type]
    alive = holder.is_alive()
    if alive:
        raise Taken(place, holder, certain=True)
    if alive is None:
        say(f"process {holder.pid} on {holder.host} used {place.parent}: waiting {PATIENCE_S:g} s for a sign of it")
        for _ in range(int(PATIENCE_S // BEAT_S)):
            wait(BEAT_S)
            if _read(place) != first:
                raise Taken(place, holder, certain=True)


def _read(place: StorePath) -> dict[str, Any] | None:
    """The lock's content; None where it is gone."""
    try:
        content = json.loads(place.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {}
