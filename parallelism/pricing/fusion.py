"""The kernels of a program: which values are written to memory, and how many bytes each node moves.

Run by the interpreter, every node is a kernel and every result is written. Compiled, pointwise operations and
reductions between two matrix products (or collectives) form one kernel, and only values with other readers are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import fx
from tpshard.kernels.dtypes import dtype_name
from tpshard.parallelism.pricing.cost import Device, operation
from tpshard.parallelism.pricing.flow import Flow, info_of
from tpshard.parallelism.program import Info, Program
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW
from tpshard.parallelism.rules.entry import Work
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.transfer import COPIES

_MOST_READS = 2
"""A value with several readers and more than this many operands of at least half its size is written to memory."""


@dataclass
class Kernel:
    """The kernel of one node: its kind of work, and the FLOPs and bytes of a device."""

    node: fx.Node
    work: Work
    flops: int
    moved: int
    """Bytes read and written in the device's memory."""
    written: int
    """Bytes of new storage: 0 for views, and for values inside a fused kernel."""
    dtype: str
    counts: bool
    """Whether the node has the overhead of a launch; of a fused group only the first node that is written has."""
    compiled: bool = False
    exponentials: int = 0
    """Elements that need an exponential."""
    cold: int = 0
    """Of the bytes moved, those of the program's inputs, which no kernel has just computed."""
    added: int = 0
    """Of the bytes moved, those of a tensor to which a product adds its result."""
    since: int = 0
    """Bytes moved since the last kernel of the same operation, in this run of the program or the one before."""


def _work(flow: Flow, node: fx.Node) -> Work:
    """The kind of work that bounds a node's kernel; `free` if it has no kernel, such as an integer of the rank."""
    info = flow.info[node]
    if node.op != "call_function" or node in flow.views or info.comm is not None or not info.specs:
        return "free"
    return flow.entry[node].work


Compiled = Literal["auto", "all", "pieces", "layers", "rest", "none"]
"""The part of a program that is compiled: all of it at once, all in pieces between collectives and control flow, the
layers (`layers.3...`), all but the layers, or none; `auto`: all, or of a large program the layers."""
LARGE = 11_000
"""Operations of a program above which only its layers are compiled. Up to about as many the compiler's time grew no
faster than the program (benchmarks/compile_time.py: with 64 layers, 138 s of CPU); larger ones were not measured."""


def is_compiled(compiled: Compiled, info: Info) -> bool:
    """Whether a node is compiled."""
    if compiled in ("all", "pieces", "none"):
        return compiled != "none"
    return (compiled == "layers") == (info.place.layer is not None)


def compiled_as(program: Program, compiled: Compiled) -> Compiled:
    """The part of a program that is compiled where `compiled` is asked for: of one with control flow, whose bodies are
    interpreted, or with copies to the host's memory, pieces in the place of all."""
    if compiled == "auto":
        operations = sum(node.op == "call_function" for node in program.graph.nodes)
        compiled = "layers" if operations > LARGE else "all"
    apart = (*CONTROL_FLOW, *COPIES)
    within = compiled == "all" and any(node.target in apart for node in program.graph.nodes)
    return "pieces" if within else compiled


@dataclass(frozen=True)
class CacheReads:
    """The blocks of a server's cache that a step reads: per layer, and the mean number to which a row attends."""

    blocks: float = 1.0
    by_row: float = 1.0

    def of_listed(self, rows: int, positions: int, block: int) -> CacheReads:
        """The blocks that a step of `rows` reads where each row reads at most so many positions, as parts of blocks."""
        most = max(1.0, positions / block)
        return CacheReads(min(self.blocks, rows * most), min(self.by_row, most))


NONE = CacheReads()


def kernels(program: Program, *, compiled: Compiled, cached: CacheReads = NONE) -> list[Kernel]:
    """The kernel of every node of the program, in issue order."""
    compiled = compiled_as(program, compiled)
    return program.cached(("kernels", compiled, cached), lambda: _kernels(Flow.of(program), compiled, cached))


