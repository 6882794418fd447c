"""Crashes: workers that a fault of native code ends, what they leave, and how often a run goes on. Knows no torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""How native code ends that went wrong. SIGKILL is no crash: somebody, or the kernel for want of memory, meant it."""

APART = 100
"""Steps between two restarts of a run, at least: a run that crashes again so soon would crash for ever."""

RESTARTS = "TPSHARD_RESTARTS"
"""Tells workers how often their launcher has started the run again."""

_HEAD = b"Fatal Python error:"
_LINES = 40


@dataclass
class Restarts:
    """How often a run is started again after a crash, and how often it was."""

    most: int = 0
    done: int = 0
    _step: int = 0
    """Where the last crash was."""

    def refusal(self, step: int) -> str:
        """Why a crash after `step` finished steps ends the run that was to survive some; else ""."""
        if self.done and step - self._step < APART:
            return f"the crash before was after step {self._step}, and {APART} steps are asked for between two"
        if self.most and self.done >= self.most:
            return f"launch.restarts is {self.most}"
        return ""

    def allowed(self, step: int) -> bool:
        """Whether a run that crashes after `step` finished steps is to be started again."""
        return self.done < self.most and not self.refusal(step)

    def count(self, step: int) -> None:
        """The run is started again."""
        self.done, self._step = self.done + 1, step


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """How often the launcher of this worker has started the run again."""
    return int(env.get(RESTARTS, "0"))


def stack(printed: bytes, *, told: bool = False) -> str:
    """What faulthandler wrote at the end of a worker's output; "" where it wrote nothing.

    With the line before it, in which a library may say why, unless the user was `told`. Cut after some lines, since a
    process may have many threads.
    """
    head = printed.rfind(_HEAD)
    if head < 0:
        return ""
    before = [] if told else printed[:head].rstrip().splitlines()[-1:]
    lines = [line for line in (*before, *printed[head:].splitlines()) if not line.startswith(b"Extension modules:")]
    text = [line.decode(errors="replace") for line in lines if line]
    return "\n".join([*text[:_LINES], *(["..."] if len(text) > _LINES else [])])
