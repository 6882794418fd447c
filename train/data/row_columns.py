"""What is read of a row (its text, its conversation, or its prompt with the completion), and the labelled tokens that
become of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpshard.diagnostics.diagnostic import plural


@dataclass(frozen=True)
class TextRow:
    """A row of a file: its text, or why it is unreadable. Rows count from 0, blank lines included.

    A conversation's text is JSON with its `messages` and `tools`, that of a pair JSON with `prompt` and `completion`.
    """

    number: int
    text: str | None
    fault: str = ""


class Labelled(NamedTuple):
    """The ids of a document."""

    ids: list[int]
    """Empty where the recipe leaves the document out, for the reason in `note`."""
    labels: list[int]
    """For each token its id where it is a target, else IGNORE."""
    note: str = ""
    """What was done to the document that it is not taken as it is, such as cutting it; counted by this text."""
    without: int = 0
    """Sequences of it that are left out, because they have no target."""

    @property
    def counted(self) -> dict[str, int]:
        """How many rows and sequences are not taken as they are, by what was done; see `in_words`."""
        return {note: n for note, n in ((f"row {self.note}", bool(self.note)), (NO_TARGET, self.without)) if n}


NO_TARGET = "sequence without a target, of rows that were split: left out"


def in_words(counted: str, n: int) -> str:
    """A count of `Labelled.counted` in words."""
    unit, _, done = counted.partition(" ")
    return f"{plural(n, unit)} {done}"


class NotLearned(ValueError):
    """A document cannot be learned from; the message says why."""


@dataclass(frozen=True)
class Columns:
    """The keys of JSON lines, or the columns of a table, that a source's rows are read from; one form is named."""

    text: str = "text"
    messages: str | None = None
    """Holds a list of messages, each with a role and a content; a column `tools` beside it is read where there is
    one."""
    prompt: str | None = None
    completion: str | None = None
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Only rows are read that have one of these values in these columns."""
    section: str = "data"
    """The recipe's keys that name the columns are below it: `data`, or one of `data.sources`."""
    filtered: str = ""
    """The recipe's key of `where`."""

    @property
    def required(self) -> tuple[str, ...]:
        """The columns without which there is no row."""
        if self.messages is not None:
            return (self.messages, *self.where)
        return (
            (self.text, *self.where) if self.completion is None else (self.prompt or "", self.completion, *self.where)
        )

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where they exist."""
        return () if self.messages is None else ("tools",)

    @property
    def name(self) -> str:
        """What resumed runs compare."""
        if self.messages is None and self.completion is None and not self.where:
            return self.text
        return ", ".join(self.required) + "".join(f" {key}={values}" for key, values in self.where.items())

    @property
    def key(self) -> str:
        """The recipe's key that names the columns."""
        return "messages" if self.messages is not None else "column" if self.completion is None else "completion"

    def key_of(self, column: str) -> str:
        """The recipe's key that names one of the columns."""
        named = {"messages": self.messages, "prompt": self.prompt, "completion": self.completion}
        own = next((key for key, value in named.items() if value == column), self.key)
        return self.filtered if column in self.where else f"{self.section}.{own}"

    @property
    def none_left(self) -> str:
        """Why there is no row where a file has some; "" without a filter."""
        values = (f"{key} {' or '.join(map(str, one))}" for key, one in self.where.items())
        return f"no row has {', '.join(values)}, as its filter asks" if self.where else ""

    @property
    def readable(self) -> str:
        """A sentence on what makes a row readable, for the fix of an error."""
        named, also = (
            f"{self.section}.{self.key}",
            f", and for {self.filtered} {_quoted(self.where)}" if self.where else "",
        )
        if self.messages is not None:
            needs = f'a list "{self.messages}" of {{"role", "content"}}, one of them the assistant\'s'
        elif self.completion is not None:
            needs, named = f'the texts "{self.prompt}" and "{self.completion}"', f"{self.section}.prompt and completion"
        else:
            needs = f'a "{self.text}" that is not empty'
        return f"a row needs {needs} ({named} {'name others' if ' ' in named else 'names another'}){also}"

    def row(self, number: int, value: Any) -> TextRow | None:
        """The row of a JSON object or a row of a table; None for one that `where` leaves out."""
        if not isinstance(value, Mapping):
            return TextRow(number, None, f'{_kind(value)}, not an object with a "{self.required[0]}"')
        if missing := next((key for key in self.required if key not in value), None):
            asks = ", which its filter asks for" if missing in self.where else ""
            return TextRow(number, None, f'no "{missing}"{asks}')
        if any(value[key] not in values for key, values in self.where.items()):
            return None
        if self.messages is not None:
            messages, tools = value[self.messages], _tools(value.get("tools"))
            fault = _fault_of_conversation(self.messages, messages)
            if tools and not isinstance(tools, list):
                fault = fault or f'"tools" is {_kind(tools)}, not a list of tools'
            text = "" if fault else json.dumps({"messages": messages, "tools": tools or None}, ensure_ascii=False)
        elif self.completion is not None:
            prompt, completion = value[self.prompt or ""], value[self.completion]
            fault = _fault_of_text(self.prompt or "", prompt, empty=True) or _fault_of_text(self.completion, completion)
            text = "" if fault else json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False)
        else:
            text = value[self.text]
            fault = _fault_of_text(self.text, text)
        if not fault:
            try:
                text.encode()
            except UnicodeEncodeError:
                fault = "an unpaired surrogate, which UTF-8 cannot encode"
        return TextRow(number, None if fault else text, fault)


