"""Paths that cannot exist, disks and limits end a command with their code, never as a bug."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tpshard.cli import main
from tpshard.cli.worker_errors import describe
from tpshard.recipes.diagnostic import Exit


@pytest.mark.parametrize(
    "line", ["validate {}", "plan --dry-run {}", "recipes cp tiny {}", "convert tiny {}", "convert {} out",
             "convert tiny out --tokenizer {}", "plan tiny --dry-run --html {}", "plan --check {}",
             "serve tiny serve.checkpoint={}", "plan tiny run.dir={}"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["n" * 300, "loop/x"], ids=["long", "loop"])
def test_a_path_that_cannot_exist_is_no_bug(
    line: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    code, errors = main.run(line.format(name).split()), capsys.readouterr().err
    assert code in (Exit.USAGE, Exit.MACHINE, Exit.CHECKPOINT) and "error: " in errors and "bug" not in errors, errors
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "pool"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "processes and threads"),
        (OSError(errno.EROFS, "Read-only file system", "x"), "x: Read-only file system"),
        (MemoryError(), "memory"),
        (RuntimeError("can't start new thread"), "processes and threads"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "9 bytes"),
        (ImportError("x.so: failed to map segment from shared object"), "failed to map"),
    ],
    ids=str,
)
def test_limits_of_the_machine_are_5(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def limited(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tpshard.cli.preflight.load_checked", limited)
    assert main.run(["validate", "tiny"]) == Exit.MACHINE
    assert words in capsys.readouterr().err
    text, code = describe(error)
    assert code == Exit.MACHINE and words in text and "bug" not in text
