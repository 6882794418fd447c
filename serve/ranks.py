"""A runner whose steps are computed by worker processes, one a rank.

Workers are told steps as plain bytes over a socket pair; rank 0 leaves the logits in memory that both sides map. A
worker that dies, fails or hangs ends them all, and the step raises WorkerLost: whoever owns the runner makes a new one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor
from tpshard.parallelism.runtime.place import nameless_file
from tpshard.serve.job import DONE, ERROR, JOB, QUIT, READY, STEP, Closed, Job, receive, send
from tpshard.serve.step import StepInput, WorkerLost

_LOOK_S = 1.0
"""How often a silent worker is looked at."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    channel: socket.socket


class Ranks:
    """`job.tp` worker processes, started by `command` (see worker.py for what they are given).

    Raises WorkerLost where they do not become ready; their own error is its message. On a CPU the process that samples
    should have one thread: torch's idle ones spin for milliseconds, on cores that the workers compute on.
    """

    def __init__(self, command: Sequence[str], job: Job) -> None:
        self.blocks, self.block_size = job.blocks, job.block_size
        self.max_rows = self.max_wanted = job.max_rows
        self.vocab, self.max_seq = job.vocab, job.max_seq
        self._job = job
        self._shared = os.memfd_create("tpshard-logits", os.MFD_CLOEXEC)
        os.ftruncate(self._shared, 4 * job.vocab * job.max_rows)
        self._memory = mmap.mmap(self._shared, 0, prot=mmap.PROT_READ)
        self._workers: list[_Worker] = []
        self._ready = selectors.DefaultSelector()
        store, rendezvous = nameless_file()
        try:
            for rank in range(job.tp):
                self._start(command, rank, store, rendezvous)
            self._await(READY, set(range(job.tp)), job.start_s)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(store)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [worker.process.pid for worker in self._workers]

    def step(self, batch: StepInput) -> Tensor:
        message = batch.encode()
        for worker in self._workers:
            try:
                send(worker.channel, STEP, message)
            except Closed:
                self._lost(worker)
        self._await(DONE, {0}, self._job.step_s)
        shape = (len(batch.wanted), self.vocab)
        logits = np.frombuffer(self._memory, dtype="<f4", count=shape[0] * shape[1]).reshape(shape)
        return torch.from_numpy(logits.copy())

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(Closed):
                worker.channel.settimeout(1)
                send(worker.channel, QUIT)
        deadline = time.monotonic() + 5
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.channel.close()
        self._workers.clear()
        self._ready.close()
        if self._shared >= 0:
            self._memory.close()
            os.close(self._shared)
            self._shared = -1

    def _start(self, command: Sequence[str], rank: int, store: int, rendezvous: str) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._job.step_s)
        threads = max(1, (os.cpu_count() or 1) // self._job.tp)
        environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
        arguments = [str(rank), str(self._job.tp), rendezvous, str(theirs.fileno()), str(self._shared)]
        process = subprocess.Popen(
            [*command, *arguments], pass_fds=(theirs.fileno(), self._shared, store),
            stdin=subprocess.DEVNULL, start_new_session=True, env=environment,
        )  # fmt: skip
        theirs.close()
        worker = _Worker(rank, process, ours)
        self._workers.append(worker)
        self._ready.register(ours, selectors.EVENT_READ, worker)
        with contextlib.suppress(Closed):  # its end is noticed below
            send(ours, JOB, self._job.encode())

    def _await(self, kind: bytes, ranks: set[int], seconds: float) -> None:
        """Waits for one frame of a kind from each of these ranks, and meanwhile for anything that goes wrong."""
        deadline = time.monotonic() + seconds
        missing = set(ranks)
        while missing:
            found = self._ready.select(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            if not found and time.monotonic() >= deadline:
                self._kill()
                raise WorkerLost(f"rank {min(missing)} did not answer within {seconds:g} s; the workers were ended")
            for worker in () if found else self._workers:
                if _is_stopped(worker.process.pid):
                    self._lost(worker, "it was stopped by a signal")
            for key, _ in found:
                worker = key.data
                try:
                    got, body = receive(worker.channel)
                except (Closed, ValueError):
                    self._lost(worker)
                if got == ERROR:
                    self._lost(worker, json.loads(body)["text"])
                if got == kind:
                    missing.discard(worker.rank)

    def _lost(self, worker: _Worker, said: str = "") -> None:
        """Ends all workers and raises WorkerLost for one of them, or for another one that said why."""
        said = said or self._last_words(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1 if said else 5)
        code = worker.process.poll()
        self._kill()
        ended = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit {code}"
        raise WorkerLost(f"rank {worker.rank} was lost: {said or ended}")

    def _last_words(self, worker: _Worker) -> str:
        """The error that a worker sent before it closed the channel."""
        with contextlib.suppress(Closed, ValueError, OSError):
            worker.channel.settimeout(0.1)
            kind, body = receive(worker.channel)
            if kind == ERROR:
                return str(json.loads(body)["text"])
        return ""

    def _kill(self) -> None:
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.wait()


def _is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) keeps the process from running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
