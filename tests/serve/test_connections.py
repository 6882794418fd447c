"""Connections are capped: idle ones make room for new ones, and the log says so once a minute."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from patience import PATIENCE, until
from tpshard.serve.api import connections
from tpshard.serve.api.connections import OncePerMinute, connection_limit
from tpshard.serve.api.service import Limits
from tpshard.serve.engine.runner import ProgramRunner
from web import web


def test_health_is_answered_beside_more_idle_connections_than_are_allowed(
    runner: ProgramRunner, served: Any, monkeypatch: pytest.MonkeyPatch, server: Any
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.0)
    with served(lambda: Kept(runner), Limits(), connections=6) as small, contextlib.ExitStack() as idle:
        host, port = small.url.removeprefix("http://").split(":")
        body = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True})
        with web.stream("POST", small.url + "/v1/completions", content=body) as running:
            lines = running.iter_lines()
            next(lines)
            for _ in range(40):
                idle.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            for _ in range(3):
                assert web.get(small.url + "/health").status_code == 200
            mine = [c for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == int(port)]
            assert sum(c.status == "ESTABLISHED" for c in mine) <= 6
            assert list(lines)[-2] == "data: [DONE]", "a connection that is answered is not idle"


HALF = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"


def test_a_body_that_never_comes_holds_no_server_at_its_end(
    runner: ProgramRunner, served: Any, caplog: pytest.LogCaptureFixture, server: Any
) -> None:
    limits = Limits(body_s=PATIENCE)
    with socket.socket() as client:
        with served(lambda: Kept(runner), limits) as small:
            client.connect(("127.0.0.1", int(small.url.rpartition(":")[2])))
            client.sendall(HALF)
            assert web.get(small.url + "/health").status_code == 200  # the bytes before are read
        assert client.recv(99) == b""
    assert "1 connections in the middle of a request are cut" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_leaves_while_its_request_is_prepared_gives_its_place_back(server: Any) -> None:
    lane = server.pool._lanes[0]
    process = lane.get_nowait()  # the only one for small bodies: requests wait
    body = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with contextlib.ExitStack() as clients:
        for _ in range(3):
            client = clients.enter_context(socket.socket())
            client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            client.sendall(head + body)
        until(lambda: len(lane._getters) == 3, "requests that wait")
    until(lambda: all(getter.done() for getter in lane._getters), "the end of their waiting")
    assert web.get(server.url + "/health").status_code == 200
    lane.put_nowait(process)
    assert web.post(server.url + "/v1/completions", content=body).status_code == 200


END_AT_ONCE = """
import asyncio, os, signal, sys
from types import SimpleNamespace
from tpshard.serve.api import http
from tpshard.serve.api.service import Limits
from tpshard.cli.serve import _end
signal.signal(signal.SIGTERM, _end)
service = SimpleNamespace(limits=Limits(), idle=True, close=lambda: print("closed"), draining=False)
begin = asyncio.run
def run(main):
    os.kill(os.getpid(), signal.SIGTERM)
    return begin(main)
asyncio.run = run
http.log_to_stderr()
sock = http.bind("127.0.0.1", 0)
code = http.run(None, service, sock, lambda: None)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""


def test_sigterm_while_the_loop_starts_or_ends_is_answered_as_later() -> None:
    command = [sys.executable, "-c", END_AT_ONCE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and done.stdout == "closed\n", done
    assert "running requests have" in done.stderr and "SystemExit" not in done.stderr


class Kept:
    """A runner shared with other servers, which does not close."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self) -> None: ...


def test_the_limit_of_descriptors_is_raised_and_leaves_a_reserve() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        most = connection_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        assert 1 <= most <= min(connections.MOST, hard - connections.RESERVE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_same_line_is_logged_once_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))  # not the loops' clock
    only, passed = OncePerMinute(), []

    def log(line: str, *arguments: object) -> None:
        record = logging.LogRecord("name", logging.ERROR, "file", 1, line, arguments, None)
        if only.filter(record):
            passed.append(record.getMessage())

    for second in range(121):
        now[0] = float(second)
        log("accept failed: %s", "too many files")
        log("another line" if second else "first")
    assert passed == [
        "accept failed: too many files", "first", "another line",
        "accept failed: too many files (59 more of this line since)",
        "another line (59 more of this line since)",
        "accept failed: too many files (59 more of this line since)",
    ]  # fmt: skip
    for number in range(5000):
        log("line %d", number)
    assert len(only._last) <= 1024
