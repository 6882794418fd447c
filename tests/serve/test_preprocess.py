"""Requests are prepared in processes that may fail in any way; the client gets an error, and the next one an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Rust
from tpshard.models.folders.chat_template import ChatTemplate
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.serve.api import preprocess_pool
from tpshard.serve.api.field_checks import Refused
from tpshard.serve.api.preprocess import Prepared, Preprocessor
from tpshard.serve.api.preprocess_pool import PreprocessPool, PreprocessSetup

RUNNER = asyncio.Runner()
"""One event loop for all tests: a pool belongs to one."""
MEMORY, LOOP = "0", "1"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == '0' %}{{ 'x' * 10 ** 10 }}{% elif m.content == '1' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def panics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose regular expression gives up on `aaa...b`, by a panic that is no Exception."""
    folder = tmp_path_factory.mktemp("panics")
    tokenizer = Rust(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def pool(panics: Path) -> Iterator[PreprocessPool]:
    result = PreprocessPool(PreprocessSetup(str(panics), None, TEMPLATE, "m", {}), each=1)
    yield result
    result.close()


def run(*jobs: Coroutine[Any, Any, Any]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*jobs, return_exceptions=True)

    return RUNNER.run(together())


def completion(prompt: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


def chat(content: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


def refusal(pool: PreprocessPool, kind: str, raw: bytes) -> Refused:
    (result,) = run(pool.run(kind, raw, 1000, 2))
    assert isinstance(result, Refused), result
    return result


def test_what_a_process_prepares_is_what_is_prepared_here(pool: PreprocessPool, panics: Path) -> None:
    tokenizer = FolderTokenizer(panics)
    here = Preprocessor("m", tokenizer, ChatTemplate(TEMPLATE, tokenizer.special))
    more = {"seed": 1, "stop": ["x"], "logit_bias": {"1": 2}, "echo": True, "n": 2, "stop_token_ids": [0], "top_k": 3}
    raw = json.dumps({"model": "m", "prompt": ["a", [0, 1]]} | more).encode()
    (there,) = run(pool.run("completion", raw, 1000, 2))
    assert there == here.run("completion", raw, 1000, 2)
    assert isinstance(there, Prepared) and there.prompts == ((0,), (0, 1))
    (tokens,) = run(pool.run("tokenize", b'{"prompt": "a"}', 1000, 2))
    assert json.loads(tokens) == here.run("tokenize", b'{"prompt": "a"}', 1000, 2)


def test_a_panic_of_the_tokenizer_is_an_error_of_the_server(pool: PreprocessPool) -> None:
    for kind, raw in (("completion", completion("a" * 60 + "b")), ("chat", chat("a" * 60 + "b"))):
        error = refusal(pool, kind, raw)
        assert (error.status, error.kind, error.code) == (500, "server_error", "tokenizer_failed")
    assert run(pool.run("completion", completion("a"), 1000, 2))[0].prompts == ((0,),)


def test_a_template_without_end_is_unavailable_and_one_without_memory_fails(pool: PreprocessPool) -> None:
    slow, large = refusal(pool, "chat", chat(LOOP)), refusal(pool, "chat", chat(MEMORY))
    assert (slow.status, slow.kind, slow.retry_after) == (503, "server_error", 1)
    assert (large.status, large.code) == (400, "chat_template_failed") and "memory" in large.message
    assert run(pool.run("chat", chat("a"), 1000, 2))[0].prompts == ((0,),)


def test_a_process_that_ends_or_hangs_is_replaced(pool: PreprocessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def while_it(happens: Callable[[int], None]) -> list[Any]:
        (process,) = pool._lanes[0]._queue  # type: ignore[attr-defined]
        happens(process.process.pid)
        jobs = (pool.run("completion", completion("a"), 1000, 2) for _ in range(3))
        return await asyncio.gather(*jobs, return_exceptions=True)

    for number in (signal.SIGKILL, signal.SIGSTOP):
        monkeypatch.setattr(preprocess_pool, "WAIT_S", 1.0 if number == signal.SIGSTOP else 600.0)
        lost, *rest = RUNNER.run(while_it(lambda pid: os.kill(pid, number)))  # noqa: B023
        monkeypatch.setattr(preprocess_pool, "WAIT_S", 600.0)
        assert isinstance(lost, Refused) and (lost.status, lost.retry_after) == (503, 1)
        for one in rest if number == signal.SIGKILL else run(pool.run("completion", completion("a"), 1000, 2)):
            assert one.prompts == ((0,),)


def test_a_large_body_delays_no_small_one(pool: PreprocessPool) -> None:
    async def order() -> list[str]:
        ended: list[str] = []

        async def ask(name: str, raw: bytes) -> None:
            await asyncio.gather(pool.run("completion", raw, 1000, 2), return_exceptions=True)
            ended.append(name)

        (held,) = pool._lanes[1]._queue  # type: ignore[attr-defined]
        os.kill(held.process.pid, signal.SIGSTOP)
        large = asyncio.ensure_future(ask("large", completion([[0]] * 40_000)))
        await ask("small", completion("a"))
        os.kill(held.process.pid, signal.SIGCONT)
        await large
        return ended

    assert RUNNER.run(order()) == ["small", "large"]


def test_a_client_that_leaves_does_not_shift_the_answers(pool: PreprocessPool) -> None:
    async def leave() -> Any:
        for _ in range(3):
            job = asyncio.ensure_future(pool.run("completion", completion(["a"] * 60), 1000, 2))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            job.cancel()
        return await pool.run("completion", completion([1, 0, 1]), 1000, 2)

    assert RUNNER.run(leave()).prompts == ((1, 0, 1),)
