"""One rank of a server: told by its parent what to compute, until the parent says so or is gone.

    COMMAND rank world rendezvous channel logits

`rendezvous` is a Place's, `channel` the descriptor of a socket pair (see job.py), `logits` of memory where rank 0
leaves results.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from tpshard.models import build
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.runtime.context import connect
from tpshard.parallelism.runtime.place import Place
from tpshard.programs.layouts import act_orders
from tpshard.programs.serving import arrangement_on_one
from tpshard.programs.setting import DTYPES
from tpshard.serve.job import DONE, ERROR, QUIT, READY, STEP, Closed, Job, Weights, receive, send
from tpshard.serve.local import LocalRunner
from tpshard.serve.quantized import cached, prepare
from tpshard.serve.step import StepInput

Compute = Callable[[StepInput], Tensor]
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(arguments: Sequence[str], open_weights: Callable[[str], Weights]) -> int:
    """The worker's life. `open_weights` reads the folder that the job names. Returns the exit code."""
    faulthandler.enable()
    rank, world, channel_fd, logits_fd = (int(arguments[i]) for i in (0, 1, 3, 4))
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it is over
    channel = socket.socket(fileno=channel_fd)
    try:
        _, body = receive(channel)
        job = Job.decode(body)
        if world == 1:
            compute = local_runner(job, open_weights(job.source)).step
            _warm(compute, job)
            _answer(channel, compute, _map(logits_fd))
            return 0
        place = Place(rank, world, rank, world, arguments[2], "tpshard")
        with connect(
            place, Mesh({"tp": world}), device=job.device, start_s=job.start_s, step_s=job.step_s, watch=False
        ) as context:
            from tpshard.serve.parallel import Part

            part = Part(context, job, open_weights(job.source))
            _warm(part.step, job)
            _answer(channel, part.step, _map(logits_fd) if rank == 0 else None)
        return 0
    except Closed:
        os._exit(0)  # the parent is gone; the other ranks may be stuck, and leaving politely would wait for them
    except BaseException as error:
        traceback.print_exc()
        text = str(error) or type(error).__name__
        try:
            send(channel, ERROR, json.dumps({"text": text.splitlines()[0][:500]}).encode())
        finally:
            sys.stderr.flush()
            os._exit(9)


def _warm(compute: Compute, job: Job) -> None:
    """A step of every size before the first request: what is compiled, measured or probed at first use is so now."""
    for size in job.rows:
        none = np.zeros(size, dtype=np.int64)  # block 0 is nobody's
        compute(StepInput(none, none, none, none, np.zeros((1, 1), dtype=np.int64), np.arange(size)))


def _answer(channel: socket.socket, compute: Compute, memory: mmap.mmap | None) -> None:
    """Computes steps until told to quit; with `memory`, results are left there and announced."""
    send(channel, READY, b"{}")
    while True:
        kind, body = receive(channel)
        if kind == QUIT:
            return
        if kind != STEP:
            raise ValueError(f"a frame of kind {kind!r} where a step was due")
        logits = compute(StepInput.decode(body))
        if memory is not None:
            flat = np.frombuffer(memory, dtype="<f4")
            flat[: logits.numel()] = logits.reshape(-1).numpy()
            del flat
            send(channel, DONE)


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0)


def local_runner(job: Job, weights: Weights) -> LocalRunner:
    """The whole model on this process's device, over its own cache."""
    dtype = DTYPES[job.dtype]
    model = build(weights.config, dtype=dtype)
    parameters = dict(model.named_parameters())
    group = lru_cache(maxsize=None)(weights.group)
    parts = {n: ((0, p.shape[0]), (0, p.shape[1])) for n, p in parameters.items() if p.dim() == 2}
    orders = act_orders(model, weights.config, group)
    arrangement = arrangement_on_one(model, weights.config, orders, job.layout)
    linears = prepare(parts, cached(weights.quantized), group, arrangement, job.device)
    for name, meta in parameters.items():
        module, _, leaf = name.rpartition(".")
        linear = linears.of.get(name)
        if linear is None:
            value = linears.parameter(name, (0,) * meta.dim(), tuple(meta.shape), weights.block).to(job.device, dtype)
        else:
            value = torch.zeros(1, dtype=dtype, device=job.device).expand(meta.shape)
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(value, requires_grad=False))
    return LocalRunner(
        model, blocks=job.blocks, block_size=job.block_size, max_rows=job.max_rows, max_seq=job.max_seq,
        batch_invariant=job.batch_invariant, linears=linears,
    )  # fmt: skip
