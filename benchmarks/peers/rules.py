"""The rule of a statement: the rules of the ops it became, joined along the values between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpshard.parallelism.factors import Cut
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.mesh import Axis, size_of
from tpshard.parallelism.partitioning.choose import Choice, layout_of
from tpshard.parallelism.resharding.halo import halo_in, price
from tpshard.parallelism.rules.rule import Kind, Rule
from tpshard.parallelism.rules.table import rule_for
from tpshard.parallelism.sharding import local_bytes

from peers.operations import Builder

KINDS = {Kind.PASS: "", Kind.REDUCE: "reduction", Kind.WHOLE: "need_replication"}
KINDS |= {k: "permutation" for k in Kind if k.name == "PERMUTE"}
Factor = tuple[int, int]
"""A factor of an op's rule: the op's place among the statement's, and the factor's number."""
HALVES = Axis("halves", 1, 2)
ORDER = ["", "permutation", "reduction", "need_replication"]


@dataclass
class Joined:
    """Factors of a statement's operands and results, with sizes and kinds."""

    operands: list[list[list[int]]]
    results: list[list[list[int]]]
    sizes: dict[int, int]
    kinds: dict[int, str]
    blocked: set[int]
    values: list[Value]
    """The operands and results."""
    halos: dict[int, float]
    """The bytes of a sharded factor's halo, on two devices."""
    reduced: dict[int, float]
    """The bytes of the all-reduces that a sharded factor needs, on two devices."""

    def show(self) -> str:
        letters: dict[int, str] = {}

        def dims(tensor: list[list[int]]) -> str:
            for f in itertools.chain.from_iterable(tensor):
                letters.setdefault(f, chr(ord("i") + len(letters)))
            return "[" + ", ".join("".join(letters[f] for f in dim) or "1" for dim in tensor) + "]"

        text = f"({', '.join(map(dims, self.operands))})->({', '.join(map(dims, self.results))})"
        text += " {" + ", ".join(f"{letters[f]}={self.sizes[f]}" for f in letters) + "}"
        for kind in ORDER[1:]:
            named = [letters[f] for f in letters if self.kinds[f] == kind]
            text += f" {kind}={{{', '.join(named)}}}" if named else ""
        named = [letters[f] for f in letters if f in self.blocked]
        return text + (f" blocked={{{', '.join(named)}}}" if named else "")

    def differs(
        self, operands: Dims, results: Dims, sizes: dict[str, int], kinds: dict[str, str], blocked: set[str]
    ) -> tuple[str, dict[str, list[float]]]:
        """Where an expected rule is another one, in words; empty where it is the same up to names, or one in which a
        sharded factor costs no less.

        The second result names such factors, each with its bytes and the expected kind's, on two devices. Dims of size
        1, which nothing shards, have no factors, and a blocked factor is one factor per tensor.
        """
        tensors = [*self.operands, *self.results]
        mine = [_apart(t, self.blocked, i) for i, t in enumerate(tensors)]
        theirs = [_apart(t, blocked, i) for i, t in enumerate([*operands, *results])]
        if len(self.operands) != len(operands) or len(mine) != len(theirs):
            return f"{self.show()}: other tensors", {}
        theirs = [[d if n != 1 else [] for d, n in zip(t, v.shape)] for t, v in zip(theirs, self.values)]
        theirs = _reachable(theirs, kinds)
        if [[len(d) for d in t] for t in mine] != [[len(d) for d in t] for t in theirs]:
            return f"{self.show()}: other factors", {}
        names: dict[Any, Any] = {}
        for f, name in zip(_flat(mine), _flat(theirs)):
            if names.setdefault(f, name) != name:
                return f"{self.show()}: `{names[f][0]}` and `{name[0]}` are one factor", {}
        if len(set(names.values())) != len(names):
            return f"{self.show()}: one expected factor is two", {}
        cheaper = {}
        for f, (name, tensor) in names.items():
            same_size = self.sizes[f[0]] == sizes[name] or tensor is not None
            if not same_size and [f] not in [d for t in mine for d in t]:
                return f"{self.show()}: `{name}` has size {self.sizes[f[0]]}, not {sizes[name]}", {}
            if self.kinds[f[0]] != kinds.get(name, ""):
                whole = self.price(f[0], "need_replication")  # which the engine chooses where it is cheaper
                price = min(whole, self.price(f[0], self.kinds[f[0]])), self.price(f[0], kinds.get(name, ""))
                if price[0] > price[1]:
                    return f"{self.show()}: `{name}` is `{self.kinds[f[0]]}`, not `{kinds.get(name, '')}`", {}
                cheaper[name] = list(price)
        return "", cheaper

    def price(self, factor: int, kind: str) -> float:
        """The bytes that a device sends if a factor of this kind is sharded over two devices: an all-reduce of the
        results, the halo, or a gather of the operands; none for what passes, unless no result has it."""
        count = len(self.operands)
        contains = [any(factor in dim for dim in t) for t in [*self.operands, *self.results]]
        if kind == "reduction":
            return self.reduced.get(factor) or float(sum(v.bytes for v in self.values[count:]))
        if kind == "permutation" and factor in self.halos:
            return self.halos[factor]
        if kind == "" and any(contains[count:]):
            return 0.0
        return sum(v.bytes for v, has_factor in zip(self.values[:count], contains) if has_factor) / 2


