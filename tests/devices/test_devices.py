"""Device files: every shipped one reads, and what is missing or absurd is refused with its place."""

import pytest
from tpshard.devices.read import BUILTIN, device, parse
from tpshard.recipes.diagnostic import Exit, Mistakes

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


@pytest.mark.parametrize("name", BUILTIN)
def test_shipped_devices_read_and_are_plausible(name):
    found = device(name)
    assert found.name == name
    assert found.context_bytes < found.memory_bytes
    assert found.rate("bfloat16") >= found.rate("float32")
    assert found.inside.bandwidth >= found.across.bandwidth


def test_units_are_what_they_say():
    found = parse(GOOD.encode(), "box.yaml")
    assert found.memory_bytes == 80 * 2**30
    assert found.across.bandwidth == 50e9
    assert found.memory_bandwidth == 3.35e12
    assert found.inside.latency_s == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("memory: 80 GiB", "memory: 80", "box.yaml:5:9", "with its unit"),
        ("memory: 80 GiB", "memory: 80 B", "box.yaml:5:9", "cannot be"),
        ("memory: 80 GiB\n", "", "box.yaml:1:1", "`memory` is missing"),
        ("3.35 TB/s", ".nan", "box.yaml:6:19", "with its unit"),
        ("989 TFLOP/s", "-1", "box.yaml:7:15", "with its unit"),
        ("bf16:", "bf17:", "box.yaml:7:9", "unknown dtype"),
        ("devices: 8", "devices: 0", "box.yaml:9:12", "between 1 and 4096"),
        ("latency: 12 us", "latency: 12", "box.yaml:11:44", "a time"),
        ("kind: gpu", "kind: tpu", "box.yaml:3:7", "gpu or cpu"),
        ("schema: 1", "schema: 9", "box.yaml:1:9", "between 1 and 1"),
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


def test_every_mistake_is_reported_at_once():
    with pytest.raises(Mistakes) as caught:
        parse(GOOD.replace("80 GiB", "80").replace("devices: 8", "devices: x").encode(), "box.yaml")
    assert len(caught.value.diagnostics) == 2


def test_unknown_device_names_the_known_ones():
    with pytest.raises(Mistakes, match="h100-sxm-80g"):
        device("h1000")