def _kernels(flow: Flow, compiled: Compiled, cached: CacheReads) -> list[Kernel]:
    works = {node: _work(flow, node) for node in flow.nodes}
    controls = {node for node in flow.nodes if node.target in CONTROL_FLOW}
    seen_by = {node: is_compiled(compiled, flow.info[node]) for node in flow.nodes}
    # the interpreter runs a kernel per node
    group = {} if compiled == "none" else _groups(flow, works, seen_by, controls)
    inlined = set() if compiled == "none" else _inlined(flow, works, seen_by)
    counted: set[tuple[fx.Node, fx.Node]] = set()
    opened: set[fx.Node] = set()
    out = []
    for node in flow.nodes:
        work, info = works[node], flow.info[node]
        dtype = _dtype(flow, node)
        if (info.comm is not None and node.op == "call_function") or node in controls or node.target in COPIES:
            out.append(Kernel(node, "free", 0, 0, info.bytes, dtype, False))
            continue
        if work == "free":
            out.append(Kernel(node, "free", 0, 0, 0, dtype, False, seen_by[node]))
            continue
        kernel_id = group.get(node, node)
        inside = node in inlined
        read = cold = 0
        if not inside:
            for source, shown in _sources(flow, node, inlined, group):
                # a fused kernel reads a value once; a view reads no more than its own elements
                if (kernel_id, source) not in counted:
                    counted.add((kernel_id, source))
                    read += shown
                    cold += shown if source.op == "placeholder" else 0
        entry = flow.entry[node]
        if entry.lookup:
            read = min(read, 2 * info.bytes + 8)
        if entry.routed and not inside:
            read -= unread_bytes(flow, node, entry.routed)
        if entry.overwrites:
            read = 2 * flow.bytes[node.all_input_nodes[-1]]  # half of it is written
        written = 0 if inside else info.bytes
        counts = not inside and kernel_id not in opened
        exponentials = entry.exponentials * _elements(info)
        flops = info.flops
        if entry.cached:
            pools = [node.all_input_nodes[i] for i in entry.cached]
            reads = cached if entry.listed is None else _listed(node, entry.listed, pools[0], cached)
            flops = int(flops * reads.by_row)
            read += int((reads.blocks - 1) * sum([flow.bytes[pool] for pool in pools]))
        moved = read + written
        cold = min(cold, read)
        added = flow.bytes[node.all_input_nodes[0]] if entry.adds else 0
        out.append(Kernel(node, work, flops, moved, written, dtype, counts, seen_by[node], exponentials, cold, added))
        if counts:
            opened.add(kernel_id)
    _count_since(out)
    return out


def unread_bytes(flow: Flow, node: fx.Node, routed: int) -> int:
    """Bytes of experts' matrices, the node's last `routed` operands, that no row chooses where all are chosen alike."""
    operands = node.all_input_nodes
    ids = next(info_of(x).specs[0] for x in operands if not info_of(x).specs[0].dtype.is_floating_point)
    experts, chosen = info_of(operands[-1]).specs[0].shape[-3], ids.shape[-1]
    share = max(0.0, 1 - chosen / experts) ** math.prod(ids.shape[:-1])
    return int(share * sum(flow.bytes[matrix] for matrix in operands[-routed:]))


def _listed(node: fx.Node, listed: int, pool: fx.Node, cached: CacheReads) -> CacheReads:
    """The blocks that a node reads, whose operand `listed` [batch, rows, count] has each row's positions."""
    listing = node.args[listed]
    assert isinstance(listing, fx.Node)
    (batch, rows, count), block = info_of(listing).specs[0].shape, info_of(pool).specs[0].shape[1]
    return cached.of_listed(batch * rows, count, block)


def _count_since(run: list[Kernel]) -> None:
    """Sets `Kernel.since` of all kernels of a program, which is assumed to have run before."""
    moved_bytes, last = 0, dict[int, int]()  # operations by identity
    for kernel in run:
        moved_bytes += kernel.moved
        last[id(kernel.node.target)] = moved_bytes
    last = {target: end - moved_bytes for target, end in last.items()}  # where the previous run left off
    moved_bytes = 0
    for kernel in run:
        target = id(kernel.node.target)
        kernel.since = moved_bytes - last[target]
        moved_bytes += kernel.moved
        last[target] = moved_bytes


