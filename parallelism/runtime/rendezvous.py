"""How the workers of a run find each other: a store that all of them share, made within a time limit.

`file:PATH` is a file that the launcher made. Tasks of a SLURM step on one host (`unix:NAME`) share a file without a
name, which rank 0 hands out over a socket in a folder of this user alone. At `tcp:HOST:PORT` and `env:` rank 0 serves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.parallelism.runtime.place import WorkerPlace, nameless_file

T = TypeVar("T")


def meet(place: WorkerPlace, start_s: float, env: Mapping[str, str] = os.environ) -> tuple[dist.Store, WorkerPlace]:
    """The store of a run once all workers have joined it, and this worker's place with its rank on this host.

    Raises WorkerFault: exit 9 where the others are not there within `start_s`, exit 5 where rank 0 cannot listen.
    """
    deadline = time.monotonic() + start_s
    store = _store(place, start_s, deadline, env)
    keys = [f"tpshard/joined/{rank}" for rank in range(place.world)]
    store.set(keys[place.rank], _host())
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except (RuntimeError, dist.DistError) as error:
        missing = ""
        with contextlib.suppress(RuntimeError, dist.DistError):
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise WorkerFault(
            f"rank {place.rank} could not join the {place.world} workers within {start_s:g} s",
            exit=Exit.WORKER_LOST,
            why=f"missing: rank {missing}" if missing else str(error).splitlines()[0],
            fix="check whether all workers were started, and whether they can reach each other",
        ) from error
    if place.local_rank < 0:
        hosts = [store.get(key) for key in keys]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[place.rank]]
        place = replace(place, local_rank=here.index(place.rank), local_world=len(here))
    return store, place


def _host() -> str:
    """What is equal for workers that share this host's devices: containers of one host may have different ones."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _store(place: WorkerPlace, start_s: float, deadline: float, env: Mapping[str, str]) -> dist.Store:
    """Connects to the store of a run, by the kind of its rendezvous."""
    kind, _, where = place.rendezvous.partition(":")
    if kind == "unix":
        where = f"/proc/self/fd/{_shared_file(own_folder(), where, place, start_s, deadline)}"
    if kind in ("file", "unix"):
        store: dist.Store = dist.FileStore(where, place.world)
        store.set_timeout(timedelta(seconds=start_s))
        return store
    if kind == "env":
        if place.rank == 0 or env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            ask = dist.rendezvous(
                "env://", rank=place.rank, world_size=place.world, timeout=timedelta(seconds=start_s)
            )  # fmt: skip
            address = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
            return within(deadline, lambda: next(iter(ask))[0], address, place, start_s)
        where = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    address, _, run = where.partition("#")
    host, _, port = address.rpartition(":")
    if place.rank == 0:
        served = _server(host.strip("[]"), int(port), place, start_s)
    else:
        served = _client(host.strip("[]"), int(port), place, start_s, deadline)
    return dist.PrefixStore(run, served) if run else served  # so that another run's at this port is told apart


def within(deadline: float, connect: Callable[[], T], address: str, place: WorkerPlace, start_s: float) -> T:
    """The result of `connect`, in a thread that is left behind at the deadline: torch waits forever for a program that
    accepts the connection and does not answer. Raises WorkerFault (exit 9) then, and the errors of `connect`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(connect())
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    thread.join(max(0.1, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if not results:
        raise _unreachable(place, address, start_s, "a program accepts the connection there, and does not answer")
    return results[0]


def _unreachable(place: WorkerPlace, address: str, start_s: float, why: str) -> WorkerFault:
    return WorkerFault(
        f"rank {place.rank} could not connect to {address} within {start_s:g} s",
        exit=Exit.WORKER_LOST,
        why=why,
        fix="start the first host (node rank 0), let the others reach that address, and give a port that no other "
        "program uses",
    )


def _server(host: str, port: int, place: WorkerPlace, start_s: float) -> dist.Store:
    """The store of rank 0, which listens only on `host`: a TCPStore by itself would listen on all addresses."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        named = "set MASTER_ADDR and MASTER_PORT to" if place.launcher == "slurm" else "give --rendezvous"
        raise WorkerFault(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror}",
            exit=Exit.MACHINE,
            fix=f"{named} an address of the first host and a free port",
        ) from error
    listener.listen(1024)
    # The store owns the descriptor from here on.
    return dist.TCPStore(
        host, port, place.world, True, timedelta(seconds=start_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _client(host: str, port: int, place: WorkerPlace, start_s: float, deadline: float) -> dist.Store:
    """Connects to rank 0's store, again and again until the deadline."""
    address = f"{host}:{port}"
    while True:
        patience = timedelta(seconds=max(1.0, min(deadline - time.monotonic(), 30)))
        connect = partial(dist.TCPStore, host, port, place.world, False, patience)
        try:
            store = within(deadline, connect, address, place, start_s)
            store.set_timeout(timedelta(seconds=start_s))
            return store
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, WorkerFault):
                raise
            if time.monotonic() > deadline:
                raise _unreachable(place, address, start_s, str(error).splitlines()[0]) from error
            time.sleep(0.2)


# ---- a SLURM step on one host ----------------------------------------------------------------------------------------
def own_folder() -> Path:
    """A folder of this user alone in the shared folder for temporary files.

    Raises WorkerFault (exit 5) where another user has made it, or may enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"tpshard-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise WorkerFault(
            f"{folder} is not a folder of this user alone",
            exit=Exit.MACHINE,
            why=f"its owner is user {status.st_uid}, its mode {stat.filemode(status.st_mode)}",
            fix="remove it, or set TMPDIR to a folder of your own",
        )
    return folder


def _shared_file(folder: Path, name: str, place: WorkerPlace, start_s: float, deadline: float) -> int:
    """The descriptor of a file that the ranks share: rank 0 makes it, and gives it to each of the others once."""
    entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = f"/proc/self/fd/{entry}/{name}"  # short enough for a socket's address, however long that of the folder
        return _give(path, place, start_s, deadline) if place.rank == 0 else _ask(path, place, start_s, deadline)
    finally:
        os.close(entry)


def _give(path: str, place: WorkerPlace, start_s: float, deadline: float) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a killed run of this step
    descriptor, _ = nameless_file()
    missing = set(range(1, place.world))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(place.world)
        try:
            while missing:
                listener.settimeout(max(0.1, deadline - time.monotonic()))
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError, struct.error):
                    connection.settimeout(5)
                    (rank,) = struct.unpack("!i", connection.recv(4))
                    if rank in missing:  # a second one is of a later run
                        socket.send_fds(connection, [b"."], [descriptor])
                        missing.discard(rank)
        except TimeoutError as error:
            raise WorkerFault(
                f"rank 0 waited {start_s:g} s for the {place.world} workers",
                exit=Exit.WORKER_LOST,
                why=f"missing: rank {', '.join(map(str, sorted(missing)))}",
                fix="check whether all tasks of the step were started with the same command",
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return descriptor


def _ask(path: str, place: WorkerPlace, start_s: float, deadline: float) -> int:
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            connection.connect(path)
            connection.sendall(struct.pack("!i", place.rank))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if descriptors:
                return descriptors[0]
        time.sleep(0.05)
    raise WorkerFault(
        f"rank {place.rank} waited {start_s:g} s for rank 0",
        exit=Exit.WORKER_LOST,
        fix="check whether all tasks of the step were started with the same command",
    )
