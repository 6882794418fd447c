"""Connections are capped: idle ones make room for new ones, and the log says so once a minute."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
from typing import Any

import psutil
import pytest
from patience import PATIENCE
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
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
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
