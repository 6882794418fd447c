"""What must hold for a case of each kind: (holds, actual, reason)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import tpshard.parallelism.annotate  # noqa: F401  (registers mesh_split)
from tpshard.parallelism import factors
from tpshard.parallelism.factors import Cut
from tpshard.parallelism.graph import Graph, Value
from tpshard.parallelism.mesh import Mesh, overlap, size_of, starts_with
from tpshard.parallelism.partitioning import choose
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.pricing.cost import wire_bytes
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import LOOPS, Loop, propagate
from tpshard.parallelism.resharding.reshard import ReshardStep, cost, redistribution
from tpshard.parallelism.rules.table import rule_for
from tpshard.parallelism.sharding import Layout, Sharding, local_bytes
from tpshard.parallelism.tracing.canonical import join_pieces
from tpshard.parallelism.why import SourcePlace

from peers.operations import Builder
from peers.program_text import numbers, read
from peers.rules import inside, joined
from peers.shardings import NotExpressible, axes_in, layout_of, mesh_of, sharding_of

Answer = tuple[bool, Any, str]
MODES = {"basic": (Loop(4, False),), "aggressive": (Loop(4, True),)}


def _build(case: dict[str, Any], rewrite: Callable[[Graph], None] | None = None) -> tuple[Builder, dict[str, Value]]:
    """The graph of a case, rewritten as a captured graph would be, and its values by name."""
    builder = Builder(read(case["program"]))
    if rewrite is not None:
        rewrite(builder.graph)
    mark_outputs(builder.graph)
    named = dict(builder.values)
    named |= {f"return[{i}]": v for i, v in enumerate(builder.graph.outputs)}
    return builder, named


def _annotations(case: dict[str, Any], named: dict[str, Value], mesh: Mesh) -> dict[Value, Annotation]:
    annotations = {}
    for name, text in case["annotations"].items():
        name = "return[0]" if name == "result" and name not in named else name
        if name not in named:
            raise NotExpressible(f"no value is named `{name}`")
        annotations[named[name]] = Annotation(sharding_of(text, named[name].rank, mesh), (SourcePlace(name),))
    return annotations


# ---- propagation ----------------------------------------------------------------------------------------------------
def propagation(case: dict[str, Any]) -> Answer:
    mesh = mesh_of(case)
    builder, named = _build(case)
    mode = str(case.get("engine_mode")).split(";")[0].split(" ")[0]
    annotations = _annotations(case, named, mesh)
    shardings = propagate(
        builder.graph, mesh, annotations, list(builder.ties.values()), loops=MODES.get(mode, LOOPS)
    ).of
    exact = "shardy" in case["source"].split(":")[0]
    actual, wrong = {}, []
    for name, text in case["expected"]["shardings"].items():
        value = named[name]
        mine, theirs = shardings[value], sharding_of(text, value.rank, mesh)
        actual[name] = mine.show(mesh)
        if exact:
            same = (mine.dims, mine.open, mine.replicated, mine.unreduced) == (
                theirs.dims, theirs.open, theirs.replicated, theirs.unreduced
            )  # fmt: skip
        elif text.startswith("none") or (text == "replicated" and "barrier" in case["program"]):
            same = not mine.axes
        else:
            same = all(starts_with(m, w) for m, w in zip(mine.dims, theirs.dims))
        if not same:
            wrong.append(f"{name}: {mine.show(mesh)}, expected {text}")
    return not wrong, actual, "; ".join(wrong)


# ---- rules ----------------------------------------------------------------------------------------------------------
def op_rule(case: dict[str, Any]) -> Answer:
    text = read(case["program"])
    mine = joined(Builder(text), text.calls[-1].results)
    wrong, cheaper = mine.differs(*_rule_of(case["expected"]["rules"][-1]))
    actual = {"rule": mine.show()} | ({"bytes and the peer's, of factors of another kind": cheaper} if cheaper else {})
    return not wrong, actual, wrong


Dims = list[list[list[str]]]


def _rule_of(expected: dict[str, str]) -> tuple[Dims, Dims, dict[str, int], dict[str, str], set[str]]:
    """`([ij, k])->([i, j, k])`, sizes and kinds, without factors of size 1, which nothing can shard."""
    sizes = {n: int(s) for n, s in re.findall(r"(\w+)=(\d+)", expected["sizes"])}
    kinds = {}
    for kind in ("reduction", "need_replication", "permutation"):
        kinds |= dict.fromkeys(re.findall(r"\w+", expected.get(kind, "")), kind)
    blocked = set(re.findall(r"\w+", expected.get("blocked_propagation", "")))

    def dim(text: str) -> list[str]:
        return [f for f in re.findall(r"[a-z](?:_\d+)?", text) if sizes[f] != 1]

    def tensors(text: str) -> Dims:
        return [[dim(d) for d in body.split(",") if body.strip()] for body in re.findall(r"\[([^\]]*)\]", text)]

    left, right = expected["map"].split("->")
    return tensors(left), tensors(right), sizes, kinds, blocked


# ---- reshards -------------------------------------------------------------------------------------------------------
def _sent_bytes(steps: tuple[ReshardStep, ...], shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes that a device sends."""
    return round(cost(steps, shape, itemsize, latency=0))


