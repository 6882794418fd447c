"""Computing which levels of a network a group of devices sends through, and how fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tpshard.parallelism.mesh import Axes, Mesh, size_of

Wire = Literal["inside", "across", "none"]


@dataclass(frozen=True)
class Link:
    """The connection through which one device sends, in one direction.

    bandwidth: bytes/s of one device. shared: the bandwidth is the whole host's, divided by its devices. direct: a link
    leads to one peer, without a switch, so that a group of m devices uses m - 1 links of each.
    """

    bandwidth: float
    latency_s: float
    efficiency: float = 1.0
    """Share of the bandwidth that a large ring collective reaches."""
    slowdown: float = 0.0
    """Share of the computing rate lost while a collective runs over this link."""
    shared: bool = False
    direct: bool = False


@dataclass(frozen=True)
class Level:
    """A network level: links of one kind between devices, or between units of the level below (NVLink, a spine)."""

    name: str
    link: Link
    devices: int = 0
    """The number of devices that it joins, all in one host; 0 where it joins hosts."""
    hosts: int = 0
    """The number of hosts that it joins; 0: all."""
    oversubscribed: float = 1.0
    """How much more the devices below can send than its links carry when all of them do."""
    rails: bool = False
    """Whether it joins only devices with the same place in their hosts; other traffic crosses the host first."""

    @property
    def between_hosts(self) -> bool:
        """Whether the level joins hosts, not devices of a host."""
        return self.devices == 0

    @property
    def rate(self) -> float:
        """Bytes/s of one device, or of all that share the link, while all devices send."""
        return self.link.bandwidth * self.link.efficiency / self.oversubscribed

    def joins(self, per_host: int) -> float:
        """The number of devices that the level joins, in a mesh with `per_host` devices on a host."""
        return min(self.devices, per_host) if self.devices else self.hosts * per_host if self.hosts else math.inf


@dataclass(frozen=True)
class Crossing:
    """The use of one network level by a group of devices."""

    level: Level
    parts: int
    """Units of the level below that the group has in one unit of this level."""
    members: int
    """Members of the group in a unit of the level below."""
    sharers: int
    """Devices of the mesh among which a shared link is divided."""
    hops: int
    """Hops over this level of a ring through the whole group."""

    def ring_rate(self) -> float:
        """Bytes/s of a ring between units of the level below, which uses the links of all members in a unit."""
        return self._rate(self.members, self.parts - 1)

    def own_rate(self, peers: int = 1) -> float:
        """Bytes/s of one device that sends to `peers` others at once."""
        return self._rate(1, peers)

    def _rate(self, members: int, peers: int) -> float:
        rate = self.level.rate * members
        if self.level.link.direct:
            rate *= max(1, peers)
        return rate / self.sharers if self.level.link.shared else rate


@dataclass(frozen=True)
class Span:
    """The extent of a group of devices: `members` in all, on `hosts` hosts."""

    members: int
    hosts: int

    @property
    def wire(self) -> Wire:
        """Whether the group's members are on one host, on several, or it has one member."""
        return "none" if self.members <= 1 else "across" if self.hosts > 1 else "inside"


class Topology:
    """The placement of a mesh on hosts: device r is on host r // devices_per_host."""

    def __init__(self, mesh: Mesh, devices_per_host: int):
        self.mesh = mesh
        self.per_host = max(1, devices_per_host)

    def span(self, refs: Axes) -> Span:
        """The extent of the group over these axes that spans the most hosts."""
        return _span(self.mesh, self.per_host, refs)

    def crossings(self, refs: Axes, levels: tuple[Level, ...], host_devices: int) -> tuple[Crossing, ...]:
        """The levels that the worst group over these axes uses, from the nearest outwards."""
        return _crossings(self.mesh, self.per_host, refs, levels, host_devices)


@cache
def _span(mesh: Mesh, per_host: int, refs: Axes) -> Span:
    hosts = max(len({rank // per_host for rank in group}) for group in mesh.groups(refs))
    return Span(size_of(refs), hosts)


@cache
def _crossings(
    mesh: Mesh, per_host: int, refs: Axes, levels: tuple[Level, ...], host_devices: int
) -> tuple[Crossing, ...]:
    sizes = [level.joins(per_host) for level in levels]
    # how many units of each level a group is in; the worst is in most of the outermost one
    counts = max(
        ([len({rank // size for rank in group}) for size in sizes] for group in mesh.groups(refs)),
        key=lambda units_of: units_of[::-1],
    )
    members = units = size_of(refs)
    below, crossings = 1, []
    for level, size, joined in zip(levels, sizes, counts):
        if joined < units:
            sharers = below if level.between_hosts else max(1, min(per_host, host_devices))
            crossings.append(Crossing(level, -(-units // joined), -(-members // units), sharers, units - joined))
        below, units = int(min(size, mesh.ranks)), joined
    return tuple(crossings)


def pairwise_s(kind: str, buffer: int, members: int, crossings: Sequence[Crossing]) -> dict[str, float]:
    """Seconds at each level of an `all_to_all`, or of sending the whole buffer to one other device.

    Data for other hosts leaves through the device's own link of each level on the way.
    """
    times = {}
    for one in crossings:
        if kind == "all_to_all":
            nearby = one.members * (one.parts if not one.level.between_hosts else 1)
            share = (members - one.members if one.level.between_hosts else nearby - one.members) / members
            if not one.level.between_hosts and any(other.level.rails for other in crossings):
                share = max(share, (nearby - one.members) / nearby)  # data for other rails crosses this level first
            times[one.level.name] = buffer * share / one.own_rate(one.parts - 1)
        else:
            # only one of the members on a host sends to the next host, so that it has a shared link to itself
            rate = one.own_rate() * (one.members if one.level.link.shared else 1)
            times[one.level.name] = buffer / rate
    return times


def hierarchical_s(buffer: int, members: int, rounds: int, crossings: Sequence[Crossing]) -> dict[str, float]:
    """Seconds at each level of a collective that runs level by level, each on the part that the level above leaves."""
    times, outer = {}, math.prod(one.parts for one in crossings)
    for one in crossings:
        outer //= one.parts
        level_bytes = buffer * (one.parts - 1) * outer / members
        hops = min(one.parts - 1, 2 * math.ceil(math.log2(one.parts)))
        times[one.level.name] = rounds * (level_bytes / one.own_rate(one.parts - 1) + hops * one.level.link.latency_s)
    return times
