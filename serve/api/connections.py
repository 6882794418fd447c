"""Connections within the limit of descriptors: how many there may be, when they are accepted, when they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MOST = 8192
"""Connections at once, even where more descriptors are allowed."""
RESERVE = 128
"""Descriptors for all else: ranks and their replacements, files, logs."""
IDLE_S = 1.0
"""Seconds that a connection may be idle before a new one may take its place."""
LAST_S = 1.0
"""Seconds that connections have to end, once the server ends, before they are cut."""
_LOOK_S = 0.05
CONNECTION = "tpshard.connection"
"""The key of a request's connection in the `state` of its ASGI scope."""


def connection_limit() -> int:
    """Raises the limit of descriptors to the hard one, and returns how many of them are for connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MOST
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else RESERVE
    return max(1, min(MOST, hard - used - RESERVE))


class Patience(H11Protocol):
    """A connection that is closed when no complete request arrives in time.

    uvicorn's own timeout ends with the first byte. Bytes of a header that never ends would keep a connection open
    forever, as would those of a body that nobody reads after a 401.
    """

    _clock: asyncio.TimerHandle | None = None
    heard: float = 0.0
    """When it was opened or last sent bytes, in seconds of the monotonic clock."""

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.conn.our_state in (h11.IDLE, h11.DONE)

    @property
    def writable(self) -> bool:
        """Whether `write` may be called: an answer of unknown length is being sent, and the client reads it."""
        return not (self.flow.write_paused or self.transport.is_closing()) and self.scope["http_version"] == "1.1"

    def write(self, data: bytes) -> None:
        """Sends a part of the body of an answer past ASGI and h11, whose state it leaves as it is."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heard = time.monotonic()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.heard = time.monotonic()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # after an error of the protocol
            self.transport.close()

    def _watch(self) -> None:
        if not self.idle:
            self._stop()  # a request is being answered; its own limits apply
        elif self._clock is None:
            self._clock = self.loop.call_later(self.timeout_keep_alive, self._end)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _end(self) -> None:
        if not self.transport.is_closing():
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class CappedServer(uvicorn.Server):
    """uvicorn with at most `most` connections.

    At the limit, connections that have been idle longest make room; while none is idle, new ones wait unaccepted. At
    the end connections are cut that do not end by themselves: a body that never comes, an answer that nobody reads, or
    one that was accepted in the same moment. Signals are the caller's.
    """

    def __init__(self, config: uvicorn.Config, most: int) -> None:
        super().__init__(config)
        self.most = most
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers: list[asyncio.Server] = []
        self._accepting = [asyncio.ensure_future(self._accept(sock)) for sock in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        ending = asyncio.ensure_future(super().shutdown(sockets))
        if await self._within(ending, LAST_S):
            return
        log.warning("ending: %d connections in the middle of a request are cut", len(self.server_state.connections))
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if not await self._within(ending, LAST_S):
            for task in self.server_state.tasks:
                task.cancel()
            self.force_exit = True
        await ending

    @staticmethod
    async def _within(task: asyncio.Future[None], seconds: float) -> bool:
        """Whether a task ends in time."""
        return bool((await asyncio.wait({task}, timeout=seconds))[0])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            while len(self.server_state.connections) >= self.most:
                self._make_room()
                await asyncio.sleep(_LOOK_S)  # also for those that were closed to be gone
            try:
                sock, _ = await loop.sock_accept(listening)
                await loop.connect_accepted_socket(self._protocol, sock)
            except ConnectionError:
                continue  # the client has left
            except OSError as error:
                log.error("a connection cannot be accepted: %s", error)
                await asyncio.sleep(1)

    def _protocol(self) -> Patience:
        connection = Patience(self.config, self.server_state, {})
        connection.app_state[CONNECTION] = connection
        return connection

    def _make_room(self) -> None:
        """Closes the longest idle connections, a sixteenth of all at most."""
        log.warning("%d connections are open, the most that the limit of descriptors leaves room for", self.most)
        before = time.monotonic() - IDLE_S
        idle = [c for c in self.server_state.connections if isinstance(c, Patience) and c.idle and c.heard < before]
        for connection in sorted(idle, key=lambda c: c.heard)[: max(1, self.most // 16)]:
            connection.transport.close()


class OncePerMinute(logging.Filter):
    """Passes a line of the log once a minute, with the number of times that it was left out."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self.seconds = seconds
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line, now = (record.name, record.getMessage()), time.monotonic()
        since, left_out = self._last.get(line, (-self.seconds, 0))
        if now - since < self.seconds:
            self._last[line] = (since, left_out + 1)
            return False
        if len(self._last) >= 1024:  # lines that differ by a number; those of the last minute stay
            self._last = {k: v for k, v in self._last.items() if now - v[0] < self.seconds}
            if len(self._last) >= 1024:
                return False
        self._last[line] = (now, 0)
        if left_out:
            record.msg, record.args = f"{line[1]} ({left_out} more of this line since)", ()
        return True
