"""Networks with levels are priced like arithmetic by hand; two levels like `inside` and `across`."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tpshard.devices.read import device
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.pricing.cost import CommCost, Device, collective
from tpshard.parallelism.pricing.network import Level, Link, Topology
from tpshard.parallelism.pricing.timeline import LaneTask, simulate

NVLINK = Level("nvlink", Link(100e9, 0.0), devices=8)
LEAF = Level("leaf", Link(10e9, 0.0), hosts=2)
SPINE = Level("spine", Link(10e9, 0.0), oversubscribed=4)
BUFFER = 64_000_000


def with_levels(*levels: Level) -> Device:
    return replace(device("h100-sxm-80g"), levels=levels)


def cost(priced_device: Device, axes: dict[str, int], over: str, kind: str, buffer: int = BUFFER) -> CommCost:
    mesh = Mesh(axes)
    return collective(priced_device, Topology(mesh, 8), kind, tuple(mesh.axis(a) for a in over.split("+")), buffer)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"])
@pytest.mark.parametrize("over", ["a", "b", "c", "a+b", "b+c", "a+b+c"])
def test_two_levels_are_inside_and_across(kind: str, over: str) -> None:
    two = device("h100-sxm-80g")
    same = with_levels(Level("inside", two.inside, devices=8), Level("across", two.across))
    mesh = {"a": 4, "b": 4, "c": 4}
    expected, actual = cost(two, mesh, over, kind), cost(same, mesh, over, kind)
    assert actual.wire == expected.wire and actual.wire_bytes == expected.wire_bytes
    if actual.algorithm == "hierarchical":  # what inside and across alone do not try
        assert actual.seconds < expected.seconds
    else:
        assert actual == replace(expected, level=actual.level)


def test_a_ring_goes_at_the_pace_of_its_slowest_level() -> None:
    net = with_levels(NVLINK, LEAF, SPINE)
    # one member a host: in a leaf through an adapter of 10 GB/s, between leaves through a quarter of it
    assert cost(net, {"x": 2, "y": 8}, "x", "all_gather").seconds == pytest.approx(BUFFER / 2 / 10e9)
    apart = cost(net, {"x": 2, "y": 16}, "x", "all_gather")
    assert apart.seconds == pytest.approx(BUFFER / 2 / 2.5e9) and apart.level == "spine"
    # groups that share the spine already have their part of it: two axes of all devices take as long as one
    assert cost(net, {"x": 2, "y": 2, "z": 8}, "x", "all_gather").seconds == apart.seconds


def test_level_by_level_sends_less_through_the_slow_one() -> None:
    """A gather over 2 leaves of 2 hosts: each device fetches from its twin beyond the spine, then in the leaf."""
    net = with_levels(NVLINK, LEAF, replace(SPINE, oversubscribed=8))
    priced = cost(net, {"x": 4, "y": 8}, "x", "all_gather")
    ring, by_level = BUFFER * 3 / 4 / 2.5e9, BUFFER / 4 / 1.25e9 + BUFFER / 2 / 10e9
    assert priced.algorithm == "hierarchical" and by_level < ring
    assert priced.seconds == pytest.approx(by_level) and priced.level == "spine"


def test_what_goes_to_other_hosts_leaves_through_the_devices_own_adapter() -> None:
    """Of an all-to-all over 16 devices on two hosts, half of what each holds; a permute sends all of one device's."""
    for net in (
        with_levels(NVLINK, LEAF),
        replace(device("h100-sxm-80g"), across=Link(10e9, 0), inside=Link(100e9, 0)),
    ):
        assert cost(net, {"x": 16}, "x", "all_to_all").seconds == pytest.approx(BUFFER / 2 / 10e9)
        assert cost(net, {"x": 16}, "x", "permute").seconds == pytest.approx(BUFFER / 10e9)
    rails = with_levels(replace(NVLINK, link=Link(5e9, 0.0)), replace(LEAF, rails=True))
    # 7 of 8 parts are for another place in a host: they go through it first
    assert cost(rails, {"x": 16}, "x", "all_to_all").seconds == pytest.approx(BUFFER * 7 / 8 / 5e9)


def test_pairs_within_a_host_are_a_level_of_their_own() -> None:
    pairs = with_levels(Level("bridge", Link(50e9, 0.0), devices=2), Level("pcie", Link(5e9, 0.0), devices=8), LEAF)
    assert cost(pairs, {"x": 4, "y": 2}, "y", "all_gather").level == "bridge"
    far = cost(pairs, {"x": 4, "y": 2}, "x", "all_gather")
    assert far.level == "pcie" and far.wire == "inside"
    assert far.seconds == pytest.approx(BUFFER * 3 / 4 / 5e9)


def test_collectives_share_the_level_that_bounds_them() -> None:
    def together(*levels: str) -> float:
        issues = [LaneTask(name, "issue", 1.0, name, level) for name, level in zip("ab", levels)]
        return simulate([*issues, LaneTask("w", "wait", 0, of=0), LaneTask("v", "wait", 0, of=1)], {}).seconds

    assert (together("spine", "spine"), together("spine", "leaf")) == (2.0, 1.0)


def test_the_worst_group_counts() -> None:
    """24 devices on three hosts, two of a leaf: groups of neighbours along x lie in a leaf or on both sides of it."""
    net = with_levels(NVLINK, LEAF, SPINE)
    topology = Topology(Mesh({"x": 3, "y": 8}), 8)
    crossed = topology.crossings((topology.mesh.axis("x"),), net.levels, 8)
    assert [(one.level.name, one.parts, one.hops) for one in crossed] == [("leaf", 2, 1), ("spine", 2, 1)]
    assert SPINE.joins(8) == inf
