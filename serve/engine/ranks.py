"""A runner whose steps are computed by worker processes, one per rank.

Workers receive steps as bytes over a socket pair; rank 0 answers with the tokens, and logits stay where they are.
Workers are started and watched as those of a training run (`parallelism.runtime.workers`). If one dies, fails or hangs,
all are ended and the step raises WorkerLost; the owner then creates a new runner.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import NoReturn

import psutil
from tpshard.diagnostics.exits import Exit
from tpshard.parallelism.runtime.workers import Workers
from tpshard.programs.server.serving import BLOCK_SIZE
from tpshard.serve.engine.job import CHANNEL, Closed, Frame, Job, receive, send
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.step import StepInput, WorkerLost

_LOOK_S = 1.0
"""Seconds between checks of a silent worker."""


class Ranks:
    """`job.world` worker processes that run `command`.

    Raises WorkerLost with their own error if they do not become ready.
    """

    block_size = BLOCK_SIZE

    def __init__(self, command: Sequence[str], job: Job) -> None:
        self.blocks, self.vocab, self.max_seq = job.blocks, job.vocab, job.max_seq
        self.max_rows, self.max_logit_rows, self.chunks = job.max_rows, job.max_logit_rows, job.chunks
        self.slots = 0 if job.slots is None else job.slots.count
        self._job = job
        self._workers = Workers(job.world)
        self._channels: list[socket.socket] = []
        try:
            self._start(command)
            self._await(Frame.READY, set(range(job.world)), job.start_s)
        except BaseException:
            self.close()
            raise

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        message, asked = batch.encode(), picks.encode()
        for channel in self._channels:
            with contextlib.suppress(Closed):  # noticed below
                send(channel, Frame.STEP, message)
                send(channel, Frame.PICK, asked)
        return Picked.decode(self._await(Frame.DONE, {0}, self._job.step_s)[0])

    def adapt(self, slot: int, folder: str) -> None:
        if wrong := self._ask(Frame.ADAPT, folder.encode()):
            raise ValueError(wrong)
        self._ask(Frame.PUT, str(slot).encode())

    def _ask(self, kind: Frame, body: bytes) -> str:
        """Sends a frame to all ranks; returns the first answer that is not empty."""
        for channel in self._channels:
            with contextlib.suppress(Closed):  # noticed below
                send(channel, kind, body)
        answers = self._await(Frame.DONE, set(range(self._job.world)), self._job.start_s)
        return next(filter(None, answers.values()), b"").decode()

    def check(self) -> None:
        self._workers.listen(0)
        for worker in self._workers.all:
            if worker.process.poll() is not None or _is_stopped(worker.process.pid):
                self._end(f"rank {worker.rank} was lost between requests: it has ended, or was stopped by a signal")

    def close(self) -> None:
        for channel in self._channels:
            with contextlib.suppress(Closed):
                channel.settimeout(1)
                send(channel, Frame.QUIT)
        deadline = time.monotonic() + 5
        for worker in self._workers.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._workers.kill()
        self._workers.close()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def _start(self, command: Sequence[str]) -> None:
        pairs = [socket.socketpair() for _ in range(self._job.world)]
        self._channels = [parent_end for parent_end, _ in pairs]
        descriptors = {rank: {CHANNEL: worker_end.fileno()} for rank, (_, worker_end) in enumerate(pairs)}
        try:
            self._workers.start(command, captured=False, descriptors=descriptors)
        finally:
            for _, worker_end in pairs:
                worker_end.close()
        for rank, channel in enumerate(self._channels):
            channel.settimeout(self._job.step_s)
            self._workers.watch(channel, rank)
            with contextlib.suppress(Closed):
                send(channel, Frame.JOB, self._job.encode())

    def _await(self, kind: Frame, ranks: set[int], seconds: float) -> dict[int, bytes]:
        """Waits for one frame of a kind from each of these ranks, and returns their bodies by rank; raises WorkerLost
        if anything goes wrong, or no frame comes for so many seconds."""
        deadline = time.monotonic() + seconds
        missing, bodies = set(ranks), dict[int, bytes]()
        while missing:
            left = deadline - time.monotonic()
            ready = self._workers.listen(0.1 if self._workers.has_failure else min(_LOOK_S, max(0.0, left)))
            for rank in ready:
                try:
                    received, body = receive(self._channels[rank])
                except (Closed, ValueError):
                    self._workers.forget(self._channels[rank])  # its message or its exit says why
                    continue
                if received == Frame.LOADING:
                    deadline = time.monotonic() + seconds
                if received == kind:
                    missing.discard(rank)
                    bodies[rank] = body
            if self._workers.reports_complete or (self._workers.has_failure and not self._workers.living):
                verdict = self._workers.verdict()
                assert verdict is not None, "there was trouble"
                if verdict.exit == Exit.CHECKPOINT:
                    self._end(verdict.cause, Exit.CHECKPOINT)
                self._end(f"rank {verdict.rank} was lost: {verdict.cause}")
            if not ready and missing:
                self._look(min(missing), left, seconds)
        return bodies

    def _look(self, rank: int, left: float, seconds: float) -> None:
        """Checks workers that have been silent for a while."""
        for worker in self._workers.living:
            if _is_stopped(worker.process.pid):
                self._end(f"rank {worker.rank} was lost: it was stopped by a signal")
        for worker in self._workers.all:
            if worker.died and not self._workers.has_failure:
                self._end(f"rank {worker.rank} was lost: it exited unexpectedly")
        if left <= 0:
            self._end(f"rank {rank} did not answer within {seconds:g} s; the workers were ended")

    def _end(self, why: str, exit: int = Exit.WORKER_LOST) -> NoReturn:
        self._workers.kill()
        raise WorkerLost(why, exit)


def _is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped the process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