def _tools(value: Any) -> Any:
    """A row's tools; tables, whose columns have one type, hold them as a text of JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _fault_of_text(column: str, text: Any, empty: bool = False) -> str:
    if not isinstance(text, str):
        return f'"{column}" is {_kind(text)}, not a string'
    return "" if empty or text.strip() else f'"{column}" is empty'


def _kind(value: Any) -> str:
    """What a value of JSON is, in its words."""
    words = {type(None): "null", bool: "true or false", str: "a text", int: "a number", float: "a number"}
    return words.get(type(value), "a map" if isinstance(value, Mapping) else "a list")


def _fault_of_part(part: Any) -> str:
    """What is wrong with a part of a message's content; "" for nothing. Tables write keys that a part lacks as null."""
    if isinstance(part, str):
        return ""
    if not isinstance(part, Mapping):
        return f"a part that is {_kind(part)}, not a map of type and text"
    keys = [key for key, value in part.items() if value is not None]
    if (kind := part.get("type") or ("text" if "text" in keys else next(iter(keys), None))) != "text":
        return f"a part of the type {kind}, which is not supported: only text is learned"
    text = part.get("text")
    return "" if isinstance(text, str) else f'a part whose "text" is {_kind(text)}, not a string'


def _fault_of_conversation(column: str, messages: Any) -> str:
    """What is wrong with a conversation whatever its template is; "" for nothing."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f'"{column}" is {_kind(messages)}, not a list of messages'
    for number, message in enumerate(messages, 1):
        at = f'message {number} of "{column}"'
        if not isinstance(message, Mapping):
            return f"{at} is {_kind(message)}, not a map of role and content"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            return (
                f"{at} has {'no role' if 'role' not in message else f'the role {json.dumps(role)}'}; its keys are "
                + (", ".join(map(str, message)))
            )
        if content is None and not any(message.get(key) for key in ("tool_calls", "function_call")):
            return f"{at} ({role}) has no content"
        if content is not None and not isinstance(content, str | list):
            return f"the content of {at} ({role}) is {_kind(content)}, neither text nor a list of parts"
        parts = content if isinstance(content, list) else []
        if fault := next(filter(None, (_fault_of_part(part) for part in parts)), ""):
            return f"{at} ({role}) has {fault}"
        if message.get("weight") not in (None, 0, 1):
            return f"{at} ({role}) has the weight {json.dumps(message['weight'])}, which is neither 0 nor 1"
    roles = dict.fromkeys(message["role"] for message in messages)
    if "assistant" not in roles:
        there = f"its roles are {', '.join(roles)}" if roles else "it is empty"
        return f'no answer: "{column}" has no message of the role "assistant"; {there}'
    return ""
