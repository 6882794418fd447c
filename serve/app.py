"""The HTTP application: OpenAI's routes over a Service."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tpshard.models.folder_tokenizer import FolderTokenizer
from tpshard.serve import fields
from tpshard.serve.access import KeyGate, read_body, refused
from tpshard.serve.answers import Answer, Choice, check_tokens, sequences
from tpshard.serve.chat import ChatTemplate, TemplateError
from tpshard.serve.fields import Order, Refused
from tpshard.serve.request import Event
from tpshard.serve.service import Full, Service, Unavailable

READ = ["GET", "HEAD"]
"""Methods of read-only routes. Load balancers use HEAD, which returns GET's headers."""


@dataclass
class Server:
    """The state that all routes share: the service, the tokenizer, and the model's name."""

    model: str
    """The model's name, which requests must use."""
    service: Service
    tokenizer: FolderTokenizer
    template: ChatTemplate | None
    programs: Sequence[Mapping[str, Any]] = ()
    """Rows and fingerprint of every program."""
    created: int = 0

    def __post_init__(self) -> None:
        self.created = self.created or int(time.time())

    # ---- from request to events ------------------------------------------------------------------------------------
    async def order(self, request: Request, parse: Callable[[dict[str, Any]], Order]) -> Answer:
        """Reads, checks and tokenizes one request. Raises Refused or ClientDisconnect."""
        self._room(1)
        body = fields.parse(await read_body(request, self.service.limits))
        order = parse(body)
        if order.model != self.model:
            raise _no_model(order.model)
        self._room(order.n * max(1, len(order.prompts)))
        try:
            limit = self.service.limit
        except Unavailable as error:
            raise _unavailable() from error
        if order.chat or sum(len(p) for p in order.prompts) > 4096:
            prompts, echoes = await run_in_threadpool(self._tokens, order, limit)
        else:  # too short to be worth a thread
            prompts, echoes = self._tokens(order, limit)
        check_tokens(order, prompts, self.service.vocab)
        ordered = sequences(order, prompts, self.tokenizer, limit)
        return Answer(order, ordered, self.tokenizer, echoes)

    def _tokens(self, order: Order, limit: int) -> tuple[list[tuple[int, ...]], list[str]]:
        """The prompts as tokens, and as text for `echo`."""
        texts: list[str | tuple[int, ...]] = list(order.prompts)
        if order.chat:
            if self.template is None:
                raise Refused("this model has no chat template; use /v1/completions", code="no_chat_template")
            try:
                texts = [self.template.render(list(order.messages))]
            except TemplateError as error:
                raise Refused(str(error), param="messages", code="chat_template_failed") from error
        tokenized, echoes = [], []
        for text in texts:
            if isinstance(text, str):
                if self.tokenizer.too_long(text, limit):
                    raise Refused(
                        f"the prompt has {len(text)} characters, which is more than {limit} tokens",
                        param="messages" if order.chat else "prompt", code="context_length_exceeded",
                    )  # fmt: skip
                tokens = tuple(self.tokenizer.encode(text, special=not order.chat))
                if not tokens:
                    raise Refused("the prompt has no tokens", param="prompt", code="invalid_value")
            else:
                tokens = text
            tokenized.append(tokens)
            echoes.append((text if isinstance(text, str) else self.tokenizer.decode(text)) if order.echo else "")
        return tokenized, echoes

    def _room(self, count: int) -> None:
        try:
            self.service.check(count)
        except Full as error:
            raise Refused(
                "too many requests are waiting", status=429, kind="rate_limit_error", code="queue_full", retry_after=1
            ) from error
        except ValueError as error:
            raise Refused(str(error), param="n", code="invalid_value") from error
        except Unavailable as error:
            raise _unavailable() from error

    async def run(self, answer: Answer) -> AsyncGenerator[Event, None]:
        """Submits an answer's sequences and yields their events. Closing the generator cancels the sequences."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[Event]]()

        def deliver(events: list[Event]) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, events)

        running = [c.sequence for c in answer.choices]
        self.service.metrics.prompt_tokens.inc(answer.prompt_tokens)
        try:
            self.service.submit(running, deliver)
        except Unavailable as error:
            raise _unavailable() from error
        try:
            while not answer.done:
                for event in await queue.get():
                    yield event
        finally:
            self.service.cancel(running)


def _unavailable() -> Refused:
    return Refused("the model is not available now", status=503, kind="server_error", code="unavailable", retry_after=2)


def _no_model(name: str) -> Refused:
    return Refused(f"there is no model `{name[:100]}`", param="model", code="model_not_found", status=404)


class Reply(Response):
    """A response that computes its answer while it watches for the client's disconnect."""

    background = None  # FastAPI reads it

    def __init__(self, server: Server, parse: Callable[[dict[str, Any]], Order]) -> None:
        self.server, self.parse = server, parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noting(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            answer = await self.server.order(Request(scope, receive), self.parse)
            work = asyncio.ensure_future((self._stream if answer.order.stream else self._whole)(answer, noting))
            leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
            try:
                longest = self.server.service.limits.request_s
                done, _ = await asyncio.wait({work, leaving}, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise Refused(f"the request took longer than {longest:g} s", status=408, code="timeout")
                if work in done:
                    work.result()
            finally:
                for task in (work, leaving):
                    task.cancel()
                await asyncio.gather(work, leaving, return_exceptions=True)
        except Refused as error:
            self.server.service.metrics.refused.labels(str(error.status)).inc()
            if not began:
                await refused(error)(scope, receive, send)
            else:
                await send(_data(error.body(), more=False))
        except (ClientDisconnect, OSError):
            return  # the client has left, or the connection broke while sending

    async def _whole(self, answer: Answer, send: Send) -> None:
        async with aclosing(self.server.run(answer)) as events:
            async for event in events:
                self._take(answer, event)
        response = Response(json.dumps(answer.whole()), media_type="application/json")
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, answer: Answer, send: Send) -> None:
        started = False
        async with aclosing(self.server.run(answer)) as events:
            async for event in events:
                choice = self._take(answer, event)
                if not started:  # not earlier: errors before the first token are answered with their status
                    started = True
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    for chunk in answer.opening():
                        await send(_data(chunk))
                next_chunk = answer.chunk(choice) if choice is not None else None
                if next_chunk is not None:
                    await send(_data(next_chunk))
        for chunk in answer.closing():
            await send(_data(chunk))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _take(self, answer: Answer, event: Event) -> Choice | None:
        choice = answer.take(event)
        if choice is not None and choice.finish is not None and not event.sequence.done:
            self.server.service.cancel([choice.sequence], "stop")  # the engine does not know stop strings
        return choice


def _data(value: dict[str, Any], more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + json.dumps(value).encode() + b"\n\n", "more_body": more}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(server: Server, key: str | None) -> ASGIApp:
    """The ASGI application of a server."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Reply(server, fields.completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return Reply(server, fields.chat)

    @app.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(server)]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> Response:
        if name != server.model:
            return refused(_no_model(name))
        return JSONResponse(_card(server))

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        healthy = server.service.healthy
        status = {"status": "ok" if healthy else "unhealthy", "programs": list(server.programs)}
        return JSONResponse(status, status_code=200 if healthy else 503)

    @app.api_route("/ready", methods=READ)
    async def ready() -> Response:
        is_ready = server.service.ready
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, status_code=200 if is_ready else 503)

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        return PlainTextResponse(server.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        refusal = Refused(f"{request.method} {request.url.path[:100]}: {error.detail}", status=error.status_code)
        return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refused(Refused("internal error; see the server's log", kind="server_error", status=500))

    return KeyGate(app, key)


def _card(server: Server) -> dict[str, Any]:
    card: dict[str, Any] = {"id": server.model, "object": "model", "created": server.created, "owned_by": "tpshard"}
    with suppress(Unavailable):
        card["max_model_len"] = server.service.limit
    return card
