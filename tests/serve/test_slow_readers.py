"""Streams as they reach clients: one event for each token, whole and in order however slowly a client reads."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, until
from tpshard.programs.scheduling.request import Event
from tpshard.serve.api.app import Delivery
from tpshard.serve.api.connections import Patience
from tpshard.serve.api.service import Limits
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.step import StepInput

TOKENS = 480


class Instant:
    """A runner that computes nothing: each token and its log-probabilities follow from its position. A step waits until
    the event loop has taken the tokens of the one before."""

    blocks, block_size, max_rows, max_logit_rows, max_seq, vocab, chunks, slots = 4096, 16, 256, 64, 512, 300, None, 0

    def __init__(self) -> None:
        self.turns = threading.Semaphore(1)

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        assert self.turns.acquire(timeout=PATIENCE)
        positions = batch.positions[batch.logit_rows]
        table = np.zeros((len(positions), 3 + 2 * picks.most))
        table[:, 0] = 1
        table[:, 1] = 2 + positions * 7 % 290
        table[:, 3 : 3 + picks.most] = 2 + (positions[:, None] + np.arange(picks.most)) % 290
        return Picked(table)

    def check(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def instant(served: Any) -> Iterator[Any]:
    runner, take = Instant(), Delivery.take

    def taking(self: Delivery, events: list[Event]) -> None:
        take(self, events)
        runner.turns.release()

    with pytest.MonkeyPatch.context() as patch, served(lambda: runner, Limits()) as running:
        patch.setattr(Delivery, "take", taking)
        yield running


def request(body: dict[str, Any], version: str = "1.1") -> bytes:
    encoded = json.dumps({"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True} | body).encode()
    path = "chat/completions" if "messages" in body else "completions"
    head = f"POST /v1/{path} HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(encoded)}"
    return head.encode() + b"\r\n\r\n" + encoded


def asked(server: Any, payload: bytes, read: Any = socket.socket.recv) -> bytes:
    """The bytes of an answer, which `read(connection, most)` receives."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        client.sendall(payload)
        return b"".join(iter(lambda: read(client, 1 << 20), b""))


def body_of(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer[:500]
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    parts = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    return bytes(parts)


def events(answer: bytes) -> list[dict[str, Any]]:
    lines = body_of(answer).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


CHAT = {"messages": [{"role": "user", "content": "hi"}], "n": 12, "logprobs": True, "top_logprobs": 20}


def test_a_client_that_reads_late_gets_the_whole_answer(instant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(body_of(asked(instant, request(CHAT))))
    held, write = list[int](), Patience.write

    def watched(self: Patience, data: bytes) -> None:
        held.append(self.transport.get_write_buffer_size())
        write(self, data)

    monkeypatch.setattr(Patience, "write", watched)

    def late(client: socket.socket, size: int) -> bytes:
        until(lambda: instant.service.idle, "the end of the answer, of which nothing was read")
        return client.recv(size)

    got = events(asked(instant, request(CHAT | {"stream": True, "stream_options": {"include_usage": True}}), late))
    assert 0 < max(held) <= 1 << 16, "where nobody reads, nothing is written"
    assert len(held) < TOKENS and len(got) < 12 * TOKENS, "what waits is one event"
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 12 * TOKENS
    texts, logprobs, ends = [""] * 12, [[] for _ in range(12)], dict[int, str]()
    for (choice,) in (one["choices"] for one in got[:-1]):
        assert choice["index"] not in ends
        texts[choice["index"]] += choice["delta"].get("content", "")
        logprobs[choice["index"]] += choice["logprobs"]["content"] if choice["logprobs"] else []
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == [one["message"]["content"] for one in whole["choices"]]
    assert logprobs == [one["logprobs"]["content"] for one in whole["choices"]]
    assert ends == dict.fromkeys(range(12), "length")
    instant.settled()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_event_comes_for_each_text(instant: Any, version: str) -> None:
    prompt = {"prompt": [5, 6, 7], "n": 2, "stream": True}
    got = events(asked(instant, request(prompt, version)))
    whole = json.loads(body_of(asked(instant, request(prompt | {"stream": False}))))
    for index in (0, 1):
        own = [one["choices"][0] for one in got if one["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in own) == whole["choices"][index]["text"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own) > TOKENS // 2, "tokens that end in half a character give none"
        assert all(one["text"] for one in own[:-1])
        assert all(list(one) == ["finish_reason", "index", "text", "logprobs"] for one in own)
    assert {(one["id"], one["object"], one["model"]) for one in got} == {(got[0]["id"], "text_completion", "tiny")}
