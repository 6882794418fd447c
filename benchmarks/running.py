"""Runs `tpshard` in processes of its own, as a user does, and reads the streams of its servers."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

COMMAND = [sys.executable, "-m", "tpshard.cli.main"]


def tpshard(*arguments: str, **options: Any) -> str:
    """The output of a command, which ends this script if it fails. Options are those of `subprocess.run`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([*COMMAND, *arguments], **pipes | options)
    if done.returncode:
        sys.exit(f"tpshard {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr or done.stdout}")
    return str(done.stdout)


@contextmanager
def serving(command: Sequence[str], **options: Any) -> Iterator[str]:
    """The address `http://.../v1` of a server, which ends with the block. Options are those of `subprocess.Popen`."""
    without_key = {name: value for name, value in os.environ.items() if name != "TPSHARD_API_KEY"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=without_key, **options) as server:
        try:
            assert server.stdout is not None
            words = server.stdout.readline().split()
            if not words:
                raise SystemExit("the server did not start")
            yield words[-1]
        finally:
            server.terminate()


@dataclass
class StreamRead:
    """What a client saw of a stream; seconds are since all requests were sent."""

    first_s: float = 0.0
    """When the first event came."""
    last_s: float = 0.0
    """When the stream ended."""
    events: int = 0
    """All but `[DONE]`."""
    tail: bytes = b""


def read_streams(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[StreamRead]:
    """Sends requests at once, each over its own connection, and counts their events. Little time is the client's: where
    a host's CPU limits a server, a client that parses what it gets would be measured too. SystemExit for a refusal.
    """
    place, selector, reads = urlsplit(url), selectors.DefaultSelector(), [StreamRead() for _ in bodies]
    for body, read in zip(bodies, reads):
        sock = socket.create_connection((place.hostname, place.port))
        payload = json.dumps(body).encode()
        head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(payload)}\r\n\r\n"
        selector.register(sock, selectors.EVENT_READ, (sock, read, head.encode() + payload))
    began = time.perf_counter()
    for key in selector.get_map().values():
        key.data[0].sendall(key.data[2])
    while selector.get_map():
        for key, _ in selector.select():
            sock, read, _ = key.data
            part = sock.recv(1 << 16)
            now = time.perf_counter() - began
            if not part or not (read.tail or part.startswith(b"HTTP/1.1 200 ")):
                raise SystemExit(part.decode() or "the server closed a connection")
            read.events += (read.tail + part).count(b"data: {") - read.tail.count(b"data: {")
            read.first_s = read.first_s or (now if read.events else 0.0)
            read.tail = (read.tail + part)[-16:]
            if read.tail.endswith(b"0\r\n\r\n"):
                read.last_s = now
                selector.unregister(sock)
                sock.close()
    return reads
