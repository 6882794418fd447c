"""The exit codes of all commands."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    DONE = 0
    """Success."""
    BUG = 1
    """A bug in tpshard: please report it. Or `tpshard check` found a difference that rounding does not explain."""
    USAGE = 2
    """The command line is wrong: an unknown option, or an output that already exists."""
    RECIPE = 3
    """The recipe itself is wrong."""
    FIT = 4
    """Model, mesh and device do not fit each other."""
    MACHINE = 5
    """This machine does not fit the recipe: device, package, port, world size."""
    DATA = 6
    """Text or tokenizer cannot be read."""
    CHECKPOINT = 7
    """A checkpoint cannot be read or written, or belongs to another run."""
    NONFINITE = 8
    """The loss or a gradient was not finite, and `train.on_nonfinite` is stop."""
    WORKER_LOST = 9
    """A worker was lost or hung; the last line names it."""
    PREEMPTED = 75
    """SIGTERM or SIGUSR1: a checkpoint was saved, or nothing had begun; the same command goes on."""
    INTERRUPTED = 130
    """Ctrl-C: a checkpoint was saved; the same command resumes."""
