"""What a process says to whoever started it."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    DONE = 0
    BUG = 1
    USAGE = 2
    RECIPE = 3
    """The recipe is wrong by itself."""
    FIT = 4
    """Model, mesh and device do not fit each other."""
    MACHINE = 5
    """This machine does not fit the recipe: device, package, port, world size."""
    DATA = 6
    CHECKPOINT = 7
    NONFINITE = 8
    WORKER_LOST = 9
    PREEMPTED = 75
    INTERRUPTED = 130
