"""Checks of a request before anything reads it: API key, size of the body, and time to receive it."""

from __future__ import annotations

import asyncio
import hmac
import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from tpshard.serve.fields import Refused
from tpshard.serve.service import Limits

OPEN = ("/health", "/ready")
"""Paths that are answered without an API key: the probes of health and readiness."""


class KeyGate:
    """ASGI middleware that answers 401 without `Authorization: Bearer KEY`, on every path but OPEN."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
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
                await refused(refusal)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def refused(refusal: Refused) -> Response:
    """The response that tells a refusal in OpenAI's format."""
    headers = {}
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.retry_after is not None:
        headers["retry-after"] = str(refusal.retry_after)
    if refusal.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(json.dumps(refusal.body()), refusal.status, headers, "application/json")


async def read_body(request: Request, limits: Limits) -> bytes:
    """Reads the request's body. Raises Refused beyond the limits of size and time, ClientDisconnect if the client has
    left."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError as error:
        raise Refused(f"the body took longer than {limits.body_s:g} s", status=408, code="timeout") from error
    return bytes(body)


def _too_large(limits: Limits) -> Refused:
    return Refused(f"the body is larger than {limits.body_bytes} bytes", status=413, code="body_too_large")
