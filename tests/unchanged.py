"""Watches the stages from a graph to a plan: none may change a graph, shardings or a program that it is given."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.partitioning import partitioner, stretch
from tpshard.parallelism.passes import run
from tpshard.parallelism.pipeline import stages
from tpshard.parallelism.program import INFO, Program
from tpshard.parallelism.propagated import Shardings
from tpshard.parallelism.propagation import propagate, storage
from tpshard.parallelism.tracing import joined_slices
from tpshard.plan import planner
from tpshard.plan.step import pricing
from tpshard.programs.parts import checks, passes
from tpshard.programs.setting import annotations
from tpshard.programs.step import staged
from tpshard.programs.step.training_step import TrainingPrograms

STAGES: tuple[Callable[..., Any], ...] = (
    annotations.annotate, propagate.propagate, storage.propagate_and_store, joined_slices.join,
    partitioner.partition_graph, stretch.stretch_program, checks.check_reshards, stages.cut, staged.recompute_uncut,
    run.run, passes.apply, planner.planned_training, pricing.price_parts,
)  # fmt: skip


def digest(value: Graph | Shardings | Program) -> str:
    """A hash of all that a value says: graph, layouts, records, warnings."""
    if isinstance(value, Graph):
        said: Any = _graph(value)
    elif isinstance(value, Shardings):
        said = _graph(value.graph), *({key.name: one for key, one in part.items()} for part in (value.of, value.rules))
    else:
        nodes = [(n.name, str(n.target), n.args, n.kwargs, n.meta.get(INFO)) for n in value.graph.nodes]
        said = nodes, value.inputs, value.outputs, value.donated, value.warnings, value.records
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _graph(graph: Graph) -> list[object]:
    def named(value: Any) -> Any:
        return value.name if isinstance(value, Value) else value

    ops = [
        (op.name, op.target, op.args, op.kwargs, op.place, [*map(named, op.operands)], [*map(named, op.results)])
        for op in graph.ops
    ]
    values = [
        (v.name, v.shape, v.dtype, v.producer and v.producer.name, v.index, v.label, v.dims, v.marked,
         [user.name for user in v.users])
        for v in graph.values()
    ]  # fmt: skip
    return [*ops, *values, [*map(named, graph.outputs)]]


def _held(value: Any) -> Iterator[Graph | Shardings | Program]:
    """The graphs, shardings and programs in a stage's argument or result."""
    if isinstance(value, Graph | Shardings | Program):
        yield value
    elif isinstance(value, TrainingPrograms):
        yield from (part for part in (value.micro, value.update, value.gather, value.reduce) if part is not None)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _held(part)


@contextmanager
def nothing_changes() -> Iterator[None]:
    """Asserts, at the end of each stage and of the block, that all its stages saw is as it was."""
    seen: dict[int, tuple[Graph | Shardings | Program, str]] = {}

    def remember(values: Iterable[Graph | Shardings | Program]) -> None:
        for one in values:
            if id(one) not in seen:
                seen[id(one)] = one, digest(one)

    def watched(stage: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stage)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [*_held(args), *_held([*kwargs.values()])]
            remember(given)
            result = stage(*args, **kwargs)
            for one in given:
                assert digest(one) == seen[id(one)][1], f"{stage.__name__} changed a {type(one).__name__}"
            remember(_held(result))
            return result

        return call

    with ExitStack() as patches:
        for stage in STAGES:
            new = watched(stage)
            for module in [module for name, module in sys.modules.items() if name.startswith("tpshard.")]:
                for name in [name for name, value in vars(module).items() if value is stage]:
                    patches.enter_context(mock.patch.object(module, name, new))
        yield
    for one, before in seen.values():
        assert digest(one) == before, f"a {type(one).__name__} was changed between the stages"