Dims = list[list[list[Any]]]


def _flat(tensors: Dims) -> list[Any]:
    return [f for tensor in tensors for dim in tensor for f in dim]


def _apart(tensor: list[list[Any]], blocked: set[Any], index: int) -> list[list[Any]]:
    """Factors as (factor, None), and a blocked one as (factor, tensor): it links nothing."""
    return [[(f, index if f in blocked else None) for f in dim] for dim in tensor]


def _reachable(tensors: Dims, kinds: dict[str, str]) -> Dims:
    """Dims that are windows as well as positions in them, as a convolution's, with the first of these factors only:
    no sharding reaches the other, since it would have to divide the first into single elements."""
    both = {"permutation", "reduction"}
    return [[d[:1] if {kinds.get(f[0]) for f in d} == both else d for d in t] for t in tensors]


def joined(builder: Builder, names: Sequence[str]) -> Joined:
    """The rule from the values that the last statement reads to the ones that it makes."""
    results = [v for name, v in builder.values.items() if name in names or name.split(".")[0] in names]
    first = {id(v) for v in builder.inputs}
    first |= {id(v) for name, v in builder.values.items() if v not in results and name[0] != "_"}
    ops = []
    stack, visited = list(results), set()
    while stack:
        value = stack.pop()
        if id(value) in first or value.producer is None or id(value.producer) in visited:
            continue
        visited.add(id(value.producer))
        ops.append(value.producer)
        stack.extend(value.producer.operands)
    ops.sort(key=builder.ops.index)
    rules = [rule_for(op) for op in ops]
    parent: dict[Factor, Factor] = {}

    def root(key: Factor) -> Factor:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    made_of: dict[Factor, list[Factor]] = {}
    """The factors of which another op sees one to be made."""

    def finest(key: Factor) -> list[Factor]:
        parts = made_of.get(root(key))
        return [key] if parts is None else [f for part in parts for f in finest(part)]

    dims_of: dict[Value, list[list[Factor]]] = {}
    for i, (op, rule) in enumerate(zip(ops, rules)):
        for value, dims in zip([*op.operands, *op.results], rule.tensors):
            mine = [[(i, f) for f in dim] for dim in dims]
            if value not in dims_of:
                dims_of[value] = mine
                continue
            for a, b in zip(dims_of[value], mine):
                if len(a) == len(b):
                    for x, y in zip(a, b):
                        parent[root(y)] = root(x)
                elif 1 in (len(a), len(b)) and a and b:
                    one, several = (a[0], b) if len(a) == 1 else (b[0], a)
                    for x, y in zip(made_of.setdefault(root(one), several), several):
                        parent[root(y)] = root(x)
    numbers: dict[Factor, int] = {}
    kinds: dict[int, str] = {}
    sizes: dict[int, int] = {}
    blocked: set[int] = set()
    halos: dict[int, float] = {}
    reduced: dict[int, float] = {}
    for i, (op, rule) in enumerate(zip(ops, rules)):
        for f, size in enumerate(rule.sizes):
            n = numbers.setdefault(root((i, f)), len(numbers))
            kind = KINDS[rule.kinds[f]]
            kinds[n] = max(kinds.get(n, ""), kind, key=ORDER.index)
            sizes[n] = max(sizes.get(n, 0), size)
            halos[n] = halos.get(n, 0.0) + inside(op, rule, {f: Cut((HALVES,))})
            if kind == "reduction":
                reduced[n] = reduced.get(n, 0.0) + sum(v.bytes for v in op.results)
            if f in rule.blocked:
                blocked.add(n)

    def tensor(value: Value) -> list[list[int]]:
        dims = dims_of.get(value, [[] for _ in value.shape])
        return [[numbers[root(f)] for key in dim for f in finest(key) if sizes[numbers[root(f)]] != 1] for dim in dims]

    operands = builder.statement_operands
    tensors = [tensor(v) for v in operands], [tensor(v) for v in results]
    return Joined(*tensors, sizes, kinds, blocked, [*operands, *results], halos, reduced)


def inside(op: Op, rule: Rule, choice: Choice) -> float:
    """The bytes that a device sends for an op itself, computed in a choice: halos, and what its `local` gathers."""
    tensors, sent = [*op.operands, *op.results], price(op, rule, choice, 0)
    for f, window in rule.windows:
        if f in choice and not rule.moving and halo_in(op, choice[f].axes, window) is None:
            layout = layout_of(rule, rule.tensors[window.read], choice, False)
            value = tensors[window.read]
            sent += local_bytes(value.shape, layout, value.dtype.itemsize) * (size_of(choice[f].axes) - 1)
    return sent
