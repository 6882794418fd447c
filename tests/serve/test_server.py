"""The server as clients see it: OpenAI's client works, requests are refused as documented, lost workers are
replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from patience import PATIENCE, until
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.serve.api import service as service_module
from tpshard.serve.api.access import Access
from tpshard.serve.api.service import Limits
from tpshard.serve.api.text import Writer
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.step import StepInput, WorkerLost
from web import web

Running = Any

BODY = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as result:
        yield result


@pytest.fixture(scope="module")
def hasty(runner: ProgramRunner, served: Any) -> Iterator[Running]:
    with served(lambda: Failing(runner, []), Limits(header_s=1), Access("secret")) as result:
        yield result


def post(server: Running, body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    response = web.post(f"{server.url}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_openai_completions(client: openai.OpenAI, model: torch.nn.Module) -> None:
    prompt = [5, 6, 7, 8]
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=2, echo=True)
    assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 6)
    actual = answer.choices[0].logprobs
    assert actual is not None and actual.token_logprobs is not None and actual.token_logprobs[0] is None
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        logprobs = torch.log_softmax(model(torch.tensor([tokens]))[0, :-1].double(), -1)
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert actual.token_logprobs[1:] == pytest.approx(expected, abs=1e-4, rel=2e-5)


def test_openai_chat_and_streams(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox?"}]
    request: Any = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)
    again = client.chat.completions.create(**request)
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert usage == again.usage and whole.usage and whole.usage.total_tokens == usage.total_tokens
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_stream_is_the_whole_answer(server: Running) -> None:
    body = BODY | {"max_tokens": 40, "temperature": 1.5, "seed": 11, "logprobs": 1, "stop": ["qu"], "echo": True}
    whole = post(server, body)["choices"][0]
    text, logprobs, last = "", [], None
    with web.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                logprobs += choice["logprobs"]["token_logprobs"]
                last = choice["finish_reason"]
            elif line:
                assert line == "data: [DONE]"
    assert (text, logprobs, last) == (whole["text"], whole["logprobs"]["token_logprobs"], whole["finish_reason"])


def test_offsets_are_where_a_token_begins_in_the_text(server: Running) -> None:
    text = "the é fox 🦊 jumps"
    response = post(server, BODY | {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0})["choices"][0]
    tokens, offsets = response["logprobs"]["tokens"], response["logprobs"]["text_offset"]
    assert response["text"] == text
    assert tokens[0] == "<|begin|>" and offsets[:2] == [0, 0]
    for token, offset in zip(tokens[1:], offsets[1:]):
        shown = text[offset : offset + len(token)]
        assert shown == token or (token.startswith("bytes:") and shown[0] in "é🦊")
    body = BODY | {"logprobs": 0, "max_tokens": 20, "temperature": 1, "seed": 2}
    answer = post(server, body)["choices"][0]
    echoed = post(server, body | {"echo": True})["choices"][0]
    ends = [x + len(BODY["prompt"]) for x in answer["logprobs"]["text_offset"]]
    assert echoed["logprobs"]["text_offset"][-20:] == ends


def test_a_chats_tokens_come_with_the_bytes_of_its_text(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "日本"}]
    choice = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=40, temperature=2, seed=1, logprobs=True
    ).choices[0]
    assert choice.logprobs and choice.logprobs.content
    text = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert text.decode(errors="replace") == choice.message.content
    assert "�" in text.decode(errors="replace")  # or it says nothing about parts of characters


def test_what_can_never_be_taken_is_no_matter_of_waiting(server: Running) -> None:
    assert len(post(server, BODY | {"n": 12, "prompt": ["a"] * 4})["choices"]) == 48
    status, error = refusal(server, json=BODY | {"n": 13, "prompt": ["a"] * 4})
    assert (status, error["param"]) == (400, "n") and "48" in error["message"]


def ended(server: Running) -> dict[str, float]:
    """The number of ended sequences by reason."""
    start = "serve/requests_finished_total."
    return {k.removeprefix(start): v for k, v in server.service.metrics.snapshot().items() if k.startswith(start)}


def test_stop_strings_end_the_answer_wherever_tokens_end(server: Running) -> None:
    body = BODY | {"max_tokens": 60, "temperature": 1, "seed": 4, "ignore_eos": True}
    free = post(server, body)["choices"][0]["text"]
    assert len(free) > 30
    before = ended(server)
    for start in range(4, 24, 3):
        stop = free[start : start + 5]
        answer = post(server, body | {"stop": ["nowhere", stop]})
        assert answer["choices"][0]["text"] == free[: free.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
    server.settled()
    after = ended(server)
    assert after["stop"] - before.get("stop", 0) == 7 and after.get("abort", 0) == before.get("abort", 0)


def test_seed_decides_whatever_else_runs(server: Running) -> None:
    bodies = [BODY | {"temperature": 1.2, "top_p": 0.9, "seed": seed, "max_tokens": 20} for seed in range(12)]
    alone = [post(server, body)["choices"][0]["text"] for body in bodies]
    assert len(set(alone)) > 10
    together: list[str] = [""] * 12

    def ask(i: int) -> None:
        together[i] = post(server, bodies[i])["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    other = post(server, {k: v for k, v in bodies[0].items() if k != "seed"})["choices"][0]["text"]
    assert other != post(server, {k: v for k, v in bodies[0].items() if k != "seed"})["choices"][0]["text"]


def test_bias_and_penalties_and_ends(server: Running) -> None:
    def text(**more: Any) -> str:
        return post(server, BODY | {"logprobs": 0} | more)["choices"][0]

    tokens = text(logit_bias={"70": 100})["logprobs"]["tokens"]
    assert len(set(tokens)) == 1 and len(tokens) == 8
    tokens = text(logit_bias={"70": 50, "71": 49.5, "72": 49}, presence_penalty=2)["logprobs"]["tokens"]
    assert len(set(tokens[:3])) == 3
    ended = text(logit_bias={"1": 100}, ignore_eos=False)
    assert ended["text"] == "" and ended["finish_reason"] == "stop" and ended["logprobs"]["tokens"] == []
    assert text(logit_bias={"1": 100})["finish_reason"] == "length"
    assert text(logit_bias={"70": 100}, stop_token_ids=[70])["finish_reason"] == "stop"


def refusal(server: Running, path: str = "/v1/completions", **more: Any) -> tuple[int, dict[str, Any]]:
    response = web.request(more.pop("method", "POST"), server.url + path, **more)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


def test_refusals_have_openais_shape(server: Running) -> None:
    assert refusal(server, json=BODY | {"frequency": 1})[0] == 400
    assert refusal(server, json=BODY | {"max_tokens": 1e99})[1]["param"] == "max_tokens"
    assert refusal(server, json=BODY | {"model": "../../etc"})[0] == 404
    assert refusal(server, json=BODY | {"model": "/etc/passwd"})[1]["code"] == "model_not_found"
    assert refusal(server, "/v1/models/../../etc/passwd", method="GET")[0] == 404
    assert refusal(server, "/v1/models/%2e%2e%2fetc", method="GET")[0] == 404
    assert refusal(server, content=b"{")[0] == 400
    assert refusal(server, content=b'{"a":' * 100_00)[0] == 400
    assert refusal(server, content=b" " * ((1 << 16) + 1))[0] == 413
    assert refusal(server, content=iter([b" " * (1 << 15)] * 3))[0] == 413  # chunked: no length is announced
    assert refusal(server, "/v1/completions", method="GET")[0] == 405
    assert web.get(server.url + "/v1/completions").headers["allow"] == "POST"
    assert refusal(server, "/v1/completions/", json=BODY)[0] == 404
    assert refusal(server, "/v1/embeddings", json={})[0] == 404
    assert refusal(server, "/docs", method="GET")[0] == 404
    assert refusal(server, json=BODY | {"prompt": [300]})[1]["param"] == "prompt"
    assert refusal(server, json=BODY | {"logit_bias": {"300": 1}})[1]["param"] == "logit_bias"
    assert post(server, BODY)["choices"][0]["text"]


def test_prompts_at_the_context_limit(server: Running) -> None:
    limit = web.get(server.url + "/v1/models").json()["data"][0]["max_model_len"]
    assert limit == 512
    below, at, above = ([7] * (limit - 1), [7] * limit, [7] * (limit + 1))
    for prompt, more in ((at, {}), (above, {}), (below, {"max_tokens": 2}), (above, {"max_tokens": 0, "echo": True})):
        body = {"model": "tiny", "prompt": prompt, "temperature": 0} | more
        assert refusal(server, json=body)[1]["code"] == "context_length_exceeded"
    assert refusal(server, json=BODY | {"prompt": "a" * 60_000})[1]["code"] == "context_length_exceeded"
    answer = post(server, {"model": "tiny", "prompt": below, "temperature": 0})
    assert answer["usage"]["completion_tokens"] == 1
    scored = post(server, {"model": "tiny", "prompt": at, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert len(scored["choices"][0]["logprobs"]["token_logprobs"]) == limit
    server.settled()


def test_a_client_that_leaves_frees_its_blocks(server: Running) -> None:
    aborted = ended(server).get("abort", 0)
    body = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    with web.stream("POST", server.url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
    server.settled()  # or the first request would be taken for the second's start
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(body | {"stream": False}).encode()
    with socket.create_connection((host, int(port))) as waiting:  # does not stream: leaves before anything came
        waiting.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(payload))
        waiting.sendall(payload)
        until(lambda: server.service._engine.busy, "the request's start")
    server.settled()
    assert ended(server)["abort"] == aborted + 2


def test_a_thousand_at_once_and_a_slow_reader(runner: ProgramRunner, served: Any) -> None:
    with served(lambda: Failing(runner, []), Limits(running=4, queue=2)) as server:
        flood_of_a_thousand(server)


def flood_of_a_thousand(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    payload = json.dumps(BODY | {"max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    slow = socket.create_connection((host, int(port)))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload)
    before = psutil.Process().memory_info().rss

    encoded = json.dumps(BODY | {"max_tokens": 4}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(encoded)

    async def ask() -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + encoded)
        answer = await reader.read()
        writer.close()
        result, _, body = answer.partition(b"\r\n\r\n")
        return result, body

    async def flood() -> list[tuple[bytes, bytes]]:
        return await asyncio.gather(*(ask() for _ in range(1000)))

    answers = asyncio.run(flood())
    texts = set()
    refusals = 0
    for result, body in answers:
        if b" 200 " in result.splitlines()[0]:
            texts.add(json.loads(body)["choices"][0]["text"])
        else:
            refusals += 1
            assert b" 429 " in result.splitlines()[0] and b"retry-after: 1" in result.lower()
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
    assert len(texts) == 1 and 0 < refusals < 1000
    slow.close()
    server.settled()
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_metrics_have_their_names(server: Running) -> None:
    post(server, BODY | {"prompt": "the quick brown fox jumps over the lazy dog and the other one " * 3})
    post(server, BODY | {"prompt": "the quick brown fox jumps over the lazy dog and the other one " * 3})
    text = web.get(server.url + "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['tpshard_kv_blocks{state="total"}']) == 256
    free, cached = (float(values[f'tpshard_kv_blocks{{state="{s}"}}']) for s in ("free", "cached"))
    assert free + cached == 256 and cached > 0
    assert float(values['tpshard_requests{state="running"}']) == float(values['tpshard_requests{state="waiting"}']) == 0
    assert float(values["tpshard_preemptions_total"]) == 0
    assert float(values["tpshard_prefix_hit_tokens_total"]) > 0
    assert float(values['tpshard_time_to_first_token_seconds_bucket{le="+Inf"}']) > 0
    assert "tpshard_time_between_tokens_seconds_sum" in values


def test_the_key_is_asked_for_on_every_route(runner: ProgramRunner, served: Any) -> None:
    with served(lambda: Failing(runner, []), Limits(), Access("secret")) as server:
        for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/docs", "/nowhere", "/health/x", "//health", "/"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": ""}):
                response = web.get(server.url + path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert web.post(server.url + "/v1/completions", content=b" " * 10**7).status_code == 401
        for path in ("/health", "/ready"):
            assert web.get(server.url + path).status_code == 200
            assert set(web.get(server.url + path).json()) - {"programs"} == {"status"}
        key = {"Authorization": "Bearer secret"}
        for path in ("/health", "/ready", "/v1/models", "/v1/models/tiny"):  # load balancers ask with HEAD
            got, head = (web.request(method, server.url + path, headers=key) for method in ("GET", "HEAD"))
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(got.content))
        assert web.head(server.url + "/metrics").status_code == 401
        assert web.post(server.url + "/health").status_code == 405
        with openai.OpenAI(base_url=server.url + "/v1", api_key="secret") as client:
            assert [m.id for m in client.models.list()] == ["tiny"]


class Failing:
    """A runner whose steps fail on request."""

    def __init__(self, runner: ProgramRunner, failures: list[BaseException]) -> None:
        self.runner, self.failures = runner, failures
        self.closed_annotation = self.gone = False

    def check(self) -> None:
        if self.gone:
            raise WorkerLost("rank 1 has ended")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        if self.failures:
            raise self.failures.pop()
        return self.runner.step(batch, picks)

    def close(self) -> None:
        self.closed_annotation = True


def test_a_lost_worker_fails_its_requests_at_once_and_is_replaced(runner: ProgramRunner, served: Any) -> None:
    failures: list[BaseException] = []
    actual: list[Failing] = []
    starting, held = threading.Event(), threading.Event()

    def make() -> Any:
        if actual:
            starting.set()
            assert held.wait(PATIENCE)
        actual.append(Failing(runner, failures))
        return actual[-1]

    with served(make, Limits()) as server:
        expected = post(server, BODY)["choices"][0]["text"]
        failures.append(MemoryError("out of memory"))  # fails this batch, not the server
        assert refusal(server, json=BODY)[0] == 503
        assert web.get(server.url + "/health").status_code == 200
        assert len(actual) == 1
        failures.append(WorkerLost("rank 1 was killed"))
        status, error = refusal(server, json=BODY)
        assert status == 503 and not held.is_set()  # before another one is there
        assert error["type"] == "server_error"
        assert starting.wait(PATIENCE)
        assert actual[0].closed_annotation
        assert web.get(server.url + "/health").status_code == 503
        assert web.get(server.url + "/ready").status_code == 503
        assert refusal(server, json=BODY)[0] == 503
        held.set()
        until(lambda: web.get(server.url + "/health").status_code == 200, "another worker")
        assert post(server, BODY)["choices"][0]["text"] == expected
        server.settled()
        assert ended(server) == {"length": 2, "error": 2}


def test_a_worker_that_is_lost_between_requests_is_replaced(
    runner: ProgramRunner, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "LOOK_S", 0.01)
    actual: list[Failing] = []

    def make() -> Any:
        actual.append(Failing(runner, []))
        return actual[-1]

    with served(make, Limits()) as server:
        expected = post(server, BODY)["choices"][0]["text"]
        actual[0].gone = True
        until(lambda: len(actual) == 2 and web.get(server.url + "/health").status_code == 200, "another worker")
        assert actual[0].closed_annotation and post(server, BODY)["choices"][0]["text"] == expected


def test_a_request_that_takes_too_long_is_ended(runner: ProgramRunner, served: Any) -> None:
    class Slow(Failing):
        def step(self, batch: StepInput, picks: Picks) -> Picked:
            time.sleep(0.01)
            return super().step(batch, picks)

    with served(lambda: Slow(runner, []), Limits(request_s=0.2, body_s=0.3)) as server:
        status, error = refusal(server, json=BODY | {"max_tokens": 490, "ignore_eos": True, "prompt": [9] * 20})
        assert (status, error["code"]) == (408, "timeout")
        server.settled()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in slow.recv(4096).splitlines()[0]


@pytest.mark.parametrize(
    ("first", "answer"),
    [
        (b"", b""),
        (b"GET /ready HTTP/1.1\r\nHost: a\r\nX: ", b"HTTP/1.1 408 "),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n", b"HTTP/1.1 401 "),
    ],
    ids=["nothing", "header", "body"],
)
def test_a_connection_that_asks_for_nothing_is_closed(hasty: Running, first: bytes, answer: bytes) -> None:
    host, port = hasty.url.removeprefix("http://").split(":")
    got, ended, began = b"", False, time.monotonic()
    with socket.create_connection((host, int(port)), timeout=0.1) as slow, httpx.Client(timeout=PATIENCE) as used:
        slow.sendall(first)
        while not ended and time.monotonic() < began + PATIENCE:
            try:
                part = slow.recv(4096)
                got, ended = got + part, not part
            except TimeoutError:
                pass
            except ConnectionResetError:  # how a byte is answered that was sent after the other side had closed
                ended = True
            with contextlib.suppress(OSError):
                slow.sendall(b"x" if first else b"")  # bytes that end nothing
            assert used.get(hasty.url + "/health").status_code == 200  # one that asks lives on
    assert ended and time.monotonic() - began > 0.9, "what comes in time is waited for"
    assert got[:13] == answer


def test_an_aborted_sequence_that_never_ran_is_no_leak(server: Running) -> None:
    sequences = [Sequence((1, 2, 3), Sampling(), 4) for _ in range(3)]
    server.service.submit(sequences, lambda events: None)
    server.service.cancel(sequences)
    server.settled()


@torch.no_grad()
def likelihoods(peer: Any, context: list[int], continuation: list[int]) -> tuple[list[float], list[float]]:
    """The log-probabilities of the continuation's tokens, and of the likeliest token at each place."""
    logits = peer(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1)
    return logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0].tolist(), logprobs.max(-1).values.tolist()


