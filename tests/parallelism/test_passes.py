"""Passes change when operations run and which values are stored, but no result."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from small_model import of_small_model
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.diagnostics.patterns import unit_of
from tpshard.parallelism.passes import buckets
from tpshard.parallelism.passes.bucket import bucket
from tpshard.parallelism.passes.gather_late import gather_late
from tpshard.parallelism.passes.hoist_gradients import hoist_gradients
from tpshard.parallelism.passes.offload import offload_saved
from tpshard.parallelism.passes.prefetch import prefetch
from tpshard.parallelism.passes.recompute import keep_all, keep_layer_inputs, keep_selected, recompute
from tpshard.parallelism.passes.reduce_early import reduce_early
from tpshard.parallelism.passes.run import Pass, run
from tpshard.parallelism.passes.simplify import simplify
from tpshard.parallelism.passes.sink_waits import sink_waits
from tpshard.parallelism.passes.wait_late import wait_late
from tpshard.parallelism.program import Program, info
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

WRAP = ("layers.*", ("tok_embed",), ("norm", "output"))
LAYERS = 4


@cache
def step_program(mesh: str = "{fsdp: 2}") -> Program:
    recipe = f"""
name: small
cluster: {{device: cpu}}
mesh: {mesh}
batch: {{global_sequences: 8}}
"""
    return step_programs.micro_program(Setting.of(loads(of_small_model(recipe, LAYERS, seq_len=16))))


def arguments(program: Program) -> list[torch.Tensor]:
    result = torch.Generator().manual_seed(0)
    out = []
    for port in program.inputs:
        if port.kind == "parameter":
            out.append(torch.randn(port.shape, generator=result) * 0.3)
        elif port.kind == "gradient":
            out.append(torch.zeros(port.shape))
        elif port.name == "positions":
            out.append(torch.arange(port.shape[1]).expand(port.shape).contiguous())
        elif port.name == "documents":
            out.append((torch.arange(port.shape[1]) >= 6).long().expand(port.shape).contiguous())
        else:
            out.append(torch.randint(0, 32, port.shape, generator=result))
    return out


def by_unit(program: Program) -> list[list[str]]:
    return buckets.by_unit(buckets.in_order_of_use(program), lambda name: unit_of(name, WRAP))


def again(keep: Any, reshard: bool = True) -> Pass:
    return partial(recompute, keep=keep, reshard_after_forward=reshard)


def in_units(program: Program) -> Program:
    return bucket(program, by_unit(program))


def in_one(program: Program) -> Program:
    return bucket(program, [buckets.in_order_of_use(program)])


def in_sizes(program: Program) -> Program:
    return bucket(program, buckets.by_size(buckets.in_order_of_use(program), Counter(), 1.0))


def schedule(units: int = 1) -> list[Pass]:
    return [hoist_gradients, gather_late, partial(prefetch, units=units), reduce_early, sink_waits]


VARIANTS: dict[str, list[Pass]] = {
    "none": [again(keep_all)],
    "kept gathered": [again(keep_all, reshard=False)],
    "full": [again(keep_layer_inputs())],
    "every second": [again(keep_layer_inputs(2))],
    "first": [again(keep_layer_inputs(first=1))],
    "of modules": [again(keep_layer_inputs(2, modules=["layers.*.mlp", "layers.*.attention_norm"]))],
    "selective": [again(keep_selected())],
    "chosen": [again(keep_selected(["attention"]))],
    "offloaded": [again(keep_all), offload_saved],
    "offloaded by layers' inputs": [again(keep_layer_inputs()), offload_saved, *schedule()],
    "the first offloaded": [again(keep_selected()), partial(offload_saved, first=2), simplify, in_units, *schedule()],
    "simplified": [simplify],
    "recomputed and simplified": [again(keep_selected()), simplify],
    "bucketed": [in_units],
    "in one bucket": [again(keep_all), in_one],
    "by size": [in_sizes],
    "hoisted": [hoist_gradients],
    "gathered late": [gather_late],
    "waited late": [wait_late],
    "prefetched": [partial(prefetch, units=2)],
    "reduced early": [reduce_early],
    "waits sunk": [sink_waits],
    "in another order": [sink_waits, reduce_early, partial(prefetch, units=1), gather_late, hoist_gradients],
    "scheduled": schedule(2),
    "all": [again(keep_selected()), simplify, in_units, *schedule()],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_bit_changes(variant: str) -> None:
    program = step_program()
    inputs = arguments(program)
    plain = program.simulate(*inputs)
    for expected, actual in zip(plain, run(VARIANTS[variant], program).simulate(*inputs)):
        assert torch.equal(expected, actual)


def test_only_what_the_named_modules_compute_is_computed_again() -> None:
    program = run([again(keep_layer_inputs(2, modules=["layers.*.mlp"]), reshard=False)], step_program())
    calls = [info(node) for node in program.graph.nodes if node.op == "call_function"]
    repeated = {one.module.split(".mlp")[0] for one in calls if one.phase == "recompute"}
    assert repeated == {"layers.0", "layers.2"}


def test_replicas_too() -> None:
    program = step_program("{dp: 2, fsdp: 2}")
    inputs = arguments(program)
    for expected, actual in zip(program.simulate(*inputs), run(VARIANTS["all"], program).simulate(*inputs)):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mesh", ["{fsdp: 4}", "{dp: 2, fsdp: 2}"])
def test_each_reduction_of_a_unit_runs_until_the_next_is_issued(mesh: str) -> None:
    """Also beside the reductions of its shards among replicas, which hold no unsharded gradients."""
    nodes = list(run(VARIANTS["all"], step_program(mesh)).graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    calls = [node for node in nodes if node.op == "call_function" and (comm := info(node).comm) is not None
             and (comm.kind, comm.of) == ("reduce_scatter", "gradient")]  # fmt: skip
    issued = [places[node] for node in calls]
    waited = [min(places[user] for user in node.users) for node in calls]
    assert len(calls) > 2 and all(after < wait for after, wait in zip(issued[1:], waited))
    assert all(wait < after for after, wait in zip(issued[2:], waited))


def test_what_the_forward_pass_reads_last_is_not_gathered_again() -> None:
    def gathered(*made: Pass) -> Counter[str]:
        return Counter(comm.value[0] for comm in run(made, step_program()).collectives if comm.of == "parameter")

    twice = {name for name, count in gathered(again(keep_all)).items() if count == 2}
    assert twice == {name for name in gathered() if name.startswith("layers.")}
    assert all(gathered(partial(again(keep_all), cut=True))[name] == 2 for name in ("norm.weight", "output.weight"))


# ---- memory --------------------------------------------------------------------------------------------------------
class Live(TorchDispatchMode):
    """Counts the bytes of storages that are alive, by watching each one until it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self.storages.discard(key)
        self.now -= nbytes


