"""Starting and watching the worker processes of this host, and finding the one at fault. Does not import torch.

Workers connect through a file without a name (no port, nothing to clean up), end when their parent ends, and report
over a pipe. When one fails or is lost the others hang or fail too: the first failure is the cause, and it may take a
moment to arrive.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.runtime import crash, messages
from tpshard.parallelism.runtime.cores import usable_cores
from tpshard.parallelism.runtime.crash import CRASHES
from tpshard.parallelism.runtime.heap import in_huge_pages
from tpshard.parallelism.runtime.messages import WorkerMessage
from tpshard.parallelism.runtime.place import WorkerPlace, nameless_file
from tpshard.parallelism.runtime.stop import POLITE

FOLLOWS = "TPSHARD_FOLLOWS"
"""The environment variable with the process id of a worker's parent."""
FINE = (Exit.DONE, Exit.PREEMPTED, Exit.INTERRUPTED)
_TAIL = 4000
_SETTLE_S = {"failed": 0.5, "died": 0.5, "secondary": 3.0, "stalled": 3.0}
"""The seconds to wait after each kind of failure for a report that explains it better."""


def follow() -> None:
    """Makes the kernel kill this process when its parent ends, in whatever way; a worker calls it first."""
    starter = os.environ.get(FOLLOWS)
    if starter is None:
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(starter):
        os._exit(Exit.WORKER_LOST)


