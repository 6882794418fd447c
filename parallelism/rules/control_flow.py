"""Control flow: operations that run a part of a graph, their body, on a condition or again and again.

In a captured graph the bodies are `Graph`s, in a device's program they are `Program`s; they are the first arguments,
then come numbers, then the operands. What crosses a body's border is listed by `joints`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from tpshard.parallelism.graph import Graph, Op, Value

T = TypeVar("T")
Ranks = list[list[Tensor]]
"""Tensors of each rank that this process computes: one of a real run, all in a simulation."""
Run = Callable[[Ranks], Ranks]
"""Runs a body on its arguments, for each rank."""

WHILE_ROUNDS = 16
"""The rounds for which a `while_loop` is priced: how many it runs is known by its data alone."""


DEARER = -1
"""In the place of the number of the body for which a condition is priced: the dearer one."""


def cond(bodies: Sequence[Run], numbers: Sequence[int], ranks: Ranks) -> Ranks:
    """Runs the first body if the first operand is true, else the second, on the other operands.

    numbers: the index of the body that runs in almost all steps, for which it is priced, or `DEARER`.
    """
    then, otherwise = bodies
    return _apart((then if _agreed([own[0] for own in ranks]) else otherwise)([own[1:] for own in ranks]), ranks)


def scan(bodies: Sequence[Run], numbers: Sequence[int], ranks: Ranks) -> Ranks:
    """Runs the body for each slice of some operands along dim 0, and carries values from one run to the next.

    numbers: how many operands are carried, how many are sliced (the rest are whole in every run), and whether from the
    last slice to the first. Returns the carried values, and the body's further results along a new dim 0.
    """
    (run,), (carried, sliced, backwards) = bodies, numbers
    rounds = ranks[0][carried].shape[0]
    held, stacks = [own[:carried] for own in ranks], list[list[Tensor]]()
    for t in reversed(range(rounds)) if backwards else range(rounds):
        at = ([x[t] for x in own[carried : carried + sliced]] for own in ranks)
        results = run([[*h, *x, *own[carried + sliced :]] for h, x, own in zip(held, at, ranks)])
        held = [own[:carried] for own in results]
        stacks = stacks or [[x.new_empty((rounds, *x.shape)) for x in own[carried:]] for own in results]
        for own, stack in zip(results, stacks):
            for x, whole in zip(own[carried:], stack):
                whole[t] = x
    return [[*h, *stack] for h, stack in zip(_apart(held, ranks), stacks)]


def while_loop(bodies: Sequence[Run], numbers: Sequence[int], ranks: Ranks) -> Ranks:
    """Runs the second body on the carried operands, the first `numbers[0]`, for as long as the first one says."""
    (test, run), (carried,) = bodies, numbers
    held = [own[:carried] for own in ranks]
    while _agreed([own[0] for own in test([[*h, *own[carried:]] for h, own in zip(held, ranks)])]):
        held = run([[*h, *own[carried:]] for h, own in zip(held, ranks)])
    return _apart(held, ranks)


CONTROL_FLOW: dict[Any, tuple[str, ...]] = {
    cond: ("then", "otherwise"), scan: ("body",), while_loop: ("test", "body")
}  # fmt: skip
"""The operations, with the names of their bodies."""


def _agreed(said: Sequence[Tensor]) -> bool:
    """The condition, which all ranks have: they would wait for each other in different collectives otherwise."""
    answers = {bool(one) for one in said}
    assert len(answers) == 1, "ranks disagree about a condition"
    return answers.pop()


def _apart(results: Ranks, ranks: Ranks) -> Ranks:
    """Results with storage of their own: a body may return an operand, or a view of it, which others overwrite."""
    return [
        [x.clone() if x.untyped_storage().data_ptr() in held else x for x in own]
        for own, held in zip(results, ({y.untyped_storage().data_ptr() for y in own} for own in ranks))
    ]


def bodies(args: Sequence[Any], kind: type) -> list[Any]:
    """The bodies among the arguments of an operation; none of one that is no control flow."""
    return [arg for arg in args if isinstance(arg, kind)]


def numbers(args: Sequence[Any]) -> list[int]:
    """The numbers among the arguments of an operation of control flow."""
    return [arg for arg in args if isinstance(arg, int)]


def every_graph(graph: Graph) -> Iterator[Graph]:
    """Yields a graph, and before it the bodies in it."""
    for op in graph.ops:
        for body in bodies(op.args, Graph) if op.target in CONTROL_FLOW else ():
            yield from every_graph(body)
    yield graph


class Joint(NamedTuple):
    """Values that are one value in and outside of bodies, and so have one sharding."""

    operand: int | None
    result: int | None
    inner: tuple[Value, ...]
    """Inputs and results of bodies, the input first that others follow."""
    sliced: bool = False
    """Whether operand or result have a dim 0 more, along which the runs of a body follow each other."""


def joints(op: Op) -> Iterator[Joint]:
    """Yields what crosses the border of an operation's bodies. A condition's operand is none: it has no dims."""
    graphs, given = bodies(op.args, Graph), numbers(op.args)
    if op.target is cond:
        for i, inner in enumerate(zip(*(graph.inputs for graph in graphs), strict=True)):
            yield Joint(i + 1, None, inner)
        for i, inner in enumerate(zip(*(graph.outputs for graph in graphs), strict=True)):
            yield Joint(None, i, inner)
        return
    body, carried = graphs[-1], given[0]
    for i, inner in enumerate(zip(*(graph.inputs for graph in reversed(graphs)), strict=True)):
        if i < carried:
            yield Joint(i, i, (*inner, body.outputs[i]))
        else:
            yield Joint(i, None, inner, op.target is scan and i < carried + given[1])
    for i, value in zip(count(carried), body.outputs[carried:]):
        yield Joint(None, i, (value,), sliced=True)


def priced(args: Sequence[Any], each: Sequence[T], dearer: Callable[[Sequence[T]], T]) -> T:
    """Of what there is for each branch of a condition with these arguments, the one that is priced."""
    (often,) = numbers(args)
    return dearer(each) if often == DEARER else each[often]


def runs_text(target: Any, args: Sequence[Any], operands: Sequence[Sequence[int]]) -> str:
    """How often the bodies run, in words."""
    if target is while_loop:
        return f"as often as its test holds, priced for {WHILE_ROUNDS} runs"
    if target is cond:
        (often,) = numbers(args)
        usual = "the dearer" if often == DEARER else f"`{CONTROL_FLOW[cond][often]}`, which runs in almost all steps"
        return f"one of both runs, priced as {usual}"
    return f"{rounds(target, args, operands)} runs"


def rounds(target: Any, args: Sequence[Any], operands: Sequence[Sequence[int]]) -> int:
    """How often the bodies run, by the shapes of the operands: of a `while_loop` the rounds for which it is priced."""
    return operands[numbers(args)[0]][0] if target is scan else WHILE_ROUNDS if target is while_loop else 1
