"""Checks of a request before anything reads it: who asks, the size of the body, and the time to receive it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.service import Limits

log = logging.getLogger(__name__)

OPEN = ("/health", "/ready")
"""Paths that are answered without an API key: the probes of health and readiness."""
ENDS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a handler on purpose; anything else that it raises is answered as an error."""
BODIES = 1 << 26
"""Bytes of bodies that are received or prepared at once."""
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/]+)(?::[0-9]{1,5})?", re.IGNORECASE)


@dataclass(frozen=True)
class Access:
    """Who may ask: holders of the key, pages of the origins `cors`, and, with `local`, only names of this machine."""

    key: str | None = None
    cors: Sequence[str] = ()
    """Origins whose pages may ask, such as https://chat.example; `*` is any."""
    local: bool = False
    """Whether requests must name this machine as their host and, if they come from a page, as its origin."""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is one of this machine's loopback interface."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower().removesuffix(".") == "localhost"


class JsonErrors:
    """ASGI middleware that answers whatever a handler raises as an error in OpenAI's format."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noting(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except ENDS:
            raise
        except BaseException as error:
            refusal = bug(error)
            if scope["type"] == "http" and not began:
                await refused(refusal)(scope, receive, send)


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


class LocalGate:
    """ASGI middleware that answers 403 unless a request names this machine, and comes from no foreign page.

    A page of any site can send requests to a port of loopback, and by a name that it resolves to 127.0.0.1 (DNS
    rebinding) also read the answers. Browsers name the host that they asked, and the page's origin.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self.app, self.origins = app, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(name, value.decode("latin-1").strip()) for name, value in scope["headers"]]
            hosts = [value for name, value in headers if name == b"host"]
            origins = [value for name, value in headers if name == b"origin"]
            if not all(map(_names_loopback, hosts)):
                await self._refuse(f"this server is not `{hosts[0][:100]}`", "host_not_allowed", scope, receive, send)
                return
            if not all(map(self._allows, origins)):
                message = f"pages of `{origins[0][:100]}` may not ask; `serve.cors` allows origins"
                await self._refuse(message, "origin_not_allowed", scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _allows(self, origin: str) -> bool:
        scheme, separator, authority = origin.partition("://")
        own = scheme in ("http", "https") and bool(separator) and _names_loopback(authority)
        return own or origin in self.origins or "*" in self.origins

    async def _refuse(self, message: str, code: str, scope: Scope, receive: Receive, send: Send) -> None:
        await refused(Refused(message, status=403, code=code))(scope, receive, send)


def _names_loopback(authority: str) -> bool:
    """Whether a host with or without a port, as in `localhost:8000` and `[::1]`, is this machine's loopback."""
    match = _AUTHORITY.fullmatch(authority)
    return match is not None and is_loopback(match[1])


def bug(error: BaseException) -> Refused:
    """Logs an unexpected exception, and returns the refusal that tells of it."""
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return Refused("internal error; see the server's log", kind="server_error", code="internal_error", status=500)


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


class BodyBudget:
    """The bytes of all bodies that are received or prepared now; more than BODIES are refused."""

    def __init__(self) -> None:
        self.held = 0

    @contextlib.contextmanager
    def body(self) -> Iterator[HeldBody]:
        """A body whose bytes count until the end of the block."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self.held -= len(body.received)


class HeldBody:
    """The part of a body that was received."""

    def __init__(self, budget: BodyBudget) -> None:
        self.budget, self.received = budget, bytearray()

    def add(self, part: bytes) -> None:
        """Raises Refused where the server holds too many bytes."""
        if self.budget.held + len(part) > BODIES:
            raise Refused(
                "too many requests are being read", status=429, kind="rate_limit_error", code="queue_full",
                retry_after=1,
            )  # fmt: skip
        self.received += part
        self.budget.held += len(part)


async def read_body(request: Request, limits: Limits, body: HeldBody) -> bytes:
    """Reads the request's body. Raises Refused beyond the limits of size and time, ClientDisconnect if the client has
    left."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                if len(body.received) + len(part) > limits.body_bytes:
                    raise _too_large(limits)
                body.add(part)
    except TimeoutError as error:
        raise Refused(f"the body took longer than {limits.body_s:g} s", status=408, code="timeout") from error
    return bytes(body.received)


def _too_large(limits: Limits) -> Refused:
    return Refused(f"the body is larger than {limits.body_bytes} bytes", status=413, code="body_too_large")
