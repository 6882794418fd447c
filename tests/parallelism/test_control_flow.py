"""Control flow on shards computes what Python's own does, with gradients, and is priced by its runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.utils import _pytree as pytree
from tpshard.devices.read import device
from tpshard.parallelism import Mesh, mesh_split, partition, program_file
from tpshard.parallelism.pricing.fusion import compiled_as, kernels
from tpshard.parallelism.pricing.liveness import liveness
from tpshard.parallelism.pricing.timeline import Priced, price
from tpshard.parallelism.program import Program
from tpshard.parallelism.resharding.lower import is_first
from tpshard.parallelism.rules.control_flow import WHILE_ROUNDS
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.runtime import regions
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor, localize
from tpshard.parallelism.simulate import run_lockstep

F64 = torch.float64
MESH, ONE = Mesh({"a": 2, "b": 3}), Mesh({"a": 1})
Ops = Sequence[Callable[..., Any]]


def plain_scan(fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    count = pytree.tree_leaves(xs)[0].shape[dim]
    ys, order = {}, range(count)
    for t in reversed(order) if reverse else order:
        init, ys[t] = fn(init, pytree.tree_map(lambda x, t=t: x.select(dim, t), xs))
    return init, pytree.tree_map(lambda *each: torch.stack(each, dim), *(ys[t] for t in order))


def plain_while(test: Any, body: Any, held: Any) -> Any:
    while test(*held):
        held = body(*held)
    return held


def plain_cond(which: Any, then: Any, otherwise: Any, operands: Any = ()) -> Any:
    return then(*operands) if which else otherwise(*operands)


TORCH, PLAIN = (torch.cond, scan, while_loop), (plain_cond, plain_scan, plain_while)

cell = nn.GRUCell(6, 6, dtype=F64)


def branches(ops: Ops, x: Tensor, w: Tensor) -> Any:
    """One branch takes operands, the other closes over tensors; results are views of those, or these themselves."""
    y, z = x * 2, w * 2
    fns = lambda x: (x @ w, x.transpose(0, 1), w * 3), lambda x: ((y - 1) @ w.sin(), y.transpose(0, 1), z)
    return ops[0](w.sum() > 0, *fns, (x,))


def recurrent(ops: Ops, x: Tensor, w: Tensor) -> Any:
    weights = {name: p + w.sum() for name, p in cell.named_parameters()}

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.func.functional_call(cell, weights, (x, h))
        return h, h.clone()

    return ops[1](step, torch.zeros(7, 6, dtype=F64), x)


def softmax_by_blocks(ops: Ops, x: Tensor, w: Tensor) -> Any:
    def step(held: Any, x: Tensor) -> Any:
        top, total, out = held
        p = x @ w
        new = torch.maximum(top, p.amax(-1))
        scores, keep = (p - new[:, None]).exp(), (top - new).exp()
        return (new, total * keep + scores.sum(-1), out * keep[:, None] + scores @ w.t()), p.argmax(-1)

    zeros = torch.zeros(7, dtype=F64)
    (_, total, out), best = ops[1](step, (zeros - 1e9, zeros, torch.zeros(7, 6, dtype=F64)), x)
    return out / total[:, None], best


def written(ops: Ops, x: Tensor, w: Tensor) -> Any:
    """Writes in place before, in and behind the body, which runs from the last slice along dim 1."""
    y = x.clone()
    y[0] += 1

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = h.clone()
        h[:, :2] += x.sum()
        return h.mul_(0.5), h @ w

    h, z = ops[1](step, y[:, 0] * 1, y, dim=1, reverse=True)
    if ops is TORCH and torch.__version__ < "2.13":  # which left the slices' dim first
        z = z.movedim(0, 1)
    z = z.clone()
    z[1] = 0
    return h, z


def nested(ops: Ops, x: Tensor, w: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = ops[0](h.sum() > 0, lambda h: torch.tanh(h @ w @ w.t()), lambda h: torch.cos(h + x), (h,))
        k, _ = ops[1](lambda k, y: (k * 0.5 + y.sin().sum(), k * 1), torch.zeros((), dtype=F64), h)
        return h * k, k * 2

    return ops[1](step, x[1] * 2, x)


def annotated(ops: Ops, x: Tensor, w: Tensor) -> Any:
    """The carried value is annotated inside, beside what its operand says."""

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = mesh_split(torch.tanh(h @ w @ w.t()) + x, MESH, ("b", None))
        return h, h.sum(0)

    return ops[1](step, x[0] * 1, x)


def roots(ops: Ops, x: Tensor, w: Tensor) -> Any:
    x, w = x.detach(), w.detach()
    first = (torch.zeros((), dtype=torch.int64), x.abs() + 1)
    step = lambda i, y: (i + 1, (y + 2 / y) / 2 + 0 * w.sum())  # noqa: E731
    return ops[2](lambda i, y: (y.square() - 2).abs().max() > 1e-9, step, first)


def repeated(ops: Ops, x: Tensor, w: Tensor) -> Any:
    """A loop whose gradient is taken, with data-dependent runs, a condition inside and a loop that never runs."""

    def step(i: Tensor, y: Tensor) -> Any:
        turned = ops[0](i > 1, lambda y: torch.tanh(y @ w @ w.t()), lambda y: torch.sin(y) + x, (y,))
        return i + 1, turned * 0.5

    first = torch.zeros((), dtype=torch.int64)
    i, y = ops[2](lambda i, y: (i < 5) & (y.detach().square().sum() > 1e-3), step, (first, x * 1))
    return i, y, ops[2](lambda i, y: i < 0, step, (first, y + w.sum()))[1]


def carried_weights(ops: Ops, x: Tensor, w: Tensor) -> Any:
    """A scan of loops that carry what they multiply by."""

    def step(h: Tensor, y: Tensor) -> Any:
        loop = lambda i, h, v: (i + 1, torch.tanh(h @ v @ w.t()) + y, v * 0.9)  # noqa: E731
        h = ops[2](lambda i, h, v: i < 2, loop, (torch.zeros((), dtype=torch.int64), h, w * 1))[1]
        return h, h * 2

    return ops[1](step, x[0] * 1, x)


def associative(ops: Ops, x: Tensor, w: Tensor) -> Any:
    def both(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    return associative_scan(both, (torch.sigmoid(x), x), 1, combine_mode="generic")


CASES = [
    branches,
    recurrent,
    softmax_by_blocks,
    written,
    nested,
    annotated,
    roots,
    repeated,
    carried_weights,
    associative,
]
SHARDINGS = [[(None, ("a", "b"), None), None], [(("b",), None, "a"), ("a", "b")], [None, (("b", "a"), None)]]


def results_of(case: Callable[..., Any], ops: Ops, x: Tensor, w: Tensor) -> list[Tensor]:
    """The results, and the gradients of their weighted sum."""
    results = list(pytree.tree_leaves(case(ops, x, w)))
    if case is roots:
        return results
    loss = 0 * w.sum()
    for one in results:
        if one.is_floating_point():
            loss = loss + (one * torch.arange(one.numel(), dtype=F64).sin().view(one.shape)).sum()
    return [*results, *torch.autograd.grad(loss, [x, w])]


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 7, 6, dtype=F64, requires_grad=True), torch.randn(6, 4, dtype=F64, requires_grad=True)


@pytest.mark.parametrize("case", CASES)
def test_devices_compute_what_python_does(case: Callable[..., Any]) -> None:
    """Also where shards are uneven, and where what is carried is annotated in several ways."""
    x, w = tensors()
    expected = results_of(case, PLAIN, x, w)
    for shardings in SHARDINGS:
        program = partition(lambda x, w: results_of(case, TORCH, x, w), [x, w], MESH, shardings)
        for mine, whole in zip(program.simulate(x, w), expected, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


def looped(rows: int, count: int) -> Callable[[Tensor, Tensor], Any]:
    """A product that sums over sharded columns in every run."""

    def fn(x: Tensor, w: Tensor) -> Any:
        return scan(lambda h, x: (torch.tanh(h @ w) + x, h * 2), torch.zeros(rows, 6), x.view(count, rows, 6))

    return fn


def partitioned(count: int = 4, rows: int = 8) -> Program:
    args = [torch.empty(count * rows, 6), torch.empty(6, 6)]
    return partition(looped(rows, count), args, Mesh({"x": 2}), [(None, "x"), ("x", None)])


def test_what_is_carried_has_one_sharding_found_in_the_body() -> None:
    """The weight's rows shard the columns of what is carried, and so of init and of both results."""
    program = partition(looped(8, 4), [torch.empty(32, 6), torch.empty(6, 6)], Mesh({"x": 2}), [None, ("x", None)])
    alike = {program.sharding_of(name) for name in ("zeros", "scan.body.input0", "scan.0", "scan.body.input1")}
    assert alike == {(None, "x")} and program.sharding_of("scan.1") == (None, None, "x")
    assert program.explain("scan.0").splitlines()[-1].endswith("annotated at in_shardings[1] = ('x', None)")
    assert "through scan `scan`" in program.explain("scan.0")


