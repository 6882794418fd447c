"""Checking the fields of a request: unsupported fields and values are refused, never ignored."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpshard.programs.scheduling.request import Sampling
from tpshard.serve.api import neutral_fields
from tpshard.serve.api.field_checks import (
    Check,
    Refused,
    biases,
    check_fields,
    check_part,
    flag,
    label,
    number,
    prompts,
    response_format,
    show,
    stops,
    stream_options,
    template_variables,
    text,
    token_ids,
    tokens,
    whole_number,
)

MAX_N = 16
MAX_LOGPROBS = 20
MAX_DEPTH = 32
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables that a chat template gets from other fields of a request."""


class AnswerLength(NamedTuple):
    """Limits of an answer in tokens, where a request does not set its own; None: the API's default."""

    max_tokens: int | None = None
    max_length: int | None = None
    """With the prompt."""
    min_tokens: int = 0
    min_length: int = 0
    """With the prompt."""


@dataclass(frozen=True)
class Order:
    """A checked request, with prompts not yet tokenized."""

    model: str
    sampling: Sampling
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    usual: AnswerLength = field(default_factory=AnswerLength)
    """What holds where the request sets neither `max_tokens` nor `min_tokens`."""
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    chat: bool = False
    request_id: str | None = None
    """The client's name for the request, a part of the answer's id."""
    add_special_tokens: bool | None = None
    """Whether the tokens that start a document are added to a text; None: to a prompt, but not to a chat."""
    add_generation_prompt: bool = True
    """Whether a chat ends with the beginning of the assistant's answer."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    reasoning_effort: str | None = None


def parse(raw: bytes) -> dict[str, Any]:
    """Parses a request's body: one JSON object in UTF-8, without duplicate keys or deep nesting. Raises Refused.

    NaN and infinities are parsed, since some clients write them; the checks of the fields refuse them by name.
    """
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    too_deep = Refused(f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(decoded, object_pairs_hook=_object)
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


def messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not 0 < len(value) <= 4096:
        raise Refused("is not a list of 1 to 4096 messages")
    return tuple(check_part(f"has an item {i}", _message, v) for i, v in enumerate(value))


def _message(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("that is not an object")
    given = _without_neutral(value, neutral_fields.MESSAGE, ("role", "content", "name"))
    role, content, name = (given.get(key) for key in ("role", "content", "name"))
    if role not in ("system", "developer", "user", "assistant"):
        raise Refused(f"whose `role` is not system, developer, user or assistant: {show(role)}")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    out = {"role": role, "content": check_part("whose `content`", text, content)}
    return out | ({"name": check_part("whose `name`", text, name)} if name is not None else {})


def _part(value: Any) -> str:
    """The text of a part of a message's content."""
    if not isinstance(value, dict):
        raise Refused("with a part of `content` that is not an object")
    if value.get("type") != "text":
        raise Refused(f"with a part of `content` of type {show(value.get('type'))}; only text is supported")
    given = _without_neutral(value, neutral_fields.PART, ("type", "text"))
    return str(check_part("whose `text`", text, given.get("text")))


def _without_neutral(
    value: dict[str, Any], neutral: Mapping[str, tuple[object, ...]], known: tuple[str, ...]
) -> dict[str, Any]:
    """The keys of a message or a part that say something. Refused for one that is not supported."""
    given = {key: v for key, v in value.items() if v is not None and key not in neutral_fields.CACHE_MARKS}
    for key in sorted(given.keys() - set(known)):
        if given[key] not in neutral.get(key, ()):
            raise Refused(f"with `{key[:64]}`, which is not supported")
    return given


