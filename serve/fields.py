"""Checking the fields of a request: unsupported fields and values are refused, never ignored."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpshard.serve.request import Sampling

MAX_N = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 64
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_DEPTH = 32


class Refused(ValueError):
    """A refused request, with OpenAI's error fields."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
        kind: str = "invalid_request_error", retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.kind, self.retry_after = status, kind, retry_after

    def body(self) -> dict[str, Any]:
        """The error as the API's JSON object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Order:
    """A checked request, with prompts not yet tokenized."""

    model: str
    sampling: Sampling
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    chat: bool = False


def parse(raw: bytes) -> dict[str, Any]:
    """Parses a request's body: one JSON object in UTF-8, without duplicate keys or deep nesting. Raises Refused.

    NaN and infinities are parsed, since some clients write them; the checks of the fields refuse them by name.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    too_deep = Refused(f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except Refused:
        raise
    except RecursionError as error:
        raise too_deep from error
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}"[:200]) from error
    if _is_deeper(value, MAX_DEPTH):
        raise too_deep
    if not isinstance(value, dict):
        raise Refused("the body is not a JSON object")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than `levels`."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_deeper(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise Refused("the body has a key twice")
    return out


# One checker per field: it returns the value to use, or raises Refused without `param`.

Check = Callable[[Any], Any]


def number(least: float, most: float) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(_float(value)):
            raise Refused(f"is not a finite number: {_show(value)}")
        if not least <= value <= most:
            raise Refused(f"is not between {least:g} and {most:g}: {_show(value)}")
        return float(value)

    return check


def whole_number(least: int, most: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused(f"is not a whole number: {_show(value)}")
        if not least <= value <= most:
            raise Refused(f"is not between {least} and {most}: {_show(value)}")
        return value

    return check


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"is not true or false: {_show(value)}")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"is not a string: {_show(value)}")
    if "\0" in value:
        raise Refused("holds a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused("holds half of a surrogate pair, which is not a character") from error
    return value


def only(*allowed: Any) -> Check:
    def check(value: Any) -> Any:
        if not any(value == a and type(value) is type(a) for a in allowed):
            raise Refused(f"is not supported except for {', '.join(json.dumps(a) for a in allowed)}: {_show(value)}")
        return value

    return check


def stops(value: Any) -> tuple[str, ...]:
    strings = [text(v) for v in (value if isinstance(value, list) else [value])]
    if len(strings) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_LENGTH for s in strings):
        raise Refused(f"is not up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(strings)


def token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS:
        raise Refused(f"is not a list of up to {MAX_STOP_TOKENS} token ids")
    return tuple(whole_number(0, 2**31 - 1)(v) for v in value)


def biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise Refused(f"is not an object of up to {MAX_BIASES} token ids and biases")
    out = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))):
            raise Refused(f"has a key that is not a token id: {_show(key)}")
        out.append((int(key), _check_part(f"of token {key}", number(-100, 100), bias)))
    return tuple(out)


def prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Checks `prompt`: a string, token ids, or a list of either. Returns a tuple of prompts."""
    if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
        value = [value]
    many = value if isinstance(value, list) else [value]
    if not 0 < len(many) <= MAX_PROMPTS:
        raise Refused(f"is not 1 to {MAX_PROMPTS} prompts")
    out: list[str | tuple[int, ...]] = []
    for v in many:
        token = partial(_check_part, "has a token that", whole_number(0, 2**31 - 1))
        out.append(tuple(map(token, v)) if isinstance(v, list) else text(v))
        if not out[-1]:
            raise Refused("is empty")
    return tuple(out)


def messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= 4096:
        raise Refused("is not a list of 1 to 4096 messages")
    return tuple(_check_part(f"has an item {i}", _message, v) for i, v in enumerate(value))


def _message(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("that is not an object")
    extra = sorted(k for k in value if k not in ("role", "content", "name") and value[k] is not None)
    if extra:
        raise Refused(f"with `{extra[0][:64]}`, which is not supported")
    if value.get("role") not in ("system", "developer", "user", "assistant"):
        raise Refused("whose `role` is not system, developer, user or assistant")
    content = value.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or set(part) != {"type", "text"}:
                raise Refused("with a part of `content` that is not text; only text is supported")
        content = "".join(_check_part("whose `text`", text, part["text"]) for part in content)
    out = {"role": value["role"], "content": _check_part("whose `content`", text, content)}
    return out | ({"name": _check_part("whose `name`", text, value["name"])} if value.get("name") is not None else {})


def _check_part(place: str, check: Check, value: Any) -> Any:
    """Checks a part of a field and returns its value; a refusal names the part."""
    try:
        return check(value)
    except Refused as error:
        raise Refused(f"{place} {error.message}") from error


def stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise Refused("is not an object with `include_usage`")
    if value.get("include_obfuscation"):
        raise Refused("asks for `include_obfuscation`, which is not supported")
    return flag(value.get("include_usage", False))


def response_format(value: Any) -> None:
    if value != {"type": "text"}:
        raise Refused('is not supported beyond {"type": "text"}')


_SHARED: dict[str, Check] = {
    "model": text,
    "max_tokens": whole_number(0, 2**31 - 1),
    "temperature": number(0, 2),
    "top_p": number(1e-6, 1),
    "top_k": whole_number(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": biases,
    "seed": whole_number(-(2**63), 2**63 - 1),
    "n": whole_number(1, MAX_N),
    "stop": stops,
    "stop_token_ids": token_ids,
    "ignore_eos": flag,
    "stream": flag,
    "stream_options": stream_options,
    "user": text,
}
COMPLETION: dict[str, Check] = _SHARED | {
    "prompt": prompts,
    "echo": flag,
    "logprobs": whole_number(0, MAX_LOGPROBS),
    "best_of": whole_number(1, MAX_N),
    "suffix": only(""),
}
CHAT: dict[str, Check] = _SHARED | {
    "messages": messages,
    "max_completion_tokens": whole_number(1, 2**31 - 1),
    "logprobs": flag,
    "top_logprobs": whole_number(0, MAX_LOGPROBS),
    "response_format": response_format,
    "store": only(False),
    "service_tier": only("auto", "default"),
}


def completion(body: Mapping[str, Any]) -> Order:
    """Checks the body of a request to /v1/completions and returns its Order. Raises Refused."""
    fields = _check(body, COMPLETION, ("model", "prompt"))
    if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise Refused("`best_of` other than `n` is not supported", param="best_of")
    order = _order(fields, fields.get("logprobs"), fields.get("max_tokens"))
    if order.max_tokens == 0 and not order.echo:
        raise Refused("`max_tokens` of 0 gives nothing without `echo`", param="max_tokens")
    return order


def chat(body: Mapping[str, Any]) -> Order:
    """Checks the body of a request to /v1/chat/completions and returns its Order. Raises Refused."""
    fields = _check(body, CHAT, ("model", "messages"))
    if "top_logprobs" in fields and not fields.get("logprobs"):
        raise Refused("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    if "max_tokens" in fields and "max_completion_tokens" in fields:
        message = "`max_tokens` and `max_completion_tokens` mean the same: give one of them"
        raise Refused(message, param="max_completion_tokens")
    if fields.get("max_tokens") == 0:
        raise Refused("`max_tokens` is not at least 1: 0", param="max_tokens")
    most = fields.get("max_completion_tokens", fields.get("max_tokens"))
    order = _order(fields, fields.get("top_logprobs", 0) if fields.get("logprobs") else None, most, chat=True)
    return order


def _check(body: Mapping[str, Any], table: Mapping[str, Check], needed: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in body.items():
        check = table.get(key)
        if check is None:
            name = key[:64]
            raise Refused(f"unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
        if value is None:
            continue
        try:
            fields[key] = check(value)
        except Refused as error:
            raise Refused(f"`{key}` {error.message}", param=key, code="invalid_value") from error
    for key in needed:
        if key not in fields:
            raise Refused(f"`{key}` is missing", param=key, code="missing_required_parameter")
    if "stream_options" in fields and not fields.get("stream"):
        raise Refused("`stream_options` needs `stream: true`", param="stream_options")
    return fields


def _order(fields: dict[str, Any], logprobs: int | None, max_tokens: int | None, chat: bool = False) -> Order:
    seed, top_k = fields.get("seed", secrets.randbits(63)), max(0, fields.get("top_k", 0))
    sampling = _named(Sampling, fields) | {"seed": seed, "top_k": top_k, "logprobs": logprobs}
    order = _named(Order, fields) | {"sampling": Sampling(**sampling), "max_tokens": max_tokens, "chat": chat}
    return Order(**order, prompts=fields.get("prompt", ()), include_usage=fields.get("stream_options", False))


def _named(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that a dataclass has under the same name; it has defaults for the others."""
    return {item.name: fields[item.name] for item in dataclasses.fields(cls) if item.name in fields}


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _show(value: Any) -> str:
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return shown if len(shown) <= 60 else shown[:57] + "..."
