"""Every shipped device file is valid, and missing or absurd values are refused with their place."""

from dataclasses import replace

import pytest
from tpshard.devices.read import device, parse
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.pricing.cost import operation
from tpshard.recipes.keys.schema import DEVICES

GOOD = """schema: 1
name: box
kind: gpu
backend: nccl
memory: 80 GiB
memory_bandwidth: 3.35 TB/s
rates: {bf16: 989 TFLOP/s}
host:
  devices: 8
  inside: {bandwidth: 450 GB/s, latency: 4 us}
  across: {bandwidth: 400 Gbit/s, latency: 12 us}
"""


@pytest.mark.parametrize("name", DEVICES)
def test_shipped_devices_read_and_are_plausible(name):
    actual = device(name)
    assert actual.name == name
    assert actual.context_bytes < actual.memory_bytes
    assert actual.rate("bfloat16") >= actual.rate("float32")
    assert actual.inside.bandwidth >= actual.across.bandwidth


def test_units_are_what_they_say():
    actual = parse(GOOD.encode(), "box.yaml")
    assert actual.memory_bytes == 80 * 2**30
    assert actual.across.bandwidth == 50e9
    assert actual.memory_bandwidth == 3.35e12
    assert actual.inside.latency_s == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("memory: 80 GiB", "memory: 80", "box.yaml:5:9", "with its unit"),
        ("memory: 80 GiB", "memory: 80 B", "box.yaml:5:9", "is not allowed"),
        ("memory: 80 GiB\n", "", "box.yaml:1:1", "`memory` is missing"),
        ("3.35 TB/s", ".nan", "box.yaml:6:19", "with its unit"),
        ("989 TFLOP/s", "-1", "box.yaml:7:15", "with its unit"),
        ("bf16:", "bf17:", "box.yaml:7:9", "unknown dtype"),
        ("devices: 8", "devices: 0", "box.yaml:9:12", "between 1 and 4096"),
        ("latency: 12 us", "latency: 12", "box.yaml:11:44", "a time"),
        ("kind: gpu", "kind: tpu", "box.yaml:3:7", "gpu or cpu"),
        ("schema: 1", "schema: 9", "box.yaml:1:9", "write a value of 1"),
        ("memory: 80 GiB", "memory: 1.2.3 GiB", "box.yaml:5:9", "with its unit"),
        ("memory: 80 GiB", "memory: . GiB", "box.yaml:5:9", "with its unit"),
        ("memory: 80 GiB", "memory: 1 GiB\ncontext: 1 TiB", "box.yaml:6:10", "between 0 B and 64 GiB"),
        ("3.35 TB/s", "1 B/s", "box.yaml:6:19", "between 100 MB/s and 1000 TB/s"),
        ("rates: {bf16: 989 TFLOP/s}\n", "", "box.yaml:1:1", "rates: {bf16: 989 TFLOP/s}"),
        ("name: box", "name: box\nfitted: 3", "box.yaml:3:9", "`fitted` is not a map"),
        ("name: box", "name: box\ncolour: red", "box.yaml:3:1", "unknown key"),
    ],
)
def test_absurd_values_are_refused_with_their_place(old, new, place, words):
    assert old in GOOD
    with pytest.raises(Mistakes) as caught:
        parse(GOOD.replace(old, new).encode(), "box.yaml")
    assert caught.value.exit == Exit.RECIPE
    assert place in str(caught.value)
    assert words in str(caught.value)


LEVELS = (
    GOOD[: GOOD.index("  inside")]
    + """levels:
  - {name: nvlink, devices: 8, bandwidth: 450 GB/s, latency: 4 us}
  - {name: leaf, hosts: 4, bandwidth: 400 Gbit/s, latency: 12 us, rails: true}
  - {name: spine, bandwidth: 400 Gbit/s, latency: 20 us, oversubscribed: 4}
"""
)


def test_levels_read_and_those_that_make_no_network_are_refused():
    actual = parse(LEVELS.encode(), "box.yaml")
    assert [level.name for level in actual.levels] == ["nvlink", "leaf", "spine"]
    assert actual.levels[2].rate == pytest.approx(0.8 * 50e9 / 4) and actual.levels[1].rails
    assert (actual.inside, actual.across) == (actual.levels[0].link, actual.levels[1].link)
    for old, new, words in (
        ("devices: 8, b", "devices: 4, b", "must join the 8 devices"),
        ("name: spine", "name: leaf", "two have one name"),
        (", hosts: 4", "", "only the last one may leave `hosts` out"),
        ("name: spine,", "name: spine, hosts: 6,", "several of the level before"),
        ("nvlink, devices: 8", "nvlink, hosts: 1", "first those of one host"),
        ("kind: gpu", "kind: cpu", "share its memory"),
        ("  devices: 8\n", "  devices: 8\n  across: {bandwidth: 1 GB/s, latency: 1 us}\n", "both describe the links"),
        ("bandwidth: 450 GB/s, ", "", "`levels[0].bandwidth` is missing"),
    ):
        assert old in LEVELS
        with pytest.raises(Mistakes) as caught:
            parse(LEVELS.replace(old, new).encode(), "box.yaml")
        assert words in str(caught.value) and "box.yaml:" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[1, 2]"])
def test_a_file_that_is_no_map_is_not_called_a_recipe(data):
    with pytest.raises(Mistakes, match="device file") as caught:
        parse(data, "box.yaml")
    assert "recipe" not in str(caught.value)


def test_every_mistake_is_reported_at_once():
    with pytest.raises(Mistakes) as caught:
        parse(GOOD.replace("80 GiB", "80").replace("devices: 8", "devices: x").encode(), "box.yaml")
    assert len(caught.value.diagnostics) == 2


