"""The memory that NCCL's communicators take of a GPU, beside the tensors that they move.

A group connects as its collectives need: a ring to one peer each way, an all-to-all or a permute to every peer. Each
connection has buffers for several channels, which are not shared between groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from tpshard.parallelism.mesh import Axes
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.program import Program

RECEIVING, SENDING = 10 << 20, 2 << 20
"""Bytes of a channel from a peer, and to one, as counted in NVIDIA/nccl issue 1685: an all-to-all among eight H100
took 3.3 GB of each, in 32 channels."""


def communicator_bytes(programs: Iterable[Program], device: Device, topology: Topology) -> int:
    """Bytes of one device for the groups of these programs' collectives, beyond one ring: `Device.context_bytes` has
    that. Trees and multicast through switches are not counted."""
    rings, peers, edges = set[Axes](), dict[Axes, int](), set[tuple[str, int]]()
    for program in programs if device.channels else ():
        for node, comm in program.issues():
            span = topology.span(comm.refs)
            if comm.kind in ("send", "recv"):
                edges.add((comm.kind, node.args[1]))  # type: ignore[arg-type]
            elif comm.kind in ("all_to_all", "permute"):
                peers[comm.refs] = -(-span.members // span.hosts) - 1  # other hosts' share the network's buffers
            elif span.members > 1:
                rings.add(comm.refs)
    each_way, both = {"send": SENDING, "recv": RECEIVING}, RECEIVING + SENDING
    of_pairs = sum(peers.values()) * both + sum(each_way[kind] for kind, _ in edges)
    return device.channels * max(0, len(rings) - 1) * both + (1 << max(0, device.channels - 1).bit_length()) * of_pairs
