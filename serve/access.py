"""Checks of a request before anything reads it: API key, size of the body, and time to receive it."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tpshard.serve.fields import Refused
from tpshard.serve.service import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Paths that are answered without an API key: the probes of health and readiness."""


class KeyGate:
    """ASGI middleware that answers 401 without `Authorization: Bearer KEY`, on every path but OPEN."""

    def __init__(self, app: App, key: str | None) -> None:
        self.app = app
        self.key = key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and self.key is not None and scope["path"] not in OPEN:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = authorization.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.key):
                refusal = Refused("no API key, or a wrong one, was given", code="invalid_api_key", status=401)
                await refuse(refusal, send)
                return
        await self.app(scope, receive, send)


async def refuse(refusal: Refused, send: Send) -> None:
    """Sends a refusal in OpenAI's format."""
    body = json.dumps(refusal.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Reads the request's body. Raises Refused beyond the limits of size and time, Gone if the client has left."""
    length = dict(scope["headers"]).get(b"content-length")
    if length is not None and length.isdigit() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.body_bytes:
                    raise _too_large(limits)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise Refused(f"the body took longer than {limits.body_s:g} s", status=408, code="timeout") from error


class Gone(Exception):
    """The client has closed the connection."""


def _too_large(limits: Limits) -> Refused:
    return Refused(f"the body is larger than {limits.body_bytes} bytes", status=413, code="body_too_large")
