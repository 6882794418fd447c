"""The launcher: starts this host's workers, forwards signals, and reports why a run ended. Does not import torch.

After a crash (see crash.py) it may restart the workers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.runtime.crash import CRASHES, RESTARTS, Restarts
from tpshard.parallelism.runtime.stop import POLITE
from tpshard.parallelism.runtime.workers import FINE, Verdict, Workers

NODES, NODE_RANK, MEET = "TPSHARD_NODES", "TPSHARD_NODE_RANK", "TPSHARD_MEET"
"""Variables by which `tpshard launch` describes the hosts: how many, which one this is, HOST:PORT of rank 0."""


@dataclass(frozen=True)
class Nodes:
    """The hosts of a run: how many, which one this is, and the address of rank 0."""

    count: int = 1
    rank: int = 0
    meet: str = ""

    @staticmethod
    def of(env: Mapping[str, str]) -> Nodes:
        """The hosts described by `tpshard launch` in the environment; one host without it."""
        if NODES not in env:
            return Nodes()
        return Nodes(int(env[NODES]), int(env[NODE_RANK]), env[MEET])

    def environment(self) -> dict[str, str]:
        return {NODES: str(self.count), NODE_RANK: str(self.rank), MEET: self.meet}


def launch(
    argv: Sequence[str], *, world: int, nodes: Nodes, restarts: int = 0, env: Mapping[str, str] | None = None
) -> int:
    """Runs `argv` in `world` workers (this host's share of them) and returns the run's exit code.

    env: further environment variables of the workers.

    When a worker fails, the others are ended, and the first error is printed last. When one crashes, all are restarted,
    up to `restarts` times; a run on several hosts ends instead, since their launchers do not communicate. Raises
    ValueError where the hosts do not divide `world`.
    """
    if world % nodes.count:
        raise ValueError(f"{world} workers do not divide over {nodes.count} hosts")
    local = world // nodes.count
    allowed = Restarts(restarts if nodes.count == 1 else 0)
    return Launcher(argv, lambda: Workers(world, local, nodes.rank * local), nodes, allowed, env or {}).run()


class Launcher:
    """Starts and supervises the workers of a run; see `launch`."""

    def __init__(
        self, argv: Sequence[str], make: Callable[[], Workers], nodes: Nodes, restarts: Restarts,
        env: Mapping[str, str],
    ):  # fmt: skip
        self.argv, self.nodes, self.restarts, self.env = argv, nodes, restarts, env
        self._make, self.workers = make, make()
        self._signals: list[int] = []
        self._interrupts = 0
        self._end_requested = False
        """Whether the user, or the system, has asked the run to end."""

    def run(self) -> int:
        before = {number: signal.signal(number, self._receive) for number in (*POLITE, signal.SIGHUP)}
        try:
            while (code := self._supervise()) is None:
                self.restarts.count(self.workers.step)
                self.workers = self._make()
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _supervise(self) -> int | None:
        """Starts the workers and waits until they have ended. Returns the run's exit code, or None if they are to be
        restarted.
        """
        rendezvous = f"tcp:{self.nodes.meet}" if self.nodes.count > 1 else None
        try:
            self.workers.start(self.argv, rendezvous, env={**self.env, RESTARTS: str(self.restarts.done)})
            while self.workers.living and not self.workers.reports_complete:
                self.workers.listen(0.1)
                if not self._pass_on_signals():
                    return Exit.INTERRUPTED
            return self._end()
        finally:
            self.workers.kill()
            self.workers.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on_signals(self) -> bool:
        """Asks the workers to save and stop; returns False at a second Ctrl-C, which ends them at once."""
        while self._signals:
            number = self._signals.pop(0)
            self._end_requested = True
            if number == signal.SIGINT:
                self._interrupts += 1
                if self._interrupts > 1:
                    return False
                _say("stopping after this step and saving; Ctrl-C again to end at once\n")
            self.workers.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        return True

    def _end(self) -> int | None:
        """Reports why the workers ended; returns the run's exit code, or None if they are to be restarted."""
        verdict = self.workers.verdict()
        if verdict is None:
            codes = {worker.process.returncode for worker in self.workers.all}
            return max(codes, key=FINE.index)
        self.workers.kill()
        if sys.stderr.isatty():
            _say("\x1b[?25h")  # shows the cursor, which a killed progress bar leaves hidden.
        again = verdict.signal in CRASHES and self._again()
        lines = [verdict.text.rstrip("\n"), *(f"  {note}" for note in self._notes(verdict, again))]
        _say("\n".join(lines) + "\n")
        if not again:
            return verdict.exit
        count = f"restart {self.restarts.done + 1} of {self.restarts.most}, see launch.restarts"
        _say(f"warning: the run is started again from its last checkpoint ({count})\n")
        return None

    def _notes(self, verdict: Verdict, again: bool) -> list[str]:
        notes = list(verdict.notes)
        refusal = self.restarts.refusal(self.workers.step)
        if verdict.signal in CRASHES and not again and refusal:
            notes.append(f"why no restart: {refusal}")
        if verdict.signal and not again:
            notes.append("fix: run the same command again: it continues from the last checkpoint")
        return notes

    def _again(self) -> bool:
        """Whether the run restarts after a crash: unless it was asked to end, or a worker was killed on purpose."""
        killed = any(worker.died and worker.process.returncode == -signal.SIGKILL for worker in self.workers.all)
        return not self._end_requested and not killed and self.restarts.allows(self.workers.step)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
