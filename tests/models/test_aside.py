"""Folders and files appear complete or not at all, whatever earlier or other writers left or do."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tpshard.files.atomic import write_aside, write_file

WRITER = (
    "import sys, time; from tpshard.files.atomic import write_aside\n"
    "with write_aside(sys.argv[1]) as aside:\n"
    "    (aside / 'half').write_text('x'); print('writing', flush=True); time.sleep(600)\n"
)


@pytest.mark.parametrize("name", ["out", "a[b]*", "n" * 255, "é" * 127], ids=["plain", "pattern", "long", "bytes"])
def test_what_a_killed_writer_leaves_hinders_nobody_and_is_removed(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(out)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
    writer.kill()
    writer.wait()
    assert not out.exists() and list(tmp_path.iterdir())
    with write_aside(out) as aside:
        (aside / "whole").write_text("x")
    assert list(tmp_path.iterdir()) == [out] and [path.name for path in out.iterdir()] == ["whole"]


def test_writers_of_one_folder_with_one_process_number_do_not_meet(tmp_path: Path) -> None:
    """As in two containers, whose processes are all number 1: the first to finish has the name."""
    out = tmp_path / "out"
    with pytest.raises(FileExistsError, match="name a new folder"), write_aside(out) as first:
        (first / "a").write_text("first")
        with write_aside(out) as second:
            assert first.exists(), "the folder of a living writer was taken for a dead one's"
            (second / "a").write_text("second")
    assert (out / "a").read_text() == "second" and list(tmp_path.iterdir()) == [out]


def test_a_folder_without_a_lock_is_not_judged_dead(tmp_path: Path) -> None:
    mine = tmp_path / ".out.writing-mine"
    mine.mkdir()
    with write_aside(tmp_path / "out"):
        pass
    assert mine.exists()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_new_file_never_replaces_another(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / ("f" * 255)
    write_file(path, "one", overwrite=False)
    with pytest.raises(FileExistsError):
        write_file(path, "two", overwrite=False)
    assert path.read_text() == "one"
    write_file(path, "three")
    assert path.read_text() == "three" and list(tmp_path.iterdir()) == [path]


def test_nothing_replaces_a_device_a_pipe_a_socket_or_what_is_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        (tmp_path / "device").symlink_to("/dev/null")
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("kept")
        before = {path.name: path.lstat().st_ino for path in tmp_path.iterdir()}
        for name in ("pipe", "socket", "device", "folder"):
            with pytest.raises(FileExistsError):
                write_file(tmp_path / name, "new", overwrite=True)
        for name in ("pipe", "socket", "device", "file"):
            with pytest.raises(FileExistsError), write_aside(tmp_path / name, overwrite=True):
                raise AssertionError("it was begun")
        assert {path.name: path.lstat().st_ino for path in tmp_path.iterdir()} == before
        assert (tmp_path / "file").read_text() == "kept"
