"""Grouping parameters into buckets: by unit, by size, or greedily by time and memory (SimpleFSDP, section 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from torch import fx
from tpshard.parallelism.program import Program, info

Groups = list[list[str]]


def by_unit(names: Sequence[str], unit_of: Callable[[str], str]) -> Groups:
    """One bucket per FSDP unit; a parameter in no unit is gathered alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(unit_of(name) or f"alone:{name}", []).append(name)
    return list(groups.values())


def by_size(names: Sequence[str], sizes: Mapping[str, int], limit: float) -> Groups:
    """Buckets of neighbours in order of use, with up to `limit` bytes of gathered parameters, but at least one each."""
    groups: Groups = []
    held = 0
    for name in names:
        if not groups or held + sizes[name] > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += sizes[name]
    return groups


def first_uses(program: Program, *, forward: bool = True) -> dict[str, int]:
    """The index of the first operation that reads each gathered parameter, by the parameter's name.

    forward: whether operations of the forward pass count.
    """
    first: dict[str, int] = {}
    names: dict[fx.Node, tuple[str, ...]] = {}
    stored = {port.name for port in program.inputs if port.kind == "parameter"}
    for i, node in enumerate(program.graph.nodes):
        if node.op != "call_function":
            continue
        comm = info(node).comm
        if comm is not None and comm.of == "parameter" and stored.issuperset(comm.value):
            names[node] = comm.value
            continue
        for operand in node.all_input_nodes:
            if operand in names:
                if info(node).flops == 0 and len(node.all_input_nodes) == 1:
                    names[node] = names[operand]
                elif forward or info(node).phase != "forward":
                    for name in names[operand]:
                        first.setdefault(name, i)
    return first


def in_order_of_use(program: Program) -> list[str]:
    """Gathered parameters in the order in which the program first reads them."""
    first = first_uses(program)
    return sorted(first, key=first.__getitem__)


@dataclass(frozen=True)
class Piece:
    """A parameter to be put into a bucket by `greedy`: what is sent for it, and what is computed meanwhile."""

    name: str
    bytes: int
    """Bytes when gathered."""
    compute_s: float
    """Seconds of the forward operations from its first use to the next parameter's."""
    again_bytes: int = 0
    """Bytes that are gathered again for the backward pass."""
    gradient_bytes: int = 0
    """Bytes of its gradient before it is reduced over the devices."""
    backward_s: float = 0.0
    """Seconds of the operations of the backward pass from its first use there to the next parameter's."""

    def __add__(self, other: Piece) -> Piece:
        sums = (getattr(self, field.name) + getattr(other, field.name) for field in fields(self)[1:])
        return Piece(self.name, *sums)


class SendTimes(Protocol):
    """Seconds of FSDP's collectives; 0 for 0 bytes."""

    def gather(self, size: int) -> float:
        """Seconds of an all-gather with `size` bytes in its result."""

    def reduce(self, size: int) -> float:
        """Seconds of a reduce-scatter of `size` bytes."""


def greedy(pieces: Sequence[Piece], times: SendTimes, memory: float) -> Groups:
    """Groups parameters into buckets: merges neighbours while computation of the previous bucket hides what is sent.

    SimpleFSDP's auto-wrapper (section 4.4): a parameter joins the open bucket if the gathered bytes of the bucket and
    the one before stay within `memory`, if the bucket's gather then takes no longer than the forward computation of the
    one before, and if, in the backward pass, the computation of the one before takes as long as what is sent meanwhile:
    the bucket's gradients, and the gather of the bucket that comes after it there. Merging saves latencies. A gather
    that nothing hides is merged only while the saved latency is worth it, so that the first bucket stays small.
    """
    groups: Groups = []
    none = Piece("", 0, 0.0)
    earlier = before = bucket = none
    for piece in pieces:
        joined = bucket + piece
        fits = before.bytes + joined.bytes <= memory
        together = times.gather(joined.bytes)
        behind = times.reduce(joined.gradient_bytes) + times.gather(earlier.again_bytes)
        # exposed either way: merge if a gather of its own would cost more than it hides
        apart = times.gather(bucket.bytes) + times.gather(piece.bytes)
        cheaper = len(groups) > 1 and apart - together > piece.compute_s
        if groups and fits and (cheaper or (together <= before.compute_s and behind <= before.backward_s)):
            groups[-1].append(piece.name)
            bucket = joined
            continue
        groups.append([piece.name])
        earlier, before, bucket = before, bucket, piece
    return groups
