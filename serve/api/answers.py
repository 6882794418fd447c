"""Answers of requests: their sequences, their growing text, and the JSON that OpenAI's API defines."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.programs.scheduling.request import Event, LoadedAdapter, Logprob, Sequence
from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.fields import Order
from tpshard.serve.api.text import Writer

DEFAULT_COMPLETION_TOKENS = 16
_ANY = "\0"
"""A text in whose place an event gets its own: no model and no id has this character."""


def sequences(
    order: Order, prompts: Iterable[tuple[int, ...]], tokenizer: FolderTokenizer, limit: int,
    adapter: LoadedAdapter | None = None,
) -> list[Sequence]:  # fmt: skip
    """Creates the sequences of an order, `n` for each tokenized prompt, which are computed with an adapter.

    Raises Refused if a prompt and its answer exceed `limit` tokens, the model's context, or `min_tokens` the answer.
    """
    ends = frozenset(order.stop_token_ids) | (frozenset() if order.ignore_eos else tokenizer.stop_tokens)
    created = []
    for tokens in prompts:
        usual, room = order.usual, limit - len(tokens)
        default = room if order.chat else DEFAULT_COMPLETION_TOKENS
        if usual.max_tokens is not None or usual.max_length is not None:
            beyond = 0 if usual.max_length is None else max(1, usual.max_length - len(tokens))
            default = beyond if usual.max_tokens is None else usual.max_tokens
        default = min(default, room)
        most = default if order.max_tokens is None else order.max_tokens
        if most > room or room <= 0 < max(most, order.max_tokens is None):
            raise Refused(
                f"the prompt has {len(tokens)} tokens and up to {max(most, 1)} more are requested; this model's "
                f"context is {limit} tokens",
                param="messages" if order.chat else "prompt",
                code="context_length_exceeded",
            )
        if order.sampling.min_tokens > most:
            message = f"`min_tokens` is {order.sampling.min_tokens}, and at most {most} are generated"
            raise Refused(message, param="min_tokens", code="invalid_value")
        least = min(most, max(order.sampling.min_tokens, usual.min_tokens, usual.min_length - len(tokens)))
        sampling = replace(order.sampling, min_tokens=least)
        created += [
            Sequence(
                tokens, sampling, most, choice=choice, stop_tokens=ends,
                prompt_logprobs=order.echo and order.sampling.logprobs is not None, adapter=adapter,
            )
            for choice in range(order.n)
        ]  # fmt: skip
    return created


class ChoicePiece(NamedTuple):
    """What a choice has for its client: one event of a stream."""

    choice: Choice
    text: str
    logprobs: list[Logprob]
    finish: str | None


@dataclass
class Choice:
    """One choice of an answer: the text sent to the client, and the text not sent yet."""

    index: int
    sequence: Sequence
    writer: Writer
    echo: str | None
    finish: str | None = None
    counted: int = 0
    """Tokens that the model generated, including the end token."""
    fresh: list[Logprob] = field(default_factory=list)
    _pending: str = ""
    _shown: int = 0

    @property
    def unsent(self) -> str:
        """The text since this was last asked; `flush` still returns it."""
        new = self._pending[self._shown :]
        self._shown = len(self._pending)
        return new

    def take(self, event: Event) -> None:
        """Adds an event; `finish` then says whether the choice has ended."""
        if self.finish is not None:
            return
        if self.echo is not None:
            self._pending, self.echo = self.echo + self._pending, None
        if event.token is not None:
            self.counted += 1
            if event.finish != "stop":
                self._pending += self.writer.add(event.token, last=event.finish is not None)
                if event.logprob is not None:
                    self.fresh.append(event.logprob)
        if self.writer.stopped:
            self.finish = "stop"
        elif event.finish is not None:
            self._pending += self.writer.end() if event.finish == "stop" else ""
            self.finish = event.finish

    def flush(self) -> tuple[str, list[Logprob]]:
        """Returns the text and log-probabilities that were not sent yet, and clears them."""
        out = self._pending, self.fresh
        self._pending, self.fresh = "", []
        return out


class Answer:
    """All choices of one request."""

    def __init__(self, order: Order, sequences: list[Sequence], tokenizer: FolderTokenizer, echoes: Many[str]) -> None:
        self.order, self.tokenizer = order, tokenizer
        self.id = f"{'chatcmpl' if order.chat else 'cmpl'}-{order.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        # a chat's answer starts its own text, a completion continues its prompt
        starts = order.chat and not order.continue_final_message
        contexts = [() if starts else s.prompt for s in sequences]
        least = [s.sampling.min_tokens for s in sequences]
        writers = [Writer(tokenizer, order.stop, context, tokens) for context, tokens in zip(contexts, least)]
        self.choices = [
            Choice(i, s, writer, echoes[i // order.n] if order.echo else None)
            for i, (s, writer) in enumerate(zip(sequences, writers))
        ]
        self._by_sequence = {c.sequence.id: c for c in self.choices}
        self._unfinished = len(self.choices)
        self._places = [Writer(tokenizer, context=() if order.echo else context) for context in contexts]
        """One Writer per choice; it decodes the tokens whose log-probabilities were sent, for `text_offset`."""
        self._lengths = [0] * len(contexts)
        """Characters that it wrote, per choice."""
        self._told_prompt: set[int] = set()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By choice, an event of a stream before and after its text."""

    @property
    def done(self) -> bool:
        """Whether all choices are finished."""
        return not self._unfinished

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts of the request."""
        return sum(len(c.sequence.prompt) for c in self._first_choices)

    @property
    def _first_choices(self) -> list[Choice]:
        """One choice of each prompt."""
        return self.choices[:: self.order.n]

    def take(self, event: Event) -> Choice | None:
        """Adds an event to its choice and returns the choice; None if it has ended. Refused (503) for an error."""
        if event.error is not None:
            raise Refused(event.error, status=503, kind="server_error", code="engine_failed", retry_after=2)
        choice = self._by_sequence.get(event.sequence.id)
        if choice is None or choice.finish is not None:
            return None
        choice.take(event)
        self._unfinished -= choice.finish is not None
        return choice

    def usage(self) -> dict[str, Any]:
        """The `usage` object of the API: tokens of prompts, answers and both."""
        completed = sum(c.counted for c in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completed,
            "total_tokens": self.prompt_tokens + completed,
            "prompt_tokens_details": {"cached_tokens": sum(c.sequence.cached or 0 for c in self._first_choices)},
        }

    def whole(self) -> dict[str, Any]:
        """The JSON of a response without streaming."""
        kind = "chat.completion" if self.order.chat else "text_completion"
        choices = [self._whole(c) for c in self.choices]
        return self._head(kind) | {"choices": choices, "usage": self.usage()}

    def opening(self) -> bytes:
        """The first events of a stream: the role, for chats."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return b"".join(sse(self._chunk({"index": c.index} | first)) for c in self.choices if self.order.chat)

    def pieces(self, choices: Iterable[Choice]) -> list[ChoicePiece]:
        """What these choices have for their client, which is then theirs no more."""
        taken = [ChoicePiece(c, *c.flush(), c.finish) for c in choices]
        return [piece for piece in taken if piece.text or piece.logprobs or piece.finish is not None]

    def events(self, pieces: Iterable[ChoicePiece]) -> bytes:
        """Pieces as events of a stream."""
        return b"".join(map(self._event, pieces))

    def closing(self) -> bytes:
        """The last events of a stream: the usage, if requested."""
        usage = sse(self._chunk(None) | {"usage": self.usage()}) if self.order.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, piece: ChoicePiece) -> bytes:
        choice, text, _, finish = piece
        if text and finish is None and self.order.sampling.logprobs is None:  # most events: only the text is new
            if choice.index not in self._frames:
                before, _, after = sse(self._body(ChoicePiece(choice, _ANY, [], None))).rpartition(
                    json.dumps(_ANY).encode()
                )
                self._frames[choice.index] = before, after
            before, after = self._frames[choice.index]
            return before + json.dumps(text).encode() + after
        return sse(self._body(piece))

    def _body(self, piece: ChoicePiece) -> dict[str, Any]:
        choice, text, logprobs, finish = piece
        body: dict[str, Any] = {"index": choice.index}
        body |= {"delta": {"content": text} if text else {}} if self.order.chat else {"text": text}
        return self._chunk(body | {"logprobs": self._logprobs(choice, logprobs), "finish_reason": finish})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.order.model}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.order.chat else "text_completion"
        head = self._head(kind) | {"choices": [] if choice is None else [{"finish_reason": None} | choice]}
        return head | ({"usage": None} if self.order.include_usage else {})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text, fresh = choice.flush()
        body: dict[str, Any] = {"index": choice.index}
        body |= {"message": {"role": "assistant", "content": text}} if self.order.chat else {"text": text}
        return body | {"logprobs": self._logprobs(choice, fresh), "finish_reason": choice.finish}

    def _logprobs(self, choice: Choice, fresh: list[Logprob]) -> dict[str, Any] | None:
        if self.order.sampling.logprobs is None:
            return None
        return self._chat_logprobs(fresh) if self.order.chat else self._completion_logprobs(choice, fresh)

    def _chat_logprobs(self, fresh: list[Logprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.tokenizer.token_text(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(self.tokenizer.token_bytes(token))}

        return {
            "content": [
                entry(x.token, x.logprob) | {"top_logprobs": [entry(t, value) for t, value in x.top]} for x in fresh
            ]
        }

    def _completion_logprobs(self, choice: Choice, fresh: list[Logprob]) -> dict[str, Any]:
        entries: list[Logprob | None] = list(fresh)
        tokens = [x.token for x in fresh]
        if self.order.echo and choice.index not in self._told_prompt:
            self._told_prompt.add(choice.index)
            scores = choice.sequence.prompt_scores
            entries = [None, *scores, *fresh]
            tokens = [choice.sequence.prompt[0], *(x.token for x in scores), *tokens]
        offsets, writer = [], self._places[choice.index]
        for token in tokens:  # where its text begins: special tokens and the first parts of a character have none
            offsets.append(self._lengths[choice.index])
            self._lengths[choice.index] += len(writer.add(token))
        return {
            "tokens": [self.tokenizer.token_text(token) for token in tokens],
            "token_logprobs": [None if x is None else _finite(x.logprob) for x in entries],
            "top_logprobs": [None if x is None else self._top(x) for x in entries],
            "text_offset": offsets,
        }

    def _top(self, x: Logprob) -> dict[str, float]:
        """Log-probabilities of the likeliest tokens and the chosen one, by text; of equal texts the likelier one."""
        by_text: dict[str, float] = {}
        for token, value in (*x.top, (x.token, x.logprob)):
            text = self.tokenizer.token_text(token)
            by_text[text] = max(_finite(value), by_text.get(text, -1e30))
        return by_text


def sse(value: dict[str, Any]) -> bytes:
    """One of the server-sent events of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _finite(logprob: float) -> float:
    """The log-probability; -9999, as in OpenAI's API, for -inf, which JSON lacks."""
    return max(logprob, -9999.0)