def test_log_likelihoods_are_those_of_transformers(server: Running, model: torch.nn.Module, tmp_path: Any) -> None:
    """Requests are those of lm-eval's `local-completions`, for 24 items."""
    from tpshard.models import to_hf
    from transformers import AutoModelForCausalLM

    to_hf(model, tmp_path / "hf")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).double()
    draw = random.Random(0)
    ours, rounded = [], []
    for _ in range(24):
        lengths = draw.randrange(1, 60), draw.randrange(1, 12)
        context, continuation = ([draw.randrange(2, 300) for _ in range(n)] for n in lengths)
        body = {
            "model": "tiny", "prompt": [context + continuation], "max_tokens": 1, "temperature": 0, "echo": True,
            "logprobs": 1, "seed": 1234,
        }  # fmt: skip
        (choice,) = post(server, body)["choices"]
        actual = choice["logprobs"]["token_logprobs"][len(context) : -1]
        greedy = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][len(context) : -1]]
        expected = likelihoods(exact, context, continuation)
        for inputs, errors in (((actual, greedy), ours), (likelihoods(peer, context, continuation), rounded)):
            errors += [abs(sum(inputs[0]) - sum(expected[0])), *(abs(a - b) for a, b in zip(inputs[1], expected[1]))]
    # sharpened weights make rounding large, and every CPU rounds otherwise: near the exact value as transformers' fp32
    assert max(ours) <= 2 * max(rounded) + 1e-5


