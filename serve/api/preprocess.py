"""From the body of a request to its tokens: parsing, checking, rendering the chat, tokenizing.

A body of a megabyte takes a second, and a tokenizer or a template may fail in any way, so a server does this work in
processes of its own, which `preprocess_pool` starts: each answers one frame after another on its standard input.
"""

from __future__ import annotations

import array
import dataclasses
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.models.folders.chat_template import ChatTemplate, TemplateError, TemplateTimeout
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.programs.scheduling.request import Sampling
from tpshard.serve.api import fields
from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.fields import AnswerLength, Order

SECONDS = 10
"""Computing time of one request's body."""
MEMORY = 1 << 30
"""Bytes of memory that a process may take beyond its tokenizer."""
HEAD = struct.Struct("<II")
"""Bytes of the JSON header and of the payload that follow."""


@dataclass(frozen=True)
class Prepared:
    """A request ready for the engine: its order without texts, and the prompts as tokens."""

    order: Order
    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]
    """The prompts as text, for `echo`."""

    def encode(self) -> tuple[dict[str, Any], bytes]:
        """A JSON header, and the tokens as 32-bit integers."""
        header = {"order": dataclasses.asdict(self.order), "counts": [len(p) for p in self.prompts]}
        flat = array.array("I", [token for prompt in self.prompts for token in prompt])
        return header | {"echoes": list(self.echoes)}, flat.tobytes()

    @staticmethod
    def decode(header: Mapping[str, Any], payload: bytes) -> Prepared:
        flat, order = array.array("I", payload), dict(header["order"])
        sampling = dict(order.pop("sampling"))
        for key in ("logit_bias", "excluded"):
            sampling[key] = tuple(tuple(item) for item in sampling[key])
        sampling["not_first"] = tuple(sampling["not_first"])
        lists = {key: tuple(order[key]) for key in ("prompts", "messages", "stop", "stop_token_ids")}
        prompts, start = [], 0
        for count in header["counts"]:
            prompts.append(tuple(flat[start : start + count]))
            start += count
        usual = AnswerLength(*order["usual"])
        decoded = Order(**{**order, **lists, "sampling": Sampling(**sampling), "usual": usual})
        return Prepared(decoded, tuple(prompts), tuple(header["echoes"]))