def test_what_is_the_same_in_all_runs_is_gathered_and_reduced_once() -> None:
    """A weight in front of a scan and its gradient behind it, as FSDP does; so is a sum over rows."""

    def step(x: Tensor, w: Tensor) -> Any:
        h, y = scan(lambda h, x: (torch.tanh(h @ w + x), (h @ w).relu()), torch.zeros(8, 4), x)
        return torch.autograd.grad(h.sum() + y.sum(), w)

    args, mesh = [torch.empty(5, 8, 4), torch.empty(4, 4, requires_grad=True)], Mesh({"x": 2})
    program = partition(step, args, mesh, [(None, "x"), None], [("x",)])
    rows = lambda x, w: scan(lambda t, x: (t + (x @ w).sum(), x * 1), torch.zeros(()), x)[0]  # noqa: E731
    total = partition(rows, args, mesh, [(None, "x"), None])
    for one, kinds in ((program, ["all_gather", "reduce_scatter"]), (total, ["all_reduce"])):
        assert [c.kind for c in one.collectives] == kinds == [c.kind for _, c in one.issues()]
    # a number of the rank is no node of its graph, which a compiler would take for a tensor
    module = localize(total, 1, torch.device("cpu"), lambda x, _: x, False)
    assert is_first in {node.target for node in total.nodes} - {node.target for node in module.graph.nodes}


