"""A server without a key answers this machine alone: its names as the host, and its pages or those of the recipe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.serve.api.access import BODIES, BodyBudget, JsonErrors, LocalGate
from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.http import read_key


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


def get(app: Any, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return await client.get("http://127.0.0.1:8000/health", headers=headers)

    return asyncio.run(ask())


HOSTS = ["127.0.0.1", "127.0.0.1:8000", "127.1.2.3:1", "[::1]", "[::1]:8000", "localhost", "LocalHost:80", "localhost."]
NO_HOSTS = [
    "attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", "localhost.attacker.example:8000", "",
    "attacker.example@localhost", "localhost@attacker.example", "localhost:8000:8000", "[::1", "::1", "[::2]:8000",
    "10.0.0.1", "0.0.0.0", "127.0.0.1:x", "localhost/", "2130706433", "localhost,attacker.example", "user@127.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_this_machines_names_are_answered(host: str) -> None:
    assert get(LocalGate(hello, ()), host=host).text == "hello"
    assert get(LocalGate(hello, ()), origin=f"http://{host}").text == "hello"


@pytest.mark.parametrize("host", NO_HOSTS)
def test_other_names_are_refused(host: str) -> None:
    for headers, code in (({"host": host}, "host_not_allowed"), ({"origin": f"http://{host}"}, "origin_not_allowed")):
        response = get(LocalGate(hello, ("https://chat.example",)), **headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, code)


def test_the_recipes_origins_are_answered() -> None:
    gate = LocalGate(hello, ("https://chat.example",))
    assert get(gate, origin="https://chat.example").text == "hello"
    for origin in ("http://chat.example", "https://chat.example:444", "https://chat.example.attacker.example", "null"):
        assert get(gate, origin=origin).status_code == 403
    assert get(LocalGate(hello, ("*",)), origin="https://attacker.example").text == "hello"
    assert get(LocalGate(hello, ("*",)), host="attacker.example").status_code == 403


class Panic(BaseException):
    """An exception as pyo3's, which no `except Exception` catches."""


@pytest.mark.parametrize("error", [Panic("panic"), ValueError("bug"), MemoryError()], ids=lambda e: type(e).__name__)
def test_whatever_a_handler_raises_is_answered_as_json(error: BaseException) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    response = get(JsonErrors(fails))
    assert response.status_code == 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_cancelled_handler_stays_cancelled() -> None:
    async def cancelled(scope: Scope, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    call: Callable[..., Awaitable[None]] = JsonErrors(cancelled)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(call({"type": "http"}, None, None))  # type: ignore[arg-type]


def test_bodies_are_held_up_to_a_budget() -> None:
    budget = BodyBudget()
    with budget.body() as first:
        first.add(b"x" * (BODIES - 1))
        with budget.body() as second:
            second.add(b"x")
            with pytest.raises(Refused) as error:
                second.add(b"x")
            assert (error.value.status, error.value.retry_after) == (429, 1)
        assert budget.held == BODIES - 1
    assert budget.held == 0


def test_a_masked_key_of_a_recipe_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's recipe.yaml has the mask in place of the key, which everybody knows."""
    monkeypatch.delenv("TPSHARD_API_KEY", raising=False)
    with pytest.raises(Mistakes, match="stands for a key"):
        read_key(None, "***")
    monkeypatch.setenv("TPSHARD_API_KEY", "mine")
    assert read_key(None, "***") == "mine" and read_key(None, "yours") == "yours"
