"""Rules written as letters, such as `...HW,oIKL->...YZ`, which name the dims of an op's tensors.

A small letter is a factor; a result that lacks it is a sum over it. A capital is a factor that must be whole. `...`
stands for leading dims, which all tensors with `...` share. The tensors are those of the op's schema in order,
including those that a call omits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpshard.parallelism.graph import Op, Ref, Value
from tpshard.parallelism.rules.entry import Entry
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, whole


def letters(text: str, local: Callable[[LocalOp], Any] | None = None, linear: str = "", **facts: Any) -> Entry:
    """The entry of an op by its letters. linear: indices of the tensors in which it is jointly linear, as digits."""
    return Entry(lambda op: rule_of(op, text, local, linear), **facts)


def rule_of(op: Op, text: str, local: Any = None, linear: str = "", same: str = "") -> Rule:
    """The rule of one op call, spelled by letters; every dim is whole if the shapes do not fit the letters.

    same: letters on which a result that lacks them does not depend, because every device computes the same.
    """
    left, right = (side.split(",") for side in text.split("->"))
    indices = tensors(op)
    factors = Factors()
    shared: dict[str, int] = {}
    operands: list[tuple[Dim, ...]] = [()] * len(op.operands)
    try:
        for spelled, index in zip(left, indices):
            if index is not None:
                operands[index] = _dims(op.operands[index], spelled, factors, shared)
        results = [_dims(value, spelled, factors, shared) for spelled, value in zip(right, op.results)]
    except ValueError:
        return whole(op)
    for name, f in shared.items():
        if name.isupper():
            continue
        in_results = [any(f in dim for dim in dims) for dims in results]
        if not all(in_results) and name not in same:
            factors.kinds[f] = Kind.REDUCE
    additive = tuple(i for place in linear if (i := indices[int(place)]) is not None)
    return factors.rule(operands, results, local=local, additive=additive)


def tensors(op: Op) -> list[int | None]:
    """The index of the operand for each tensor of the op's schema; None for a tensor that the call omits."""
    indices: list[int | None] = []
    for position, argument in enumerate(op.target._schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        value = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
        for one in value if isinstance(value, tuple) and not isinstance(value, Ref) else (value,):
            indices.append(one.index if isinstance(one, Ref) else None)
    return indices


def _dims(value: Value, spelled: str, factors: Factors, shared: dict[str, int]) -> tuple[Dim, ...]:
    if not value.rank:
        return ()
    names = spelled.removeprefix("...")
    lead = value.rank - len(names)
    if lead != 0 and not spelled.startswith("..."):
        raise ValueError(f"`{spelled}` does not fit {value}")
    out: list[Dim] = []
    for d, size in enumerate(value.shape):
        name = f"{d - lead}" if d < lead else names[d - lead]  # leading dims are counted back from the letters
        if size == 1:
            out.append(())
        else:
            if name not in shared:
                shared[name] = factors.new(size, Kind.WHOLE if name.isupper() else Kind.PASS)
            if factors.sizes[shared[name]] != size:
                raise ValueError(f"`{name}` of `{spelled}` is {factors.sizes[shared[name]]} and, in {value}, {size}")
            out.append((shared[name],))
    return tuple(out)