def reshard_plan(case: dict[str, Any]) -> Answer:
    mesh = mesh_of(case)
    head = re.search(r"reshard\(\w+: (\[[\d, ]*\])", case["program"])
    if head is None:
        raise NotExpressible("not a bare reshard")
    shape = tuple(numbers(head[1]))
    target = case["annotations"].get("target", case["annotations"].get("result"))
    source, goal = (layout_of(t, len(shape), mesh) for t in (case["annotations"]["a0"], target))
    mine = redistribution(shape, source, goal, 4, latency=0)  # as for large tensors: bytes decide
    theirs, at = 0, source
    for step in case["expected"]["collectives"]:
        after = layout_of(step["to"], len(shape), mesh)
        if step["op"] in ("all_slice", "replicated_to_unreduced", "sharded_to_unreduced"):
            at = after
            continue
        kind = {"collective_permute": "permute"}.get(step["op"], step["op"])
        before_bytes, after_bytes = (local_bytes(shape, layout, 4) for layout in (at, after))
        moved = axes_in(step.get("axes", ""), mesh)
        members = size_of(moved) if moved else 2
        sent = wire_bytes(
            kind, max(after_bytes, before_bytes * members) if kind == "all_gather" else before_bytes, members
        )
        uneven = any(n % size_of(axes) for layout in (at, after) for n, axes in zip(shape, layout.dims))
        if uneven:  # pieces that do not lie one in another take more than the one collective
            sent = max(sent, _sent_bytes(redistribution(shape, at, after, 4, latency=0), shape, 4))
        theirs += sent
        at = after
    sent = _sent_bytes(mine, shape, 4)
    reached = (mine[-1].after if mine else source) == goal or not mine
    actual = {"steps": [f"{s.kind} -> {s.after.show(mesh)}" for s in mine], "bytes": sent, "peer_bytes": theirs}
    reason = "" if sent <= theirs else f"{sent} bytes, {theirs} expected: {actual['steps']}"
    return reached and sent <= theirs, actual, reason if reached else "ends in another layout"


def explicit_reshards(case: dict[str, Any]) -> Answer:
    mesh = mesh_of(case)
    builder, named = _build(case)
    annotations = _annotations(case, named, mesh)
    for name, value in named.items():  # what carries no sharding is whole
        if value not in annotations and not name.startswith("_"):
            annotations[value] = Annotation(Sharding(((),) * value.rank, (False,) * value.rank), (SourcePlace(name),))
    theirs = _peer_bytes(
        case, named, mesh, {n: layout_of_annotation(annotations[v]) for n, v in named.items() if v in annotations}
    )
    program = partition_graph(propagate(builder.graph, mesh, annotations, list(builder.ties.values())), latency=0)
    mine = sum(wire_bytes(c.kind, c.bytes, c.size) for c in program.collectives)
    actual: dict[str, Any] = {"collectives": [f"{c.kind} {c.axes} {c.bytes}" for c in program.collectives]}
    actual |= {"bytes": mine, "peer_bytes": theirs}
    return mine <= theirs, actual, "" if mine <= theirs else f"{mine} bytes, {theirs} expected: {actual['collectives']}"


def layout_of_annotation(annotation: Annotation) -> Layout:
    return Layout(annotation.sharding.dims, annotation.sharding.unreduced)


