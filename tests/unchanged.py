"""Watches the stages from a graph to a plan: none may change a graph, shardings or a program that it is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from tpshard.parallelism.graph import Graph
from tpshard.parallelism.partitioning import partitioner, stretch
from tpshard.parallelism.passes import run
from tpshard.parallelism.pipeline import stages as pipeline_stages
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
    partitioner.partition_graph, stretch.stretch_program, checks.check_reshards, pipeline_stages.cut,
    staged.recompute_uncut, run.run, passes.apply, planner.planned_training, pricing.price_parts,
)  # fmt: skip


def contents(value: Graph | Shardings | Program) -> object:
    """All that a value says: graph, layouts, records, warnings. Parts that cannot change are the value's own."""
    if isinstance(value, Graph):
        return _graph(value)
    if isinstance(value, Shardings):
        return _graph(value.graph), dict(value.of), dict(value.rules)
    nodes = [(n.name, n.target, _frozen(n.args), _frozen(n.kwargs), n.meta.get(INFO)) for n in value.graph.nodes]
    parts = (value.inputs, value.outputs, value.donated, value.warnings, value.records)
    return nodes, [_frozen(part) for part in parts]


def _graph(graph: Graph) -> object:
    ops = [
        (op.name, op.target, _frozen(op.args), _frozen(op.kwargs), op.place, tuple(op.operands), tuple(op.results))
        for op in graph.ops
    ]
    values = [
        (v.name, _frozen(v.shape), v.dtype, v.producer, v.index, v.label, _frozen(v.dims), v.marked, tuple(v.users))
        for v in graph.values()
    ]
    return ops, values, tuple(graph.outputs)


def _frozen(value: Any) -> Any:
    """A value without the lists and dictionaries in it, which could change."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


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
    """Asserts at the end of the block that all that its stages saw is as it was when the first of them saw it."""
    seen: dict[int, tuple[Graph | Shardings | Program, object, list[str]]] = {}

    def remember(values: Iterable[Graph | Shardings | Program], stage: str) -> None:
        for one in values:
            if id(one) not in seen:
                seen[id(one)] = one, contents(one), []
            seen[id(one)][2].append(stage)

    def watched(stage: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stage)
        def call(*args: Any, **kwargs: Any) -> Any:
            remember(_held([*args, *kwargs.values()]), stage.__name__)
            result = stage(*args, **kwargs)
            remember(_held(result), stage.__name__)
            return result

        return call

    with ExitStack() as patches:
        for stage in STAGES:
            new = watched(stage)
            for module in [module for name, module in sys.modules.items() if name.startswith("tpshard.")]:
                for name in [name for name, value in vars(module).items() if value is stage]:
                    patches.enter_context(mock.patch.object(module, name, new))
        yield
    for one, before, stages in seen.values():
        assert contents(one) == before, f"a {type(one).__name__} was changed after {', '.join(stages)}"
