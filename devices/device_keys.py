"""The keys of a device file: their units, bounds and defaults."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

PREFIX = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNITS = {
    "bytes": re.compile(r"(\d+\.?\d*(?:e[+]?\d+)?)\s*([KkMGT]?)(i?)B"),
    "bandwidth": re.compile(r"(\d+\.?\d*(?:e[+]?\d+)?)\s*([kMGT]?)(i?)(B|bit)/s"),
    "rate": re.compile(r"(\d+\.?\d*(?:e[+]?\d+)?)\s*([GTP])(i?)FLOP/s"),
    "time": re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*(s|ms|us|ns)"),
}
WORDS = {
    "levels": ("a list of levels, from the nearest", "[{name: nvlink, devices: 8, ...}, {name: spine, ...}]"),
    "bytes": ("an amount of memory", "80 GiB"),
    "bandwidth": ("a bandwidth", "3.35 TB/s or 400 Gbit/s"),
    "rate": ("a rate", "989 TFLOP/s"),
    "time": ("a time", "5 us"),
    "rates": ("dense rates by dtype", "{bf16: 989 TFLOP/s}"),
    "host": ("devices of a host and their links", "{devices: 8, inside: {...}, across: {...}}"),
    "link": ("a link between devices", "{bandwidth: 450 GB/s, latency: 4 us}"),
}


@dataclass(frozen=True)
class DeviceKey:
    """A key of a device file: its unit, plausible range, and default (None: required)."""

    unit: str
    least: float = 0.0
    most: float = math.inf
    default: Any = None
    what: str = ""


LINK = {
    "bandwidth": DeviceKey("bandwidth", 1e6, 1e13, what="bytes or bits one device sends a second, one direction"),
    "latency": DeviceKey("time", 0.0, 1.0, what="of one hop"),
    "efficiency": DeviceKey("share", 0.01, 1.0, 0.8),
    "slowdown": DeviceKey("share", 0.0, 0.95, 0.0),
    "shared": DeviceKey("bool", default=False),
    "direct": DeviceKey("bool", default=False),
}
LEVEL = {
    "name": DeviceKey("text"),
    "devices": DeviceKey("int", 1, 4096, 0, what="devices of a host that it joins"),
    "hosts": DeviceKey("int", 1, 1 << 20, 0, what="hosts that it joins"),
    "oversubscribed": DeviceKey("ratio", 1.0, 1000.0, 1.0),
    "rails": DeviceKey("bool", default=False),
    **LINK,
}
CROWD = {
    "compute": DeviceKey("ratio", 0.01, 4.0, 1.0),
    "memory": DeviceKey("ratio", 0.01, 4.0, 1.0),
    "growth": DeviceKey("ratio", 0.01, 16.0, -1.0),
    "overhead": DeviceKey("ratio", 0.01, 1000.0, 1.0),
    "bandwidth": DeviceKey("bandwidth", 1e6, 1e13, 0.0),
    "latency": DeviceKey("time", 0.0, 1.0, 0.0),
    "skew": DeviceKey("time", 0.0, 1.0, 0.0),
    "spread": DeviceKey("ratio", 0.0, 1.0, 0.0),
    "slowdown": DeviceKey("share", 0.0, 0.95, -1.0),
    "message": DeviceKey("time", 0.0, 1.0, 0.0),
}
EFFICIENCY = {
    "matmul": DeviceKey("share", 0.01, 1.0, 0.75),
    "attention": DeviceKey("share", 0.005, 1.0, 0.5),
    "attention_backward": DeviceKey("share", 0.005, 1.0, 0.4),
    "streaming": DeviceKey("share", 0.01, 1.0, 0.85),
    "reading": DeviceKey("share", 0.01, 1.0, 0.0, what="of weights by products of few rows; as streaming"),
}
OVERHEAD = {
    "op": DeviceKey("time", 0.0, 0.1, 4e-6),
    "eager_op": DeviceKey("time", 0.0, 0.1, 8e-6),
    "issue": DeviceKey("time", 0.0, 0.1, 2e-5),
    "step": DeviceKey("time", 0.0, 10.0, 0.0),
}
SERVING = {
    "serve_step": DeviceKey("time", 0.0, 10.0, 0.0),
    "serve_token": DeviceKey("time", 0.0, 1.0, 0.0),
    "serve_request": DeviceKey("time", 0.0, 10.0, 0.0),
}
CONSTANTS = {
    **EFFICIENCY,
    **OVERHEAD,
    **SERVING,
    "softmax": DeviceKey("ratio", 0.0, 1000.0, 0.0),
    "packing": DeviceKey("ratio", 0.01, 100.0, 1.0),
    "exponential": DeviceKey("ratio", 0.0, 1000.0, 0.0),
    "view": DeviceKey("time", 0.0, 0.1, 0.0),
    "growth": DeviceKey("bandwidth", 0.0, 1e15, 0.0),
    "cold_bandwidth": DeviceKey("bandwidth", 0.0, 1e15, 0.0),
    "cold_overhead": DeviceKey("ratio", 1.0, 100.0, 1.0),
}
OF_CPU = ("packing", "exponential", "softmax", "growth", "cold_bandwidth", "cold_overhead")
TOP = {
    "schema": DeviceKey("int", 1, 1),
    "name": DeviceKey("text"),
    "kind": DeviceKey("gpu|cpu"),
    "backend": DeviceKey("nccl|gloo"),
    "memory": DeviceKey("bytes", 2**28, 2**50),
    "context": DeviceKey("bytes", 0, 2**36, 0),
    "channels": DeviceKey("int", 0, 64, 0),
    "memory_bandwidth": DeviceKey("bandwidth", 1e8, 1e15),
    "rates": DeviceKey("rates"),
    "host": DeviceKey("host"),
    "levels": DeviceKey("levels", default=()),
    "constants": DeviceKey("constants", default={}),
    "fitted": DeviceKey("texts", default={}),
    "measured": DeviceKey("text", default=""),
}
HOST = {
    "devices": DeviceKey("int", 1, 4096),
    "cores": DeviceKey("int", 0, 4096, 0),
    "inside": DeviceKey("link", default={}, what="how devices of a host are joined"),
    "across": DeviceKey("link", default={}, what="how hosts are joined"),
    "bus": DeviceKey("link", default={}, what="how a device and its host's memory are joined; PCI Express 4, 16 lanes"),
    "crowds": DeviceKey("crowds", default={}),
    "products": DeviceKey("products", default={}),
}
MAPS = {"host": HOST, "link": LINK, "constants": CONSTANTS}
"""The units that are maps, with their keys."""
PRODUCT = DeviceKey("time", 1e-15, 1e-3, 1.0)
LAYOUTS = ("fp32", "bf16", "int4", "parts")
"""The layouts of weights in `host.products` (see `cost.Cpu.products`)."""
RATES = {name: DeviceKey("rate", 1e8, 1e17) for name in ("bf16", "fp16", "fp32", "tf32", "fp8", "fp64", "int8")}
