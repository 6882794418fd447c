"""Computes the memory of one device at each node of a program, from the lifetimes of all values.

A value is allocated when its node runs and freed after its last reader; inputs and outputs of a collective live until
its wait. Program inputs belong to the caller and live throughout. Views keep their storage alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from torch import fx
from tpshard.parallelism.node_info import programs_in
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.flow import Flow
from tpshard.parallelism.pricing.fusion import Kernel, kernels
from tpshard.parallelism.program import Program
from tpshard.parallelism.resharding.exchange import runs_as_exchange
from tpshard.parallelism.transfer import offload

CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "gathered", "logits_and_loss", "communication", "cache",
    "temporary",
)  # fmt: skip
_INPUTS = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer", "cache": "cache",
           "state": "cache", "saved": "activations", "received": "communication"}  # fmt: skip
_RESULTS = {"gradient": "gradients", "optimizer": "optimizer", "parameter": "parameters", "cache": "cache"}
"""The category of a result by the kind of its port, as `_INPUTS` has those of inputs."""


class Living(NamedTuple):
    """A value that holds memory at the peak."""

    node: fx.Node
    category: str
    bytes: int
    last: int
    """Index of the node that reads it last; the number of nodes for what outlives the program."""


class Lifetime(NamedTuple):
    """Memory that a program allocates before the node `start` runs, and frees before the node `end` allocates."""

    start: int
    end: int
    """More than the number of nodes for what outlives the program."""
    bytes: int


@dataclass
class Memory:
    """Bytes of one device over the nodes of a program."""

    peak_bytes: int
    peak_index: int
    """Index of the node with the peak."""
    at_peak: dict[str, int]
    curve: list[int]
    """Bytes held while each node runs."""
    by_category: dict[str, list[int]] = field(default_factory=dict)
    alive: list[Living] = field(default_factory=list)
    """The values in memory at the peak, largest first."""
    spans: list[Lifetime] = field(default_factory=list)
    """What the program allocates, in order of allocation; without what kernels take while they run."""
    taken: list[Lifetime] = field(default_factory=list)
    """What kernels take while they run."""
    host_bytes: int = 0
    """The most pinned bytes that the program holds in its host's memory; 0 on a CPU, which holds them in its own."""

    @property
    def largest(self) -> list[tuple[str, str, int]]:
        """The name, category and bytes of the twelve largest values at the peak."""
        return [(value.node.name, value.category, value.bytes) for value in self.alive[:12]]


