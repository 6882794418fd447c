"""The server's socket, event loop and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.recipes.text.write import MASK
from tpshard.serve.api.access import is_loopback
from tpshard.serve.api.connections import CappedServer, OncePerMinute, Patience, connection_limit
from tpshard.serve.api.service import Limits, Service

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask the server to end."""


def read_key(file: Path | None = None, of_recipe: str | None = None) -> str | None:
    """The API key from a file, the recipe or TPSHARD_API_KEY; None if none is set.

    Raises Mistakes if the file cannot be read, or the key is empty or not printable ASCII. A run's recipe.yaml masks
    the key, which is then not served with: everybody knows the mask.
    """
    masked = of_recipe is not None and of_recipe.strip() == MASK
    if file is not None:
        try:
            key: str | None = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            message, fix = f"the API key's file cannot be read: {error}", "check its path, and who may read it"
            raise Mistakes.one(message, exit=Exit.MACHINE, fix=fix) from error
    else:
        key = of_recipe if of_recipe is not None and not masked else os.environ.get("TPSHARD_API_KEY")
        if masked and key is None:
            raise Mistakes.one(
                f"`serve.api_key: {MASK}` stands for a key that the recipe was written without", exit=Exit.USAGE,
                fix="set TPSHARD_API_KEY, or name the variable of the key: serve.api_key='${oc.env:NAME}'",
            )  # fmt: skip
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
        raise Mistakes.one(
            "the API key is empty or has characters that a header cannot carry", exit=Exit.USAGE,
            fix="set TPSHARD_API_KEY to printable ASCII, or leave it unset",
        )  # fmt: skip
    return key.strip() if key is not None else None


def check_exposure(host: str, key: str | None, insecure: bool, where: Source | None = None) -> None:
    """Raises Mistakes if the server would be open to the network without a key."""
    if not is_loopback(host) and key is None and not insecure:
        raise Mistakes.one(
            f"`serve.host: {host}` can be reached from other machines, and no API key is set", exit=Exit.USAGE,
            where=where, fix="set TPSHARD_API_KEY, or pass --insecure to serve everybody",
        )  # fmt: skip


def bind(host: str, port: int, where: Source | None = None) -> socket.socket:
    """Creates a socket that listens on a host and port. Raises Mistakes (exit 5) if it cannot be bound."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as failing:
            sock = failing.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1024)  # binding alone would let a second server bind too
            failing.pop_all()
        return sock
    except OSError as error:
        fixes = {
            errno.EADDRINUSE: "another program listens there; choose another `serve.port`, or 0 for a free one",
            errno.EACCES: "ports below 1024 need a privilege; choose a higher `serve.port`",
            errno.EADDRNOTAVAIL: "this machine does not have that address",
        }
        raise Mistakes.one(
            f"cannot listen on {host} port {port}: {error.strerror or error}", exit=Exit.MACHINE, where=where,
            fix=fixes.get(error.errno or 0, ""),
        ) from error  # fmt: skip


def log_to_stderr() -> None:
    """Logs to stderr, the same line once a minute."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(OncePerMinute())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])


def run(app: ASGIApp, service: Service, sock: socket.socket, announce: Callable[[], None]) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests finish. Returns 0, or 130 for Ctrl-C.

    A signal that comes before the loop runs is answered by it, one that comes after changes nothing. The handlers are
    Python's own, since asyncio's end with its loop, and a blocked signal goes to any thread that does not block it.
    """
    received: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    return asyncio.run(_run(app, service, sock, announce, received))


def server_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """uvicorn's configuration for the app."""
    return uvicorn.Config(
        app, http=Patience, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=limits.header_s,
        server_header=False, h11_max_incomplete_event_size=1 << 16, backlog=1024,
    )  # fmt: skip


async def _run(
    app: ASGIApp, service: Service, sock: socket.socket, announce: Callable[[], None], received: list[int]
) -> int:
    stopping = asyncio.Event()

    def look() -> None:
        """Answers the signals received so far."""
        with contextlib.suppress(BlockingIOError):
            waking.recv(64)
        if received.count(signal.SIGINT) > 1:
            # a second Ctrl-C ends at once; a second SIGTERM may be a wrapper's copy of the first
            os._exit(Exit.INTERRUPTED)
        if received:
            service.draining = True
            stopping.set()

    waking, written = socket.socketpair()
    waking.setblocking(False)
    written.setblocking(False)
    signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)  # a signal wakes the loop
    asyncio.get_running_loop().add_reader(waking, look)
    look()
    server = CappedServer(server_config(app, service.limits), connection_limit())
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    announce()
    waiting = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        log.info("ending: running requests have %g s", service.limits.grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(service.limits.grace_s):
                while not (service.idle and _is_idle(server)):
                    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.to_thread(service.close)
    server.should_exit = True
    await serving
    signal.set_wakeup_fd(-1)
    asyncio.get_running_loop().remove_reader(waking)
    waking.close()
    written.close()
    return Exit.INTERRUPTED if received[:1] == [signal.SIGINT] else Exit.DONE


def _is_idle(server: uvicorn.Server) -> bool:
    """Whether no connection is in the middle of an answer."""
    return not server.server_state.tasks
