"""The cost model agrees with arithmetic by hand."""

from dataclasses import replace

import pytest
import torch
from tpshard.kernels.attention.attention import attention
from tpshard.parallelism import partition
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pricing.communicators import communicator_bytes
from tpshard.parallelism.pricing.cost import (
    Cpu,
    Crowd,
    Device,
    Efficiency,
    Overhead,
    collective,
    operation,
    wire_bytes,
)
from tpshard.parallelism.pricing.fusion import kernels
from tpshard.parallelism.pricing.liveness import liveness
from tpshard.parallelism.pricing.network import Link, Topology
from tpshard.parallelism.pricing.timeline import LaneTask, price, simulate
from tpshard.parallelism.program import INFO, Info, info, make_collective
from tpshard.parallelism.transfer import recv, send


def make(**changes):
    base = {
        "name": "box", "kind": "gpu", "backend": "nccl", "memory_bytes": 80 << 30, "context_bytes": 0,
        "memory_bandwidth": 1e12, "rates": {"bf16": 1e15, "fp32": 1e14}, "host_devices": 8,
        "inside": Link(100e9, 0.0), "across": Link(10e9, 0.0), "efficiency": Efficiency(matmul=0.5, streaming=1.0),
        "overhead": Overhead(0.0, 0.0, 0.0),
    }  # fmt: skip
    return Device(**{**base, **changes})


def cost(device, axes, over, kind, buffer, per_host=8):
    mesh = Mesh(axes)
    return collective(device, Topology(mesh, per_host), kind, tuple(mesh.axis(a) for a in over), buffer)


def test_each_further_communicator_takes_its_buffers():
    """A ring's are in the device's context; two hosts of four devices: an all-to-all has three peers near, of seven."""
    box, both, mib = make(channels=24), Topology(Mesh({"x": 2, "y": 4}), 4), 2**20
    x, y = torch.randn(8, 8), torch.randn(8, 8)

    def program(fn, ins, out):
        return partition(fn, [x, y][: len(ins)], both.mesh, ins, [out])

    over_y = program(lambda x, y: x @ y, [(None, "y"), ("y",)], ())
    over_x = program(lambda x: x * 2, [("x",)], ())
    exchanged = program(lambda x: x * 2, [("y",)], (None, "y"))
    everywhere = program(lambda x: x * 2, [(("x", "y"),)], (None, ("x", "y")))
    assert communicator_bytes([over_y, over_y], box, both) == 0
    assert communicator_bytes([over_y, over_x], box, both) == 24 * 12 * mib
    assert communicator_bytes([over_y, exchanged], box, both) == 32 * 3 * 12 * mib
    assert communicator_bytes([everywhere], box, both) == 32 * 3 * 12 * mib
    assert communicator_bytes([over_y, over_x, exchanged], make(), both) == 0
    piped = partition(lambda x: x * 2, [x], both.mesh, [("x",)], [("x",)])
    (node,) = (node for node in piped.graph.nodes if node.op == "call_function")
    for kind, target, offset in (("send", send, 1), ("recv", recv, 1), ("recv", recv, -1)):
        with piped.graph.inserting_after(node):
            moved = piped.graph.call_function(target, (node, offset))
        comm = make_collective(both.mesh, kind, (both.mesh.axis("x"),), 4, torch.float32)
        moved.meta[INFO] = Info(info(node).specs, comm=comm)
    assert communicator_bytes([piped], box, both) == 32 * (2 + 10 + 10) * mib


@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_ring_bytes_inside_a_host(kind, rounds):
    priced = cost(make(), {"tp": 4}, ["tp"], kind, 4_000_000)
    assert priced.wire_bytes == rounds * 3_000_000
    assert priced.wire == "inside"
    assert priced.seconds == pytest.approx(rounds * 3_000_000 / 100e9)


def test_a_reduce_scatter_of_gloo_sends_what_an_all_reduce_sends():
    assert wire_bytes("reduce_scatter", 4_000, 4, "gloo") == wire_bytes("all_reduce", 4_000, 4)
    assert wire_bytes("reduce_scatter", 4_000, 4, "nccl") * 2 == wire_bytes("all_reduce", 4_000, 4)


