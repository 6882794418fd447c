"""Chat templates, rendered in a sandboxed process with limits of one second and one mebibyte of output."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from typing import Any

SECONDS = 1.0
BYTES = 1 << 20
_MEMORY = 1 << 29
_SCRIPT = "from tpshard.serve.chat import _child; _child()"


class TemplateError(ValueError):
    """The template refuses these messages or exceeds its limits; the message says which."""


class ChatTemplate:
    """Renders messages to a prompt with a model's jinja2 template, in a separate process.

    A sandbox cannot stop `{% for i in range(10**9) %}`, so the process is killed after a second per request, and its
    memory is limited. It renders one request at a time and ends when the server does.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        self.source, self.variables = source, variables
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises only TemplateError."""
        job = {"source": self.source, "messages": messages, "variables": self.variables}
        with self._lock:
            answer = self._ask(json.dumps(job).encode() + b"\n")
        if "error" in answer:
            raise TemplateError(str(answer["error"]))
        return str(answer["text"])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, job: bytes) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(job)
            process.stdin.flush()
            line = _line(process.stdout.fileno(), SECONDS)
        except OSError:
            line = b""
        if line is None:
            self.close()
            raise TemplateError(f"the chat template took longer than {SECONDS:g} s")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self.close()
            raise TemplateError("the chat template's process ended without an answer") from error
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            environment = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "HOME", "LANG")}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip
            assert self._process.stdout is not None
            _line(self._process.stdout.fileno(), 30.0)  # it says when it is ready; the limit excludes starting
        return self._process


def _line(fd: int, seconds: float) -> bytes | None:
    """Reads a line from `fd`, or what is left before the end of the stream; None after `seconds`."""
    deadline, parts = time.monotonic() + seconds, b""
    while not parts.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(fd, 1 << 16)
        if not part:
            break
        parts += part
    return parts


def render_in_process(source: str, messages: list[dict[str, Any]], variables: dict[str, str]) -> str:
    """Renders the template in this process: sandboxed, with limited output, unlimited time. Raises TemplateError."""
    from jinja2 import TemplateError as JinjaError

    values = {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None} | variables
    parts, size = [], 0
    try:
        template = _environment().from_string(source)
        for part in template.generate(values):
            size += len(part.encode())
            if size > BYTES:
                raise TemplateError(f"the chat template wrote more than {BYTES} bytes")
            parts.append(part)
    except TemplateError:
        raise
    except (JinjaError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}"[:300]) from error
    except MemoryError as error:
        raise TemplateError("the chat template took too much memory") from error
    return "".join(parts)


def _environment() -> Any:
    """The jinja2 sandbox, with the functions that transformers gives to templates."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The `{% generation %}` block of training templates, rendered as its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = as_json
    return environment


def _child() -> None:
    import jinja2.sandbox  # noqa: F401  imported before any clock starts

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        job = json.loads(line)
        signal.alarm(5)  # ends the process if the server is gone
        try:
            answer = {"text": render_in_process(job["source"], job["messages"], job["variables"])}
        except TemplateError as error:
            answer = {"error": str(error)}
        signal.alarm(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