SAMPLING: dict[str, Check] = {
    "temperature": number(0, 2),
    "top_p": number(1e-6, 1),
    "top_k": whole_number(-1, 2**31 - 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
}
_SHARED: dict[str, Check] = SAMPLING | {
    "model": text,
    "max_tokens": whole_number(0, 2**31 - 1),
    "min_tokens": whole_number(0, 2**31 - 1),
    "logit_bias": biases,
    "seed": whole_number(-(2**63), 2**63 - 1),
    "n": whole_number(1, MAX_N),
    "stop": stops,
    "stop_token_ids": token_ids,
    "ignore_eos": flag,
    "stream": flag,
    "stream_options": stream_options,
    "response_format": response_format,
    "add_special_tokens": flag,
}
_RENDERING: dict[str, Check] = {
    "messages": messages,
    "add_generation_prompt": flag,
    "continue_final_message": flag,
    "chat_template_kwargs": template_variables,
}
COMPLETION: dict[str, Check] = {
    **neutral_fields.COMPLETION,
    **_SHARED,
    "prompt": prompts,
    "echo": flag,
    "logprobs": whole_number(0, MAX_LOGPROBS),
    "best_of": whole_number(1, MAX_N),
}
CHAT: dict[str, Check] = {
    **neutral_fields.CHAT,
    **_SHARED,
    **_RENDERING,
    "max_completion_tokens": whole_number(1, 2**31 - 1),
    "logprobs": flag,
    "top_logprobs": whole_number(0, MAX_LOGPROBS),
    "reasoning_effort": label,
}
TOKENIZE: dict[str, Check] = {
    **neutral_fields.TOKENIZE,
    **_RENDERING,
    "model": text,
    "prompt": text,
    "add_special_tokens": flag,
    "return_token_strs": flag,
}
DETOKENIZE: dict[str, Check] = {"model": text, "tokens": tokens}


def completion(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Order:
    """Checks the body of a request to /v1/completions and returns its Order. Raises Refused.

    `defaults`: what the model's folder says (see `generation_defaults`), where the body does not set it.
    """
    fields = _check(body, COMPLETION, ("model", "prompt"))
    if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise Refused("`best_of` other than `n` is not supported", param="best_of")
    order = _order(fields, fields.get("logprobs"), fields.get("max_tokens"), defaults)
    if order.max_tokens == 0 and not order.echo:
        raise Refused("`max_tokens` of 0 gives nothing without `echo`", param="max_tokens")
    return order


def chat(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Order:
    """Checks the body of a request to /v1/chat/completions and returns its Order. Raises Refused.

    `defaults`: what the model's folder says (see `generation_defaults`), where the body does not set it.
    """
    fields = _check(_without_unused_tools(body), CHAT, ("model", "messages"))
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise Refused("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    most = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if fields.get("max_tokens", most) != most:
        message = "`max_tokens` and `max_completion_tokens` mean the same, and differ"
        raise Refused(message, param="max_completion_tokens")
    if most == 0:
        raise Refused("`max_tokens` is not at least 1: 0", param="max_tokens")
    logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    return _order(fields | rendering(fields), logprobs, most, defaults, chat=True)


def _without_unused_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body without the lists of tools that its `tool_choice` or `function_call` says are not to be called."""
    chosen = {"tools": body.get("tool_choice"), "functions": body.get("function_call")}
    return {key: v for key, v in body.items() if not (chosen.get(key) == "none" and isinstance(v, list))}


def tokenize(body: Mapping[str, Any]) -> dict[str, Any]:
    """The checked fields of a request to /tokenize: those of a prompt, or of messages. Raises Refused."""
    fields = check_fields(body, TOKENIZE, ())
    if ("prompt" in fields) == ("messages" in fields):
        raise Refused("either `prompt` or `messages` is needed", param="prompt", code="missing_required_parameter")
    return fields | (rendering(fields) if "messages" in fields else {})


def detokenize(body: Mapping[str, Any]) -> dict[str, Any]:
    """The checked fields of a request to /detokenize. Raises Refused."""
    return check_fields(body, DETOKENIZE, ("tokens",))


def rendering(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`add_generation_prompt` and `continue_final_message`, of which one excludes the other. Raises Refused."""
    continues = fields.get("continue_final_message", False)
    opens = fields.get("add_generation_prompt", not continues)
    if continues and opens:
        message = "`continue_final_message` and `add_generation_prompt` exclude one another"
        raise Refused(message, param="continue_final_message", code="invalid_value")
    for key in fields.get("chat_template_kwargs", {}):
        if key in _GIVEN:
            message = f"`chat_template_kwargs` has `{key}`, which is a field of its own"
            raise Refused(message, param="chat_template_kwargs", code="invalid_value")
    return {"add_generation_prompt": opens, "continue_final_message": continues}


def _check(body: Mapping[str, Any], table: Mapping[str, Check], needed: tuple[str, ...]) -> dict[str, Any]:
    fields = check_fields(body, table, needed)
    if "stream_options" in fields and not fields.get("stream"):
        raise Refused("`stream_options` needs `stream: true`", param="stream_options")
    return fields


def _order(
    fields: dict[str, Any], logprobs: int | None, max_tokens: int | None, defaults: Mapping[str, Any] | None,
    chat: bool = False,
) -> Order:  # fmt: skip
    fields = {**(defaults or {}), **fields}
    if not fields.get("ignore_eos"):  # a model's stop strings end answers as its stop tokens do
        fields["stop"] = (*fields.get("stop", ()), *fields.get("model_stop", ()))
    named = {key: fields.get(f"usual_{key}") for key in AnswerLength._fields}
    usual = AnswerLength(**{key: value for key, value in named.items() if value is not None})
    if "min_tokens" in fields:
        usual = usual._replace(min_tokens=0, min_length=0)
    seed, top_k = fields.get("seed", secrets.randbits(63)), max(0, fields.get("top_k", 0))
    sampling = _named(Sampling, fields) | {"seed": seed, "top_k": top_k, "logprobs": logprobs}
    order = _named(Order, fields) | {"sampling": Sampling(**sampling), "max_tokens": max_tokens, "chat": chat}
    order |= {"usual": usual, "include_usage": fields.get("stream_options", False)}
    return Order(**order, prompts=fields.get("prompt", ()))


def _named(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that a dataclass has under the same name; it has defaults for the others."""
    return {item.name: fields[item.name] for item in dataclasses.fields(cls) if item.name in fields}