def test_outer_axes_leave_the_host_and_use_the_adapters_of_all_members_there():
    mesh = {"fsdp": 4, "tp": 4}
    across = cost(make(), mesh, ["fsdp"], "all_gather", 8_000_000)
    assert across.wire == "across"
    # 2 of the 4 members share a host, so two adapters carry the ring's 6 MB
    assert across.seconds == pytest.approx(6_000_000 / (2 * 10e9))
    assert cost(make(), mesh, ["tp"], "all_gather", 8_000_000).wire == "inside"
    alone = cost(make(), {"fsdp": 4, "tp": 8}, ["fsdp"], "all_gather", 8_000_000)
    assert alone.seconds == pytest.approx(6_000_000 / 10e9)


def test_a_shared_link_is_divided():
    device = make(inside=Link(100e9, 0.0, shared=True), kind="cpu", cpu=Cpu(cores=4))
    priced = cost(device, {"dp": 4}, ["dp"], "all_gather", 4_000_000, per_host=4)
    assert priced.seconds == pytest.approx(3_000_000 / 25e9)


def test_direct_links_add_up_over_the_peers():
    device = make(inside=Link(100e9, 0.0, direct=True))
    two, four = (cost(device, {"tp": n}, ["tp"], "all_gather", n * 1_000_000) for n in (2, 4))
    assert two.seconds == pytest.approx(1_000_000 / 100e9)
    assert four.seconds == pytest.approx(3_000_000 / 300e9)


def test_latency_grows_with_the_group():
    device = make(across=Link(10e9, 1e-5), inside=Link(100e9, 1e-6))
    small, large = (cost(device, {"fsdp": n}, ["fsdp"], "all_gather", 1024) for n in (16, 64))
    assert small.seconds < large.seconds < 1e-3


def test_the_roofline_takes_the_larger_side():
    assert operation(make(), "matmul", 10**12, 1, "bf16", eager=False) == pytest.approx(2e-3)
    assert operation(make(), "matmul", 1, 10**9, "bf16", eager=False) == pytest.approx(1e-3)
    assert operation(make(), "stream", 0, 10**9, "bf16", eager=False) == pytest.approx(1e-3)


def test_processes_share_a_cpu():
    device = make(kind="cpu", cpu=Cpu(cores=2), overhead=Overhead(eager_op_s=1e-5)).shared_by(4)
    assert device.rate("fp32") == 1e14 / 4
    assert device.memory_bytes == 20 << 30
    assert device.overhead.eager_op_s == pytest.approx(2e-5)


# ---- the two-lane simulation ----------------------------------------------------------------------------------


def test_a_collective_behind_computing_is_not_exposed():
    tasks = [
        LaneTask("g", "issue", 1.0, "fsdp", "across"),
        LaneTask("mm", "compute", 2.0),
        LaneTask("w", "wait", 0, of=0),
    ]
    results = simulate(tasks, {})
    assert (results.seconds, results.exposed_s, results.comm_s) == (2.0, 0.0, 1.0)


def test_a_wait_at_once_is_exposed_wholly():
    tasks = [
        LaneTask("g", "issue", 1.0, "tp", "inside"),
        LaneTask("w", "wait", 0, of=0),
        LaneTask("mm", "compute", 2.0),
    ]
    results = simulate(tasks, {})
    assert (results.seconds, results.exposed_s) == (3.0, 1.0)
    assert results.exposed == {0: 1.0}


def test_one_lane_runs_in_order_and_two_share_their_link():
    one = [LaneTask("a", "issue", 1.0, "fsdp", "across"), LaneTask("b", "issue", 1.0, "fsdp", "across")]
    two = [LaneTask("a", "issue", 1.0, "fsdp", "across"), LaneTask("b", "issue", 1.0, "dp", "across")]
    apart = [LaneTask("a", "issue", 1.0, "fsdp", "across"), LaneTask("b", "issue", 1.0, "tp", "inside")]
    waits = [LaneTask("wb", "wait", 0, of=1), LaneTask("wa", "wait", 0, of=0)]
    assert simulate(one + waits, {}).seconds == 2.0
    assert simulate(two + waits, {}).seconds == 2.0
    assert simulate(apart + waits, {}).seconds == 1.0
    ends = {e.name: e.end for e in simulate(one + waits, {}).events}
    assert ends["a"] == 1.0