def test_a_program_with_bodies_prints_and_is_stored() -> None:
    program = partitioned()
    text = str(program)
    assert "scan(body, 1, 1, 0, " in text
    assert "\n  body, 4 runs:\n    input scan.body.input0[8, 3] float32 of [I, J_x] 8x6" in text
    assert [c.kind for c in program.collectives] == ["reduce_scatter"] and "reduce_scatter" in text
    back = program_file.load(json.loads(json.dumps(program_file.dump(program))))
    assert (back.fingerprint, str(back)) == (program.fingerprint, text)
    assert partitioned(count=5).fingerprint != program.fingerprint
    damaged = program_file.dump(program)
    damaged["value"] = json.loads(json.dumps(damaged["value"]).replace('["function", "scan"]', '["function", "cond"]'))
    with pytest.raises(ValueError, match="other bodies"):
        program_file.load(damaged)


def priced(program: Program) -> Priced:
    return price(program, device("h100-sxm-80g"), 1, compiled="none")


def test_a_scan_costs_its_runs() -> None:
    seconds = {n: priced(partitioned(n)).run() for n in (1, 4, 16)}
    body = (seconds[16].seconds - seconds[4].seconds) / 12
    assert body == pytest.approx((seconds[4].seconds - seconds[1].seconds) / 3, rel=0.01) and body > 0
    assert seconds[16].exposed_s == pytest.approx(16 * seconds[1].exposed_s) and seconds[1].exposed_s > 0
    flops = {n: partitioned(n).useful_flops for n in (1, 4)}
    assert flops[4] == 4 * flops[1] > 4 * 2 * 8 * 6 * 6


def test_a_condition_costs_its_dearer_branch_and_a_while_loop_a_stated_number_of_runs() -> None:
    def either(x: Tensor, w: Tensor, turned: bool) -> Tensor:
        fns = [lambda x: x @ w, lambda x: x @ w @ w @ w]
        return torch.cond(x.sum() > 0, *(fns[::-1] if turned else fns), (x,))  # type: ignore[no-any-return]

    args = [torch.empty(64, 64), torch.empty(64, 64)]
    one, other = (priced(partition(lambda x, w, t=t: either(x, w, t), args, Mesh({"x": 1}))) for t in (False, True))
    assert one.run().seconds == other.run().seconds
    assert 1 < one.program.useful_flops / (3 * 2 * 64**3) < 1.01
    loop = partition(lambda x, w: while_loop(lambda x: x.sum() > 0, lambda x: (x @ w,), (x,)), args, Mesh({"x": 1}))
    assert 1 < loop.useful_flops / (WHILE_ROUNDS * 2 * 64**3) < 1.05
    assert f"priced for {WHILE_ROUNDS} runs" in str(loop)


def test_a_rare_branch_has_no_price_and_reduces_its_result_itself() -> None:
    """Unreduced the result would be twice as large, and be reduced behind the condition in every step."""

    def fallback(x: Tensor, rare: bool) -> Tensor:
        some = lambda x: x.t() @ x  # noqa: E731
        some.rare = rare  # type: ignore[attr-defined]
        return torch.cond(x.sum() > 0, some, torch.zeros_like, (x,))  # type: ignore[no-any-return]

    mesh = Mesh({"x": 2})
    rare, plain = (partition(lambda x, r=r: fallback(x, r), [torch.empty(64, 64)], mesh, [("x",)], [("x",)])
                   for r in (True, False))  # fmt: skip
    assert [c.kind for c in rare.collectives] == ["all_reduce", "reduce_scatter"]
    assert float(fallback(torch.ones(2, 2), False).sum()) == 8  # torch's own still runs behind a capture
    assert [c.kind for _, c in rare.issues() if c.bytes > 4] == []
    assert priced(rare).run().comm_s < priced(plain).run().comm_s and rare.useful_flops < 64**3 < plain.useful_flops
    assert "priced as `otherwise`, which runs in almost all steps" in str(rare)
    x = torch.rand(64, 64)
    torch.testing.assert_close(rare.simulate(x)[0], x.t() @ x)
    assert not rare.simulate(-x)[0].any()


