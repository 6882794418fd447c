"""Workers meet within their time limit, whatever else answers, and leave nothing for others to use."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from tpshard.parallelism.runtime import rendezvous
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.parallelism.runtime.place import WorkerPlace


@pytest.fixture(params=["silent", "http"])
def foreign(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a program that is no store of a run."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as held:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = held.enter_context(server.accept()[0])
                    if request.param == "http":
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 10)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_foreign_program_at_the_rendezvous_is_told_in_time(foreign: int) -> None:
    place = WorkerPlace(1, 2, 0, 1, f"tcp:127.0.0.1:{foreign}", "tpshard")
    with pytest.raises(WorkerFault, match=f"rank 1 could not connect to 127.0.0.1:{foreign} within 1 s") as caught:
        rendezvous.meet(place, 1)
    assert caught.value.exit == 9 and caught.value.why


def test_workers_of_another_run_at_the_same_port_are_never_joined() -> None:
    """Two SLURM steps whose ports are equal: all tasks of each wait for their own, until their time is over."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def join(rank: int) -> str:
        place = WorkerPlace(rank, 2, 0, 1, f"tcp:127.0.0.1:{port}#{'other' if rank else 'one'}", "slurm")
        with pytest.raises(WorkerFault) as caught:
            rendezvous.meet(place, 2)
        assert caught.value.exit == 9
        return str(caught.value.why)

    assert together(2, join)[0] == "missing: rank 1"


def together(world: int, work: Callable[[int], Any]) -> dict[int, Any]:
    """The results of `work` by rank, each in a thread of its own."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def test_workers_find_their_number_on_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {0: "a", 1: "b", 2: "a", 3: "b", 4: "a"}
    rank_of_thread = threading.local()
    monkeypatch.setattr(rendezvous, "_host", lambda: hosts[rank_of_thread.rank])

    def join(rank: int) -> tuple[int, int]:
        rank_of_thread.rank = rank
        place = WorkerPlace(rank, 5, -1, 1, f"file:{tmp_path / 'store'}", "torchrun")
        _, found = rendezvous.meet(place, PATIENCE)
        return found.local_rank, found.local_world

    assert together(5, join) == {0: (0, 3), 1: (0, 2), 2: (1, 3), 3: (1, 2), 4: (2, 3)}


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    place = WorkerPlace(0, 3, 0, 1, f"file:{tmp_path / 'store'}", "torchrun")
    with pytest.raises(WorkerFault) as caught:
        rendezvous.meet(place, 0.2)
    assert caught.value.exit == 9 and caught.value.why == "missing: rank 1, 2"


def test_the_tasks_of_a_step_share_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the second run of a step, and after one that was killed."""
    deep = tmp_path / ("d" * 120)  # longer than the address of a socket may be
    deep.mkdir()
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(deep))
    folder = rendezvous.own_folder()
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as left:
        left.bind("7-0-0-cafe")

    def share(rank: int) -> tuple[int, int]:
        place = WorkerPlace(rank, 3, rank, 3, "unix:7-0-0-cafe", "slurm")
        deadline = time.monotonic() + PATIENCE
        status = os.fstat(rendezvous._shared_file(folder, "7-0-0-cafe", place, PATIENCE, deadline))
        return status.st_ino, status.st_nlink

    runs = [together(3, share) for _ in range(2)]
    for shared in runs:
        assert len(shared) == 3 and len(set(shared.values())) == 1 and shared[0][1] == 0
    assert runs[0][0] != runs[1][0] and list(folder.iterdir()) == []


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"tpshard-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    for _ in range(2):
        with pytest.raises(WorkerFault, match="not a folder of this user alone") as caught:
            rendezvous.own_folder()
        assert caught.value.exit == 5
        if not folder.is_symlink():
            folder.rmdir()
            (tmp_path / "mine").mkdir(0o700)
            folder.symlink_to(tmp_path / "mine")
