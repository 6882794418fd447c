"""Checks of single values of a request: each returns the value to use, or raises Refused without `param`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 64
MAX_PROMPTS = 64
MAX_BIASES = 1024
MAX_LABEL = 256

Check = Callable[[Any], Any]


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


def number(least: float, most: float) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(_float(value)):
            raise Refused(f"is not a finite number: {show(value)}")
        if not least <= value <= most:
            raise Refused(f"is not between {least:g} and {most:g}: {show(value)}")
        return float(value)

    return check


def whole_number(least: int, most: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Refused(f"is not a whole number: {show(value)}")
        if not least <= value <= most:
            raise Refused(f"is not between {least} and {most}: {show(value)}")
        return value

    return check


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"is not true or false: {show(value)}")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused(f"is not a string: {show(value)}")
    if "\0" in value:
        raise Refused("holds a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused("holds half of a surrogate pair, which is not a character") from error
    return value


def label(value: Any) -> str:
    """Checks a name that a client gives to a request, to its user or to a cache entry; it changes no answer."""
    if len(text(value)) > MAX_LABEL or not value.isprintable():
        raise Refused(f"is not up to {MAX_LABEL} printable characters")
    return str(value)


def only(*allowed: Any) -> Check:
    """The check that a value is one of those that ask for nothing beyond what is done anyway."""

    def check(value: Any) -> Any:
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            beyond = f" except for {', '.join(json.dumps(a) for a in allowed)}" if allowed else ""
            raise Refused(f"is not supported{beyond}: {show(value)}")
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
            raise Refused(f"has a key that is not a token id: {show(key)}")
        out.append((int(key), check_part(f"of token {key}", number(-100, 100), bias)))
    return tuple(out)


def tokens(value: Any) -> tuple[int, ...]:
    """Checks a list of token ids of any length."""
    if not isinstance(value, list):
        raise Refused(f"is not a list of token ids: {show(value)}")
    check = whole_number(0, 2**31 - 1)
    return tuple(check_part("has a token that", check, v) for v in value)


def prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Checks `prompt`: a string, token ids, or a list of either. Returns a tuple of prompts."""
    if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
        value = [value]
    many = value if isinstance(value, list) else [value]
    if not 0 < len(many) <= MAX_PROMPTS:
        raise Refused(f"is not 1 to {MAX_PROMPTS} prompts")
    out: list[str | tuple[int, ...]] = []
    for v in many:
        out.append(tokens(v) if isinstance(v, list) else text(v))
        if not out[-1]:
            raise Refused("is empty")
    return tuple(out)


def stream_options(value: Any) -> bool:
    if not isinstance(value, dict):
        raise Refused("is not an object with `include_usage`")
    given = {key: v for key, v in value.items() if v is not None}
    for key in given:
        if key not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise Refused(f"has `{key[:64]}`, which is not supported; only `include_usage` is")
    for key in ("include_obfuscation", "continuous_usage_stats"):
        if given.get(key, False) is not False:
            raise Refused(f"asks for `{key}`, which is not supported")
    return flag(given.get("include_usage", False))


def response_format(value: Any) -> None:
    if value != {"type": "text"}:
        raise Refused('is not supported beyond {"type": "text"}')


def template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("is not an object of variables for the chat template")
    return {text(key): v for key, v in value.items() if v is not None}


def check_part(place: str, check: Check, value: Any) -> Any:
    """Checks a part of a field and returns its value; a refusal names the part."""
    try:
        return check(value)
    except Refused as error:
        raise Refused(f"{place} {error.message}") from error


def check_fields(body: Mapping[str, Any], table: Mapping[str, Check], needed: tuple[str, ...]) -> dict[str, Any]:
    """The checked fields of a body; null is as good as absent. Raises Refused with the field as `param`."""
    fields: dict[str, Any] = {}
    for key, value in body.items():
        if value is None:
            continue
        check = table.get(key)
        if check is None:
            name = key[:64]
            raise Refused(f"unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
        try:
            fields[key] = check(value)
        except Refused as error:
            raise Refused(f"`{key}` {error.message}", param=key, code="invalid_value") from error
    for key in needed:
        if key not in fields:
            raise Refused(f"`{key}` is missing", param=key, code="missing_required_parameter")
    return fields


def show(value: Any) -> str:
    """A value for a message, cut to 60 characters; of a large one only the kind, since its text would take long."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a huge number"
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} items"
    shown = repr(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
