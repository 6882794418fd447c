"""The launcher: starts this host's workers, passes signals on, and says why a run ended. Knows no torch.

Workers meet in a file without a name (nothing listens, nothing is left behind), die with the launcher by order of the
kernel, and report over a pipe: the launcher waits a moment for the error that came first, ends the others, and prints
that error last. After a crash (see crash.py) it may start them all again.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tpshard.parallelism.runtime import crash, report
from tpshard.parallelism.runtime.crash import CRASHES, RESTARTS, Restarts
from tpshard.parallelism.runtime.place import Place, nameless_file
from tpshard.parallelism.runtime.report import Report
from tpshard.parallelism.runtime.stop import POLITE

NODES, NODE_RANK, MEET = "TPSHARD_NODES", "TPSHARD_NODE_RANK", "TPSHARD_MEET"
"""How `tpshard launch` tells the command it runs about the other hosts: how many, which one this is, HOST:PORT."""

_BUG, _MACHINE, _WORKER_LOST, _INTERRUPTED = 1, 5, 9, 130
_FINE = (0, 75, 130)
_TAIL = 4000
_SETTLE_S = {"failed": 0.5, "died": 0.5, "secondary": 3.0, "stalled": 3.0}
"""How long to wait for a better explanation after the first sign of trouble."""


@dataclass(frozen=True)
class Nodes:
    """The hosts of a run: how many, which one this is, and where rank 0 can be reached."""

    count: int = 1
    rank: int = 0
    meet: str = ""

    @staticmethod
    def of(env: Mapping[str, str]) -> Nodes:
        """As `tpshard launch` wrote them into the environment; one host without it."""
        if NODES not in env:
            return Nodes()
        return Nodes(int(env[NODES]), int(env[NODE_RANK]), env[MEET])

    def environment(self) -> dict[str, str]:
        return {NODES: str(self.count), NODE_RANK: str(self.rank), MEET: self.meet}


def launch(
    argv: Sequence[str],
    *,
    world: int,
    nodes: Nodes | None = None,
    command: Sequence[str] | None = None,
    say: Callable[[str], None] | None = None,
    restarts: int = 0,
) -> int:
    """Runs `argv` in `world` workers (this host's share of them) and returns the run's exit code.

    Each worker is this Python running tpshard's command line with the same `argv` (or `command`), with RANK,
    LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in its environment. Rank 0 keeps the terminal; the output of the others
    is kept for the day they fail. When one of them crashes, all are started again, up to `restarts` times; a run on
    several hosts ends instead, since their launchers do not know of each other. ValueError where `world` does not
    divide over the hosts.
    """
    nodes = nodes or Nodes.of(os.environ)
    if world % nodes.count:
        raise ValueError(f"{world} workers do not divide over {nodes.count} hosts")
    local = world // nodes.count
    argv = list(command) if command is not None else [sys.executable, "-m", "tpshard.cli.main", *argv]
    return Launcher(argv, local, world, nodes, say or _say, Restarts(restarts if nodes.count == 1 else 0)).run()


@dataclass
class Worker:
    """One child."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    output: IO[bytes] | None
    """What it printed; None for rank 0, which prints to the terminal."""
    unread: bytes = b""
    reports: list[Report] = field(default_factory=list)
    step: int = 0
    """The last that it said is done; rank 0 says so."""
    died: float = 0.0
    """When the launcher saw it end (monotonic seconds); 0 while it lives."""

    @property
    def said_why(self) -> bool:
        return any(r.kind in ("failed", "secondary", "stalled") for r in self.reports)

    @property
    def log(self) -> Report | None:
        """Which file holds what it printed, once it said so."""
        return next((known for known in reversed(self.reports) if known.kind == "log"), None)

    def printed(self) -> bytes:
        """What it printed since it was started; of rank 0, whose output the user has seen, only what its log holds."""
        if self.log is not None:
            with suppress(OSError):
                return Path(self.log.text).read_bytes()[self.log.progress :]
        if self.output is None:
            return b""
        self.output.seek(0)
        return self.output.read()

    def tail(self) -> str:
        """The end of what it printed and nobody saw."""
        return "" if self.output is None else self.printed()[-_TAIL:].decode(errors="replace").strip()


@dataclass(frozen=True)
class Verdict:
    """Why a run ended."""

    text: str
    exit: int
    crashed: bool = False
    """By a fault of native code, which need not come again."""


class Launcher:
    """Supervises the workers of this host; see `launch`."""

    def __init__(
        self, argv: Sequence[str], local: int, world: int, nodes: Nodes, say: Callable[[str], None], restarts: Restarts
    ):
        self.argv, self.local, self.world, self.nodes, self.say = list(argv), local, world, nodes, say
        self.restarts = restarts
        self.workers: list[Worker] = []
        self._signals: list[int] = []
        self._asked = False
        """Somebody wants the run to end."""
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None

    def run(self) -> int:
        before = {number: signal.signal(number, self._receive) for number in (*POLITE, signal.SIGHUP)}
        try:
            while (code := self._supervise()) is None:
                self.restarts.count(self._step)
                self.workers, self._selector, self._deadline = [], selectors.DefaultSelector(), None
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _supervise(self) -> int | None:
        """Runs the workers once. The run's exit code, or None where they are to be started again."""
        try:
            self._start()
            while any(worker.died == 0 for worker in self.workers):
                self._listen(0.1)
                if not self._pass_on_signals():
                    return _INTERRUPTED
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
            return self._end()
        finally:
            self._kill()
            self._close()

    @property
    def _step(self) -> int:
        return max((worker.step for worker in self.workers), default=0)

    # ---- starting -----------------------------------------------------------------------------------------
    def _start(self) -> None:
        store = None
        if self.nodes.count == 1:
            store, rendezvous = nameless_file()
        else:
            rendezvous = f"tcp:{self.nodes.meet}"
        threads = max(1, len(os.sched_getaffinity(0)) // self.local)
        try:
            for local_rank in range(self.local):
                rank = self.nodes.rank * self.local + local_rank
                place = Place(rank, self.world, local_rank, self.local, rendezvous, "tpshard")
                self._spawn(place, threads, store)
        finally:
            if store is not None:
                os.close(store)

    def _spawn(self, place: Place, threads: int, store: int | None) -> None:
        reader, writer = os.pipe()
        output = None if place.local_rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the run)
        env = {
            "OMP_NUM_THREADS": str(threads), **os.environ, **place.environment(), report.REPORT_FD: str(writer),
            RESTARTS: str(self.restarts.done),
        }  # fmt: skip
        try:
            process = subprocess.Popen(
                self.argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[writer] + ([store] if store is not None else []),
                process_group=0, preexec_fn=_die_with(os.getpid()),
            )  # fmt: skip
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        worker = Worker(place.rank, process, reader, output)
        self.workers.append(worker)
        self._selector.register(reader, selectors.EVENT_READ, worker)

    # ---- while they run -----------------------------------------------------------------------------------
    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on_signals(self) -> bool:
        """Asks the workers to save and stop; False at the second Ctrl-C, which waits for nothing."""
        while self._signals:
            number = self._signals.pop(0)
            self._asked = True
            if number == signal.SIGINT:
                self._interrupts += 1
                if self._interrupts > 1:
                    return False
                self.say("stopping after this step and saving; Ctrl-C again to end at once\n")
            for worker in self.workers:
                if worker.died == 0:
                    with suppress(ProcessLookupError):
                        worker.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        return True

    _interrupts = 0

    def _listen(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            self._read(key.data)
        for worker in self.workers:
            if worker.died == 0 and worker.process.poll() is not None:
                self._read(worker)
                worker.died = time.monotonic()
                if worker.process.returncode not in _FINE and not worker.said_why:
                    self._trouble("died")

    def _read(self, worker: Worker) -> None:
        while True:
            try:
                data = os.read(worker.pipe, 1 << 16)
            except (BlockingIOError, OSError):
                return
            if not data:
                with suppress(KeyError):
                    self._selector.unregister(worker.pipe)
                return
            *lines, worker.unread = (worker.unread + data).split(b"\n")
            for known in filter(None, map(report.parse, lines)):
                if known.kind == "step":
                    worker.step = known.progress
                    continue
                worker.reports.append(known)
                if known.kind in _SETTLE_S:
                    self._trouble(known.kind)

    def _trouble(self, kind: str) -> None:
        settle = time.monotonic() + _SETTLE_S[kind]
        self._deadline = settle if self._deadline is None else min(self._deadline, settle)

    # ---- ending -------------------------------------------------------------------------------------------
    def _end(self) -> int | None:
        for worker in self.workers:
            self._read(worker)
        verdict = self._verdict()
        if verdict is None:
            codes = {worker.process.returncode for worker in self.workers}
            return max(codes, key=_FINE.index)
        self._kill()
        if sys.stderr.isatty():
            self.say("\x1b[?25h")  # A progress bar that was killed leaves the cursor hidden.
        self.say(verdict.text.rstrip("\n") + "\n")
        if not verdict.crashed:
            return verdict.exit
        again = f"restart {self.restarts.done + 1} of {self.restarts.most}, see launch.restarts"
        self.say(f"warning: the run is started again from its last checkpoint ({again})\n")
        return None

    def _verdict(self) -> Verdict | None:
        """The cause rather than its consequences: an own error or a death, the first; a hang; only then lost peers."""
        causes: list[tuple[float, Verdict]] = []
        for worker in self.workers:
            causes += [(r.time, self._own(r)) for r in worker.reports if r.kind == "failed"]
            if worker.died and worker.process.returncode not in _FINE and not worker.said_why:
                causes.append((worker.died, self._death(worker)))
        if causes:
            return min(causes, key=lambda cause: cause[0])[1]
        stalled = [r for worker in self.workers for r in worker.reports if r.kind == "stalled"]
        if stalled:
            return self._hang(stalled)
        lost = [r for worker in self.workers for r in worker.reports if r.kind == "secondary"]
        if lost:
            return Verdict(min(lost, key=lambda r: r.time).text, _WORKER_LOST)
        return None

    def _own(self, failed: Report) -> Verdict:
        """A worker's own error; with its rank, unless all say the same (a mistake in what all were given)."""
        alike = sum(any(r.text == failed.text for r in worker.reports) for worker in self.workers)
        head = f"rank {failed.rank} of {self.world} failed:\n" if alike < len(self.workers) else ""
        return Verdict(head + failed.text, failed.exit or _BUG)

    def _death(self, worker: Worker) -> Verdict:
        code, printed = worker.process.returncode, worker.tail()
        if code > 0:
            said = f"error: rank {worker.rank} ended with exit code {code}, saying no more"
            return Verdict(f"{printed}\n{said}".lstrip(), code)
        name = signal.Signals(-code).name if -code in list(signal.Signals) else str(-code)
        lost, notes, again = f"error: rank {worker.rank} was lost: killed by {name}", [], False
        if -code == signal.SIGKILL:
            notes.append("why: the kernel does this when memory runs out (see `dmesg`)")
        elif -code in CRASHES:
            printed = crash.stack(worker.printed(), told=worker.output is None) or printed
            lost += f" after step {self._step}" if self._step else " before its first step was done"
            again = self._again()
            if worker.log is not None:
                notes.append(f"stacks: {worker.log.text}")
            if refusal := "" if again else self.restarts.refusal(self._step):
                notes.append(f"why no restart: {refusal}")
        if not again:
            notes.append("fix: run the same command again: it continues from the last checkpoint")
        lines = [printed, f"{lost}; the other workers were stopped", *(f"  {note}" for note in notes)]
        return Verdict("\n".join(filter(None, lines)), _WORKER_LOST, again)

    def _again(self) -> bool:
        """Whether the run goes on after a crash: nobody wants it to end, and nobody ended a worker of it."""
        killed = any(worker.died and worker.process.returncode == -signal.SIGKILL for worker in self.workers)
        return not self._asked and not killed and self.restarts.allowed(self._step)

    def _hang(self, stalled: list[Report]) -> Verdict:
        """Of ranks that wait for each other: the silent one, or one outside of a collective, or the one behind."""
        spoke = {r.rank for r in stalled}
        silent = [worker.rank for worker in self.workers if worker.rank not in spoke and worker.died == 0]
        if silent:
            waiting = stalled[0].text.splitlines()[0].removeprefix("error: ")
            names = ", ".join(f"rank {rank}" for rank in silent)
            return Verdict(f"{stalled[0].text}\nerror: {names} does not answer; {waiting}", _WORKER_LOST)
        blamed = min(stalled, key=lambda r: (r.waiting, r.progress))
        others = [r.text.splitlines()[0].replace("error: ", "note: ", 1) for r in stalled if r is not blamed]
        return Verdict("\n".join([*others, blamed.text]), _WORKER_LOST)

    def _kill(self) -> None:
        for worker in self.workers:
            # The whole process group: a worker's own helpers (compilation, wandb) go with it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=10)

    def _close(self) -> None:
        self._selector.close()
        for worker in self.workers:
            os.close(worker.pipe)
            if worker.output is not None:
                worker.output.close()


def _die_with(launcher: int) -> Callable[[], Any]:
    """Run in the child before it becomes a worker: die with the launcher; hold polite signals until it listens."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal = 1

    def prepare() -> None:
        libc.prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(_WORKER_LOST)
        signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)

    return prepare


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