@dataclass(frozen=True)
class Preprocessor:
    """What turns bodies into tokens: the tokenizer, the chat template, the served model's name, and its defaults.

    `adapters`, where a method takes them, are the other names that a request may ask for.
    """

    model: str
    tokenizer: FolderTokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of sampling fields that a request does not set."""

    def run(
        self, kind: str, raw: bytes, limit: int, vocab: int, adapters: Collection[str] = ()
    ) -> Prepared | dict[str, Any]:
        """Answers a body sent to the route `kind`. Raises Refused.

        `limit`: tokens of the model's context. `vocab`: number of tokens that the model knows.
        """
        body = fields.parse(raw)
        if kind == "tokenize":
            asked = fields.tokenize(body)
            self._check_model(asked.get("model", self.model), adapters)
            return self._tokenize(asked, limit)
        if kind == "detokenize":
            asked = fields.detokenize(body)
            self._check_model(asked.get("model", self.model), adapters)
            return self._detokenize(asked)
        parse = fields.chat if kind == "chat" else fields.completion
        return self.prepare(parse(body, self.defaults), limit, vocab, adapters)

    def prepare(self, order: Order, limit: int, vocab: int, adapters: Collection[str] = ()) -> Prepared:
        """Tokenizes the prompts of an order. Raises Refused."""
        self._check_model(order.model, adapters)
        special = not order.chat if order.add_special_tokens is None else order.add_special_tokens
        place = "messages" if order.chat else "prompt"
        texts = [self._render(dataclasses.asdict(order))] if order.chat else list(order.prompts)
        prompts, echoes = [], []
        for text in texts:
            if isinstance(text, str):
                if self.tokenizer.too_long(text, limit):
                    raise Refused(
                        f"the prompt has {len(text)} characters, which is more than {limit} tokens",
                        param=place, code="context_length_exceeded",
                    )  # fmt: skip
                tokens = tuple(self._encode(text, special))
                if not tokens:
                    raise Refused("the prompt has no tokens", param=place, code="invalid_value")
            else:
                tokens = text
            if len(tokens) > limit:
                raise Refused(
                    f"the prompt has {len(tokens)} tokens; this model's context is {limit} tokens",
                    param=place, code="context_length_exceeded",
                )  # fmt: skip
            prompts.append(tokens)
            echoes.append((text if isinstance(text, str) else self.tokenizer.decode(text)) if order.echo else "")
        for key, ids in (
            *(("prompt", p) for p in prompts),
            ("logit_bias", [token for token, _ in order.sampling.logit_bias]),
            ("stop_token_ids", order.stop_token_ids),
        ):
            _check_tokens(key, ids, vocab)
        return Prepared(dataclasses.replace(order, prompts=(), messages=()), tuple(prompts), tuple(echoes))

    def _tokenize(self, request: Mapping[str, Any], limit: int) -> dict[str, Any]:
        text = self._render(request) if "messages" in request else request["prompt"]
        tokens = self._encode(text, request.get("add_special_tokens", "prompt" in request))
        names = self.tokenizer.names(tokens) if request.get("return_token_strs") else None
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": names}

    def _detokenize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _check_tokens("tokens", request["tokens"], self.tokenizer.size)
        return {"prompt": self.tokenizer.decode(request["tokens"], special=True)}

    def _check_model(self, name: str, adapters: Collection[str]) -> None:
        if name != self.model and name not in adapters:
            raise no_model(name)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, special)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            why = f"the tokenizer failed on this text: {error}"
            raise Refused(why[:300], status=500, kind="server_error", code="tokenizer_failed") from error

    def _render(self, request: Mapping[str, Any]) -> str:
        if self.template is None:
            raise Refused("this model has no chat template; use /v1/completions", code="no_chat_template")
        variables = dict(request.get("chat_template_kwargs") or {})
        effort = request.get("reasoning_effort")
        try:
            if variables or effort is not None:
                known = self.template.variables_read
                for name in variables.keys() - known:
                    message = f"the chat template reads no variable `{name[:64]}`"
                    raise Refused(message, param="chat_template_kwargs", code="invalid_value")
                if effort not in (None, "none") and not {"reasoning_effort", "enable_thinking"} & known:
                    message = "the chat template knows no reasoning effort"
                    raise Refused(message, param="reasoning_effort", code="invalid_value")
                if effort is not None:
                    variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | variables
            return self.template.render(
                request["messages"], add_generation_prompt=request["add_generation_prompt"],
                continue_final_message=request["continue_final_message"], **variables,
            )  # fmt: skip
        except TemplateTimeout as error:
            raise Refused(
                str(error), status=503, kind="server_error", code="chat_template_failed", retry_after=1
            ) from error
        except TemplateError as error:
            raise Refused(str(error), param="messages", code="chat_template_failed") from error


def no_model(name: str) -> Refused:
    """The refusal of a request for a model that is not served."""
    return Refused(f"there is no model `{name[:100]}`", param="model", code="model_not_found", status=404)


def _check_tokens(key: str, ids: Any, vocab: int) -> None:
    most = max(ids, default=0)
    if most >= vocab:
        raise Refused(f"`{key}` names token {most}; there are {vocab}", param=key, code="invalid_value")


def main() -> None:
    """Answers frames until standard input, a socket, ends. The first frame's header says what to load."""
    channel = socket.socket(fileno=0)
    os.nice(10)  # the event loop is served before it
    setup, _ = _receive(channel)
    tokenizer = FolderTokenizer(Path(setup["folder"]), setup["rows"])
    template = None if setup["template"] is None else ChatTemplate(setup["template"], tokenizer.special)
    preprocessor = Preprocessor(setup["model"], tokenizer, template, setup["defaults"])
    _limit_memory(MEMORY)
    while True:
        job, raw = _receive(channel)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process, whatever it is in
        try:
            result = preprocessor.run(job["kind"], raw, job["limit"], job["vocab"], job["adapters"])
            header, payload = result.encode() if isinstance(result, Prepared) else ({}, json.dumps(result).encode())
        except Refused as error:
            header, payload = {"refused": vars(error)}, b""
        except MemoryError:
            header, payload = {"refused": vars(_failure("it took too much memory"))}, b""
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            header, payload = {"refused": vars(_failure(f"{type(error).__name__}: {error}"))}, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        encoded = json.dumps(header).encode()
        channel.sendall(HEAD.pack(len(encoded), len(payload)) + encoded + payload)


def _failure(why: str) -> Refused:
    message = f"the request could not be prepared: {why}"
    return Refused(message[:300], status=500, kind="server_error", code="preprocessing_failed")


def _receive(channel: socket.socket) -> tuple[dict[str, Any], bytes]:
    sizes = HEAD.unpack(_exactly(channel, HEAD.size))
    header, payload = (_exactly(channel, size) for size in sizes)
    return json.loads(header), payload


def _exactly(channel: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = channel.recv(min(size - len(received), 1 << 20))
        if not part:
            sys.exit(0)  # the server has ended
        received += part
    return bytes(received)


def _limit_memory(more: int) -> None:
    """Limits this process's address space to what it has now and `more` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = pages * resource.getpagesize() + more
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
