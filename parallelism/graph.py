"""The global graph: a function as ATen ops with global shapes, before anything is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A placeholder for operand `index` in an op's arguments."""

    index: int  # type: ignore[assignment]


Role = str
"""The role of a tensor in a step: parameter, gradient, optimizer, batch, seed, cache, state, order, scalar, logits,
loss or none ("")."""


class Layer(NamedTuple):
    """A layer: module number `number` of the list of modules at path `stack`."""

    stack: str
    number: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.number}"


class Place(NamedTuple):
    """The module of the model and the phase of the step to which an op belongs."""

    module: str = ""
    """The module's path, such as `layers.3.mlp`."""
    layer: Layer | None = None
    phase: str = "forward"
    """forward, backward, recompute or update."""
    role: Role = ""
    """The role of values computed there."""


ANYWHERE = Place()


@dataclass(eq=False)
class Value:
    """A tensor of the graph: an input, a constant, or one result of an op."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: Op | None = None
    index: int = 0
    """Index among the producer's results, or among the inputs."""
    users: list[Op] = field(default_factory=list)
    """The readers, once per operand."""
    label: str = ""
    """The model's name for an activation, shared by its gradient; annotation patterns match it."""
    dims: tuple[str, ...] = ()
    """The names of its dims, if the model gives them."""
    marked: Role = ""
    """The role stated for this value, if any."""

    @property
    def role(self) -> Role:
        """The value's role: the stated one, else that of its producer's place."""
        return self.marked or (self.producer.place.role if self.producer is not None else "")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements of the whole value."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole value."""
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name}{list(self.shape)}"


@dataclass(eq=False)
class Op:
    """One operation, `target(*args, **kwargs)`; tensor arguments are `Ref`s to operands."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Value]
    results: list[Value]
    place: Place = ANYWHERE

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def phase(self) -> str:
        return self.place.phase

    def __repr__(self) -> str:
        return f"{self.results} = {self.target}({self.operands})"


@dataclass
class Graph:
    """A function: its inputs, ops in execution order, and outputs (values, or constants that the function returns)."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value | Any]
    constants: dict[str, tuple[Value, torch.Tensor]] = field(default_factory=dict)
    out_tree: Any = None
    in_tree: Any = None
    seed: Value | None = None
    """The last input, if random numbers are drawn."""

    def values(self) -> Iterator[Value]:
        """Yields all values: inputs, constants, and the results of ops in order."""
        yield from self.inputs
        for value, _ in self.constants.values():
            yield value
        for op in self.ops:
            yield from op.results

    def number_inputs(self) -> None:
        """Renews the inputs' indices after inputs were added or removed."""
        for i, value in enumerate(self.inputs):
            value.index = i

    def refresh_users(self) -> None:
        """Recomputes every value's users after ops were added, removed or rewired."""
        for value in self.values():
            value.users = []
        for op in self.ops:
            for operand in op.operands:
                operand.users.append(op)

    def replace(self, old: Value, new: Value) -> None:
        """Makes all readers of `old` read `new`."""
        new.marked = new.marked or old.marked
        for op in set(old.users):
            op.operands = [new if operand is old else operand for operand in op.operands]
        new.users.extend(old.users)
        old.users = []
        self.outputs = [new if output is old else output for output in self.outputs]

    def drop_dead(self) -> None:
        """Removes ops whose results are never read."""
        needed = {id(output) for output in self.outputs if isinstance(output, Value)}
        live: list[Op] = []
        for op in reversed(self.ops):
            if any(id(result) in needed for result in op.results):
                live.append(op)
                needed.update(id(operand) for operand in op.operands)
        self.ops = live[::-1]
        self.constants = {name: pair for name, pair in self.constants.items() if id(pair[0]) in needed}
        self.refresh_users()

    def copy(self) -> tuple[Graph, dict[Value, Value], dict[Op, Op]]:
        """Returns a graph with values and ops of its own, and the copy of each value and of each op."""
        values = {value: replace(value) for value in self.values()}
        ops = {
            op: replace(op, operands=[values[v] for v in op.operands], results=[values[v] for v in op.results])
            for op in self.ops
        }
        for value in values.values():
            value.producer = None if value.producer is None else ops[value.producer]
        graph = replace(
            self, inputs=[values[v] for v in self.inputs], ops=[*ops.values()],
            outputs=[values[out] if isinstance(out, Value) else out for out in self.outputs],
            constants={name: (values[value], tensor) for name, (value, tensor) in self.constants.items()},
            seed=None if self.seed is None else values[self.seed],
        )  # fmt: skip
        graph.refresh_users()
        return graph, values, ops


def mark(values: Iterable[Any], role: Role) -> None:
    """Sets the role of values."""
    for value in values:
        value.marked = role


def map_refs(tree: Any, change: Callable[[Ref], Any]) -> Any:
    """Replaces every `Ref` in a tree of arguments by `change(ref)`."""
    if isinstance(tree, Ref):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_refs(item, change) for item in tree)
    return tree
