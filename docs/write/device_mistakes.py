"""Device files that `tpshard validate` refuses."""

from __future__ import annotations

from mistake_sample import Sample

DEVICE = """schema: 1
name: mine
kind: gpu
backend: nccl
memory: 80 GiB
memory_bandwidth: 3 TB/s
rates: {bf16: 900 TFLOP/s}
host:
  devices: 8
  inside: {bandwidth: 400 GB/s, latency: 4 us}
  across: {bandwidth: 50 GB/s, latency: 12 us}"""
"""A device file without a mistake."""
FILE = "mine.yaml"
LINKS = "\n  inside: {bandwidth: 400 GB/s, latency: 4 us}\n  across: {bandwidth: 50 GB/s, latency: 12 us}"
LEVEL = "{name: nvlink, devices: 4, bandwidth: 400 GB/s, latency: 4 us}"

CHANGES = (
    ("memory: 80 GiB", "memory: 1 GiB\ncontext: 1 GiB"),
    ("kind: gpu", "kind: cpu"),
    ("kind: gpu", "kind: tpu"),
    ("  across: {bandwidth: 50 GB/s, latency: 12 us}", ""),
    ("name: mine", f"name: mine\nlevels: [{LEVEL}]"),
    ("name: mine", "name: mine\nlevels: nvlink"),
    ("memory: 80 GiB\n", ""),
    ("memory: 80 GiB", "memory: [80 GiB]"),
    ("memory: 80 GiB", "memory: 80"),
    ("latency: 4 us", "latency: 4 us, shared: 1"),
    ("latency: 4 us", "latency: 4 us, efficiency: 3"),
    ("devices: 8", "devices: 8\n  adapters: 4"),
    (f"host:\n  devices: 8{LINKS}", "host: 8"),
    ("devices: 8", "devices: eight"),
    ("devices: 8", "devices: 8\n  crowds: {all: {}}"),
    ("rates: {bf16: 900 TFLOP/s}", "rates: 900 TFLOP/s"),
    ("bf16: 900", "bf16: 900 TFLOP/s, fp61: 900"),
    ("bf16: 900", "fp8: 900"),
)
"""(text of `DEVICE`, its replacement): each makes one mistake."""

SAMPLES = (
    Sample(command="validate tiny cluster.device=my.yaml"),
    *(
        Sample(command=f"validate tiny cluster.device={FILE}", files={FILE: DEVICE.replace(text, instead)})
        for text, instead in CHANGES
    ),
)
