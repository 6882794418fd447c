"""The global graph: what is computed, with global shapes, before anything is spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """Stands for operand `index` inside an op's arguments."""

    index: int  # type: ignore[assignment]


Role = str
"""What a tensor is in a step: parameter, gradient, optimizer, batch, seed, cache, order, scalar, logits or loss; ""."""


class Layer(NamedTuple):
    """One of a model's stack of alike modules."""

    stack: str
    number: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.number}"


class Place(NamedTuple):
    """Where in the model and in the step an op stands."""

    module: str = ""
    """Its path, `layers.3.mlp`."""
    layer: Layer | None = None
    phase: str = "forward"
    """forward, backward, recompute or update."""
    role: Role = ""
    """Of what is computed there."""


ANYWHERE = Place()


@dataclass(eq=False)
class Value:
    """A tensor of the graph: an input, a constant, or one result of an op."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    producer: Op | None = None
    index: int = 0
    """Which of the producer's results, or which input."""
    users: list[Op] = field(default_factory=list)
    """One entry for each operand that reads it."""
    label: str = ""
    """The model's own name for an activation, shared by its gradient; what annotations by pattern match."""
    dims: tuple[str, ...] = ()
    """Names of its dims, where the model gave them."""
    marked: Role = ""
    """What the value is, where that was said of it."""

    @property
    def role(self) -> Role:
        """What the value is: as marked, else as everything where it is made."""
        return self.marked or (self.producer.place.role if self.producer is not None else "")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name}{list(self.shape)}"


@dataclass(eq=False)
class Op:
    """One operation: `target(*args, **kwargs)` where a tensor argument is a `Ref` to an operand."""

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
    """Inputs, ops in execution order, outputs (a value, or a constant that the function returned)."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value | Any]
    constants: dict[str, tuple[Value, torch.Tensor]] = field(default_factory=dict)
    out_tree: Any = None
    in_tree: Any = None
    seed: Value | None = None
    """The last input, where random numbers are drawn."""

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        for value, _ in self.constants.values():
            yield value
        for op in self.ops:
            yield from op.results

    def refresh_users(self) -> None:
        """Recounts every value's users, after ops were added, removed or rewired."""
        for value in self.values():
            value.users = []
        for op in self.ops:
            for operand in op.operands:
                operand.users.append(op)

    def replace(self, old: Value, new: Value) -> None:
        """Lets everything that reads `old` read `new`."""
        new.marked = new.marked or old.marked
        for op in set(old.users):
            op.operands = [new if operand is old else operand for operand in op.operands]
        new.users.extend(old.users)
        old.users = []
        self.outputs = [new if output is old else output for output in self.outputs]

    def drop_dead(self) -> None:
        """Removes ops whose results nothing reads."""
        needed = {id(output) for output in self.outputs if isinstance(output, Value)}
        kept: list[Op] = []
        for op in reversed(self.ops):
            if any(id(result) in needed for result in op.results):
                kept.append(op)
                needed.update(id(operand) for operand in op.operands)
        self.ops = kept[::-1]
        self.constants = {name: pair for name, pair in self.constants.items() if id(pair[0]) in needed}
        self.refresh_users()

    def __str__(self) -> str:
        lines = [f"inputs {self.inputs}", *(f"  {op}" for op in self.ops), f"return {self.outputs}"]
        return "\n".join(lines)


def mark(values: Iterable[Any], role: Role) -> None:
    """Says of values what they are."""
    for value in values:
        value.marked = role


def map_refs(tree: Any, change: Callable[[Ref], Any]) -> Any:
    """Rebuilds an argument tree with every `Ref` changed."""
    if isinstance(tree, Ref):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_refs(item, change) for item in tree)
    return tree
