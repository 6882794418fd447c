"""What a process says to whoever started it."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    DONE = 0
    """All went well."""
    BUG = 1
    """A mistake in tpshard: please report it. Or `tpshard check` found a difference that rounding does not explain."""
    USAGE = 2
    """The command line is wrong: an unknown option, a file that is there already."""
    RECIPE = 3
    """The recipe is wrong by itself."""
    FIT = 4
    """Model, mesh and device do not fit each other."""
    MACHINE = 5
    """This machine does not fit the recipe: device, package, port, world size."""
    DATA = 6
    """Text or tokenizer cannot be read."""
    CHECKPOINT = 7
    """A checkpoint cannot be read or written, or is not of this run."""
    NONFINITE = 8
    """The loss or a gradient was not finite, and `train.on_nonfinite` is stop."""
    WORKER_LOST = 9
    """A worker ended or hung; the last line names it."""
    PREEMPTED = 75
    """SIGTERM or SIGUSR1: a checkpoint was saved, and the same command continues."""
    INTERRUPTED = 130
    """Ctrl-C: a checkpoint was saved, and the same command continues."""
