"""One rank of a server: computes the steps that its parent sends, until it is told to quit or the parent is gone."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import torch
from torch import Tensor
from tpshard.diagnostics.exits import Exit
from tpshard.files.folder_json import FolderError
from tpshard.parallelism.runtime.context import connect
from tpshard.parallelism.runtime.messages import WorkerFault
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.programs.server.serving import ServingPrograms
from tpshard.serve.engine.job import CHANNEL, Closed, Frame, Job, receive, send
from tpshard.serve.engine.picks import Picks
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Weights

Prepare = Callable[[Job], tuple[ServingPrograms, Weights]]
"""A function from a job to its programs and weights."""


def work(place: WorkerPlace, prepare: Prepare) -> int:
    """Runs the worker and returns its exit code."""
    channel = socket.socket(fileno=int(os.environ[CHANNEL]))
    try:
        kind, body = receive(channel)
        if kind != Frame.JOB:
            raise ValueError(f"received a frame of kind {kind!r} instead of a job")
        job = Job.decode(body)
        programs, weights = prepare(job)
        mesh = programs.setting.mesh
        with connect(place, mesh, device=job.device, start_s=job.start_s, step_s=job.step_s, watch=False) as context:
            fingerprints = " ".join(str(one["fingerprint"]) for one in programs.listed)
            context.agree({"programs": fingerprints, "version of torch": torch.__version__})
            if programs.listed != list(job.programs):
                raise WorkerFault(
                    "this rank's programs differ from the server's", exit=Exit.MACHINE,
                    fix="start the server again: the recipe, the folder or an installed version has changed",
                )  # fmt: skip
            runner = ProgramRunner(context, programs, weights, job.blocks, _telling(channel))
            runner.warm()
            _answer(channel, runner, answers=place.rank == 0)
        return Exit.DONE
    except Closed:
        # the parent is gone; other ranks may be stuck, and a regular exit would wait for them
        os._exit(Exit.DONE)


def _telling(channel: socket.socket) -> Callable[[], None]:
    """A function that tells the parent that weights are being read, at most once a second."""
    told = 0.0

    def tell() -> None:
        nonlocal told
        if time.monotonic() >= told + 1:
            told = time.monotonic()
            send(channel, Frame.LOADING)

    return tell


def describe(error: BaseException) -> tuple[str, int]:
    """A line about the error for the parent; the trace goes to stderr, but for weights that cannot be used."""
    if isinstance(error, FolderError):
        return str(error).splitlines()[0][:500], Exit.CHECKPOINT
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    return (str(error) or type(error).__name__).splitlines()[0][:500], Exit.WORKER_LOST


def _answer(channel: socket.socket, runner: ProgramRunner, answers: bool) -> None:
    """Computes steps until told to quit. answers: whether this rank sends the tokens."""
    send(channel, Frame.READY)
    adapter: dict[str, Tensor] = {}
    while True:
        kind, body = receive(channel)
        if kind == Frame.QUIT:
            return
        if kind == Frame.ADAPT:  # no rank's slot changes before every rank has read it
            wrong = ""
            try:
                adapter = runner.read_adapter(body.decode())
            except (ValueError, OSError) as error:
                wrong = str(error) or type(error).__name__
            send(channel, Frame.DONE, wrong.encode())
            continue
        if kind == Frame.PUT:
            runner.put_adapter(int(body), adapter)
            adapter = {}
            send(channel, Frame.DONE)
            continue
        if kind != Frame.STEP:
            raise ValueError(f"received a frame of kind {kind!r} instead of a step")
        kind, asked = receive(channel)
        if kind != Frame.PICK:
            raise ValueError(f"received a frame of kind {kind!r} instead of what a step is asked for")
        batch = StepInput.decode(body)
        if not answers and not runner.choose_together:
            runner.logits(batch)
            continue
        picked = runner.step(batch, Picks.decode(asked))
        if answers:
            send(channel, Frame.DONE, picked.encode())
