"""The processes in which a server prepares requests, and the queue for them.

Small bodies and large ones have processes of their own, so that a large one delays no small one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.preprocess import HEAD, SECONDS, Prepared

log = logging.getLogger(__name__)

SMALL = 1 << 16
"""Bytes up to which a body counts as small."""
WAIT_S = 60.0
"""Seconds after which a process that does not answer is replaced; its computing time is limited to SECONDS."""
_COMMAND = [sys.executable, "-P", "-c", "from tpshard.serve.api.preprocess import main; main()"]
_ENVIRONMENT = ("PATH", "PYTHONPATH", "HOME", "LANG")
"""Variables that the processes see: no key of the server's is among them."""


@dataclass(frozen=True)
class PreprocessSetup:
    """What a process loads."""

    folder: str
    """The tokenizer's folder."""
    rows: int | None
    """Embedding rows of the model."""
    template: str | None
    """The chat template's source."""
    model: str
    defaults: Mapping[str, Any]
    """Values of sampling fields that a request does not set."""


class _Process:
    """A process that prepares one request at a time."""

    def __init__(self, setup: PreprocessSetup) -> None:
        self.channel, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if k in _ENVIRONMENT} | {"TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self.process = subprocess.Popen(
                _COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with contextlib.suppress(OSError):  # it has ended: the first job says so
            self.channel.sendall(_frame(vars(setup), b""))
        self.channel.setblocking(False)

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


class PreprocessPool:
    """Prepares requests in `each` processes for small bodies and as many for large ones."""

    def __init__(self, setup: PreprocessSetup, each: int | None = None) -> None:
        self.setup = setup
        self._lanes: tuple[asyncio.Queue[_Process], ...] = (asyncio.Queue(), asyncio.Queue())
        self._processes: set[_Process] = set()
        self._jobs: set[asyncio.Task[Any]] = set()
        for lane in self._lanes:
            for _ in range(each or max(1, min(4, (os.cpu_count() or 1) // 4))):
                lane.put_nowait(self._started())

    async def run(
        self, kind: str, raw: bytes, limit: int, vocab: int, adapters: Collection[str] = ()
    ) -> Prepared | bytes:
        """The result of `Preprocessor.run`, its JSON as bytes. Raises Refused, with 503 where the process was lost."""
        lane = self._lanes[len(raw) > SMALL]
        process = await lane.get()
        # a job goes on when its client leaves: the next frame of the process would be the answer to this one
        head = {"kind": kind, "limit": limit, "vocab": vocab, "adapters": [*adapters]}
        job = asyncio.ensure_future(self._ask(lane, process, head, raw))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        answer, payload = await asyncio.shield(job)
        if "refused" in answer:
            raise Refused(**answer["refused"])
        return Prepared.decode(answer, payload) if answer else payload

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.close()
        self._processes.clear()

    def _started(self) -> _Process:
        process = _Process(self.setup)
        self._processes.add(process)
        return process

    async def _ask(
        self, lane: asyncio.Queue[_Process], process: _Process, job: dict[str, Any], raw: bytes
    ) -> tuple[dict[str, Any], bytes]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WAIT_S):
                await loop.sock_sendall(process.channel, _frame(job, raw))
                sizes = HEAD.unpack(await _exactly(process.channel, HEAD.size))
                header, payload = [await _exactly(process.channel, size) for size in sizes]
            lane.put_nowait(process)
            return json.loads(header), payload
        except (OSError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            why = f"did not answer within {WAIT_S:g} s" if late else f"ended, or computed for more than {SECONDS} s"
            log.error("the process that prepares requests %s; another one is started", why)
            self._processes.discard(process)
            await asyncio.to_thread(process.close)
            lane.put_nowait(await asyncio.to_thread(self._started))
            message = f"the process that prepares requests {why}"
            refusal = Refused(message, status=503, kind="server_error", code="preprocessing_failed", retry_after=1)
            return {"refused": vars(refusal)}, b""


async def _exactly(channel: socket.socket, size: int) -> bytes:
    loop, received = asyncio.get_running_loop(), bytearray()
    while len(received) < size:
        part = await loop.sock_recv(channel, min(size - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("the process has ended")
        received += part
    return bytes(received)


def _frame(header: Mapping[str, Any], payload: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return HEAD.pack(len(encoded), len(payload)) + encoded + payload