class Living(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of storages that are alive at once, those of operands included."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.alive = 0, Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        out = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(out):
            storage = one.untyped_storage() if isinstance(one, Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, self.alive.total())
        return out


def run_one(program: Program, args: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    module, mode = localize(program, 0, torch.device("cpu"), lambda x, _: x, False), Living()
    with mode:
        results = module(*args)
    return results, mode.peak


def test_memory_counts_the_peak_of_a_body() -> None:
    def step(x: Tensor, w: Tensor) -> Any:
        return scan(lambda h, x: (torch.tanh((h @ w).exp() @ w.t()), h[:8] * 2), x[0] * 1, x)

    x, w = torch.randn(5, 64, 16), torch.randn(16, 1024)
    program = partition(step, [x, w], Mesh({"x": 1}))
    predicted = liveness(program, kernels(program, compiled="all"))
    _, peak = run_one(program, [x, w])
    assert predicted.peak_bytes == pytest.approx(peak, rel=0.01)


def test_what_stands_around_control_flow_is_compiled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "compile_graph", lambda piece, _: lambda boxed: list(piece(*boxed)))
    x, w = (one.detach() for one in tensors())
    program = partition(lambda x, w: results_of(nested, TORCH, *(y.requires_grad_() for y in (x, w))), [x, w], ONE)
    assert compiled_as(program, "all") == compiled_as(program, "auto") == "pieces"
    pieces = regions.with_blocks(localize(program, 0, torch.device("cpu"), None, False), rest=True)
    left = [node.target for node in pieces.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert all(entry_of(target).view is not None for target in left)
    assert sum(isinstance(node.target, regions.CompiledRegion) for node in pieces.graph.nodes) > 2
    for mine, whole in zip(pieces(x, w), program.simulate(x, w), strict=True):
        assert torch.equal(mine, whole)


def on_rank(context: Context, stored: dict[str, Any], args: list[Tensor]) -> list[Tensor]:
    program = program_file.load(stored)
    return [one.clone() for one in Executor(program, context)(*program.local(context.rank, *args))]


def test_processes_compute_what_is_simulated(pool: Any) -> None:
    x, w = tensors()
    program = partition(lambda x, w: results_of(nested, TORCH, x, w), [x, w], Mesh({"a": 2}), [("a",), (None, "a")])
    simulated = run_lockstep(program, [program.local(rank, x, w) for rank in range(2)])
    results = pool.run(on_rank, program_file.dump(program), [x.detach(), w.detach()], world=2, mesh={"a": 2})
    for mine, expected in zip(results, simulated, strict=True):
        assert all(map(torch.equal, mine, expected)) and len(mine) == len(expected)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


def own_gradient(x: Tensor, copied: bool) -> Tensor:
    w = x.requires_grad_()[0] * 1
    add = lambda h, x: (h + Tripled.apply(w.clone() if copied else w), h * 1)  # noqa: E731
    return torch.autograd.grad(scan(add, torch.zeros(4), x)[0].sum(), x)[0]


def test_a_gradient_of_ones_own_is_kept() -> None:
    program = partition(lambda x: own_gradient(x, True), [torch.empty(3, 4)], Mesh({"x": 1}))
    assert program.simulate(torch.ones(3, 4))[0].tolist() == [[9.0] * 4, [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: scan(lambda h, x: (h[:2], h), x[0], x), "carries .4. float32 into its function, and .2. float32 o"),
        (lambda x: torch.cond(x.sum() > 0, lambda: x, lambda: x[0]), "one branch returns .3, 4. float32, the other .4"),
        (lambda x: while_loop(lambda x: x > 0, lambda x: (x - 1,), (x,)), "condition returns .3, 4. bool, not one b"),
        (lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x), (0, x)), "pass a tensor, `torch.tensor.0.`"),
        (lambda x: scan(lambda h, x: (h + torch.rand(4), h), x[0], x), "draw them before"),
        (lambda x: scan(lambda h, x: (h * (h.nonzero().shape[0]), h), x[0], x), "shape depends on data"),
        (lambda x: scan(lambda h, x: (h.add_(x), h), x[0], x), "modifies its argument"),
        (lambda x: own_gradient(x, False), "make it an operand, or pass `tensor.clone"),
        (lambda x: torch.vmap(lambda y: scan(lambda h, z: (h + z, h * 1), y[0], y))(x[:, :, None]), "of `torch.func`"),
    ],
)  # fmt: skip
def test_what_control_flow_cannot_hold_is_refused_with_a_reason(fn: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(fn, [torch.empty(3, 4)], Mesh({"x": 1}))