@dataclass
class Worker:
    """One worker process, with its messages and output."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    output: IO[bytes] | None
    """Its output; None if it prints to the terminal."""
    unread: bytes = b""
    reports: list[WorkerMessage] = field(default_factory=list)
    step: int = 0
    """The last finished step that it reported; rank 0 reports it."""
    died: float = 0.0
    """When its end was noticed, in monotonic seconds; 0 while it runs."""

    @property
    def reported_cause(self) -> bool:
        """Whether the worker reported why it failed or stalled."""
        return any(r.kind in ("failed", "secondary", "stalled") for r in self.reports)

    @property
    def log(self) -> WorkerMessage | None:
        """The message that names its log file, once received."""
        return next((message for message in reversed(self.reports) if message.kind == "log"), None)

    def output_text(self) -> bytes:
        """Its output since the start, from its log file if it has one; empty if it printed to the terminal only."""
        if self.log is not None:
            with suppress(OSError):
                return Path(self.log.text).read_bytes()[self.log.progress :]
        if self.output is None:
            return b""
        self.output.seek(0)
        return self.output.read()

    def tail(self) -> str:
        """The end of its output that the user has not seen."""
        return "" if self.output is None else self.output_text()[-_TAIL:].decode(errors="replace").strip()


@dataclass(frozen=True)
class Verdict:
    """Why a run ended: the worker at fault, its error or the way it ended, and the exit code."""

    rank: int
    cause: str
    """The cause in one line."""
    text: str
    """The full text for the user."""
    exit: int
    notes: tuple[str, ...] = ()
    """Further lines for the user."""
    signal: int = 0
    """The signal that ended the worker; 0 if it reported an error."""


class Workers:
    """Starts, watches and ends the worker processes of this host.

    >>> workers = Workers(world=2)
    >>> workers.start(argv)
    >>> while workers.living and not workers.reports_complete:
    ...     workers.listen(0.1)
    >>> verdict = workers.verdict()
    """

    def __init__(self, world: int, local: int | None = None, first: int = 0) -> None:
        """world: workers in all. local: those on this host (by default all), from rank `first` on."""
        self.world, self.local, self.first = world, world if local is None else local, first
        self.all: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None

    # ---- starting -----------------------------------------------------------------------------------------
    def start(
        self, argv: Sequence[str], rendezvous: str | None = None, *, captured: bool = True,
        env: Mapping[str, str] | None = None, descriptors: Mapping[int, Mapping[str, int]] | None = None,
    ) -> None:  # fmt: skip
        """Starts all workers, with RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in their environment.

        Rank 0 prints to the terminal. captured: whether the output of the others is stored in case they fail, instead
        of going to the terminal too. env: further variables. descriptors: for each rank, further descriptors to inherit
        by the variable that holds their number. Without `rendezvous` all workers are on this host.
        """
        store = None
        if rendezvous is None:
            store, rendezvous = nameless_file()
        try:
            for local_rank in range(self.local):
                place = WorkerPlace(self.first + local_rank, self.world, local_rank, self.local, rendezvous, "tpshard")
                inherited = dict((descriptors or {}).get(place.rank, {}))
                if store is not None:
                    inherited["TPSHARD_STORE"] = store
                self._spawn(argv, place, captured and local_rank > 0, env or {}, inherited)
        finally:
            if store is not None:
                os.close(store)

    def _spawn(
        self,
        argv: Sequence[str],
        place: WorkerPlace,
        captured: bool,
        more: Mapping[str, str],
        inherited: Mapping[str, int],
    ) -> None:
        reader, writer = os.pipe()
        output = tempfile.TemporaryFile() if captured else None  # noqa: SIM115 (lives as long as the run)
        threads = max(1, int(usable_cores()) // self.local)
        # sets of names, over which some models loop, have one order: all ranks trace one program
        env = {
            "OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0", **os.environ, **in_huge_pages(os.environ),
            **place.environment(), messages.REPORT_FD: str(writer), FOLLOWS: str(os.getpid()), **more,
            **{name: str(number) for name, number in inherited.items()},
        }  # fmt: skip
        # signals to stop are blocked until a worker listens; the mask is inherited
        before = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
        try:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[writer, *inherited.values()], process_group=0,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(writer)
        os.set_blocking(reader, False)
        worker = Worker(place.rank, process, reader, output)
        self.all.append(worker)
        self._selector.register(reader, selectors.EVENT_READ, worker)

    # ---- while they run -----------------------------------------------------------------------------------
    @property
    def living(self) -> list[Worker]:
        """The workers that have not ended."""
        return [worker for worker in self.all if worker.died == 0]

    @property
    def step(self) -> int:
        """The last finished step."""
        return max((worker.step for worker in self.all), default=0)

    @property
    def has_failure(self) -> bool:
        """Whether a worker has failed or is lost."""
        return self._deadline is not None

    @property
    def reports_complete(self) -> bool:
        """Whether a worker has failed and the others have had time to report."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def watch(self, file: Any, data: Any) -> None:
        """Makes `listen` also wait for a file, and return its `data` when it is readable."""
        self._selector.register(file, selectors.EVENT_READ, data)

    def forget(self, file: Any) -> None:
        """Makes `listen` ignore a file."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def listen(self, timeout: float) -> list[Any]:
        """Reads the workers' messages and checks which have ended. Returns the data of readable watched files."""
        ready = []
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Worker):
                self._read(key.data)
            else:
                ready.append(key.data)
        for worker in self.living:
            if worker.process.poll() is not None:
                self._read(worker)
                worker.died = time.monotonic()
                if worker.process.returncode not in FINE and not worker.reported_cause:
                    self._trouble("died")
        return ready

    def _read(self, worker: Worker) -> None:
        while True:
            try:
                data = os.read(worker.pipe, 1 << 16)
            except (BlockingIOError, OSError):
                return
            if not data:
                self.forget(worker.pipe)
                return
            *lines, worker.unread = (worker.unread + data).split(b"\n")
            for message in filter(None, map(messages.parse, lines)):
                if message.kind == "step":
                    worker.step = message.progress
                    continue
                worker.reports.append(message)
                if message.kind in _SETTLE_S:
                    self._trouble(message.kind)

    def _trouble(self, kind: str) -> None:
        """Records a failure, and sets the time until which other workers' reports may still explain it."""
        settle = time.monotonic() + _SETTLE_S[kind]
        self._deadline = settle if self._deadline is None else min(self._deadline, settle)

    def send_signal(self, number: int) -> None:
        for worker in self.living:
            with suppress(ProcessLookupError):
                worker.process.send_signal(number)

    # ---- ending -------------------------------------------------------------------------------------------
    def verdict(self) -> Verdict | None:
        """The cause of a failure: the first error or death of a worker, else a hang, else a lost peer; else None."""
        for worker in self.all:
            self._read(worker)
        causes: list[tuple[float, Verdict]] = []
        for worker in self.all:
            causes += [(r.time, self._own(r)) for r in worker.reports if r.kind == "failed"]
            if worker.died and worker.process.returncode not in FINE and not worker.reported_cause:
                causes.append((worker.died, self._death(worker)))
        if causes:
            return min(causes, key=lambda cause: cause[0])[1]
        stalled = [r for worker in self.all for r in worker.reports if r.kind == "stalled"]
        if stalled:
            return self._hang(stalled)
        lost = [r for worker in self.all for r in worker.reports if r.kind == "secondary"]
        if lost:
            first = min(lost, key=lambda r: r.time)
            return Verdict(first.rank, _line(first.text), first.text, Exit.WORKER_LOST)
        return None

    def _own(self, failed: WorkerMessage) -> Verdict:
        """The verdict on a worker that reported its own error; it names the rank unless all workers reported the
        same."""
        alike = sum(any(r.text == failed.text for r in worker.reports) for worker in self.all)
        head = f"rank {failed.rank} of {self.world} failed:\n" if alike < len(self.all) else ""
        return Verdict(failed.rank, _line(failed.text), head + failed.text, failed.exit or Exit.BUG)

    def _death(self, worker: Worker) -> Verdict:
        """The verdict on a worker that ended without a report: its signal or exit code, and the end of its output."""
        code, printed = worker.process.returncode, worker.tail()
        if code > 0:
            ending = f"error: rank {worker.rank} ended with exit code {code}, saying no more"
            return Verdict(worker.rank, f"exit code {code}", f"{printed}\n{ending}".lstrip(), code)
        name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
        lost, notes = f"error: rank {worker.rank} was lost: killed by {name}", list[str]()
        if -code == signal.SIGKILL:
            notes.append("why: the kernel does this when memory runs out (see `dmesg`)")
        elif -code in CRASHES:
            printed = crash.stack(worker.output_text(), explained=worker.output is None) or printed
            lost += f" after step {self.step}" if self.step else " before its first step was done"
            if worker.log is not None:
                notes.append(f"stacks: {worker.log.text}")
        text = "\n".join(filter(None, [printed, f"{lost}; the other workers were stopped"]))
        return Verdict(worker.rank, f"killed by {name}", text, Exit.WORKER_LOST, tuple(notes), -code)

    def _hang(self, stalled: list[WorkerMessage]) -> Verdict:
        """The verdict when ranks wait for each other: the rank at fault, and the message for the user.

        At fault is a silent one, else one outside of a collective, else the one that is furthest behind.
        """
        spoke = {r.rank for r in stalled}
        silent = [worker.rank for worker in self.living if worker.rank not in spoke]
        if silent:
            waiting = stalled[0].text.splitlines()[0].removeprefix("error: ")
            names = ", ".join(f"rank {rank}" for rank in silent)
            text = f"{stalled[0].text}\nerror: {names} does not answer; {waiting}"
            return Verdict(silent[0], "it does not answer", text, Exit.WORKER_LOST)
        blamed = min(stalled, key=lambda r: (r.waiting, r.progress))
        others = [r.text.splitlines()[0].replace("error: ", "note: ", 1) for r in stalled if r is not blamed]
        return Verdict(blamed.rank, _line(blamed.text), "\n".join([*others, blamed.text]), Exit.WORKER_LOST)

    def kill(self) -> None:
        """Kills all workers, with the processes they have started."""
        for worker in self.all:
            # the whole process group, to include a worker's helpers (compilation, wandb)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self.all:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=10)

    def close(self) -> None:
        self._selector.close()
        for worker in self.all:
            with contextlib.suppress(OSError):
                os.close(worker.pipe)
            if worker.output is not None:
                worker.output.close()


def _line(text: str) -> str:
    """The first line of an error, without the prefix `error:`."""
    return text.strip().splitlines()[0].removeprefix("error: ") if text.strip() else ""
