"""Paths that cannot exist, disks and limits end a command with their code, never as a bug."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tpshard.cli import main
from tpshard.cli.shared import machine_errors
from tpshard.cli.shared.worker_errors import describe
from tpshard.diagnostics.diagnostic import Exit


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
        (RuntimeError("[enforce fail at loop.cc:105] epoll_create: Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "processes and threads"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "9 bytes"),
        (RuntimeError("std::bad_alloc"), "bad_alloc"),
        (ImportError("x.so: failed to map segment from shared object"), "failed to map"),
    ],
    ids=str,
)
def test_limits_of_the_machine_are_5(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def limited(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tpshard.cli.preflight.preflight.load_checked", limited)
    assert main.run(["validate", "tiny"]) == Exit.MACHINE
    assert words in capsys.readouterr().err
    text, code = describe(error)
    assert code == Exit.MACHINE and words in text and "bug" not in text


def test_an_extension_that_forgets_its_error_at_the_limit_of_memory_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SystemError("error return without exception set")
    assert machine_errors.of_machine(error) is None
    monkeypatch.setattr(machine_errors.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    diagnostic = machine_errors.of_machine(error)
    assert diagnostic is not None and diagnostic.exit == Exit.MACHINE and "memory" in diagnostic.message


def test_an_error_is_reported_without_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def empty(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tpshard.cli.preflight.preflight.load_checked", empty)
    monkeypatch.setattr(main, "report", empty)
    assert main.run(["validate", "tiny"]) == Exit.MACHINE
    assert "no more memory" in capsys.readouterr().err
