"""What a server's step computes and moves for any number of rows, from the programs of two sizes with few layers.

Every kernel's FLOPs and bytes grow with the rows of a step by equal steps, so two programs say them for all; and equal
layers of a deep model repeat those of a shallow one. This is for engines that are not tpshard's (`engine_steps`), whose
steps have any number of rows; tpshard's own are priced program by program (`server_prices`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tpshard.parallelism.pricing.flow import Flow, info_of
from tpshard.parallelism.pricing.fusion import Kernel, kernels, unread_bytes
from tpshard.parallelism.program import Program
from tpshard.parallelism.rules.entry import Work
from tpshard.parallelism.rules.table import entry_of
from tpshard.programs.server.serving import BLOCK_SIZE

_EXPERT_LAUNCHES = 8
"""Kernels that engines launch for the experts of a layer: five that choose, sort and pad, two products, activation."""
_LAYER = re.compile(r"layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class KernelWork:
    """One kernel of a step, on one device."""

    work: Work
    dtype: str
    times: float
    """How often a step runs it: in how many layers."""
    launches: float
    """Kernels that an engine launches for it; 0: it is part of another's."""
    flops: float
    """Per row; of attention, per row and position that it attends to."""
    row_bytes: float
    """Bytes of activations per row."""
    weights: int
    """Bytes of the parameters that it reads."""
    routed: int = 0
    """Of these, those of all experts."""
    chosen: float = 0.0
    """The share of the experts that one row chooses."""
    of_logits: bool = False
    """Whether its rows are those whose next token is chosen."""
    module: str = ""
    """The path of its module, with `experts` for those; empty outside of layers."""
    position_bytes: float = 0.0
    """Of attention, bytes of the cache per position that is read."""
    window: float = float("inf")
    """Of attention, the most positions to which a row attends."""
    summed: int = 0
    """Bytes per row of an all-reduce."""


@dataclass(frozen=True)
class StepWork:
    """The kernels of a server's step on one device, and what the server holds there."""

    kernels: tuple[KernelWork, ...]
    members: int
    """Devices that share the step."""
    weight_bytes: float
    """Bytes of all parameters."""
    position_bytes: float
    """Bytes of the cache per position, over all layers."""

    @cached_property
    def attention(self) -> tuple[KernelWork, ...]:
        return tuple(one for one in self.kernels if one.work == "attention")

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Fields of the kernels without attention and collectives, as arrays [kernels]."""
        plain = [one for one in self.kernels if one.work != "attention" and not one.summed]
        names = ("times", "launches", "flops", "row_bytes", "weights", "routed", "chosen", "of_logits")
        return {name: np.array([getattr(one, name) for one in plain], dtype=float) for name in names} | {
            "dtype": np.array([one.dtype for one in plain]), "module": np.array([one.module for one in plain]),
            "product": np.array([one.work == "matmul" for one in plain]),
        }  # fmt: skip


def step_work(programs: Mapping[int, Program], layers: int, built: int) -> StepWork:
    """The work of a step of a model with `layers` layers.

    programs: those of two numbers of rows, all of whose rows have logits, of the same model with `built` layers, two
    rounds of layers that repeat: the first round stands for all others but the last.
    """
    (few, low), (many, high) = sorted(programs.items())
    period = built // 2
    pairs = list(zip(*(kernels(program, compiled="all") for program in (low, high)), strict=True))
    sums = [info.comm.bytes for one, _ in pairs if (info := info_of(one.node)).comm and info.comm.kind == "all_reduce"]
    flows, found = (Flow.of(low), Flow.of(high)), list[KernelWork]()
    seen = False
    for one, other in pairs:
        layer = _layer(str(info_of(one.node).place.layer or ""))
        seen |= layer is not None
        times = (layers - period) / period if layer is not None and layer < period else 1.0
        comm = info_of(one.node).comm
        if comm is not None and one.node.op == "call_function":
            if comm.kind == "all_reduce":  # one of them all: an engine adds the experts of a row before
                summed = min(sums) // few
                found.append(KernelWork("free", one.dtype, times, 1, 0.0, 0.0, 0, summed=summed))
        elif one.work != "free":
            found.append(_kernel_work(flows, one, other, many - few, times, seen and layer is None))
    held = 0.0
    for port in low.inputs:
        layer = _layer(port.name)
        repeated = layer is not None and layer < period
        held += port.local_bytes * ((layers - period) / period if repeated else 1.0) * (port.kind == "parameter")
    cached = sum(one.position_bytes * one.times for one in found)
    return StepWork(tuple(found), low.mesh.ranks, held, cached)


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _kernel_work(
    flows: tuple[Flow, Flow], one: Kernel, other: Kernel, more: int, times: float, of_logits: bool
) -> KernelWork:
    """A kernel from its forms in two programs, of which the second has so many more rows."""
    node, entry, flow = one.node, entry_of(one.node.target), flows[0]
    flops = (other.flops - one.flops) / more
    module = str(info_of(node).place.module) if info_of(node).place.layer is not None else ""
    if one.work == "attention":
        pools = [node.all_input_nodes[i] for i in entry.cached]
        window = node.args[10] if len(node.args) > 10 and node.args[10] is not None else float("inf")
        assert isinstance(window, int | float)
        return KernelWork(
            one.work, one.dtype, times, 1, flops / min(BLOCK_SIZE, window), (other.moved - one.moved) / more, 0,
            module=module, position_bytes=sum(flow.bytes[pool] for pool in pools) / BLOCK_SIZE, window=window,
        )  # fmt: skip
    routed, chosen, launches = 0, 0.0, float(one.counts)
    weights, row_bytes = min(one.cold, one.moved) if one.work == "matmul" else 0, (other.moved - one.moved) / more
    if entry.routed:
        module = module if "experts" in module else f"{module}.experts"
        launches = _EXPERT_LAUNCHES / (1 if entry.routed == 3 else 2)  # in one operation or in two
        operands = node.all_input_nodes
        routed = sum(flow.bytes[matrix] for matrix in operands[-entry.routed :])
        ids = next(info_of(x).specs[0] for x in operands if not info_of(x).specs[0].dtype.is_floating_point)
        chosen = min(1.0, ids.shape[-1] / info_of(operands[-1]).specs[0].shape[0])
        unread = unread_bytes(flow, node, entry.routed), unread_bytes(flows[1], other.node, entry.routed)
        weights, row_bytes = routed, row_bytes + (unread[1] - unread[0]) / more
    return KernelWork(
        one.work, one.dtype, times, launches, flops, max(0.0, row_bytes), weights, routed, chosen, of_logits,
        module,
    )  # fmt: skip
