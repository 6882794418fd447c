"""The routes that load and drop adapters while a server runs, as vLLM names them.

A client names a folder below `serve.adapter_root`, and no other: a path that leads out of it, by `..` or by a link, is
refused. Without that key both routes refuse.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from tpshard.serve.api import fields
from tpshard.serve.api.access import read_body, refused
from tpshard.serve.api.field_checks import Check, Refused, check_fields, flag, only, text, whole_number
from tpshard.serve.api.service import NameTaken, Unavailable

if TYPE_CHECKING:
    from tpshard.serve.api.app import Server

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
"""Names of adapters, as `serve.adapters` has them."""


def _name(value: Any) -> str:
    if NAME.fullmatch(text(value)) is None:
        raise Refused("is not a name of at most 200 letters, digits and any of . _ : / -")
    return str(value)


LOAD: dict[str, Check] = {
    "lora_name": _name, "lora_path": text, "load_inplace": flag, "is_3d_lora_weight": only(False)
}  # fmt: skip
UNLOAD: dict[str, Check] = {"lora_name": text, "lora_int_id": whole_number(0, 2**63 - 1)}


def add_adapter_routes(app: FastAPI, server: Server) -> None:
    """Adds `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        return await answered(request, LOAD, ("lora_name", "lora_path"), loaded)

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        return await answered(request, UNLOAD, ("lora_name",), unloaded)

    async def answered(
        request: Request, table: dict[str, Check], needed: tuple[str, ...],
        change: Callable[[Path, dict[str, Any]], Coroutine[Any, Any, str]],
    ) -> Response:  # fmt: skip
        try:
            with server.budget.body() as held:
                raw = await read_body(request, server.service.limits, held)
                asked = check_fields(fields.parse(raw), table, needed)
            if server.adapter_root is None:
                raise Refused("this server loads and drops no adapters: `serve.adapter_root` is not set", status=403)
            return PlainTextResponse(await change(server.adapter_root, asked))
        except Refused as error:
            server.service.metrics.refused.labels(str(error.status)).inc()
            return refused(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    async def loaded(root: Path, asked: dict[str, Any]) -> str:
        name, folder = asked["lora_name"], await asyncio.to_thread(_inside, root, asked["lora_path"])
        if name == server.model:
            raise Refused(f"`{name}` is the name of the model itself", param="lora_name", code="invalid_value")
        try:
            await _done(lambda: server.service.load(name, str(folder), asked.get("load_inplace", False)))
        except NameTaken as error:
            raise Refused(str(error), param="lora_name", code="adapter_not_loaded") from error
        except ValueError as error:
            raise Refused(str(error), param="lora_path", code="adapter_not_loaded") from error
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unloaded(root: Path, asked: dict[str, Any]) -> str:
        name = asked["lora_name"]
        try:
            await _done(lambda: server.service.unload(name))
        except KeyError as error:
            message = f"there is no adapter `{name[:100]}`"
            raise Refused(message, param="lora_name", code="model_not_found", status=404) from error
        return f"Success: LoRA adapter '{name}' removed successfully."


async def _done(change: Callable[[], Future[None]]) -> None:
    """Waits for a change of the engine; it goes on where the client leaves."""
    try:
        await asyncio.shield(asyncio.wrap_future(change()))
    except Unavailable as error:
        message = "the model is not available now"
        raise Refused(message, status=503, kind="server_error", code="unavailable", retry_after=2) from error


def _inside(root: Path, path: str) -> Path:
    """The folder that a client names below the root. Raises Refused for any other."""
    try:
        folder, top = (root / path).resolve(), root.resolve()
        if folder.is_relative_to(top) and folder != top and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):  # too long, or links in a circle
        pass
    message = "`lora_path` names no folder below `serve.adapter_root`"
    raise Refused(message, param="lora_path", code="invalid_value")
