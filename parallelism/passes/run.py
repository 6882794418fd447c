"""Running a list of passes on a program; a pass changes when operations run and what is stored, not the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tpshard.parallelism.passes.copy import copy_program
from tpshard.parallelism.program import Program

Pass = Callable[[Program], Program]
"""A function that edits its own copy of a program and returns it, named like the pass.

A pass that only reorders nodes returns `program.with_new_order()`, so that later ones need not classify them again."""


class PassResult(NamedTuple):
    """What `run` reports after each pass: the pass, the program that it returned, and its duration."""

    name: str
    """The pass's name; "" before the first pass."""
    settings: dict[str, Any]
    """The arguments of the pass."""
    program: Program
    """The program after the pass."""
    seconds: float
    """Seconds that the pass took."""


Watch = Callable[[PassResult], None]


def run(passes: Sequence[Pass], program: Program, watch: Watch | None = None) -> Program:
    """Runs passes in order on a copy of a program, and returns the result. `watch` is called after each pass, with
    a program that no later pass edits."""
    program, _ = copy_program(program)
    if watch is not None:
        watch(PassResult("", {}, program, 0.0))
    for one in passes:
        if watch is not None:
            program, _ = copy_program(program)
        started = time.perf_counter()
        result = one(program)
        seconds = time.perf_counter() - started
        # cached facts of the old graph are invalid, unless the pass says which are not
        program = result.replace_graph(result.graph) if result is program else result
        if watch is not None:
            watch(PassResult(*name_and_settings(one), program, seconds))
    return program


def name_and_settings(one: Pass) -> tuple[str, dict[str, Any]]:
    """A pass's name, and the arguments that a list of passes gives it."""
    if isinstance(one, partial):
        return one.func.__name__, one.keywords
    return getattr(one, "__name__", str(one)), {}
