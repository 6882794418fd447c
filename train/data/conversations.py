"""Conversations and pairs of prompt and completion as token ids, of which the model learns the answers alone."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source, did_you_mean
from tpshard.models.folders.assistant_spans import ConversationRenderer, rendered_text
from tpshard.models.folders.chat_template import ChatTemplate, TemplateError
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.models.objectives.targets import IGNORE
from tpshard.train.data.row_columns import Columns, Labelled, NotLearned
from tpshard.train.data.tokens import TextTokenizer, read_tokenizer

TooLong = Literal["truncate", "split", "drop"]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
"""Roles that any conversation may have; a template may name more."""


@dataclass(frozen=True)
class AnswerTokenizer:
    """Turns rows of conversations, or of prompts with completions, into ids and labels. It is used as a
    `TextTokenizer`, but its documents are packed whole."""

    text: TextTokenizer
    learned: Callable[[Mapping[str, Any]], tuple[list[int], list[bool]]]
    """The ids of a row, and whether each is the assistant's. Raises NotLearned."""
    length: int
    """Tokens of a sequence of training."""
    too_long: TooLong
    fingerprint: str
    whole = True
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.text.folder

    @property
    def vocab(self) -> int:
        return self.text.vocab

    @property
    def end(self) -> int:
        return self.text.end

    def pieces(self, text: str) -> list[str]:
        """A row is one piece: what is longer than a sequence is cut by tokens."""
        return [text]

    def labelled(self, text: str, *, first: bool = True, last: bool = True) -> Labelled:
        """The ids of a row. Raises NotLearned where nothing of it would be learned."""
        ids, learned = self.learned(json.loads(text))
        labels = [id if one else IGNORE for id, one in zip(ids, learned)]
        if all(label == IGNORE for label in labels[1:]):
            raise NotLearned("no token of it is an answer's, as the chat template renders it")
        if len(ids) <= self.length:
            return Labelled(ids, labels)
        note = f"longer than the {self.length} tokens of model.seq_len"
        if self.too_long == "split":
            return self._split(ids, labels, f"{note}: split into several sequences")
        kept = labels[: self.length]
        if self.too_long == "drop" or all(label == IGNORE for label in kept[1:]):
            return Labelled([], [], f"{note}: dropped" + (", no answer is left" if self.too_long != "drop" else ""))
        return Labelled(ids[: self.length], kept, f"{note}: truncated")

    def _split(self, ids: list[int], labels: list[int], note: str) -> Labelled:
        """A row without the sequences of which no token is a target, nor the one that follows. What follows such a
        sequence is therefore no target of the one before."""
        size = self.length
        starts = [at for at in range(0, len(ids), size) if any(one != IGNORE for one in labels[at : at + size + 1])]

        kept = [i for at in starts for i in range(at, min(at + size, len(ids)))]
        empty = -(-len(ids) // size) - len(starts)
        return Labelled([ids[i] for i in kept], [labels[i] for i in kept], note, empty)


def answer_tokenizer(
    text: TextTokenizer, columns: Columns, length: int, too_long: TooLong, where: Source | None = None,
    template: str | None = None,
) -> AnswerTokenizer:  # fmt: skip
    """The tokenizer of rows with answers.

    Args:
        text: of the same folder.
        columns: name messages, or a prompt and a completion.
        where: the place in the recipe that names the template or the tokenizer.
        template: the source of a chat template in place of the tokenizer's own.

    Raises:
        Mistakes: exit 6 where the tokenizer's folder has no chat template that can be read.
    """
    read = _rows_of(text, read_tokenizer(text.folder, where))
    cut = f"split by {length}" if too_long == "split" else too_long
    digest = hashlib.sha256(f"{text.fingerprint} {cut} {columns.key} ".encode())
    if columns.messages is None:
        return AnswerTokenizer(text, _pairs(text, read), length, too_long, digest.hexdigest()[:32])
    source = read.chat_template if template is None else template
    if source is None:
        raise Mistakes.one(
            f"the tokenizer {text.folder} has no chat template", exit=Exit.DATA, where=where,
            why=f"{columns.section}.messages are rendered by it",
            fix="data.chat_template: chatml, or a template's file; or a tokenizer with chat_template.jinja",
        )  # fmt: skip
    renderer = ConversationRenderer(read, ChatTemplate(source, read.special))
    require_template(renderer.template, f"of {text.folder}" if template is None else "of the recipe", where)
    digest.update(source.encode())
    return AnswerTokenizer(text, _conversations(renderer), length, too_long, digest.hexdigest()[:32])


def _rows_of(text: TextTokenizer, read: FolderTokenizer) -> FolderTokenizer:
    """The tokenizer without the special tokens for which the model has no rows."""
    return read if read.size <= text.vocab else FolderTokenizer(text.folder, text.vocab)


def require_template(template: ChatTemplate, whose: str, where: Source | None) -> None:
    """Raises Mistakes (exit 6) for a template that is none, or writes nothing of a question with its answer."""
    fix = "correct it, or name another in data.chat_template"
    try:
        template.variables_read  # noqa: B018 (raises)
    except TemplateError as error:
        message = f"the chat template {whose} cannot be read"
        raise Mistakes.one(message, exit=Exit.DATA, where=where, why=str(error), fix=fix) from error
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    with suppress(TemplateError):  # it may ask for more than these, which rows may have
        if not template.render(talk, add_generation_prompt=False).strip():
            raise Mistakes.one(f"the chat template {whose} writes nothing", exit=Exit.DATA, where=where, fix=fix)


def renders(source: str, where: Source | None) -> Callable[[str], None]:
    """Renders rows of conversations by a template, where there is no tokenizer yet. It raises NotLearned. where: the
    place in the recipe that names the template. Raises `Mistakes` for one that is none."""
    template = ChatTemplate(source, {})
    require_template(template, "of the recipe", where)

    def render(text: str) -> None:
        row = json.loads(text)
        _refuse_unwritten(template, row["messages"])
        try:
            rendered_text(template, row["messages"], row.get("tools"))
        except TemplateError as error:
            raise NotLearned(str(error)) from error

    return render


def _refuse_unwritten(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises NotLearned for what a template would leave out in silence."""
    known = (*ROLES, *re.findall(r"""["'](\w+)["']""", template.source))
    for number, message in enumerate(messages, 1):
        if (role := message["role"]) not in known:
            roles = ", ".join(ROLES[:5])
            raise NotLearned(f"message {number} has the unknown role {role!r}: {did_you_mean(role, ROLES, roles)}")
        if message.get("tool_calls") and "tool_call" not in template.source:
            raise NotLearned(f"message {number} calls tools, which the chat template does not write")


def _conversations(renderer: ConversationRenderer) -> Callable[[Mapping[str, Any]], tuple[list[int], list[bool]]]:
    def learned(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        _refuse_unwritten(renderer.template, row["messages"])
        try:
            rendered = renderer.rendered(row["messages"], row.get("tools"))
        except (TemplateError, ValueError) as error:
            raise NotLearned(str(error)) from error
        return rendered.ids, rendered.learned

    return learned


def _pairs(text: TextTokenizer, read: FolderTokenizer) -> Callable[[Mapping[str, Any]], tuple[list[int], list[bool]]]:
    def learned(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        start = len(row["prompt"])
        try:
            ids, offsets = read.encode_with_offsets(row["prompt"] + row["completion"])
        except ValueError as error:
            raise NotLearned(str(error)) from error
        begin, after = list(text.begin), list(text.after)
        mask = [False] * len(begin) + [end > start for _, end in offsets] + [True] * len(after)
        return [*begin, *ids, *after], mask

    return learned
