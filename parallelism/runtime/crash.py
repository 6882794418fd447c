"""Crashes of workers in native code: their stacks, and the limit on restarts. Does not import torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""Signals of failing native code. SIGKILL is not one: a user or the kernel (out of memory) sent it."""

APART = 100
"""The least number of steps between two crashes that are both followed by a restart."""

RESTARTS = "TPSHARD_RESTARTS"
"""The environment variable with the number of restarts by the launcher."""

_HEAD = b"Fatal Python error:"
_LINES = 40


@dataclass
class Restarts:
    """The limit on restarts after crashes, and the number of restarts so far."""

    most: int = 0
    done: int = 0
    _step: int = 0
    """The step of the last crash."""

    def refusal(self, step: int) -> str:
        """Why a crash after `step` finished steps ends a run that allows restarts; "" if it does not."""
        if self.done and step - self._step < APART:
            return f"the previous crash was after step {self._step}; two crashes must be {APART} steps apart"
        if self.most and self.done >= self.most:
            return f"launch.restarts is {self.most}"
        return ""

    def allows(self, step: int) -> bool:
        """Whether a run that crashes after `step` finished steps is restarted."""
        return self.done < self.most and not self.refusal(step)

    def count(self, step: int) -> None:
        """Counts a restart."""
        self.done, self._step = self.done + 1, step


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """The number of times that this worker's launcher has restarted the run."""
    return int(env.get(RESTARTS, "0"))


def stack(printed: bytes, *, explained: bool = False) -> str:
    """The stacks that faulthandler wrote at the end of a worker's output; "" if there are none.

    They are cut after some lines, since a process may have many threads. Unless the output was already shown
    (`explained`), the line before them comes first: a library may say there why it failed.
    """
    head = printed.rfind(_HEAD)
    if head < 0:
        return ""
    before = [] if explained else printed[:head].rstrip().splitlines()[-1:]
    lines = [line for line in (*before, *printed[head:].splitlines()) if not line.startswith(b"Extension modules:")]
    text = [line.decode(errors="replace") for line in lines if line]
    return "\n".join([*text[:_LINES], *(["..."] if len(text) > _LINES else [])])