def peak(program: Program) -> int:
    inputs = arguments(program)
    with Live() as live:
        program.simulate(*inputs)
    return live.peak


def test_recomputation_takes_less_memory() -> None:
    program = step_program()
    stored = {
        name: peak(run([*VARIANTS[name], *schedule()], program))
        for name in ("none", "every second", "selective", "full")
    }
    assert stored["full"] < stored["selective"] < stored["none"]
    assert stored["full"] < stored["every second"] < stored["none"]


def test_gathered_parameters_are_not_kept() -> None:
    program = step_program()
    actual, stored = (run([*VARIANTS[name], *schedule()], program) for name in ("none", "kept gathered"))
    assert peak(actual) < peak(stored)
    gathers = [sum(c.kind == "all_gather" and c.of == "parameter" for c in p.collectives) for p in (actual, stored)]
    # the table is not needed again: its gradient needs the indices alone; the norm and the head are not freed before
    parameters = sum(port.kind == "parameter" for port in program.inputs)
    assert gathers == [2 * parameters - 3, parameters]


# ---- order ---------------------------------------------------------------------------------------------------------
def events(program: Program) -> list[tuple[str, str, int]]:
    """(issue | wait | use, what, index) of parameter gathers and gradient scatters, in the graph's order."""
    out = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        comm = info(node).comm
        if comm is not None and comm.of in ("parameter", "gradient"):
            out.append(("issue", comm.of, comm.value))
        elif "wait_tensor" in str(node.target):
            source = info(node.args[0]).comm
            if source is not None and source.of in ("parameter", "gradient"):
                out.append(("wait", source.of, source.value))
    return out


@pytest.mark.parametrize("units", [0, 1, 2])
def test_as_many_buckets_are_gathered_ahead_as_asked(units: int) -> None:
    program = step_program()
    done = run([again(keep_all), in_units, *schedule(units)], program)
    open_gathers = most = 0
    for kind, what, _ in events(done):
        if what == "parameter":
            open_gathers += 1 if kind == "issue" else -1
            most = max(most, open_gathers)
    assert most == units + 1


def test_one_bucket_a_unit() -> None:
    program = step_program("{dp: 2, fsdp: 2}")
    done, plain = (run([again(keep_all), *more], program) for more in ([in_units], []))
    counted = Counter((c.kind, c.of) for c in done.collectives if c.of in ("parameter", "gradient"))
    units = LAYERS + 2
    assert counted == {
        ("all_gather", "parameter"): 2 * units - 2, ("reduce_scatter", "gradient"): units,
        ("all_reduce", "gradient"): units,
    }  # fmt: skip
    assert sum(c.bytes for c in done.collectives) == sum(c.bytes for c in plain.collectives)


def collectives_of(program: Program, what: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.kind, c.value) for _, c in program.issues() if c.of == what]


# ---- choosing ------------------------------------------------------------------------------------------------------
class Times:
    """Half a second for each collective, and a second for 100 bytes."""

    def gather(self, size: int) -> float:
        return 0.5 + size / 100 if size else 0.0

    reduce = gather


def test_greedy_merges_what_hides_and_fits() -> None:
    pieces, gather_s = [buckets.Piece(f"p{i}", 10, 1.0) for i in range(6)], Times().gather
    one_each = buckets.greedy(pieces, Times(), memory=10)
    assert one_each == [[piece.name] for piece in pieces]
    merged = buckets.greedy(pieces, Times(), memory=1000)
    assert len(merged) < len(pieces)
    assert [name for group in merged for name in group] == [piece.name for piece in pieces]
    hidden_behind = 0.0
    for group in merged[1:]:
        assert gather_s(10 * len(group)) <= max(hidden_behind, gather_s(10)) or hidden_behind == 0.0
        hidden_behind = float(len(group))


@pytest.mark.parametrize(
    ("backward_s", "again", "sizes"), [(0.6, 0, [1, 1, 1, 1, 1]), (0.75, 0, [1, 2, 2]), (0.75, 100, [1, 2, 1, 1])]
)
def test_greedy_hides_what_the_backward_pass_sends(backward_s: float, again: int, sizes: list[int]) -> None:
    """While a bucket's gradients are computed, those of the last one are reduced and the next one is gathered again."""
    pieces = [buckets.Piece(f"p{i}", 10, 10.0, again, 10, backward_s) for i in range(5)]
    assert [len(group) for group in buckets.greedy(pieces, Times(), memory=1000)] == sizes


def test_sizes_bound_a_bucket() -> None:
    sizes = {"a": 5, "b": 5, "c": 20, "d": 1}
    assert buckets.by_size(list(sizes), sizes, 10) == [["a", "b"], ["c"], ["d"]]
