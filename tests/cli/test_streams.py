"""Standard streams that cannot be written change nothing that a command does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from patience import PATIENCE
from tpshard.cli.main import main
from tpshard.cli.shared.streams import TolerantWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_reader_that_has_gone_is_noted_once(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = TolerantWriter(pipe[1])
    assert writer.write(b"one") == 3 and writer.write(b"more") == 4
    assert isinstance(writer.failure, BrokenPipeError)


def test_a_full_disk_is_noted() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = TolerantWriter(full.fileno())
        assert writer.write(b"x") == 1 and writer.failure is not None and writer.failure.errno == errno.ENOSPC


def test_a_pipe_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    data, writer, read = b"x" * (1 << 20), TolerantWriter(pipe[1]), bytearray()
    assert fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ) < len(data)

    def reader() -> None:
        while len(read) < len(data):
            read.extend(os.read(pipe[0], 1 << 16))

    thread = threading.Thread(target=reader)
    thread.start()
    rest = memoryview(data)
    while rest:
        rest = rest[writer.write(rest) :]
    thread.join(PATIENCE)
    assert bytes(read) == data and writer.failure is None


def test_a_check_that_cannot_be_printed_is_not_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `serve` the exit code tells what was served; of `serve --check` and of a help what is printed is the result.
    A copy was written where its name cannot be printed."""
    monkeypatch.setattr("tpshard.cli.main.run", lambda line: print("printed") or 0)  # type: ignore[func-returns-value]
    done, lost = ("serve r", "recipes cp quickstart"), ("serve r --check", "train --help", "plan", "recipes ls")
    for line in done + lost:
        with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
            patch.setattr("tpshard.cli.shared.streams.prepare", lambda: None)
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(TolerantWriter(full.fileno()))))
            with pytest.raises(SystemExit) as ended:
                main(line.split())
        assert ended.value.code == (5 if line in lost else 0), line
        said = "error" if line in lost else "warning"
        assert f"{said}: stdout cannot be written" in capsys.readouterr().err


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    code = (
        "import os; from tpshard.cli.shared import streams; streams.prepare(); print('lost'); "
        "os._exit(0 if os.open('/dev/null', 0) > 2 else 1)"
    )
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], timeout=PATIENCE)
        assert done.returncode == 0, closed


def test_a_command_that_loads_triton_ends_quietly() -> None:
    pytest.importorskip("triton")
    code = "import triton, sys; from tpshard.cli.main import main; main(['version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert "leaked" not in done.stderr
