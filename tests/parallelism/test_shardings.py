"""Laws of meshes, axes, shardings and factors, and of moving a value between any two layouts."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from tpshard.parallelism import Mesh, manual, mesh_split, partition
from tpshard.parallelism.graph import Op, Ref, Value
from tpshard.parallelism.mesh import (
    Axes,
    Axis,
    atoms,
    common_prefix,
    covers,
    difference,
    merge,
    remainder,
    size_of,
    split,
    starts_with,
    union,
    without,
)
from tpshard.parallelism.resharding.reshard import LATENCY_BYTES, ReshardStep, cost, redistribution
from tpshard.parallelism.rules.rule import Factors, Kind
from tpshard.parallelism.rules.shape import reshape_factors
from tpshard.parallelism.rules.table import rule_for
from tpshard.parallelism.sharding import Layout, Sharding, local_shape, parse
from tpshard.parallelism.simulate import block, cut, join

torch.set_num_threads(1)
MESHES = [Mesh({"x": 4, "y": 2}), Mesh({"x": 2, "y": 3}), Mesh({"x": 2, "y": 2, "z": 2})]


def some_axes(rng: random.Random, mesh: Mesh) -> Axes:
    """Axes and parts of axes, disjoint, in any order."""
    pieces = []
    for name, size in mesh.axes.items():
        pieces += [Axis(name, 1, 2), Axis(name, 2, 2)] if size == 4 and rng.random() < 0.5 else [Axis(name, 1, size)]
    rng.shuffle(pieces)
    return merge(pieces[: rng.randint(0, len(pieces))])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_partition_the_ranks(mesh: Mesh) -> None:
    rng = random.Random(0)
    for _ in range(50):
        axes = some_axes(rng, mesh)
        groups = mesh.groups(axes)
        assert sorted(r for group in groups for r in group) == list(range(mesh.ranks))
        for group in groups:
            assert group == sorted(group) and len(group) == size_of(axes)
            assert [mesh.linear_index(mesh.sorted(axes), r) for r in group] == list(range(len(group)))
            others = difference([Axis(n, 1, s) for n, s in mesh.axes.items()], axes)
            assert len({mesh.linear_index(others, r) for r in group}) == 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_algebra_of_axes(mesh: Mesh) -> None:
    rng = random.Random(1)
    for _ in range(300):
        a, b = some_axes(rng, mesh), some_axes(rng, mesh)
        assert merge(split(a, atoms((a, b)))) == a
        prefix = common_prefix(a, b)
        assert prefix == common_prefix(b, a) and starts_with(a, prefix) and starts_with(b, prefix)
        assert merge((*prefix, *remainder(a, prefix))) == a
        remaining = without(a, b)
        assert starts_with(a, remaining) and not any(x.overlaps(y) for x in remaining for y in b)
        assert covers(union(a, b), a) and covers(union(a, b), b)
        assert size_of(difference(a, b)) * size_of(b) == size_of(union(a, b))


def test_wrong_axes_are_refused() -> None:
    mesh = Mesh({"x": 4})
    for bad in ("y", ("x", 3, 2), ("x", 1), ("x", 0, 2)):
        with pytest.raises(ValueError, match="axis"):
            mesh.axis(bad)
    with pytest.raises(ValueError, match="used twice"):
        Sharding.of(mesh, [("x", 1, 2), "x"], 2)
    with pytest.raises(ValueError, match="3 dims"):
        Sharding.of(mesh, [None, None, "x"], 2)
    for wrong in ((2, 4), {"a b": 2}, {"": 2}):
        with pytest.raises(ValueError, match="mesh axis"):
            Mesh(wrong)
    for call in (
        lambda sizes: partition(torch.relu, [torch.ones(4)], sizes),
        lambda sizes: mesh_split(torch.ones(4), sizes, [0]),
        lambda sizes: manual(sizes, "x", [None], [None]),
    ):
        with pytest.raises(ValueError, match="give a `Mesh`"):
            call({"x": 2})
    with pytest.raises(ValueError, match="whole number"):
        Mesh({"x": 0})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_text_of_a_sharding_reads_back(mesh: Mesh) -> None:
    rng = random.Random(2)
    for _ in range(100):
        axes = list(split(some_axes(rng, mesh), {}))
        cut_at = rng.randint(0, len(axes))
        inputs = Sharding(
            (merge(axes[:cut_at]), (), merge(axes[cut_at:])), (rng.random() < 0.5, True, False),
            frozenset(difference([Axis(n, 1, s) for n, s in mesh.axes.items()], axes)),
            rng.choice([None, (1, 0, 2)]),
        )  # fmt: skip
        if rng.random() < 0.5:
            inputs = replace(inputs, replicated=frozenset(), unreduced=merge(sorted(inputs.replicated)))
        assert parse(inputs.show(mesh), mesh) == inputs


@pytest.mark.parametrize("text", [
    "", "{x}", "[{x} {y}", "[{x} {x}]", "[{x:(1)2} {x}]", "[{x}] and more", "[{x} y]", "[{q}]", "[{?,x}]", "[{x:(1)}]",
    "[{x@pz}]", "[{x@p1}p2]", "[{x,}]", "[{x}] replicated={x}", "[{x}] unreduced=", "[{x}] unreduced={y} unreduced={z}",
    "[{x:(1)2} {x:(1)4}]", "[[{x}]]", "[{x@p} {}]", "[{x@p1.5}]", "[{x@p1,y}]", "[{x}p]", "[{x}p-1]", "[{x:2}]",
])  # fmt: skip
def test_texts_that_are_no_sharding_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sharding") as refusal:
        parse(text, Mesh({"x": 8, "y": 2, "z": 2}))
    assert repr(text) in str(refusal.value)


WRONG = [5, ("x", 5), ((("x", "y"), 3),), {"x": 0}, ("q",), ("x", "x"), ("?", "x", "?", None)]


@pytest.mark.parametrize("sharding", WRONG, ids=str)
def test_what_is_no_sharding_of_an_argument_is_told_what_is(sharding: object) -> None:
    with pytest.raises(ValueError, match=r"in_shardings\[0\] of `arg0` \[8, 8\]"):
        partition(lambda x: x + 1, [torch.empty(8, 8)], Mesh({"x": 2, "y": 2}), in_shardings=[sharding])


def test_an_argument_may_have_every_property_of_a_sharding() -> None:
    mesh = Mesh({"x": 2, "y": 2, "z": 2})
    for inputs in ("[{x,?} {?}] replicated={z}", (("x", "?"), "?")):
        program = partition(lambda a, b: a + b, [torch.empty(8, 8)] * 2, mesh, [inputs, (("x", "z"), "y")])
        assert program.in_shardings[0] == ("x" if isinstance(inputs, str) else ("x", "z"), "y")
    program = partition(lambda a: a * 2.0, [torch.empty(8, 8)], mesh, ["[{x} {}] unreduced={y}"], [("x",)])
    assert [c.kind for c in program.collectives] == ["all_reduce"]


@pytest.mark.parametrize("axis", ["x", "y", "z"])
def test_a_sum_over_an_axis_is_given_and_returned_whole(axis: str) -> None:
    """Whatever the other axes do, a simulation adds each summand once."""
    mesh, x = Mesh({"x": 2, "y": 3, "z": 2}), torch.arange(28.0).reshape(7, 4)
    other = "xz".replace(axis, "")[0]
    texts = [f"[{{}} {{}}] unreduced={{{axis}}}", f"[{{{other}}} {{}}] unreduced={{{axis}}}", f"[{{{other}}} {{}}]"]
    for into, out in itertools.product(texts, texts):
        program = partition(lambda x: x * 2 + 1, [x], mesh, [into], [out])
        assert torch.equal(program.simulate(x)[0], x * 2 + 1), (into, out)


def test_a_program_refuses_tensors_of_other_shapes() -> None:
    program = partition(lambda x: x + 1, [torch.empty(8, 4)], Mesh({"x": 2}), [("x",)])
    for shape in ((16, 4), (8,), (8, 4, 1)):
        with pytest.raises(ValueError, match=r"`arg0` is \[8, 4\] in the program"):
            program.simulate(torch.empty(shape))


def test_factors_of_a_view_cover_both_shapes() -> None:
    shapes = [(24,), (4, 6), (2, 12), (2, 3, 4), (6, 4), (1, 24), (8, 3), (3, 8), (2, 2, 6, 1), (12, 2)]
    for source, target in itertools.product(shapes, repeat=2):
        factors = Factors()
        left, right = reshape_factors(factors, source, target)
        for shape, dims in ((source, left), (target, right)):
            for n, members in zip(shape, dims, strict=True):
                assert math.prod(factors.sizes[f] for f in members) == n
        shared = [f for dim in left for f in dim if factors.kinds[f] is Kind.PASS]
        assert shared == [f for dim in right for f in dim if factors.kinds[f] is Kind.PASS]
    factors = Factors()
    left, right = reshape_factors(factors, (16,), (2, 8))
    assert left == ((0, 1),) and right == ((0,), (1,)) and factors.sizes == [2, 8]
    left, right = reshape_factors(factors, (2, 3), (3, 2))
    assert not {f for dim in left for f in dim} & {f for dim in right for f in dim}


def test_op_without_a_rule_is_computed_whole() -> None:
    value = Value("a", (4, 4), torch.float32)
    op = Op("odd", torch.ops.aten.linalg_cross.default, (Ref(0),), {}, [value], [Value("b", (4, 4), torch.float32)])
    rule = rule_for(op)
    assert not rule.has_rule and set(rule.kinds) == {Kind.WHOLE}


# ---- layouts --------------------------------------------------------------------------------------------------
def layouts(mesh: Mesh, rank: int) -> list[tuple[Axes, ...]]:
    """Every way to put whole axes (and halves of an axis of 4) on dims, in every order."""
    pieces: list[list[Axis]] = [[Axis(n, 1, s)] for n, s in mesh.axes.items()]
    choices = [pieces]
    if mesh.axes["x"] == 4:
        choices.append([[Axis("x", 1, 2)], [Axis("x", 2, 2)], *pieces[1:]])
    names = set()
    for parts in choices:
        flat = [part[0] for part in parts]
        for order in itertools.permutations(flat):
            for places in itertools.product(range(rank + 1), repeat=len(order)):
                names.add(tuple(merge(a for a, p in zip(order, places) if p == d) for d in range(rank)))
    return sorted(names)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cut_and_join_are_inverse(mesh: Mesh) -> None:
    for shape in ((8, 12), (3, 5), (1, 7)):
        whole = torch.randn(shape)
        for dims in layouts(mesh, 2):
            layout = Layout(dims)
            parts = [cut(whole, layout, mesh, rank) for rank in range(mesh.ranks)]
            assert {tuple(p.shape) for p in parts} == {local_shape(shape, layout)}

            class Here:
                pass

            port = Here()
            port.shape, port.layout = shape, layout  # type: ignore[attr-defined]
            assert torch.equal(join(port, mesh, parts), whole)  # type: ignore[arg-type]
            copies = math.prod(mesh.axes.values()) // size_of(layout.axes)
            covered = sum(math.prod(n for _, n in block(shape, layout, mesh, rank)) for rank in range(mesh.ranks))
            assert covered == copies * whole.numel()


@pytest.mark.parametrize(("mesh", "shape"), [(m, s) for m in MESHES for s in ((8, 12), (3, 10))], ids=str)
def test_any_layout_reaches_any_other(mesh: Mesh, shape: tuple[int, int]) -> None:
    """A reshard is the identity, through `partition`, uneven layouts included; so is the sum of a partial one."""
    rng = random.Random(3)
    value = torch.randn(shape, dtype=torch.float64)
    rows = torch.randn(6, 12, shape[0], dtype=torch.float64)
    pairs = list(itertools.product(layouts(mesh, 2), repeat=2))
    for source, target in rng.sample(pairs, 30):
        program = partition(lambda x: x, [value], mesh, [source], [target])
        assert torch.equal(program.simulate(value)[0], value), (source, target)
        assert program.outputs[0].layout.dims == target
        assert all("arg0" in c.reason for c in program.collectives)
    for source, target in rng.sample(pairs, 12):
        left = (None, source[1], source[0])
        program = partition(lambda a: a.sum(1), [rows], mesh, [left], [target])
        torch.testing.assert_close(program.simulate(rows)[0], rows.sum(1), msg=f"{left} {target}")


def test_plans_send_no_more_than_through_replication_and_hold_no_more_than_they_must() -> None:
    mesh, shape = MESHES[0], (16, 16)

    def sent_bytes(steps: tuple[ReshardStep, ...]) -> float:
        return cost(steps, shape, 4) - LATENCY_BYTES * sum(s.kind not in ("slice", "mask") for s in steps)

    for source, target in random.Random(4).sample(list(itertools.product(layouts(mesh, 2), repeat=2)), 150):
        whole = Layout(((), ()))
        direct = redistribution(shape, Layout(source), Layout(target), 4)
        through = (*redistribution(shape, Layout(source), whole, 4), *redistribution(shape, whole, Layout(target), 4))
        assert sent_bytes(direct) <= sent_bytes(through) + 1, (source, target, direct)
        bound = max(math.prod(local_shape(shape, Layout(d))) for d in (source, target))
        assert all(math.prod(local_shape(shape, s.after)) <= bound for s in direct), (source, target, direct)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_matmul_work_is_divided(mesh: Mesh) -> None:
    """Wherever the axes lie on the three dims of a product, no device does more than its share."""
    a, b = torch.randn(24, 48, dtype=torch.float64), torch.randn(48, 24, dtype=torch.float64)
    names = list(mesh.axes)
    for places in itertools.product("mkn", repeat=len(names)):
        on = {d: tuple(n for n, p in zip(names, places) if p == d) or None for d in "mkn"}
        program = partition(torch.matmul, [a, b], mesh, [(on["m"], on["k"]), (on["k"], on["n"])])
        assert program.flop_efficiency == 1, places
        assert {c.kind for c in program.collectives} <= {"all_reduce", "reduce_scatter"}
        assert len(program.collectives) == (on["k"] is not None), places
        torch.testing.assert_close(program.simulate(a, b)[0], a @ b)


def test_a_sharded_tensor_is_printed_as_in_the_scaling_book() -> None:
    mesh = Mesh({"fsdp": 2, "tp": 4})
    fsdp, tp = mesh.axis("fsdp"), mesh.axis("tp")
    assert Layout(((fsdp,), (tp,))).notation(mesh, ("embed", "mlp")) == "[E_fsdp, M_tp]"
    assert Layout(((), (fsdp, tp))).notation(mesh) == "[I, J_fsdp+tp]"
    assert Layout(((fsdp,), ()), (tp,)).notation(mesh, ("batch", "rows")) == "[B_fsdp, rows] {U_tp}"
    assert Layout(((),), (tp,), "max").notation(mesh) == "[I] {max_tp}"
    blueprint = Sharding.of(mesh, "[{fsdp,?} {?}] replicated={tp}", 2)
    assert blueprint.notation(mesh) == "[I_fsdp?, J_?] replicated over tp"