def liveness(
    program: Program,
    run: Sequence[Kernel],
    *,
    always: Mapping[str, int] | None = None,
    device: Device | None = None,
) -> Memory:
    """Computes the memory that a program holds while each of its nodes runs, by category.

    always: bytes by category that live throughout and are not inputs (optimizer state, accumulated gradients).
    device: the one that runs it. On a CPU collectives run otherwise (`parallelism.resharding.exchange`); on a GPU some
    kernels take memory of their own; None: neither. A compiled pointwise kernel may overwrite an operand that it is the
    last to read.
    """
    flow = Flow.of(program)
    nodes = flow.nodes
    birth, death, size, category = _lives(program, run, flow)
    away = [base for base in birth if base.target is offload] if device is None or device.kind == "gpu" else []
    host_bytes = _most([(birth[base], death[base], pinned_bytes(size.pop(base))) for base in away])
    for base in away:
        del birth[base]

    change: dict[str, list[int]] = {name: [0] * (len(nodes) + 3) for name in CATEGORIES}
    spans: list[Lifetime] = []
    for base, start in birth.items():
        end = death[base]
        over = end < len(nodes) and run[end].compiled and run[end].work == "stream" and run[end].written == size[base]
        freed = end if over and end > start else end + 1
        change[category[base]][start] += size[base]
        change[category[base]][freed] -= size[base]
        if base.op != "placeholder" and size[base]:
            spans.append(Lifetime(start, freed, size[base]))
    for name, extra in (always or {}).items():
        change[name][0] += extra
    for issue, wait, buffers in _exchanges(flow) if device is not None and device.exchanges else ():
        # The result is allocated by the local sum after the exchange, when the sent data, which is no smaller, is free.
        # Until the wait only the exchange's buffers count.
        change["communication"][issue] += buffers - run[issue].written
        change["communication"][wait + 1] -= buffers - run[issue].written

    scratch = _scratch(flow, run) if device is not None and device.kind == "gpu" else ()
    taken = [Lifetime(i, i + 1, size) for i, size in (*scratch, *_inside_bodies(flow, device))]
    for i, after, inside in taken:
        change["temporary"][i] += inside
        change["temporary"][after] -= inside

    by_category: dict[str, list[int]] = {}
    curve = [0] * len(nodes)
    for name in CATEGORIES:
        series = list(accumulate(change[name][: len(nodes)]))
        if any(series):
            by_category[name] = series
            curve = [a + b for a, b in zip(curve, series)]
    peak_index = max(range(len(nodes)), key=curve.__getitem__) if nodes else 0
    alive = [
        Living(base, category[base], size[base], death[base])
        for base, start in birth.items()
        if start <= peak_index <= death[base] and size[base]
    ]
    alive.sort(key=lambda entry: (-entry.bytes, entry.node.name))
    return Memory(
        curve[peak_index] if curve else 0,
        peak_index,
        {name: series[peak_index] for name, series in by_category.items()},
        curve,
        by_category,
        alive,
        spans,
        taken,
        host_bytes,
    )


def pinned_bytes(size: int) -> int:
    """Bytes that torch's allocator takes of a host's memory for a pinned tensor: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def _most(spans: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes of (first, last, bytes) at once."""
    changes = sorted((at, size) for first, last, held in spans for at, size in ((first, held), (last + 1, -held)))
    return max(accumulate(size for _, size in changes), default=0)


def _scratch(flow: Flow, kernels: Sequence[Kernel]) -> Iterator[tuple[int, int]]:
    """Yields the kernels that take memory while they run: index and bytes."""
    for i, kernel in enumerate(kernels):
        if kernel.work != "free" and (scratch := flow.entry[kernel.node].scratch) is not None:
            specs = (flow.info[operand].specs for operand in kernel.node.all_input_nodes)
            yield i, scratch([one[0].shape for one in specs if one])


def _inside_bodies(flow: Flow, device: Device | None) -> Iterator[tuple[int, int]]:
    """Yields the operations of control flow: index, and the most bytes that a body holds besides its inputs."""
    for i, node in enumerate(flow.nodes):
        if each := programs_in(node):
            peaks = (liveness(body, kernels(body, compiled="none"), device=device).peak_bytes for body in each)
            held = (sum(port.local_bytes for port in body.inputs) for body in each)
            yield i, max(peak - own for peak, own in zip(peaks, held))


def _exchanges(flow: Flow) -> Iterator[tuple[int, int, int]]:
    """Yields the collectives that a CPU runs as an exchange: indices of issue and wait, and the bytes of its buffers.

    Those are what is received, and for an all-reduce the copies that are sent.
    """
    index = {node: i for i, node in enumerate(flow.nodes)}
    for node, i in index.items():
        comm = flow.info[node].comm
        if comm is not None and runs_as_exchange(comm.kind, comm.bytes, comm.size):
            waits = [index[user] for user in node.users if flow.name[user] == "wait_tensor"]
            yield i, max(waits, default=i), comm.bytes * (2 * comm.size if comm.kind == "all_reduce" else 1)


