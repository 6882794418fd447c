"""Errors of the user's own code: a module's or a task's class, told with the line that raised them."""

from __future__ import annotations

import linecache
import traceback

_OURS = ("torch", "tpshard", "importlib", "contextlib", "unittest")
"""Packages whose lines are not the user's."""


def line_of(error: BaseException | None) -> str | None:
    """The innermost line of code, with its place, that is neither torch's nor this package's; None without one.

    If errors caused each other, the line of the original cause is preferred.
    """
    innermost = None
    while error is not None:
        frames = [(str(f.f_globals.get("__name__")), f, line) for f, line in traceback.walk_tb(error.__traceback__)]
        foreign = [(f, line) for name, f, line in frames if name.partition(".")[0] not in _OURS]
        if foreign:
            frame, line = foreign[-1]
            text = linecache.getline(frame.f_code.co_filename, line).strip()
            innermost = f"`{text}` in {frame.f_code.co_filename}:{line}"
        error = error.__cause__
    return innermost


def one_line(error: BaseException) -> str:
    """An error in one line: its kind, its text, and the line of the user's code."""
    text, line = " ".join(str(error).split()), line_of(error)
    return type(error).__name__ + (f": {text}" if text else "") + (f", at {line}" if line else "")
