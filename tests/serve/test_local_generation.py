"""`tpshard generate` and `tpshard chat` answer as a server does, without one."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.models import to_hf
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.runner import ProgramRunner

SMALL = ["serve.requests=8", "serve.step_tokens=8", "cluster.device=cpu"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("hf") / "model"
    to_hf(model, result, tokenizer=tokenizer_folder)
    return result


def engines_text(runner: ProgramRunner, folder: Path, text: str) -> str:
    """The engine's greedy continuation, up to the end of the text."""
    tokenizer, engine = FolderTokenizer(folder), Engine(runner)
    prompt = tuple(tokenizer.encode(text))
    sequence = Sequence(prompt, Sampling(temperature=0), 8, stop_tokens=tokenizer.stop_tokens)
    engine.add(sequence)
    while engine.busy:
        engine.step()
    return tokenizer.decode(sequence.tokens)[len(tokenizer.decode(prompt)) :]


def test_generate_continues_a_text(
    folder: Path, runner: ProgramRunner, capsys: pytest.CaptureFixture[str], copies: None
) -> None:
    assert run(["generate", str(folder), "the quick", *SMALL, *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == engines_text(runner, folder, "the quick") + "\n"
    assert "8 tokens, ended by length" in err


def test_chat_keeps_the_conversation_and_ends_with_exit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, copies: None
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand then?\n/exit\nnever\n"))
    assert run(["chat", str(folder), *SMALL, *GREEDY, "--json", "--system", "be brief"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    tokenizer = FolderTokenizer(folder)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, special=False))

    asked = "<|begin|>system: be brief\nuser: hello\nassistant: "
    assert first["usage"]["prompt_tokens"] == count(asked)
    answered = asked.removesuffix("assistant: ") + f"assistant: {first['choices'][0]['message']['content']}\n"
    assert second["usage"]["prompt_tokens"] == count(answered + "user: and then?\nassistant: ")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run([*arguments])
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_what_cannot_be_answered_is_told_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("tpshard.cli.serve.start_service", load)
    code, err = refused(capsys, "generate", str(folder), "a", "train.steps=3")
    assert code == Exit.USAGE and "`generate` does not obey `train.steps`" in err
    code, err = refused(capsys, "generate", str(folder), "a", "--temperature", "-1", *SMALL)
    assert code == Exit.USAGE and "`temperature` is not between" in err
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    config = json.loads((plain / "tokenizer_config.json").read_text())
    (plain / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    code, err = refused(capsys, "chat", str(plain), *SMALL)
    assert code == Exit.DATA and "has no chat template" in err and "tpshard generate" in err
    (plain / "generation_config.json").write_text('{"temperature": "hot"}')
    code, err = refused(capsys, "generate", str(plain), "a", *SMALL)
    assert code == Exit.CHECKPOINT and "`temperature` is not a finite number" in err
    secret = tmp_path / "secret.jinja"
    secret.write_text("{{ messages }}")
    (plain / "chat_template.jinja").symlink_to(secret)
    code, err = refused(capsys, "chat", str(plain), *SMALL)
    assert code == Exit.DATA and "a link that leads out of the folder" in err