def test_unknown_device_names_the_known_ones():
    with pytest.raises(Mistakes, match="h100-sxm-80g"):
        device("h1000")


CROWDED = (
    GOOD.replace("kind: gpu", "kind: cpu").replace("devices: 8", "devices: 8\n  cores: 2")
    + "  products: {fp32: {1: 2 ns}}\n"
    + "  crowds:\n"
    + "    1: {compute: 0.9}\n"
    + "    4: {compute: 0.8, memory: 0.5, overhead: 3, bandwidth: 1 GB/s, latency: 2 ms, skew: 3 ms, spread: 0.1, "
    + "growth: 2, slowdown: 0.9}\n"
    + "constants: {view: 5 us, eager_op: 10 us, packing: 0.5, softmax: 20, growth: 8 GB/s, exponential: 40}\n"
)


def test_crowds_say_what_processes_lose_to_each_other():
    actual = parse(CROWDED.encode(), "box.yaml")
    four = actual.shared_by(4)
    assert four.rate("bf16") == pytest.approx(actual.rate("bf16") * 0.8 / 4)
    assert four.memory_bandwidth == pytest.approx(3.35e12 * 0.5 / 4)
    assert (four.cpu.view_s, four.overhead.eager_op_s) == (pytest.approx(15e-6), pytest.approx(30e-6))
    assert (four.inside.bandwidth, four.inside.latency_s, four.inside.slowdown) == (1e9, 2e-3, 0.9)
    assert four.cpu.product_s("fp32", 1) == pytest.approx(2e-9 * 4 / 0.8)
    assert four.cpu.growth == pytest.approx(4e9)  # of its own; without, as of the memory
    without = parse(CROWDED.replace("growth: 2, ", "").encode(), "box.yaml").shared_by(4)
    assert without.cpu.growth == pytest.approx(1e9)
    assert (four.cpu.skew_s, actual.shared_by(8).cpu.skew_s) == (3e-3, 6e-3)
    assert [actual.shared_by(n).cpu.spread for n in (2, 4, 8)] == [0.0, 0.1, 0.1]
    # one process has an entry of its own, two and three take it too
    assert actual.shared_by(1).rate("bf16") == pytest.approx(actual.rate("bf16") * 0.9)
    assert actual.shared_by(3).rate("bf16") == pytest.approx(actual.rate("bf16") * 0.9 / 3)
    assert actual.shared_by(3).inside.latency_s == pytest.approx(1.5 * 4e-6)  # taking turns


def test_numbers_may_have_exponents_of_either_sign():
    """A measurement on a busy machine writes 3.7e+04 us."""
    text = CROWDED.replace("skew: 3 ms", "skew: 3.7e+04 us, message: 4e-04 s")
    busy = parse(text.encode(), "box.yaml").shared_by(4)
    assert (busy.cpu.skew_s, busy.cpu.message_s) == (pytest.approx(3.7e-2), pytest.approx(4e-4))


def test_a_file_without_skew_has_none():
    actual = parse(CROWDED.replace("skew: 3 ms, ", "").encode(), "box.yaml")
    assert actual.shared_by(4).cpu.skew_s == actual.cpu.skew_s == 0.0
    assert all(device(name).shared_by(4).cpu.skew_s == 0.0 for name in DEVICES)


def test_constants_change_what_operations_cost():
    one = parse(CROWDED.encode(), "box.yaml").shared_by(2)
    plain = replace(one, cpu=replace(one.cpu, packing=1.0, softmax=0.0))

    def cost(device, work, **more):
        return operation(device, work, 10**9, 10**9, "bf16", eager=True, **more)

    moved = 10**9 / one.memory_bandwidth
    assert cost(one, "matmul") - cost(plain, "matmul") == pytest.approx(moved)  # at half the bandwidth
    added_s = cost(one, "stream", exponentials=10**6) - cost(one, "stream")
    assert added_s == pytest.approx(40e6 / one.stream_rate)
    computed = cost(plain, "attention", head_dim=20) - one.overhead.eager_op_s
    assert cost(one, "attention", head_dim=20) - one.overhead.eager_op_s == pytest.approx(2 * computed)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    1: {compute: 0.9}", "    one: {compute: 0.9}", "not a number of processes"),
        ("    1: {compute: 0.9}", "    0: {compute: 0.9}", "not a number of processes"),
        ("compute: 0.9", "computing: 0.9", "unknown key `host.crowds.1.computing`"),
        ("slowdown: 0.9", "slowdown: 1.5", "is not allowed"),
        ("latency: 2 ms", "latency: 2", "a time"),
        ("skew: 3 ms", "skew: 3", "a time"),
        ("skew: 3 ms", "skew: 2 s", "is not allowed"),
        ("spread: 0.1", "spread: 2", "is not allowed"),
        ("exponential: 40", "exponential: -1", "is not allowed"),
        ("growth: 2", "growth: 100", "is not allowed"),
        ("growth: 8 GB/s", "growth: fast", "a bandwidth"),
        ("{fp32: {1: 2 ns}}", "[1]", "is not a map"),
        ("fp32: {1: 2 ns}", "fp64: {1: 2 ns}", "no layout"),
        ("{1: 2 ns}", "2 ns", "no layout"),
        ("{1: 2 ns}", "{0: 2 ns}", "not a number of rows"),
        ("{1: 2 ns}", "{one: 2 ns}", "not a number of rows"),
        ("{1: 2 ns}", "{1: fast}", "a time"),
    ],
)
def test_absurd_crowds_are_refused(old, new, words):
    assert old in CROWDED
    with pytest.raises(Mistakes, match=words):
        parse(CROWDED.replace(old, new, 1).encode(), "box.yaml")