def _peer_bytes(case: dict[str, Any], named: dict[str, Value], mesh: Mesh, layouts: dict[str, Layout]) -> int:
    """Bytes of the expected steps: each reshard by the engine's own cheapest plan, and each op by what it sends itself
    in the layouts that these bring, such as a halo."""
    total = 0
    at = {name: (value, layouts[name]) for name, value in named.items() if name in layouts}
    stated: set[str] = set()
    """Results whose layout a step has said, and not only the annotation that it must reach."""
    for step in case["expected"]["steps"]:
        if step.get("op") == "return":
            continue
        if "no" in step:  # no reshard: every op is computed as its values lie
            computed = [(n, v) for n, v in named.items() if v.producer is not None and not n.startswith("_")]
            for _, value in computed:
                total += _compute(value, dict(at.values()), dict(at.values())[value])[1]
            continue
        if step["op"] in named or "kind" in step:
            base = step["op"]
            for name in step["of"]:  # what no step computes is computed as it lies
                if name in named and name not in stated and named[name].producer is not None:
                    others = {v: layout for n, (v, layout) in at.items() if n != name}
                    total += _compute(named[name], others, at[name][1])[1]
                    stated.add(name)
            layout_of_value = dict(at.values()) | {at[n][0]: at[n][1] for n in step["of"] if n in at}
            for name in (n for n in named if n == base or n.startswith(f"{base}.")):
                result_layout = (
                    layout_of(step["result_sharding"], named[name].rank, mesh) if "result_sharding" in step else None
                )
                layout, sent = _compute(named[name], layout_of_value, result_layout)
                total += sent if "." not in name or name.endswith(".0") else 0
                at[name] = (named[name], layout)
                stated.add(name)
            continue
        name = {"ARG0": "a0"}.get(step["of"], step["of"])
        if name not in at and "[[" in name:
            name = next(reversed([n for n in named if not n.startswith(("return", "_"))]))
        if name not in at:
            raise NotExpressible(f"a step reads `{step['of']}`")
        value, before = at[name]
        after = layout_of(step["to"], value.rank, mesh)
        if step["op"] == "reshard" and value.producer is not None and name in named and name not in stated:
            before, sent = _compute(value, {v: layout for n, (v, layout) in at.items() if n != name}, None)
            total += sent
            at[name] = (value, before)
            stated.add(name)
        if step["op"] == "all_reduce":
            members = size_of(axes_in(step["axes"].removeprefix("max"), mesh))
            total += wire_bytes(
                "all_reduce", local_bytes(value.shape, Layout(after.dims), value.dtype.itemsize), members
            )
        elif step["op"] == "reshard":
            total += _move(value, Layout(before.dims), Layout(after.dims))
        elif step["op"] not in ("sharded_to_unreduced", "replicated_to_unreduced", "all_slice"):
            total += _move(value, before, after)
        at[step["name"]] = (value, after)
    return total


def _move(value: Value, before: Layout, after: Layout) -> int:
    itemsize = value.dtype.itemsize
    return _sent_bytes(redistribution(value.shape, before, after, itemsize, latency=0), value.shape, itemsize)


def _compute(value: Value, layouts: dict[Value, Layout], result_layout: Layout | None) -> tuple[Layout, int]:
    """The layout in which a statement leaves its result that computes on its operands as they lie, and the bytes that
    this takes. A statement may be several ops. wanted: the result's layout, where a step says it."""
    op = value.producer
    if op is None:
        return layouts.get(value, Layout(((),) * value.rank)), 0
    rule, total, homes = rule_for(op), 0, []
    for operand in op.operands:
        layout, sent = (layouts[operand], 0) if operand in layouts else _compute(operand, layouts, None)
        homes.append(layout)
        total += sent
    cuts: dict[int, Cut] = {}
    for layout, dims in zip(
        [*homes, *([result_layout] if result_layout else [])], [*rule.operands, rule.results[value.index]]
    ):
        for factor, cut in factors.cuts(Layout(layout.dims), dims, rule.sizes).items():
            if cut.axes and factor not in cuts and not any(overlap(a, c.axes) for a in cut.axes for c in cuts.values()):
                cuts[factor] = cut
    for operand, home, dims in zip(op.operands, homes, rule.operands):
        need = choose.layout_of(rule, dims, cuts, False)
        if need.dims != home.dims:  # a dim of size 1, or axes that another operand has elsewhere
            total += _move(operand, Layout(home.dims), need)
    result = factors.layout_of(rule.results[value.index], cuts, rule.sizes)
    return Layout(result.dims), total + round(inside(op, rule, cuts))


# ---- whole programs -------------------------------------------------------------------------------------------------
DEAR = {"permute": 0, "all_to_all": 1, "all_gather": 2, "reduce_scatter": 2, "all_reduce": 3}


