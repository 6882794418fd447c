"""Grouping parameters into buckets: by unit, by size, or greedily by time and memory (SimpleFSDP, section 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


def first_uses(program: Program) -> dict[str, int]:
    """The index of the first operation that reads each gathered parameter, by the parameter's name."""
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
                else:
                    for name in names[operand]:
                        first.setdefault(name, i)
    return first


def in_order_of_use(program: Program) -> list[str]:
    """Gathered parameters in the order in which the program first reads them."""
    first = first_uses(program)
    return sorted(first, key=first.__getitem__)


@dataclass(frozen=True)
class Piece:
    """A parameter to be put into a bucket by `greedy`: its gathered bytes, and the computation after its first use."""

    name: str
    bytes: int
    """Bytes when gathered."""
    compute_s: float
    """Seconds of the forward operations from its first use to the next parameter's."""


def greedy(pieces: Sequence[Piece], gather_s: Callable[[int], float], memory: float) -> Groups:
    """Groups parameters into buckets: merges neighbours while the previous bucket's computation hides the gather.

    SimpleFSDP's auto-wrapper: a parameter joins the open bucket if the bucket's gather then takes no longer than the
    computation it overlaps with, and the gathered bytes of both buckets stay within `memory`. Merging saves one
    latency. A gather that nothing hides is merged only while the saved latency is worth it, so that the first bucket
    stays small.
    """
    groups: Groups = []
    previous_compute = open_compute = 0.0
    previous_bytes = open_bytes = 0
    for piece in pieces:
        fits = previous_bytes + open_bytes + piece.bytes <= memory
        together = gather_s(open_bytes + piece.bytes)
        apart = gather_s(open_bytes) + gather_s(piece.bytes) if open_bytes else 0.0
        # exposed either way: merge if a gather of its own would cost more than it hides
        cheaper = len(groups) > 1 and apart - together > piece.compute_s
        if groups and fits and (together <= previous_compute or cheaper):
            groups[-1].append(piece.name)
            open_bytes += piece.bytes
            open_compute += piece.compute_s
            continue
        groups.append([piece.name])
        previous_compute, previous_bytes = open_compute, open_bytes
        open_bytes, open_compute = piece.bytes, piece.compute_s
    return groups
