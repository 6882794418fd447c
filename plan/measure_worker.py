"""One process of a measurement: seconds of what it computes, moves and sends beside the others, written as JSON.

All processes do the same at the same time, with the threads that the launcher would give them. Nothing here is a
recipe: products, attention and a block of small operations in usual shapes, run the way a program's graph is run.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from tpshard.kernels import attention

OPS = attention.__name__  # importing it registers torch.ops.tpshard.attention
MATMULS = {
    torch.float32: ((2048, 128, 64), (2048, 128, 384), (1024, 512, 512), (1024, 512, 1536), (1024, 1024, 1024)),
    torch.bfloat16: ((256, 64, 128), (256, 128, 256)),  # a CPU without instructions for it is a hundred times slower
}
HEADS = ((8, 256, 8, 16), (4, 256, 8, 32), (2, 512, 8, 64), (1, 512, 8, 128))
"""Batch, sequence, heads and head size."""
ELEMENTS = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
BLOCK_OPS = 31
"""Operations of a `block`."""
COMM_BYTES = (64, 1 << 16, 1 << 20, 1 << 22)
LEAST_S = 0.04
aten, funcol = torch.ops.aten, torch.ops._c10d_functional


class Clock:
    """Seconds that one call takes a process of this crowd.

    A process with one thread and a core to itself takes its own time, and with more processes than cores so many turns
    as there are processes for a core: counted like that, what else runs on the machine does not count. Of several
    threads only the wall clock knows.
    """

    def __init__(self, threads: int, turns: float):
        self.read, self.turns = (time.process_time, turns) if threads == 1 else (time.perf_counter, 1.0)

    def seconds(self, run: Callable[[], object], least_s: float = LEAST_S) -> float:
        """Mean over calls of at least `least_s` together, without the first and the slowest tenth: a step is a sum
        of operations, so that a median would leave out what some of them lose."""
        run()
        taken: list[float] = []
        end = self.read() + least_s
        while (begun := self.read()) < end or len(taken) < 3:
            run()
            taken.append(self.read() - begun)
        kept = sorted(taken)[: max(1, len(taken) * 9 // 10)]
        return sum(kept) / len(kept) * self.turns


# ---- computing -----------------------------------------------------------------------------------------------
def products(clock: Clock) -> list[list[float | str]]:
    """Matrix products, plain and with either operand transposed: (dtype, FLOPs, bytes read and written, seconds)."""
    rows: list[list[float | str]] = []
    for dtype, shapes in MATMULS.items():
        name = str(dtype).removeprefix("torch.")
        for m, k, n in shapes:
            # operands in turn, so that they are not all in the nearest cache
            lefts = [torch.randn(m, k, dtype=dtype) for _ in range(4)]
            rights = [torch.randn(k, n, dtype=dtype) for _ in range(4)]
            for left_turned, right_turned in ((False, False), (False, True), (True, False)):
                a = [x.t().contiguous().t() for x in lefts] if left_turned else lefts
                b = [x.t().contiguous().t() for x in rights] if right_turned else rights
                taken = clock.seconds(partial(_all, a, b)) / len(a)
                rows.append([name, 2 * m * k * n, dtype.itemsize * (m * k + k * n + m * n), taken])
    return rows


def _all(lefts: list[Tensor], rights: list[Tensor]) -> list[Tensor]:
    return [torch.mm(a, b) for a, b in zip(lefts, rights)]


def attentions(clock: Clock) -> tuple[list[list[float]], list[list[float]]]:
    """Causal attention within documents, forward and backward: (FLOPs, head size, seconds)."""
    forward, backward = torch.ops.tpshard.attention, torch.ops.tpshard.attention_backward
    ahead, back = [], []
    for b, s, h, d in HEADS:
        q, kv, documents = torch.randn(b, s, h, d), torch.randn(b, s, h // 2, d), torch.zeros(b, s, dtype=torch.int64)
        o, lse = forward(q, kv, kv, documents, 0.2)
        flops = 4 * b * h * s * s * d // 2
        ahead.append([flops, d, clock.seconds(partial(forward, q, kv, kv, documents, 0.2))])
        back.append([flops * 5 // 2, d, clock.seconds(partial(backward, o, q, kv, kv, o, lse, documents, 0.2))])
    return ahead, back


class Tape:
    """A graph of operations as a program's executor runs it, and what they read and write."""

    def __init__(self) -> None:
        self.graph, self.inputs = fx.Graph(), list[Tensor]()
        self.ops = self.views = self.moved = 0
        self.kept: list[fx.Node] = []
        self.between: Callable[[], None] = lambda: None
        """Called after every operation."""

    def feed(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["value"] = torch.rand(shape) + 0.5
        self.inputs.append(node.meta["value"])
        return node

    def add(self, target: Any, *args: Any, view: bool = False) -> fx.Node:
        node = self.graph.call_function(target, args)
        out = target(*fx.map_arg(args, lambda n: n.meta["value"].to("meta")))
        node.meta["value"] = out
        if view:
            self.views += 1
            return node
        self.ops += 1
        self.moved += sum(4 * n.meta["value"].numel() for n in (*node.all_input_nodes, node))
        return node

    def op(self, target: Any, *args: Any) -> fx.Node:
        node = self.add(target, *args)
        self.between()
        return node

    def keep(self, *nodes: fx.Node) -> None:
        """As activations are, until the end."""
        self.kept += nodes

    def module(self) -> fx.GraphModule:
        self.graph.output(tuple(self.kept))
        return fx.GraphModule({}, self.graph)


def block(tape: Tape, x: fx.Node, weight: fx.Node) -> fx.Node:
    """What a transformer's layer and its gradient do besides products and attention: mostly scaling and adding, and of
    the rest a norm, a rotation, a gate, sums over rows, and an exponential."""

    def mul(a: fx.Node, b: fx.Node) -> fx.Node:
        return tape.op(aten.mul.Tensor, a, b)

    def add(a: fx.Node, b: fx.Node) -> fx.Node:
        return tape.op(aten.add.Tensor, a, b)

    op = tape.op
    inverse = op(aten.rsqrt.default, op(aten.mean.dim, mul(x, x), [-1], True))
    scaled = mul(x, inverse)
    normed = mul(scaled, weight)
    rotated = add(mul(normed, weight), mul(op(aten.roll.default, normed, [1], [1]), weight))
    gate = op(aten.silu.default, rotated)
    hidden = mul(gate, normed)
    out = add(x, mul(hidden, weight))
    tape.keep(scaled, normed, rotated, gate, hidden, out)
    grad = op(aten.exp.default, op(aten.div.Tensor, out, inverse))
    back = add(mul(grad, gate), mul(mul(grad, normed), weight))
    tape.keep(op(aten.sum.dim_IntList, mul(back, scaled), [0]))
    row = op(aten.sum.dim_IntList, mul(back, rotated), [-1], True)
    down = add(mul(back, inverse), mul(mul(scaled, row), weight))
    return add(mul(down, weight), add(x, mul(down, inverse)))


def streams(clock: Clock) -> list[list[float]]:
    """Blocks of several sizes, whose results are kept as activations are:
    (operations, bytes moved, bytes kept, bytes that the system had to hand out anew, seconds)."""
    rows = []
    for elements in ELEMENTS:
        tape = _blocks(elements, max(1, min(16, (1 << 21) // elements)), "")
        kept = sum(4 * node.meta["value"].numel() for node in tape.kept)
        run, calls = partial(tape.module(), *tape.inputs), 0

        def counted(run: Callable[[], object] = run) -> None:
            nonlocal calls
            calls += 1
            run()

        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        taken = clock.seconds(counted, 2 * LEAST_S)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        rows.append([tape.ops, tape.moved, kept, faults * resource.getpagesize() / calls, taken])
    return rows


def overheads(clock: Clock) -> dict[str, list[float]]:
    """Seconds of a tiny operation and of a view between larger ones: what they add to the blocks around them."""
    found: dict[str, list[float]] = {"op": [], "view": []}
    for elements in ELEMENTS[:2]:
        seconds = {}
        for between in ("", "op", "view"):
            tape = _blocks(elements, 8, between)
            tape.kept = tape.kept[-1:]  # nothing is kept: memory that grows and shrinks would hide so little
            seconds[between] = clock.seconds(partial(tape.module(), *tape.inputs), 3 * LEAST_S)
            if between:
                found[between].append((seconds[between] - seconds[""]) / (2 * 8 * BLOCK_OPS))
    return found


def _blocks(elements: int, count: int, between: str) -> Tape:
    """Several blocks in a row on so many elements, with what `between` says after each of their operations."""
    tape = Tape()
    width = 128 if elements <= ELEMENTS[1] else 512
    x, weight = tape.feed(elements // width, width), tape.feed(width)
    small = [tape.feed(8, 16) for _ in range(512 if between == "op" else 0)]
    if between:
        tape.between = partial(_interleave, tape, between, x, small)
    for _ in range(count):
        x = block(tape, x, weight)
    tape.keep(x)
    return tape


def _interleave(tape: Tape, what: str, x: fx.Node, small: list[fx.Node]) -> None:
    """Two tiny operations on tensors that were not used for long, as an optimizer's are; or two views."""
    if what == "op":
        a, b = small[tape.ops % len(small)], small[(tape.ops + 7) % len(small)]
        kind = (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor)[tape.ops // 3 % 4]
        tape.add((aten.sqrt.default, aten.reciprocal.default)[tape.ops % 2], tape.add(kind, a, b))
        return
    rows, width = x.meta["value"].shape
    split = tape.add(aten.reshape.default, x, [8, rows // 8, width // 16, 16], view=True)
    tape.add(aten.permute.default, split, [0, 2, 1, 3], view=True)


# ---- communicating -------------------------------------------------------------------------------------------
def communicate(cores: int) -> list[list[Any]]:
    """Collectives as a program runs them, in pairs and over all, each behind some computing: whoever is late is waited
    for, and what is sent was made a while ago. (kind, members, bytes of the buffer, seconds, share of the host's cores
    that it kept busy).

    With more processes than cores somebody always has work: there a collective takes the time it computes, in turns.
    Otherwise it takes what the wall clock says.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    turns = world / cores
    rows: list[list[Any]] = []
    a, b = torch.randn(2048, 128), torch.randn(128, 384)

    def spent(run: Callable[[Tensor], object], buffers: list[Tensor]) -> tuple[float, float]:
        """(wall, own) seconds of one collective with the computing before it."""
        begun, own = time.perf_counter(), time.process_time()
        for buffer in buffers:
            torch.mm(a, b)
            run(buffer)
        return (time.perf_counter() - begun) / len(buffers), (time.process_time() - own) / len(buffers)

    for members in sorted({2, world}):
        # every rank makes every group; those of a size run at the same time, as the groups of a mesh axis do
        groups = [dist.new_group(list(range(i, i + members))) for i in range(0, world - members + 1, members)]
        if rank >= len(groups) * members:
            continue
        calls = _collectives(groups[rank // members].group_name, members)
        for size in COMM_BYTES:
            n = max(world, size // 4 // world * world)
            buffers = [torch.ones(n) for _ in range(8)]
            for kind, run in calls.items():
                rounds = []
                for _ in range(3):
                    alone, with_it = spent(lambda _: None, buffers), spent(run, buffers)
                    rounds.append((with_it[0] - alone[0], with_it[1] - alone[1]))
                wall, own = (max(1e-6, sorted(times)[1]) for times in zip(*rounds))
                seconds = own * turns if turns > 1 else wall
                rows.append([kind, members, 4 * n, seconds, min(1.0, own * turns / seconds)])
    return rows


def _collectives(group: str, members: int) -> dict[str, Callable[[Tensor], Tensor]]:
    wait = funcol.wait_tensor.default

    def all_reduce(x: Tensor) -> Tensor:
        return wait(funcol.all_reduce.default(x, "sum", group))

    def all_gather(x: Tensor) -> Tensor:
        return wait(funcol.all_gather_into_tensor.default(x[: x.numel() // members], members, group))

    def all_to_all(x: Tensor) -> Tensor:
        pieces = [x.numel() // members] * members
        return wait(funcol.all_to_all_single.default(x, pieces, pieces, group))

    return {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all": all_to_all}


def main(folder: str, rank: int, world: int, cores: int) -> None:
    threads = max(1, cores // world)
    torch.set_num_threads(threads)
    turns = max(1.0, world / cores)
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that newer torch spells otherwise
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(folder) / f"store-{world}"), world), rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    clock, found = Clock(threads, turns), dict[str, Any]()
    with torch.no_grad():
        parts = {"matmul": products, "attention": attentions, "stream": streams, "overhead": overheads}
        for name, part in parts.items():
            dist.barrier()
            found[name] = part(clock)
        dist.barrier()
        found["comm"] = communicate(cores) if world > 1 else []
    (Path(folder) / f"result-{world}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(int(text) for text in sys.argv[2:5]))
