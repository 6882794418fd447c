"""Chat templates, rendered in jinja2's sandbox with limits of one second of computing and one mebibyte of output."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any, TypeVar

Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""
T = TypeVar("T")

SECONDS = 1.0
BYTES = 1 << 20
_MARK = secrets.token_hex(8)
"""Text that no template writes by itself."""
_OPENS, _CLOSES = f"<{_MARK}", f"{_MARK}>"
"""What `marked_render` writes around blocks of `{% generation %}`."""


_CALL: Mapping[str, Any] = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {}}}],
}  # fmt: skip


class TemplateError(ValueError):
    """The template refuses these messages or exceeds its limits; the message says which."""


class TemplateTimeout(TemplateError):
    """The template computed for too long."""


class _OutOfTime(BaseException):
    """Raised in the middle of a template; nothing in a template catches it."""


class ChatTemplate:
    """A model's jinja2 template, with the values of its special tokens.

    The sandbox keeps it from attributes, files and changes; the output and, in a main thread, the time are limited. It
    cannot stop a single long operation, nor limit memory: servers render in processes that are limited (preprocess.py).
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source, self.variables = source, dict(variables)
        self._drops, self._reads_parts = cache(self._probe), cache(self._probe_parts)
        self._reads_only_parts = cache(self._probe_text)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, **variables: Any,
    ) -> str:  # fmt: skip
        """The prompt: up to where the assistant's answer begins, or to the end of the last message's text.

        A role `developer` is rendered as `system` where the template does not know it; a content in parts is the text
        of these where the template does not read them. Raises only TemplateError.
        """
        renamed = [m | {"role": self._role(m["role"])} for m in map(dict, messages)]
        values = self.variables | variables | {"add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            renamed[-1]["content"] = _extended(self._with_text(renamed[-1])["content"], f"{_MARK} ")
            text, mark, after = self._render(renamed, values).rpartition(_MARK)
            if not mark:
                raise TemplateError("the chat template does not write the last message, which is to be continued")
            text = text if after.startswith(" ") else text.rstrip()  # the template strips messages
        else:
            text = self._render(renamed, values)
        for role in {str(m["role"]) for m in renamed}:
            if self._drops(role):
                raise TemplateError(f"the chat template drops messages of the role `{role}`")
        return text

    @cached_property
    def marks_answers(self) -> bool:
        """Whether blocks of `{% generation %}` enclose what the model is to learn. Raises TemplateError."""
        tokens = _called(lambda: list(_environment().lex(self.source)))
        return any(kind == "name" and word == "generation" and tokens[i - 2][1] == "block_begin"
                   for i, (_, kind, word) in enumerate(tokens) if i > 1)  # fmt: skip

    def marked_spans(self, messages: Sequence[Mapping[str, Any]], text: str, **variables: Any) -> list[Span] | None:
        """The parts of `text`, which is `messages` rendered whole, from blocks of `{% generation %}`; None where the
        template changes what it wrote in them. Raises TemplateError."""
        values = self.variables | variables | {"add_generation_prompt": False}
        marked = self._render(messages, values, self._marking)
        spans, plain, at = [], "", 0
        while (start := marked.find(_OPENS, at)) >= 0 and (end := marked.find(_CLOSES, start)) >= 0:
            plain += marked[at:start]
            inside = marked[start + len(_OPENS) : end]
            spans.append((len(plain), len(plain) + len(inside)))
            plain, at = plain + inside, end + len(_CLOSES)
        return spans if plain + marked[at:] == text else None

    @cached_property
    def variables_read(self) -> frozenset[str]:
        """The variables that the template reads. Raises TemplateError."""
        from jinja2 import meta

        return _called(lambda: frozenset(meta.find_undeclared_variables(_environment().parse(self.source))))

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and not self._knows_developer else role

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template writes a developer's message as such.

        Where it is written as one of any unknown role would be, without the role's name, it is not.
        """
        text = self._rendered("developer")
        return _MARK in text and text != self._rendered("unheard-of")

    def _probe(self, role: str) -> bool:
        """Whether the template renders, but drops, a message of this role."""
        texts = self._probes(role, _MARK)
        return any(texts) and not any(_MARK in text for text in texts) and not self._reads_parts(role)

    def _probe_text(self, role: str) -> bool:
        """Whether the template writes a content in parts, and of a text nothing."""
        return not any(_MARK in text for text in self._probes(role, _MARK)) and self._reads_parts(role)

    def _probe_parts(self, role: str) -> bool:
        """Whether the template writes the text of a content in parts, rather than the parts as data."""
        as_data = re.compile(rf"""["']text["']\s*:\s*["']{_MARK}""")
        return any(_MARK in text and not as_data.search(text) for text in self._probes(role, _parts(_MARK)))

    def _probes(self, role: str, content: Any) -> list[str]:
        """Conversations with a message of the role; some templates write a tool's result only where it was called."""
        return [self._rendered(role, content, before) for before in ((None, _CALL) if role == "tool" else (None,))]

    def _with_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message whose content is text or in parts, whichever the template reads. Raises TemplateError."""
        role, content = message["role"], message.get("content")
        if isinstance(content, str) and content and self._reads_only_parts(role):
            return {**message, "content": _parts(content)}
        if isinstance(content, list) and not self._reads_parts(role):
            return {**message, "content": "".join(map(_text_of, content))}
        return dict(message)

    def _rendered(self, role: str, content: Any = _MARK, before: Mapping[str, Any] | None = None) -> str:
        """A short conversation with a message of the role; "" where the template refuses it.
        before: the message before it."""
        marked, question = {"role": role, "content": content}, {"role": "user", "content": "question"}
        messages = [question, marked, question] if role == "assistant" else [marked, question]
        if role == "user":
            messages = [marked]
        if before is not None:
            messages = [question, dict(before), {**marked, "tool_call_id": before["tool_calls"][0]["id"]}]
        try:
            return self._render(messages, self.variables | {"add_generation_prompt": True}, joined=False)
        except TemplateError:
            return ""

    @cached_property
    def _template(self) -> Any:
        return _environment().from_string(self.source)

    @cached_property
    def _marking(self) -> Any:
        return _environment(marks=(_OPENS, _CLOSES)).from_string(self.source)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], template: Any = None,
        joined: bool = True,
    ) -> str:  # fmt: skip
        """joined: contents in parts that the template does not read become text."""
        from jinja2 import TemplateError as JinjaError

        written = [_as_transformers(self._with_text(message) if joined else message) for message in messages]
        values = {"messages": written, "tools": None, "documents": None, **variables}
        parts, size = [], 0
        try:
            with _limited(SECONDS):
                for part in (template or self._template).generate(values):
                    size += len(part.encode())
                    if size > BYTES:
                        raise TemplateError(f"the chat template wrote more than {BYTES} bytes")
                    parts.append(part)
        except TemplateError:
            raise
        except _OutOfTime:
            raise TemplateTimeout(f"the chat template took longer than {SECONDS:g} s") from None
        except (JinjaError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}"[:300]) from error
        except RecursionError as error:
            raise TemplateError("the chat template recurses too deeply") from error
        except MemoryError as error:
            raise TemplateError("the chat template took too much memory") from error
        return "".join(parts)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _text_of(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise TemplateError(f"the chat template reads no contents in parts, and of these one has no text: {part}"[:300])
    return text


def _extended(content: Any, more: str) -> Any:
    """A content with more text at its end; of parts, at the end of the last that has a text."""
    if not isinstance(content, list):
        return content + more
    for i, part in reversed(list(enumerate(content))):
        if isinstance(part, Mapping) and "text" in part:
            return [*content[:i], {**part, "text": part["text"] + more}, *content[i + 1 :]]
    raise TemplateError("the last message, which is to be continued, has no text")


def _as_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that are null, as tables write those that it lacks, and its reasoning by both names that
    templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _OutOfTime in the block once this process has computed for so long; only a main thread can do that.

    Computing counts, not waiting: a busy machine makes no template fail.
    """

    def end(*_: object) -> None:
        raise _OutOfTime

    try:
        before = signal.signal(signal.SIGVTALRM, end)
    except ValueError:  # not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _called(parse: Callable[[], T]) -> T:
    from jinja2 import TemplateError as JinjaError

    try:
        return parse()
    except (JinjaError, RecursionError) as error:
        raise TemplateError(f"the chat template failed: {error}"[:300]) from error


def _environment(marks: tuple[str, str] | None = None) -> Any:
    """The jinja2 sandbox, with the functions that transformers gives to templates. marks: texts to write around the
    blocks of `{% generation %}`."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The `{% generation %}` block of training templates, rendered as its content, which is a scope of its own."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))]
            before, after = ([nodes.Output([nodes.TemplateData(mark)])] for mark in marks or ("", ""))
            return [*before, *body, *after] if marks else body

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