def test_tokens_of_a_text_are_its_tokens(server: Running, client: openai.OpenAI) -> None:
    def ask(path: str, **body: Any) -> Any:
        response = web.post(f"{server.url}/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    text = "the quick fox 🦊"
    asked = ask("tokenize", model="tiny", prompt=text, return_token_strs=True)
    assert set(asked) == {"count", "max_model_len", "tokens", "token_strs"}
    assert asked["count"] == len(asked["tokens"]) == len(asked["token_strs"]) and asked["max_model_len"] == 512
    assert asked["token_strs"][0] == "<|begin|>" and asked["tokens"][0] == 0
    assert ask("detokenize", tokens=asked["tokens"]) == {"prompt": "<|begin|>" + text}
    plain = ask("tokenize", prompt=text, add_special_tokens=False)
    assert plain["tokens"] == asked["tokens"][1:] and plain["token_strs"] is None
    messages: Any = [{"role": "user", "content": "hi"}]
    usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert usage and ask("tokenize", messages=messages)["count"] == usage.prompt_tokens
    assert ask("tokenize", messages=messages, add_generation_prompt=False)["count"] < usage.prompt_tokens
    assert refusal(server, "/tokenize", json={"model": "x", "prompt": "a"})[0] == 404
    assert refusal(server, "/detokenize", json={"tokens": [300]})[1]["param"] == "tokens"
    assert set(web.get(server.url + "/version").json()) == {"version"}


def test_an_answer_has_at_least_its_least_tokens(server: Running) -> None:
    body = BODY | {"ignore_eos": False, "logit_bias": {"1": 100}, "logprobs": 0}  # 1 ends an answer
    for least in (0, 3):
        choice = post(server, body | {"min_tokens": least, "temperature": 0})["choices"][0]
        assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["tokens"]) == least
    assert refusal(server, json=body | {"min_tokens": 9})[1]["param"] == "min_tokens"
    free = post(server, BODY | {"max_tokens": 30})["choices"][0]["text"]
    stopped = post(server, BODY | {"max_tokens": 30, "min_tokens": 30, "stop": [free[:2]]})["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (free, "length")


def test_an_answer_goes_on_from_the_last_message(server: Running) -> None:
    question = {"role": "user", "content": "the fox?"}
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    rendered = "<|begin|>user: the fox?\nassistant: the quick"
    tokens = web.post(server.url + "/tokenize", json={"prompt": rendered, "add_special_tokens": False}).json()["tokens"]
    expected = post(server, body | {"prompt": tokens})["choices"][0]["text"]
    messages = [question, {"role": "assistant", "content": "the quick"}]
    chat = post(server, body | {"messages": messages, "continue_final_message": True}, "chat/completions")
    assert chat["choices"][0]["message"]["content"] == expected


def test_the_models_defaults_are_shown_and_hold(runner: ProgramRunner, served: Any) -> None:
    with served(lambda: Failing(runner, []), Limits(), temperature=0.0, usual_max_tokens=5) as server:
        assert web.get(server.url + "/v1/models/tiny").json()["generation_defaults"] == {
            "temperature": 0.0, "max_tokens": 5,
        }  # fmt: skip
        said = {"model": "tiny", "prompt": "the quick brown", "ignore_eos": True}
        silent = post(server, said)
        assert silent["usage"]["completion_tokens"] == 5
        assert silent["choices"][0]["text"] == post(server, BODY | {"max_tokens": 5})["choices"][0]["text"]
        warm = {post(server, said | {"temperature": 1.5, "seed": i})["choices"][0]["text"] for i in range(4)}
        assert len(warm) > 1


def test_pages_of_the_recipes_origins_may_ask(runner: ProgramRunner, served: Any) -> None:
    access = Access("secret", ("https://chat.example",))
    with served(lambda: Failing(runner, []), Limits(), access) as server:
        page = {"origin": "https://chat.example"}
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        response = web.options(server.url + "/v1/completions", headers=page | asks)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in response.headers["access-control-allow-headers"]
        refused = web.get(server.url + "/v1/models", headers=page)  # a page can read why it is refused
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == page["origin"]
        other = web.get(server.url + "/health", headers={"origin": "https://attacker.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_failure_while_text_is_made_is_an_error_in_openais_shape(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException): ...

    def fail(self: Any, token: int, last: bool = False) -> str:
        raise Panic("of the tokenizer")

    monkeypatch.setattr(Writer, "add", fail)
    status, error = refusal(server, json=BODY)
    assert (status, error["type"]) == (500, "server_error")
    with web.stream("POST", server.url + "/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.status_code == 500
    monkeypatch.undo()
    server.settled()
    assert post(server, BODY)["choices"][0]["text"]