def _lives(
    program: Program, kernels: Sequence[Kernel], flow: Flow
) -> tuple[dict[fx.Node, int], dict[fx.Node, int], dict[fx.Node, int], dict[fx.Node, str]]:
    """For each storage, the index of the node that allocates it, the index of its last use, its bytes, its category."""
    nodes, sources, root = flow.nodes, flow.sources, flow.root
    end = len(nodes)
    birth: dict[fx.Node, int] = {}
    size: dict[fx.Node, int] = {}
    category: dict[fx.Node, str] = {}
    ports = iter(program.inputs)
    for i, kernel in enumerate(kernels):
        node = kernel.node
        if node.op == "placeholder":
            port = next(ports, None)
            birth[node], size[node] = 0, port.local_bytes if port is not None else 0
            category[node] = _INPUTS.get(port.kind, "temporary") if port is not None else "temporary"
        elif kernel.written and root[node] is node:
            birth[node], size[node] = i, kernel.written

    death = dict(birth)
    readers: dict[fx.Node, list[fx.Node]] = {}
    run = _run_at(kernels, flow)
    for node in nodes:
        if node.op == "output":
            continue
        i = run[node]
        for source in sources[node]:
            base = root[source]
            if base in death:
                death[base] = max(death[base], i)
                readers.setdefault(base, []).append(node)
        if flow.name[node] == "wait_tensor":
            for issued in sources[node]:
                for source in sources[issued]:  # data being sent must stay alive until the wait
                    if root[source] in death:
                        death[root[source]] = max(death[root[source]], i)
    results: dict[fx.Node, str] = {}
    ends: list[fx.Node] = [source for node in nodes if node.op == "output" for source in _flat(node)]
    for source, port in zip(ends, program.outputs):
        base = root[source]
        if base in death:
            death[base] = end
            results[base] = port.kind
    for node in nodes:
        if node.op == "placeholder" and node in death:
            death[node] = end
    for output in program.donated:
        # the output uses the input's storage and allocates nothing
        if output < len(ends) and root[ends[output]] in size and root[ends[output]].op != "placeholder":
            size[root[ends[output]]] = 0
    for base in birth:
        if base not in category:
            category[base] = _RESULTS.get(results.get(base, "")) or _category(base, readers.get(base, []), flow)
    return birth, death, size, category


def _run_at(kernels: Sequence[Kernel], flow: Flow) -> dict[fx.Node, int]:
    """Returns the index of the node at which each node's operands are read.

    A node inside a fused kernel reads them where the kernel writes its result.
    """
    root = flow.root
    run = {node: i for i, node in enumerate(flow.nodes)}
    inner = {k.node for k in kernels if k.work == "stream" and not k.written}
    for kernel in reversed(kernels):
        node = kernel.node
        if node in inner or (root[node] is not node and root[node] in inner):
            run[node] = max([run[user] for user in node.users if user.op != "output"], default=run[node])
    return run


def _category(base: fx.Node, readers: Sequence[fx.Node], flow: Flow) -> str:
    """The memory category of a value inside a program, from what it is, what it comes from and what reads it."""
    infos = flow.info
    info = infos[base]
    if info.comm is not None:
        moved = info.comm.of
        if info.comm.kind == "all_gather" and moved == "parameter":
            return "gathered"
        if info.phase == "forward" and any(infos[reader].phase in ("backward", "recompute") for reader in readers):
            return "activations"
        return "gradients" if moved == "gradient" else "communication"
    if info.place.role in ("logits", "loss"):
        return "logits_and_loss"
    for reader in readers:
        comm = infos[reader].comm
        if comm is not None:
            if comm.of == "gradient":
                return "gradients"
            if comm.of == "parameter":
                return "gathered"
    sources = [infos[flow.root[source]].comm for source in flow.sources[base]]
    if sources and all(c is not None and c.kind == "all_gather" and c.of == "parameter" for c in sources):
        return "gathered"  # a copy of a gathered parameter, in its shape
    if info.phase == "forward" and any(infos[reader].phase in ("backward", "recompute") for reader in readers):
        return "activations"
    return "activations" if info.phase == "recompute" else "temporary"


def _flat(output: fx.Node) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(output.args, nodes.append)
    return nodes