def partition(case: dict[str, Any]) -> Answer:
    mesh = mesh_of(case)
    if case["program"].startswith("reshard("):
        return _partitioned_reshard(case, mesh)
    builder, named = _build(case, join_pieces)
    program = partition_graph(propagate(builder.graph, mesh, _annotations(case, named, mesh)), latency=0)
    actual: dict[str, Any] = {"collectives": [f"{c.kind} {c.axes} {c.bytes}" for c in program.collectives]}
    if not _equals_expected([c.kind for c in program.collectives], case["expected"]):
        mine = sum(wire_bytes(c.kind, c.bytes, c.size) for c in program.collectives)
        theirs = _least_bytes(case["expected"]["collectives"], mesh)
        actual |= {"bytes": mine, "peer_bytes": theirs}
        if theirs is None or mine > theirs:
            return False, actual, f"{actual['collectives']}, expected {case['expected']['collectives']}"
    return (*_numerics(builder, program, actual),)  # type: ignore[return-value]


def _least_bytes(expected: list[dict[str, Any]], mesh: Mesh) -> int | None:
    """The least number of bytes that a device sends for the expected collectives, each over the smallest axis; None
    where a shape is unknown. Elements have 4 bytes."""
    members, total = min(mesh.axes.values()), 0
    for each in expected:
        kind = each["op"].replace("collective_", "")
        shape = (
            each.get("shape_in") or each.get("local_out" if kind == "all_gather" else "local_in") or each.get("shape")
        )
        if shape is None:
            return None
        total += each.get("count", 1) * wire_bytes(kind, 4 * math.prod(shape), members)
    return total


def _equals_expected(mine: list[str], expected: dict[str, Any]) -> bool:
    """Whether the kinds of a program's collectives are the expected ones, or cheaper; or, where a note says that the
    peer's test asserts less than that, what it does assert."""
    note = expected.get("note", "")
    contained = re.search(r"must contain ([\w-]+) and no ([\w/-]+)", note)
    if contained:
        kinds = contained[1].replace("-", "_"), contained[2].replace("-", "_").split("/")
        return kinds[0] in mine and not set(mine) & set(kinds[1])
    exactly = re.search(r"only asserts that exactly (\d+) (?:collective-)?([\w-]+)", note)
    if exactly:
        return mine.count(exactly[2].replace("-", "_")) == int(exactly[1]) and "all_gather" not in mine
    return not _without_match(mine, expected["collectives"])


def _partitioned_reshard(case: dict[str, Any], mesh: Mesh) -> Answer:
    head = re.search(r"reshard\(\w+: (\[[\d, ]*\])", case["program"])
    assert head is not None
    shape = tuple(numbers(head[1]))
    source, goal = (layout_of(t, len(shape), mesh) for t in case["annotations"].values())
    kinds = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce", "exchange": "all_to_all",
             "permute": "permute"}  # fmt: skip
    steps = redistribution(shape, source, goal, 4)
    mine = [kinds[s.kind] for s in steps if s.kind in kinds]
    actual = {"collectives": mine}
    holds = _equals_expected(mine, case["expected"])
    return holds, actual, "" if holds else f"{mine}, expected {case['expected']['collectives']}"


def _without_match(mine: list[str], expected: list[dict[str, Any]]) -> bool:
    """Whether a collective has no expected one, as dear or dearer, of its own."""
    allowed = [e["op"].replace("collective_", "") for e in expected for _ in range(e.get("count", 1))]
    for kind in sorted(mine, key=lambda k: -DEAR[k]):
        fit = [a for a in allowed if DEAR[a] >= DEAR[kind]]
        if not fit:
            return True
        allowed.remove(min(fit, key=lambda a: (a != kind, DEAR[a])))
    return False


def _numerics(builder: Builder, program: Any, actual: dict[str, Any]) -> Answer:
    from peers.interpret import evaluate

    total = sum(v.numel for op in builder.ops for v in [*op.operands, *op.results])
    if total > 30_000_000:
        return True, actual | {"numerics": "too large to run"}, ""
    generator = torch.Generator().manual_seed(0)
    args = [
        torch.randn(v.shape, generator=generator) if v.dtype.is_floating_point
        else torch.randint(0, 2, v.shape, generator=generator) for v in builder.inputs
    ]  # fmt: skip
    whole = evaluate(builder.graph, args)
    parts = program.simulate(*args)
    far = [
        float((a.double() - b.double()).abs().max())
        for a, b in zip(whole, parts)
        if a.numel() and a.dtype != torch.bool
    ]
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(whole, parts))
    actual = actual | {"largest difference": max(far, default=0.0)}
    return close, actual, "" if close else "the numbers differ from eager"
