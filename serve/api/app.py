"""The HTTP application: OpenAI's routes over a Service."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.programs.scheduling.request import Event
from tpshard.serve.api.access import ENDS, Access, BodyBudget, JsonErrors, KeyGate, LocalGate, bug, read_body, refused
from tpshard.serve.api.adapter_routes import add_adapter_routes
from tpshard.serve.api.answers import Answer, Choice, ChoicePiece, sequences, sse
from tpshard.serve.api.connections import CONNECTION, Patience
from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.preprocess import Prepared, no_model
from tpshard.serve.api.preprocess_pool import PreprocessPool
from tpshard.serve.api.service import Full, Service, Unavailable

T = TypeVar("T")
_BUILDER = ThreadPoolExecutor(1, thread_name_prefix="answers")

READ = ["GET", "HEAD"]
"""Methods of read-only routes. Load balancers use HEAD, which returns GET's headers."""


@dataclass
class Server:
    """The state that all routes share: the service, the tokenizer, and the model's name."""

    model: str
    """The model's name, which requests must use."""
    service: Service
    tokenizer: FolderTokenizer
    pool: PreprocessPool
    programs: Sequence[Mapping[str, Any]] = ()
    """Rows and fingerprint of every program."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of sampling fields that a request does not set."""
    adapter_root: Path | None = None
    """The folder below which clients may load adapters; None: they may not."""
    created: int = 0
    budget: BodyBudget = field(default_factory=BodyBudget)

    def __post_init__(self) -> None:
        self.created = self.created or int(time.time())

    # ---- from request to events ------------------------------------------------------------------------------------
    async def prepared(self, request: Request, kind: str) -> Prepared | bytes:
        """Reads, checks and tokenizes a request to the route `kind`. Raises Refused or ClientDisconnect."""
        self._room(1)
        with self.budget.body() as body:
            raw = await read_body(request, self.service.limits, body)
            try:
                work = self.pool.run(kind, raw, self.service.limit, self.service.vocab, self.service.adapters)
            except Unavailable as error:
                raise _unavailable() from error
            return await self.while_connected(request.receive, work)

    async def while_connected(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled where the client leaves (ClientDisconnect) or it takes too long."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
        longest = self.service.limits.request_s
        try:
            done, _ = await asyncio.wait({working, leaving}, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise Refused(f"the request took longer than {longest:g} s", status=408, code="timeout")
            if working not in done:
                raise ClientDisconnect
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def answer(self, request: Request, kind: str) -> Answer:
        """The answer to a request, before its first token. Raises Refused or ClientDisconnect."""
        prepared = await self.prepared(request, kind)
        assert isinstance(prepared, Prepared), "these routes have orders"
        order = prepared.order
        self._room(order.n * len(prepared.prompts))
        try:
            limit = self.service.limit
        except Unavailable as error:
            raise _unavailable() from error
        adapter = self.service.adapters.get(order.model)
        if adapter is None and order.model != self.model:
            raise no_model(order.model)  # it was unloaded meanwhile
        ordered = sequences(order, prepared.prompts, self.tokenizer, limit, adapter)
        return Answer(order, ordered, self.tokenizer, prepared.echoes)

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

    @contextmanager
    def running(self, answer: Answer, streams: bool) -> Iterator[Delivery]:
        """Submits an answer's sequences, which the end of the block cancels. Raises Refused."""
        running, delivery = [c.sequence for c in answer.choices], Delivery(answer, self.service, streams)
        self.service.metrics.prompt_tokens.inc(answer.prompt_tokens)
        try:
            self.service.submit(running, delivery.take, asyncio.get_running_loop().call_soon_threadsafe)
        except Unavailable as error:
            raise _unavailable() from error
        try:
            yield delivery
        finally:
            self.service.cancel(running)


def _unavailable() -> Refused:
    return Refused("the model is not available now", status=503, kind="server_error", code="unavailable", retry_after=2)


class Delivery:
    """Takes the events of an answer in the event loop, and wakes the task that sends it only where it must: at the end
    and, of a stream, at the first token and where a part of the text cannot be written at once.

    A task's turn for each token, and the layers of ASGI, would take most of the time of a step of many streams.
    """

    def __init__(self, answer: Answer, service: Service, streams: bool) -> None:
        self.answer, self.service, self.streams = answer, service, streams
        self.connection: Patience | None = None
        """To which events are written while the task waits; None: the task sends them."""
        self._changed: dict[int, Choice] = {}
        """Choices with something for the client, by index."""
        self._news = asyncio.Event()
        self._failed: BaseException | None = None

    def take(self, events: list[Event]) -> None:
        """Takes the events of a step."""
        try:
            for event in events:
                choice = self.answer.take(event)
                if choice is None:
                    continue
                self._changed[choice.index] = choice
                if choice.finish is not None and not choice.sequence.done:
                    self.service.cancel([choice.sequence], "stop")  # the engine does not know stop strings
            if self.answer.done or (self.streams and not self._write()):
                self._news.set()
        except BaseException as error:  # the task raises it
            self._failed = error
            self._news.set()

    async def news(self) -> None:
        """Waits until the task is needed. Raises what taking an event raised."""
        await self._news.wait()
        self._news.clear()
        if self._failed is not None:
            raise self._failed

    def pieces(self) -> list[ChoicePiece]:
        """What the client has not got."""
        changed, self._changed = self._changed, {}
        return self.answer.pieces(changed.values())

    def _write(self) -> bool:
        """Whether all that the client has not got could be written."""
        if self.connection is None or not self.connection.writable:
            return False
        if pieces := self.pieces():
            self.connection.write(self.answer.events(pieces))
        return True


class Reply(Response):
    """A response that computes its answer while it watches for the client's disconnect."""

    background = None  # FastAPI reads it

    def __init__(self, server: Server, kind: str) -> None:
        self.server, self.kind = server, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noting(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            answer = await self.server.answer(Request(scope, receive), self.kind)
            connection = scope.get("state", {}).get(CONNECTION)
            work = self._stream(answer, noting, connection) if answer.order.stream else self._whole(answer, noting)
            await self.server.while_connected(receive, work)
        except (ClientDisconnect, OSError):
            return  # the client has left, or the connection broke while sending
        except ENDS:
            raise
        except BaseException as error:
            refusal = error if isinstance(error, Refused) else bug(error)
            self.server.service.metrics.refused.labels(str(refusal.status)).inc()
            if not began:
                await refused(refusal)(scope, receive, send)
            else:
                await send(_body(sse(refusal.body()), more=False))

    async def _whole(self, answer: Answer, send: Send) -> None:
        with self.server.running(answer, streams=False) as delivery:
            await delivery.news()
        body = await _built(answer, lambda: json.dumps(answer.whole()), sum(len(c.fresh) for c in answer.choices))
        response = Response(body, media_type="application/json")
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, answer: Answer, send: Send, connection: Patience | None) -> None:
        with self.server.running(answer, streams=True) as delivery:
            await delivery.news()  # not earlier: errors before the first token are answered with their status
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_body(answer.opening()))
            while True:
                done, pieces = answer.done, delivery.pieces()
                events = await _built(answer, partial(answer.events, pieces), sum(len(p.logprobs) for p in pieces))
                await send(_body(events))  # waits while the client reads too slowly
                if done:
                    break
                delivery.connection = connection
                await delivery.news()
                delivery.connection = None
        await send(_body(answer.closing(), more=False))


async def _built(answer: Answer, make: Callable[[], T], logprobs: int) -> T:
    """The result of `make`; from a thread where it names many tokens, one answer after another."""
    if answer.order.sampling.logprobs is None or logprobs + answer.order.echo * answer.prompt_tokens < 64:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_BUILDER, make)


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(server: Server, access: Access) -> ASGIApp:
    """The ASGI application of a server."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Reply(server, "completion")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return Reply(server, "chat")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await prepared(request, "tokenize")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await prepared(request, "detokenize")

    async def prepared(request: Request, kind: str) -> Response:
        try:
            return Response(await server.prepared(request, kind), media_type="application/json")
        except Refused as error:
            server.service.metrics.refused.labels(str(error.status)).inc()
            return refused(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    @app.api_route("/version", methods=READ)
    async def tpshard_version() -> Response:
        return JSONResponse({"version": version("tpshard")})

    @app.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        names = [server.model, *server.service.adapters]
        return JSONResponse({"object": "list", "data": [_card(server, name) for name in names]})

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> Response:
        if name != server.model and name not in server.service.adapters:
            return refused(no_model(name))
        return JSONResponse(_card(server, name))

    add_adapter_routes(app, server)

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

    @app.exception_handler(Exception)  # or the framework answers in plain text
    async def failed(request: Request, error: Exception) -> Response:
        return refused(bug(error))

    gated: ASGIApp = KeyGate(app, access.key)
    if access.cors:
        gated = CORSMiddleware(gated, access.cors, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
    if access.local:
        gated = LocalGate(gated, access.cors)
    return JsonErrors(gated)


def _card(server: Server, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": server.created, "owned_by": "tpshard"}
    card |= {} if name == server.model else {"parent": server.model}
    with suppress(Unavailable):
        card["max_model_len"] = server.service.limit
    named = {key.removeprefix("usual_").replace("model_stop", "stop"): v for key, v in server.defaults.items()}
    return card | {"generation_defaults": named}
