"""A run's folder is locked by one living run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import until
from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.files.atomic import write_aside
from tpshard.files.file_lock import unlocked
from tpshard.train.records.records import Records, note_saved
from tpshard.train.run import run_lock
from tpshard.train.run.run_lock import Holder, RunLock, Taken
from tpshard.train.run.rundir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from tpshard.train.run.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_and_told_who_the_first_is_until_that_is_killed(tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    with pytest.raises(Mistakes) as caught:
        RunDir(tmp_path / "run", where=Source("recipe.yaml", 3, 1, "run: {dir: run}"))
    assert caught.value.exit == Exit.MACHINE
    assert f"process {first.pid} on {socket.gethostname()}" in str(caught.value)
    assert "recipe.yaml:3:1" in str(caught.value)
    first.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # all its threads have ended; it is still a zombie
    with RunDir(tmp_path / "run") as second:
        assert json.loads((second.path / "lock.json").read_text())["pid"] == os.getpid()
    first.wait()
    assert not (tmp_path / "run" / "lock.json").exists()


def plant(path: Path, **changes: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "lock.json").write_text(json.dumps({**vars(Holder.this()), **changes}))


def test_a_lock_of_another_host_is_never_reclaimed(tmp_path: Path) -> None:
    plant(tmp_path, host="elsewhere", pid=2**22 - 1, started="gone")
    with pytest.raises(Mistakes, match="on elsewhere"):
        RunDir(tmp_path)


def test_a_process_number_that_was_given_out_again_is_not_the_holder(tmp_path: Path) -> None:
    plant(tmp_path, started="another boot:17")  # this very number, but another process
    RunDir(tmp_path).close()
    plant(tmp_path)
    with pytest.raises(Mistakes):
        RunDir(tmp_path)


def test_a_lock_that_cannot_be_read_is_respected(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text("")
    with pytest.raises(Mistakes, match=r"lock\.json"):
        RunDir(tmp_path)


def test_of_many_that_find_a_dead_holder_one_gets_the_lock(tmp_path: Path) -> None:
    plant(tmp_path, started="another boot:17")
    folders: list[RunDir] = []
    refused: list[Mistakes] = []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        try:
            folders.append(RunDir(tmp_path))
        except Mistakes as mistakes:
            refused.append(mistakes)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(folders), len(refused)) == (1, 7)


def test_what_lies_in_it(tmp_path: Path) -> None:
    with RunDir(tmp_path / "a" / "b") as run:
        assert run.attempt == 1
        run.write("recipe.yaml", "name: é\n")
        run.write("recipe.yaml", "name: ü\n")
        Records(run.metrics)({"step": 1, "loss": 1.0, "run": run.attempt})
        (run.checkpoints / ".step-000005.tmp").mkdir()
        assert (run.path / "recipe.yaml").read_text(encoding="utf-8") == "name: ü\n"
    with RunDir(tmp_path / "a" / "b") as again:
        assert again.attempt == 2
        assert not list(again.checkpoints.iterdir()), "what a killed save left is cleaned"
        assert {p.name for p in again.path.iterdir() if not p.name.startswith(".")} == {
            "checkpoints", "logs", "lock.json", "metrics.jsonl", "recipe.yaml",
        }  # fmt: skip


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Mistakes, match="cannot be written") as caught:
        RunDir(tmp_path / "file" / "run")
    assert caught.value.exit == Exit.MACHINE


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begin() -> None:
        with RunDir(tmp_path / "run") as run:
            monkeypatch.setattr(os, "fsync", full)
            run.write("plan.json", "{}")

    with pytest.raises(Mistakes, match=r"No space left on device, on the disk at /.* MiB free") as caught:
        begin()
    assert caught.value.exit == Exit.MACHINE
    assert not (tmp_path / "run" / "plan.json").exists() and not list((tmp_path / "run").glob(".plan.json*"))


def test_wandb_knows_a_run_by_one_name_over_all_its_attempts(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as first:
        name = first.wandb_id
    with RunDir(tmp_path / "run") as again, RunDir(tmp_path / "other") as other:
        assert again.wandb_id == name != other.wandb_id
        (again.path / "wandb" / "id").write_text("../../etc\n")
        assert again.wandb_id.isalnum()


IN_A_CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
needs_namespaces = pytest.mark.skipif(
    subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode != 0, reason="no namespaces of processes"
)


@needs_namespaces
def test_containers_with_one_host_name_and_one_folder(tmp_path: Path) -> None:
    """Neither sees the other's processes: the lock decides, while its holder lives and after it was killed."""
    first = subprocess.Popen([*IN_A_CONTAINER, sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    refused = subprocess.run([*IN_A_CONTAINER, sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True)
    assert b"another run uses" in refused.stderr and b"held" not in refused.stdout
    with pytest.raises(Mistakes, match="process 1 on"):
        RunDir(tmp_path)
    first.kill()
    first.wait()

    def is_free() -> bool:
        with unlocked(tmp_path / "lock.json") as free:
            return free

    until(is_free)
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == 1
    RunDir(tmp_path).close()


def test_many_that_begin_a_folder_at_once_do_not_refuse_one_another(tmp_path: Path) -> None:
    taken: list[RunLock] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        with contextlib.suppress(Taken):
            taken.append(RunLock(tmp_path / "lock.json"))

    for _ in range(20):
        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1 and [path.name for path in tmp_path.iterdir()] == ["lock.json"]
        taken.pop().close()


@pytest.mark.parametrize(
    ("mount", "changes", "ended"),
    [
        ("ext4", {"processes": "pid:[1]"}, True),  # another container of this machine
        ("ext4", {"started": "another boot:17", "processes": "pid:[1]"}, True),  # before the machine was restarted
        ("ext4", {"started": "another boot:17", "host": "elsewhere"}, False),  # a server of this disk does not tell
        ("nfs4 rw,local_lock=none", {"started": "another boot:17", "host": "elsewhere"}, True),
        ("nfs4 rw,local_lock=all", {"started": "another boot:17"}, False),
        ("lustre rw,flock", {"started": "another boot:17", "host": "elsewhere"}, True),
        ("lustre rw,localflock", {"started": "another boot:17"}, False),
        ("fuse.sshfs rw", {"processes": "pid:[1]"}, False),
        ("fuse.sshfs rw", {"pid": 2**22 - 1}, True),  # this machine, these processes
        ("", {"processes": "pid:[1]"}, False),
    ],
)  # fmt: skip
def test_a_free_lock_tells_that_its_holder_has_ended_where_it_would_be_seen(
    mount: str, changes: dict[str, object], ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _, options = mount.partition(" ")
    monkeypatch.setattr(run_lock, "_file_system", lambda path: (kind, options.split(",")))
    plant(tmp_path, **changes)
    if ended:
        RunDir(tmp_path).close()
        return
    with pytest.raises(Mistakes, match="cannot be told from here"):
        RunDir(tmp_path)
    assert json.loads((tmp_path / "lock.json").read_text()) == {**vars(Holder.this()), **changes}


def test_on_a_disk_without_locks_the_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunDir(tmp_path), pytest.raises(Mistakes, match="cannot be told from here"):
        RunDir(tmp_path)
    RunDir(tmp_path).close()


def test_a_run_whose_checkpoints_are_gone_knows_that_they_were(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run:
        assert run.lost_step is None, "killed before its first checkpoint, it begins again"
        (run.checkpoints / "step-000005").mkdir()
        note_saved(run.path, 5, 0.1)
        assert run.lost_step is None
        (run.checkpoints / "step-000005").rmdir()
    with RunDir(tmp_path) as again:
        assert again.lost_step == 5


@pytest.mark.parametrize("out", [".", "run", "run/checkpoints"])
def test_a_folder_that_is_written_replaces_no_run_that_goes_on(out: str, tmp_path: Path) -> None:
    place = tmp_path / "runs" / out
    with RunDir(tmp_path / "runs" / "run") as run:
        (run.checkpoints / "mine").touch()
        with pytest.raises(FileExistsError, match="a run that goes on"), write_aside(place, overwrite=True):
            pass
        assert (run.checkpoints / "mine").exists()
    with write_aside(place, overwrite=True):
        pass