def _elements(info: Info) -> int:
    return sum([spec.bytes // spec.dtype.itemsize for spec in info.specs])


def _sources(
    flow: Flow, node: fx.Node, inlined: set[fx.Node], group: dict[fx.Node, fx.Node]
) -> list[tuple[fx.Node, int]]:
    """The storages that a node's kernel reads, also through inlined values, each with the bytes read of it."""
    root, size = flow.root, flow.bytes
    read_bytes: dict[fx.Node, int] = {}
    queue = [(source, root[source]) for source in flow.sources[node]]
    visited: set[fx.Node] = set()
    kernel = group.get(node)
    while queue:
        source, base = queue.pop()
        if base in inlined:
            if base not in visited:
                visited.add(base)
                queue.extend([(s, root[s]) for s in flow.sources[base]])
            continue
        if kernel is not None and base is not node and group.get(base) is kernel:
            continue  # stays in registers, though it may also be written
        shown = min(size[source], max(size[base], 1))
        read_bytes[base] = max(read_bytes.get(base, 0), shown)
    return list(read_bytes.items())


def _inlined(flow: Flow, works: dict[fx.Node, Work], seen_by: dict[fx.Node, bool]) -> set[fx.Node]:
    """The pointwise values that a compiler recomputes in each kernel that reads them, instead of writing them.

    Not those that a non-fused kernel reads, nor those with several readers and several operands (one, if the backward
    pass reads it: then one value is saved, not two).
    """
    inlined: set[fx.Node] = set()
    size, infos = flow.bytes, flow.info
    outputs = {flow.root[n] for node in flow.nodes if node.op == "output" for n in flow.sources[node]}
    readers = _readers(flow)
    reads: dict[fx.Node, set[fx.Node]] = {}
    for node in flow.nodes:
        if works[node] != "stream" or not seen_by[node]:
            continue
        inputs: set[fx.Node] = set()
        for source in flow.sources[node]:
            base = flow.root[source]
            inputs |= reads[base] if base in inlined else {base}
        reads[node] = inputs
        users = readers.get(node, ())
        if node in outputs or any(works[user] != "stream" or not seen_by[user] for user in users):
            continue
        if not flow.entry[node].inlined:
            continue
        if len(users) > 1:
            large = sum([2 * size[source] >= size[node] for source in inputs])
            crosses = infos[node].phase == "forward" and any(infos[user].phase != "forward" for user in users)
            if large > (1 if crosses else _MOST_READS):
                continue
        inlined.add(node)
    return inlined


def _readers(flow: Flow) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that read each storage, also through views."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in flow.nodes:
        if node not in flow.views:
            for source in flow.sources[node]:
                readers.setdefault(flow.root[source], []).append(node)
    return readers


def _groups(
    flow: Flow, works: dict[fx.Node, Work], seen_by: dict[fx.Node, bool], controls: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The fused kernel of each pointwise node, named by one of its nodes.

    A kernel has connected nodes, all or none of the forward pass, with equally many barriers before them.
    """
    depth: dict[fx.Node, int] = {}
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    infos = flow.info
    barriers = ("matmul", "attention", "attention_backward")
    beyond: dict[fx.Node, int] = {}  # depth of a node's readers
    for node in flow.nodes:
        sources = flow.sources[node]
        level = max([beyond[source] for source in sources], default=0)
        depth[node] = level
        beyond[node] = level + (works[node] in barriers or infos[node].comm is not None or node in controls)
        if works[node] != "stream" or not seen_by[node]:
            continue
        parent[node] = node
        forward = infos[node].phase == "forward"
        for source in sources:
            base = flow.root[source]
            if base in parent and depth[base] == level and (infos[base].phase == "forward") == forward:
                parent[find(node)] = find(base)
    return {node: find(node) for node in parent}


def _dtype(flow: Flow, node: fx.Node) -> str:
    """The compute dtype of a node: that of its first tensor operand."""
    for source in flow.sources[node]:
        for spec in flow.info[source].specs:
            return dtype_name(spec.dtype)
    for spec in flow.info[node].specs:
        return dtype_name(spec.dtype)
    return "float32"


def seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of one kernel on `device`."""
    node, info = kernel.node, info_of(kernel.node)
    if kernel.work == "free":
        # the interpreter dispatches it though it moves nothing; a compiler removes it
        dispatched = node.op == "call_function" and info.specs and info.comm is None
        dispatch_s = device.cpu.view_s * device.cpu.overhead_after(kernel.since)
        return dispatch_s if dispatched and not kernel.compiled else 0.0
    if kernel.work == "stream" and not kernel.counts:
        streamed = kernel.moved + device.cpu.exponential * kernel.exponentials
        return streamed / device.stream_rate
    dtype = kernel.dtype
    if device.kind == "cpu" and entry_of(node.target).packed:
        layout, rows, weights = _packed(kernel)
        each_s = device.cpu.product_s(layout, rows)
        if each_s is not None:
            least = device.overhead.op_s if kernel.compiled else device.overhead.eager_op_s
            return weights * each_s + least * device.cpu.overhead_after(kernel.since)
        dtype = "float32" if layout in ("fp32", "parts") else dtype
    head_dim = info.specs[0].shape[-1] if kernel.work.startswith("attention") and info.specs else 0
    one = operation(
        device, kernel.work, kernel.flops, kernel.moved, dtype, eager=not kernel.compiled, head_dim=head_dim,
        exponentials=kernel.exponentials, cold=kernel.cold, since=kernel.since, added=kernel.added,
    )  # fmt: skip
    return one + _in_parts(kernel, device)


def _packed(kernel: Kernel) -> tuple[str, int, float]:
    """The layout of a product's weight (see `cost.Cpu.products`), its rows, and the number of weights."""
    x, weight = (info_of(node).specs[0] for node in kernel.node.args[:2])  # type: ignore[arg-type]
    rows = math.prod(x.shape[:-1])
    weights = kernel.flops / (2 * rows)
    plain = kernel.node.target.__name__ == "fixed_rows_linear"  # type: ignore[union-attr]
    # codes of 4 bits take less than a byte a weight, with their scales
    narrow, wide = ("bf16", "fp32") if plain else ("int4", "parts")
    return wide if weight.bytes > 3 * weights else narrow, rows, weights


def _in_parts(kernel: Kernel, device: Device) -> float:
    """Further seconds of an operation that a CPU computes by `entry.calls` library operations rather than one.

    Each has its own overhead. An operation on a cache first copies keys and values out of it: these are read, written
    and read again.
    """
    entry = entry_of(kernel.node.target)
    if device.kind != "cpu" or entry.calls == 1:
        return 0.0
    least = device.overhead.op_s if kernel.compiled else device.overhead.eager_op_s
    least *= device.cpu.overhead_after(kernel.since)
    copied = 3 * kernel.moved / device.stream_rate if entry.cached else 0.0
    return (entry.calls - 1) * least + copied
