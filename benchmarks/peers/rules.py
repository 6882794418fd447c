"""The rule of a statement: the rules of the ops it became, joined along the values between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tpshard.parallelism.graph import Value
from tpshard.parallelism.rules.rule import Kind
from tpshard.parallelism.rules.table import rule_for

from peers.operations import Builder

KINDS = {Kind.PASS: "", Kind.REDUCE: "reduction", Kind.WHOLE: "need_replication"}
KINDS |= {k: "permutation" for k in Kind if k.name == "PERMUTE"}
ORDER = ["", "permutation", "reduction", "need_replication"]


@dataclass
class Joined:
    """Factors of a statement's operands and results, with sizes and kinds."""

    operands: list[list[list[int]]]
    results: list[list[list[int]]]
    sizes: dict[int, int]
    kinds: dict[int, str]
    blocked: set[int]

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
        self, operands: list[list[list[str]]], results: list[list[list[str]]], sizes: dict[str, int],
        kinds: dict[str, str], blocked: set[str],
    ) -> str:  # fmt: skip
        """Where an expected rule is another one, in words; empty where it is the same up to names."""
        mine, theirs = [*self.operands, *self.results], [*operands, *results]
        shape = [[len(dim) for dim in t] for t in mine], [[len(dim) for dim in t] for t in theirs]
        if len(self.operands) != len(operands) or shape[0] != shape[1]:
            return f"{self.show()}: other factors"
        names: dict[int, str] = {}
        for f, name in zip(
            itertools.chain.from_iterable(d for t in mine for d in t),
            itertools.chain.from_iterable(d for t in theirs for d in t),
        ):
            if names.setdefault(f, name) != name:
                return f"{self.show()}: `{names[f]}` and `{name}` are one factor"
        if len(set(names.values())) != len(names):
            return f"{self.show()}: one expected factor is two"
        for f, name in names.items():
            if self.sizes[f] != sizes[name]:
                return f"{self.show()}: `{name}` has size {self.sizes[f]}, not {sizes[name]}"
            if self.kinds[f] != kinds.get(name, ""):
                return f"{self.show()}: `{name}` is `{self.kinds[f]}`, not `{kinds.get(name, '')}`"
            if (f in self.blocked) != (name in blocked):
                return f"{self.show()}: `{name}` is {'' if f in self.blocked else 'not '}blocked"
        return ""


def joined(builder: Builder, names: Sequence[str]) -> Joined:
    """The rule from the values that the last statement reads to the ones that it makes."""
    made = [v for name, v in builder.values.items() if name in names or name.split(".")[0] in names]
    first = {id(v) for v in builder.inputs}
    first |= {id(v) for name, v in builder.values.items() if v not in made and name[0] != "_"}
    ops = []
    stack, seen = list(made), set()
    while stack:
        value = stack.pop()
        if id(value) in first or value.producer is None or id(value.producer) in seen:
            continue
        seen.add(id(value.producer))
        ops.append(value.producer)
        stack.extend(value.producer.operands)
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def root(key: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    rules = {id(op): rule_for(op) for op in ops}
    dims_of: dict[Value, list[list[tuple[int, int]]]] = {}
    kind: dict[tuple[int, int], str] = {}
    size: dict[tuple[int, int], int] = {}
    blocked: set[tuple[int, int]] = set()
    for op in sorted(ops, key=builder.ops.index):
        rule = rules[id(op)]
        for value, dims in zip([*op.operands, *op.results], rule.tensors):
            mine = [[(id(op), f) for f in dim] for dim in dims]
            if value not in dims_of:
                dims_of[value] = mine
                continue
            for a, b in zip(dims_of[value], mine):
                if len(a) == len(b):
                    for x, y in zip(a, b):
                        parent[root(y)] = root(x)
        for f in range(len(rule.sizes)):
            kind[(id(op), f)] = KINDS[rule.kinds[f]]
            size[(id(op), f)] = rule.sizes[f]
            if f in getattr(rule, "blocked", ()):
                blocked.add((id(op), f))
    numbers: dict[tuple[int, int], int] = {}
    kinds: dict[int, str] = {}
    sizes: dict[int, int] = {}
    stuck: set[int] = set()
    for key in kind:
        n = numbers.setdefault(root(key), len(numbers))
        kinds[n] = max(kinds.get(n, ""), kind[key], key=ORDER.index)
        sizes[n] = max(sizes.get(n, 0), size[key])
        if key in blocked:
            stuck.add(n)

    def tensor(value: Value) -> list[list[int]]:
        dims = dims_of.get(value, [[] for _ in value.shape])
        return [[numbers[root(key)] for key in dim if sizes[numbers[root(key)]] != 1] for dim in dims]

    return Joined([tensor(v) for v in builder.statement_operands], [tensor(v) for v in made], sizes, kinds, stuck)
