"""Running passes in order. They change when operations run and what is stored, never the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tpshard.parallelism.passes.copy import copied
from tpshard.parallelism.program import Program

Pass = Callable[[Program], Program]
"""A function that edits its own copy of a program and returns it, named like the pass."""


class Passed(NamedTuple):
    """A program after a pass."""

    name: str
    """The pass's name; "" before the first pass."""
    settings: dict[str, Any]
    """The arguments of the pass."""
    program: Program
    """The program; the next pass edits it, so observers must read it at once."""
    seconds: float
    """Seconds that the pass took."""


Watch = Callable[[Passed], None]


def run(passes: Sequence[Pass], program: Program, watch: Watch | None = None) -> Program:
    """The program after all passes in order; the given one is not changed."""
    program, _ = copied(program)
    if watch is not None:
        watch(Passed("", {}, program, 0.0))
    for one in passes:
        started = time.perf_counter()
        made = one(program)
        seconds = time.perf_counter() - started
        program = made.replace_graph(made.graph)  # cached facts of the old graph are invalid
        if watch is not None:
            watch(Passed(*_called(one), program, seconds))
    return program


def _called(one: Pass) -> tuple[str, dict[str, Any]]:
    if isinstance(one, partial):
        return one.func.__name__, one.keywords
    return getattr(one, "__name__", str(one)), {}


__all__ = ["Pass", "Passed", "Watch", "run"]
