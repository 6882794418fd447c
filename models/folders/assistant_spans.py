"""Which characters of a rendered conversation the assistant wrote: those that a model learns to write.

The rendered text is the truth. A template's own blocks of `{% generation %}` decide where it has them. Elsewhere an
answer is what changes in the text when the message is replaced, from where the prompt of that answer ends; the marker
that ends its turn belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tpshard.models.folders.chat_template import ChatTemplate, Span, TemplateError
from tpshard.models.folders.folder_tokenizer import FolderTokenizer

_MARK = "\ue0a1answer\ue0a2"
"""A message that begins and ends with characters of private use, which no other text has."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as its model reads it, with what the assistant wrote."""

    text: str
    ids: list[int]
    learned: list[bool]
    """Whether each token is the assistant's."""


class ConversationRenderer:
    """Renders conversations by a tokenizer's own template. The ids are those of transformers' `apply_chat_template`."""

    def __init__(self, tokenizer: FolderTokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template

    def rendered(self, messages: Sequence[Message], tools: Any = None) -> RenderedConversation:
        """The conversation with its tokens. Raises TemplateError where the template refuses it or writes nothing, and
        ValueError where the tokenizer's library fails."""
        text = rendered_text(self.template, messages, tools)
        marked = self.template.marked_spans(messages, text, tools=tools) if self.template.marks_answers else None
        answers, spans = [i for i, message in enumerate(messages) if message["role"] == "assistant"], marked or []
        if marked is None:
            for i in answers:
                spans.append(self._answer(messages, i, text, tools, spans[-1][1] if spans else 0))
        for i in answers:
            self._require_calls(messages[i], i, "".join(text[slice(*span)] for span in spans))
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        own = [""] * len(spans) if marked is not None else [_text(messages[i]).rstrip() for i in answers]
        spans = [self._with_end(s, text, ids, offsets, marked is not None, one) for s, one in zip(spans, own)]
        if any(messages[i].get("weight") == 0 for i in answers):
            if len(spans) != len(answers):
                raise TemplateError("`weight: 0` of an answer, of which the chat template marks several parts or none")
            spans = [span for i, span in zip(answers, spans) if messages[i].get("weight") != 0]
        learned, at = [], 0
        for start, end in offsets:
            while at < len(spans) and start >= spans[at][1]:
                at += 1
            learned.append(at < len(spans) and end > spans[at][0])
        return RenderedConversation(text, ids, learned)

    def _answer(self, messages: Sequence[Message], i: int, text: str, tools: Any, after: int) -> Span:
        """What message `i` adds to the text, from the end of its prompt on. after: the end of the answer before."""
        try:
            replaced = self._whole([*messages[:i], _other(messages[i]), *messages[i + 1 :]], tools)
            suffix = _shared(text[::-1], replaced[::-1])
        except TemplateError:  # it refuses the results of tools that nothing called
            whole, text = text, self._whole(messages[: i + 1], tools)
            replaced = self._whole([*messages[:i], _other(messages[i])], tools)
            suffix = _shared(text[::-1], replaced[::-1])
            if not whole.startswith(text[: len(text) - suffix]):  # what is before it is written otherwise, too
                return self._call(messages, i, whole, text[_shared(text, replaced) : len(text) - suffix], tools, after)
        if _MARK not in replaced:
            raise TemplateError(f"the chat template does not write message {i + 1}, an answer")
        changes = _shared(text, replaced)
        return self._start(messages[:i], text, tools, after, changes), max(changes, len(text) - suffix)

    def _require_calls(self, message: Message, i: int, written: str) -> None:
        """Raises TemplateError for an answer whose calls are left out, as some templates do beside a content."""
        if (names := _called(message)) and not any(name in written for name in names):
            beside = message.get("content") is not None and "tool_call" in self.template.source
            hint = ", at least not beside a content that is not null" if beside else ""
            raise TemplateError(f"message {i + 1} calls tools, which the chat template does not write{hint}")

    def _call(
        self, messages: Sequence[Message], i: int, text: str, written: str, tools: Any, after: int
    ) -> Span:  # fmt: skip
        """Where message `i`, which calls tools, stands in the text. written: what it adds to the messages up to it,
        which may begin with more than it has in the whole conversation, such as thoughts."""
        if (at := text.find(written, after)) >= 0:
            return at, at + len(written)
        begins = [at for at, character in enumerate(written) if character == "<"]
        for rest in (written[at:] for at in begins if any(name in written[at:] for name in _called(messages[i]))):
            if (at := text.find(rest, after)) >= 0:
                return self._start(messages[:i], text, tools, after, at + len(rest)), at + len(rest)
        raise TemplateError(f"message {i + 1} calls tools, and is written otherwise where results follow")

    def _start(self, before: Sequence[Message], text: str, tools: Any, after: int, changes: int) -> int:
        """Where the prompt of an answer ends in the text, in which the answer itself begins to differ at `changes`."""
        try:
            prompt = self._whole(before, tools, add_generation_prompt=True)
            if text.startswith(prompt) and len(prompt) <= changes:
                return len(prompt)
            asked = self._whole(before, tools)
        except TemplateError:
            return changes
        opening = prompt[len(asked) :] if prompt.startswith(asked) else ""
        while opening:
            if (at := text.rfind(opening, after, changes)) >= 0:
                return at + len(opening)
            opening = opening.rpartition("<")[0]  # it ends with more than this answer has, such as `<think>`
        ends = range(after + len(text[after:changes].rstrip()), changes + 1)
        fit = [_shared(text[after:end][::-1], prompt[::-1]) for end in ends]  # another system message stands before it
        return ends[fit.index(max(fit))] if max(fit) else changes

    def _whole(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> str:
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    @cached_property
    def _closing(self) -> str:
        """What the template writes after the last answer of a conversation: a marker, up to a line's end, or white
        space alone; "" for nothing."""
        try:
            text = self._whole([{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}], None)
        except TemplateError:
            return ""
        after = text.rpartition(_MARK)[2]
        return (after.strip() and after.lstrip().partition("\n")[0].rstrip()) or after

    @cached_property
    def _ending(self) -> int | None:
        """The special token with which the template ends a question and an answer alike, where neither is the last;
        None where another stands there, such as one that begins the next turn."""
        asked = [{"role": "user", "content": f"{_MARK}{i}"} for i in range(2)]
        answer = {"role": "assistant", "content": _MARK}
        try:
            text = self._whole([asked[0], answer, asked[1], answer], None)
        except TemplateError:
            return None
        after = [part.removeprefix("0") for part in text.split(_MARK)[1:3]]
        first = [self.tokenizer.encode_with_offsets(part.lstrip())[0][:1] for part in after]
        return first[0][0] if first[0] and first[0] == first[1] and first[0][0] in self.tokenizer.special_ids else None

    def _with_end(
        self, span: Span, text: str, ids: Sequence[int], offsets: Sequence[Span], marked: bool, content: str
    ) -> Span:
        """A span with the marker that ends its turn, where the marker is not in it already. marked: the template's own
        blocks say where it ends, so that a marker at its end is that of the turn. content: else what the message ends
        with, where a marker is the message's own."""
        (start, end), closing = span, self._closing.strip()
        special, stops = self.tokenizer.special_ids, self.tokenizer.stop_tokens
        inside = [id for id, at in zip(ids, offsets) if start < at[1] and at[0] < end and text[slice(*at)].strip()]
        ended = inside and inside[-1] in (special if marked else stops)
        own = bool(content) and text[start:end].rstrip().endswith(content)
        if not own and (ended or (closing and text[start:end].rstrip().endswith(closing))):
            return span
        follows = end + len(text[end:]) - len(text[end:].lstrip())
        if closing and text.startswith(closing, follows):
            return start, follows + len(closing)
        ends = bool(closing) and self.tokenizer.encode_with_offsets(closing)[0][0] in special
        for id, at in zip(ids, offsets):
            if at[1] > follows:  # another marker than after a last answer, such as one for tools
                if id in stops or (ends and id in special and (not (own and ended) or id == self._ending)):
                    return start, at[1]
                break
        blank = not marked and not closing and text.startswith(self._closing, end)
        return (start, end + len(self._closing)) if blank else span


def _called(message: Message) -> list[str]:
    """The names of the tools that a message calls, and the ids of its calls: a template may write one of them alone."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    named = [(call.get("id"), (call.get("function") or call).get("name")) for call in calls]
    return [str(one) for pair in named for one in pair if one]


def _text(message: Message) -> str:
    """A message's content where it is a text; else ""."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _other(message: Message) -> Message:
    """A plain answer in place of a message."""
    listed = isinstance(message.get("content"), list)
    return {"role": message["role"], "content": [{"type": "text", "text": _MARK}] if listed else _MARK}


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def rendered_text(template: ChatTemplate, messages: Sequence[Message], tools: Any = None) -> str:
    """A conversation as text. Raises TemplateError where the template refuses it or writes nothing."""
    text = template.render(messages, add_generation_prompt=False, tools=tools)
    if not text.strip():
        raise TemplateError("the chat template writes nothing for it")
    return text
