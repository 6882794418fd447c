"""Fixtures of the server's tests: a small random model, and one runner of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from patience import until
from servers import runner_of
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from tpshard.models import build
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.serve.api.access import Access
from tpshard.serve.api.app import Server, make_app
from tpshard.serve.api.connections import CappedServer
from tpshard.serve.api.http import bind, server_config
from tpshard.serve.api.metrics import Metrics
from tpshard.serve.api.preprocess_pool import PreprocessPool, PreprocessSetup
from tpshard.serve.api.service import Limits, Service
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.step import Runner

CONFIG = ModelConfig(
    family="llama", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=300, max_seq=512, seq_len=128,
    dtype="fp32",
)  # fmt: skip


OPEN_ACCESS = Access()


def sharpen(config: ModelConfig, seed: int = 1) -> torch.nn.Module:
    """Random weights, large enough for varied answers."""
    model = build(config, device="cpu", seed=seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    return sharpen(CONFIG)


@pytest.fixture(scope="session")
def runner(model: torch.nn.Module) -> ProgramRunner:
    return runner_of(model, blocks=256)


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of 300 tokens with a chat template, in a folder as Hugging Face writes them."""
    tokenizer = Rust(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and the other one"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    service: Service
    make: Callable[[], Runner]
    pool: PreprocessPool

    def settled(self) -> None:
        """Waits until nothing runs, then asserts that all cache blocks are free."""
        until(lambda: self.service.idle and not self.service._engine.busy, "the end of all requests")
        pool = self.service._engine.pool
        assert pool.available == pool.total


@contextlib.contextmanager
def serving(
    make: Callable[[], Runner],
    folder: Path,
    limits: Limits,
    access: Access = OPEN_ACCESS,
    connections: int = 2048,
    adapters: Mapping[str, str] = MappingProxyType({}),
    adapter_root: Path | None = None,
    **defaults: Any,
) -> Iterator[Running]:
    service = Service(make, limits, Metrics(), adapters)
    service.start()
    tokenizer = FolderTokenizer(folder)
    pool = PreprocessPool(PreprocessSetup(str(folder), None, tokenizer.chat_template, "tiny", defaults), each=1)
    sock = bind("127.0.0.1", 0)
    app = make_app(Server("tiny", service, tokenizer, pool, defaults=defaults, adapter_root=adapter_root), access)
    server = CappedServer(server_config(app, limits), most=connections)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        until(lambda: server.started, "the server's start")
        yield Running(f"http://127.0.0.1:{sock.getsockname()[1]}", service, make, pool)
    finally:
        server.should_exit = True
        thread.join()
        service.close()
        pool.close()


class Kept:
    """A runner shared by several tests: a server does not close it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self) -> None: ...


@pytest.fixture(scope="session")
def server(runner: ProgramRunner, tokenizer_folder: Path) -> Iterator[Running]:
    with serving(lambda: Kept(runner), tokenizer_folder, Limits(running=16, queue=32, body_bytes=1 << 16)) as running:
        yield running


@pytest.fixture(scope="session")
def served(tokenizer_folder: Path) -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """A context with a separate server: `served(make_runner, limits, access, **defaults)`."""
    return lambda make, limits, *rest, **defaults: serving(make, tokenizer_folder, limits, *rest, **defaults)
