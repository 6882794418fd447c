"""Passes in order: they change when things happen and what is kept, never what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tpshard.parallelism.passes.copy import copied
from tpshard.parallelism.program import Program

Pass = Callable[[Program], Program]
"""Changes the program that it is given, which is nobody else's, and returns it. Its name is its function's."""


class Passed(NamedTuple):
    """A program as a pass left it."""

    name: str
    """The pass's; "" where none has run."""
    settings: dict[str, Any]
    """What the pass was told."""
    program: Program
    """The next pass changes it: whoever watches looks at it at once."""
    seconds: float
    """What the pass took."""


Watch = Callable[[Passed], None]


def run(passes: Sequence[Pass], program: Program, watch: Watch | None = None) -> Program:
    """A program, changed by passes one after the other; the given one stays as it is."""
    program, _ = copied(program)
    if watch is not None:
        watch(Passed("", {}, program, 0.0))
    for one in passes:
        started = time.perf_counter()
        made = one(program)
        seconds = time.perf_counter() - started
        program = made.replace_graph(made.graph)  # nothing derived from it before holds still
        if watch is not None:
            watch(Passed(*_called(one), program, seconds))
    return program


def _called(one: Pass) -> tuple[str, dict[str, Any]]:
    if isinstance(one, partial):
        return one.func.__name__, one.keywords
    return getattr(one, "__name__", str(one)), {}


__all__ = ["Pass", "Passed", "Watch", "run"]
