"""Waiting for a condition, with a limit that is long enough for any machine."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds for what takes one or two on an idle machine. A busy machine is no reason to fail."""


def until(reached: Callable[[], object], what: str = "what the test waits for", every: float = 0.02) -> None:
    """Waits until `reached()` is true. AssertionError, with `what`, after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE:g} s"
        time.sleep(every)
