"""Rules written as letters, such as `...HW,oIKL->...YZ`, which name the dims of an op's tensors.

A small letter is a factor; a result that lacks it is a sum over it. A capital is a factor that must be whole. `(kg)` is
a dim of two factors, from major to minor. `...` stands for dims that all tensors with `...` share. Dims of size 1
broadcast, and a tensor with fewer dims has the last ones. The tensors are those of the op's schema in order, including
those that a call omits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from tpshard.parallelism.graph import Op, Ref
from tpshard.parallelism.rules.entry import Entry
from tpshard.parallelism.rules.rule import Dim, Factors, Kind, LocalOp, Rule, whole

Names = tuple[tuple[str, ...], ...]
"""The letters of every dim of a tensor."""
SpelledDim = tuple[tuple[str, ...], int]
"""The letters of a dim, and its size."""
_SHARED = tuple("...")
Local = Callable[[LocalOp, Mapping[str, int]], Any]
"""A rule's `local`, which also receives the factor of each letter."""


def letters(
    text: str, *, flops: Callable[[Op], int] | None = None, fills: tuple[tuple[int, float], ...] = (),
    local: Local | None = None, linear: str = "", guarded: str = "", same: str = "", **facts: Any,
) -> Entry:  # fmt: skip
    """The entry of an op by its letters. flops: of one call. local, linear, guarded, same: see `rule_of`."""

    def rule(op: Op) -> Rule:
        count = flops(op) if flops else 0
        return rule_of(op, text, same=same, local=local, linear=linear, guarded=guarded, flops=count, fills=fills)

    return Entry(rule, **facts)


def rule_of(op: Op, text: str, *, same: str = "", **rest: Any) -> Rule:
    """The rule of one op call, spelled by letters; every dim is whole if the shapes do not fit the letters.

    same: letters (or `...`) on which a result that lacks them does not depend, because every device computes the same.
    rest: as of `Spelled.rule`.
    """
    try:
        return Spelled(op, text, same).rule(**rest)
    except ValueError:
        return whole(op)


class Spelled:
    """The factors of one op call, spelled by letters. Raises ValueError if the shapes do not fit the letters.

    same: as of `rule_of`. sizes: those of letters that the shapes do not tell.
    """

    def __init__(self, op: Op, text: str, same: str = "", sizes: Mapping[str, int] | None = None):
        left, right = _parse(text)
        self.indices = tensors(op)
        of_operand = {i: dims for dims, i in zip(left, self.indices) if i is not None}
        operands = [_spread(of_operand.get(i, ()), value.shape) for i, value in enumerate(op.operands)]
        results = [_spread(dims, value.shape) for dims, value in zip(right, op.results)]
        self.sizes = _sizes([dim for tensor in operands + results for dim in tensor], sizes or {})
        self.factors = Factors()
        self.of: dict[str, int] = {}
        """The factor of each letter."""
        in_all = set.intersection(*({name for names, size in dims if size != 1 for name in names} for dims in results))
        for name, size in self.sizes.items():
            summed = size > 1 and name not in in_all and name[:3] not in same
            kind = Kind.WHOLE if name.isupper() else Kind.REDUCE if summed else Kind.PASS
            self.of[name] = self.factors.new(size, kind)
        self.operands, self.results = ([self._factors(dims) for dims in side] for side in (operands, results))

    def _factors(self, dims: Sequence[SpelledDim]) -> tuple[Dim, ...]:
        return tuple(tuple(self.of[name] for name in names if size != 1 < self.sizes[name]) for names, size in dims)

    def rule(self, *, linear: str = "", guarded: str = "", local: Local | None = None, **rest: Any) -> Rule:
        """The rule of these factors.

        linear: indices of the tensors in which the op is jointly linear, as digits. guarded: summed letters whose
        padding `local` does not read. rest: fields of the rule.
        """
        if local is not None:
            rest["local"] = lambda at: local(at, self.of)
        additive = tuple(i for place in linear if (i := self.indices[int(place)]) is not None)
        owned = tuple(self.of[name] for name in guarded)
        return self.factors.rule(self.operands, self.results, additive=additive, guarded=owned, **rest)


@cache
def _parse(text: str) -> tuple[list[Names], list[Names]]:
    """The letters of every dim of every operand, and of every result."""

    def names(tensor: str) -> Names:
        return tuple(tuple(dim.strip("()")) for dim in re.findall(r"\.{3}|\(\w+\)|\w", tensor))

    left, right = text.split("->")
    return [names(tensor) for tensor in left.split(",")], [names(tensor) for tensor in right.split(",")]


def tensors(op: Op) -> list[int | None]:
    """The index of the operand for each tensor of the op's schema; None for a tensor that the call omits."""
    indices: list[int | None] = []
    for position, name in _tensor_arguments(op.target):
        value = op.args[position] if position < len(op.args) else op.kwargs.get(name)
        for one in value if isinstance(value, tuple) and not isinstance(value, Ref) else (value,):
            indices.append(one.index if isinstance(one, Ref) else None)
    return indices


@cache
def _tensor_arguments(target: Any) -> list[tuple[int, str]]:
    """The position and the name of every argument of an op that is a tensor or a list of tensors."""
    arguments = enumerate(target._schema.arguments)
    return [(position, argument.name) for position, argument in arguments if "Tensor" in str(argument.type)]


def _spread(names: Names, shape: Sequence[int]) -> list[SpelledDim]:
    """The letters and the size of every dim. Dims of `...` are counted back from its end: `...-1`, `...-2`."""
    if shape and _SHARED in names:
        place, count = names.index(_SHARED), len(shape) - len(names) + 1
        names = (*names[:place], *((f"...{i - count}",) for i in range(count)), *names[place + 1 :])
    if len(names) < len(shape):
        raise ValueError(f"{names} do not fit {shape}")
    return list(zip(names[len(names) - len(shape) :], shape))


def _sizes(dims: Sequence[SpelledDim], sizes_of: Mapping[str, int]) -> dict[str, int]:
    """The size of each letter, 1 if all its dims broadcast. Dims of one letter tell it for those of several."""
    sizes = {**dict.fromkeys((name for names, _ in dims for name in names), 1), **sizes_of}
    settled = {*sizes_of, *(names[0] for names, _ in dims if len(names) == 1)}
    for names, size in sorted(dims, key=lambda dim: len(dim[0])):
        if size == 1:
            continue
        unsettled = next((name for name in names if name not in settled), names[0])
        if sizes[unsettled] == 1:
            sizes[unsettled] = size // math.prod(sizes[name] for name in names)
        if math.prod(sizes[name] for name in names) != size:
            raise ValueError(f"{names} of sizes {sizes} do not fit a dim of {size}")
    return sizes