def test_a_running_collective_slows_computing():
    tasks = [
        LaneTask("g", "issue", 1.0, "fsdp", "across"),
        LaneTask("mm", "compute", 2.0),
        LaneTask("w", "wait", 0, of=0),
    ]
    results = simulate(tasks, {"across": 0.5})
    # half a second of work is done in the first second, the other 1.5 s undisturbed
    assert results.seconds == pytest.approx(2.5)
    assert results.slowed_s == pytest.approx(0.5)


def test_what_is_never_waited_for_still_ends_before_the_step():
    assert simulate([LaneTask("g", "issue", 1.0, "fsdp", "across")], {}).exposed_s == 1.0


def test_skew_is_paid_once_a_collective_and_hidden_behind_computing():
    four = make(kind="cpu", cpu=Cpu(cores=2, crowds={4: Crowd(skew_s=2.0)})).shared_by(4)
    plain, skewed = (cost(d, {"a": 4}, ["a"], "all_gather", 4_000) for d in (replace(four, cpu=Cpu()), four))
    assert skewed.seconds - plain.seconds == pytest.approx(2.0) and skewed.wire_bytes == plain.wire_bytes
    issue = LaneTask("gather", "issue", skewed.seconds, "a", "inside")
    tasks = [issue, LaneTask("work", "compute", 10.0), LaneTask("wait", "wait", 0.0, of=0)]
    assert simulate(tasks, {"inside": 0.0}).exposed_s == 0.0
    late = simulate([issue, tasks[2], issue, LaneTask("wait", "wait", 0.0, of=2)], {"inside": 0.0})
    assert late.exposed_s == pytest.approx(2 * skewed.seconds)


def test_a_collective_waits_for_what_its_ranks_drifted_apart_since_the_last():
    def step(x, w):
        return (x.exp().sum(0) * w).exp().sum(), x.sum()

    inputs = (torch.ones(8, 4096, device="meta"), torch.ones(4096, device="meta"))
    program = partition(step, inputs, Mesh({"x": 4}), in_shardings=[("x",), ()])
    box = make(kind="cpu", cpu=Cpu(cores=2, crowds={4: Crowd(spread=0.5)}))
    plain, apart = (price(program, d.shared_by(4), 4, compiled="none") for d in (replace(box, cpu=Cpu(cores=2)), box))
    assert len(plain.costs) >= 2
    before = 0.0
    for i, task in enumerate(plain.tasks):
        if task.kind == "compute":
            before += task.seconds
        elif task.kind == "issue":
            assert apart.costs[i].seconds - plain.costs[i].seconds == pytest.approx(0.5 * before)
            before = 0.0
    assert apart.run().exposed_s > plain.run().exposed_s
    assert apart.run().compute_s == pytest.approx(plain.run().compute_s)


@pytest.mark.parametrize("compiled", ["none", "all"])
def test_exponentials_of_a_device_are_counted(compiled):
    def gate(x):
        return torch.nn.functional.silu(x) * x.exp()

    program = partition(gate, (torch.ones(8, 6, device="meta"),), Mesh({"x": 4}), in_shardings=[("x",)])
    assert sum(kernel.exponentials for kernel in kernels(program, compiled=compiled)) == 2 * 2 * 6


def test_a_gpus_attention_takes_its_sums_in_fp32_while_it_runs() -> None:
    """Of a batch of one with few heads, FlashAttention divides each head's keys among more processors."""
    mesh, q, kv = Mesh({}), torch.randn(1, 256, 4, 64), torch.randn(1, 256, 2, 64)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v).sum(), [q, k, v])

    program = partition(step, tuple(x.requires_grad_() for x in (q, kv, kv.clone())), mesh)
    on_gpu, on_cpu = (
        liveness(program, kernels(program, compiled="none"), device=make(kind=kind)) for kind in ("gpu", "cpu")
    )
    sums, expanded = 33 * 256 * 4 * 64 * 4, 2 * 256 * 4 * 64 * 2
    assert max(a - b for a, b in zip(on_gpu.curve, on_cpu.curve)) == sums + expanded
