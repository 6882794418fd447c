"""The times of the steps of servers that are not tpshard's: vLLM, SGLang, TensorRT-LLM and others.

They run the same products, attention and sums as tpshard's programs (`step_work`), in other ways: any number of rows,
fused pointwise operations, graphs on several devices, all-reduces of their own. An `EngineProfile` says in which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from tpshard.parallelism.pricing.cost import Device

from engines.step_work import KernelWork, StepWork

_CALLS = 4
"""Launches that an all-reduce outside of a graph takes of the host's time: it is called through several layers."""


_NORMAL = np.array([NormalDist().inv_cdf((n + 0.5) / 64) for n in range(64)])
"""Quantiles of a normal distribution."""


@dataclass(frozen=True)
class WeightFormat:
    """How a server holds the weights of linear layers."""

    bytes: float = 2.0
    """Of one weight, with its scales."""
    computed: str = ""
    """The dtype of the products; empty: that of the activations."""
    only: str = ""
    """The weights that have it: those of modules whose path contains this; "" of all layers."""


@dataclass(frozen=True)
class KernelShares:
    """What the kernels of published engines reach; the same for all devices and engines."""

    cache: float = 0.74
    """Share of the memory bandwidth at which keys and values are read from a cache of blocks."""
    gap_s: float = 2.4e-6
    """Seconds of each kernel besides: it fills and drains the device."""
    unpacked: float = 0.62
    """Share of the reading rate at which weights of few bits are turned into the activations' dtype."""
    converted: float = 0.4
    """Of the rate of experts' products, the share that is reached with such weights."""
    experts: float = 0.7
    """Share of the rates that grouped products of experts reach."""
    attention: float = 0.67
    """Share of the dense rate that attention of a prompt reaches."""
    hops: float = 1.5
    """Latencies of the link that an all-reduce by direct reads and writes takes for each of its rounds."""
    uneven: float = 1.0
    """How unevenly tokens choose experts: the standard deviation of the logarithm of an expert's popularity."""


@dataclass(frozen=True)
class EngineProfile:
    """How a server's engine forms and runs its steps."""

    name: str
    host_s: float = 0.0
    """Seconds of a step in which the device waits for the host."""
    row_s: float = 0.0
    """The same per sequence of the step."""
    peers_s: float = 0.0
    """The same where several devices share the step, which the host tells each of them."""
    request_s: float = 0.0
    """From a request's arrival to its first step, and from its first token to the client."""
    step_tokens: int = 8192
    """Most rows of a step."""
    mixes: bool = True
    """Whether prompts are computed in the same steps as next tokens; else these wait."""
    running: int = 256
    """Most sequences at once."""
    share: float = 0.9
    """Share of the device's memory for weights, activations and cache."""
    reserves: bool = False
    """Whether the cache must hold a request's whole answer to admit it; else the youngest gives its room back."""
    captured: int = 512
    """Most rows of a step that is replayed as a graph."""
    launch_s: float = 6e-6
    """Seconds of the host for a kernel of other steps."""
    narrow: float = 0.7
    """Share of the rate of products in 8 or 4 bits, relative to that of products in 16 bits."""
    kernels: KernelShares = KernelShares()


@dataclass(frozen=True)
class StepLoad:
    """The rows of one step."""

    sequences: int = 0
    """Sequences that get their next token."""
    positions: float = 0.0
    """Positions that each of these attends to, on average."""
    prompt: int = 0
    """Rows of prompts."""
    attended: float = 0.0
    """Positions that each of these attends to, on average."""
    ends: int = 0
    """Prompts that end in this step."""


@dataclass(frozen=True)
class EngineSteps:
    """The seconds of an engine's steps for a model on one device of a server."""

    work: StepWork
    device: Device
    engine: EngineProfile
    weights: WeightFormat = WeightFormat()
    cache_bytes: float = 2.0
    """Bytes of a number in the cache."""

    @cached_property
    def _formatted(self) -> np.ndarray:
        """Which kernels read weights in `weights`."""
        arrays = self.work.arrays
        named = np.array([bool(name) and self.weights.only in name for name in arrays["module"]], dtype=bool)
        return named & arrays["product"] & (arrays["weights"] > 0)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of all weights on a device."""
        arrays = self.work.arrays
        narrowed = (arrays["weights"] * arrays["times"])[self._formatted].sum() * (1 - self.weights.bytes / 2)
        return float(self.work.weight_bytes - narrowed)

    @cached_property
    def positions(self) -> int:
        """Positions that the cache holds: what weights, context and the activations of a step leave."""
        free = self.device.memory_bytes * self.engine.share - self.weight_bytes - self.device.context_bytes
        activations = max(one.row_bytes for one in self.work.kernels if not one.of_logits) * self.engine.step_tokens
        return int(max(0.0, free - activations) / (self.work.position_bytes * self.cache_bytes / 2))

    def seconds(self, load: StepLoad) -> float:
        """Seconds of one step."""
        engine, rows = self.engine, load.sequences + load.prompt
        busy = self._products(rows, load.sequences + load.ends) + self._attention(load) + self._sums(rows)
        if rows > engine.captured:
            busy = max(busy, self._launches * engine.launch_s)
        told = engine.peers_s if self.work.members > 1 else 0.0
        return busy + engine.host_s + told + engine.row_s * (load.sequences + load.ends)

    @cached_property
    def _launches(self) -> float:
        return sum(one.times * (_CALLS if one.summed else one.launches) for one in self.work.kernels)

    @cached_property
    def _rates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each kernel: seconds per FLOP, seconds per byte of its weights, bytes per stored byte."""
        arrays, shares = self.work.arrays, self.engine.kernels
        computed = np.where(self._formatted & (self.weights.computed != ""), self.weights.computed, arrays["dtype"])
        each = {str(dtype): self._rate(str(dtype)) for dtype in set(computed)}
        stored = np.where(self._formatted, self.weights.bytes / 2, 1.0)
        packed, routed = (stored < 0.5) & (self.weights.computed == ""), arrays["chosen"] > 0
        rate = np.array([each[str(dtype)] for dtype in computed]) * np.where(routed, shares.experts, 1.0)
        rate *= np.where(packed & routed, shares.converted, 1.0)
        return 1 / rate, 1 / (self._read_rate * np.where(packed, shares.unpacked, 1.0)), stored

    @cached_property
    def _quantized(self) -> np.ndarray:
        """Launches before each kernel that turn its activations into 8 bits or fewer."""
        return (self._formatted & (self.weights.computed != "")).astype(float)

    def _rate(self, dtype: str) -> float:
        """FLOP/s of products in a dtype; of 4 bits twice those of 8."""
        rate = 2 * self.device.rate("fp8") if dtype == "fp4" else self.device.rate(dtype)
        return rate * self.device.efficiency.matmul * (self.engine.narrow if dtype in ("fp8", "int8", "fp4") else 1.0)

    @property
    def _read_rate(self) -> float:
        """Bytes/s of weights and activations."""
        return self.device.serving.stream_rate

    def _products(self, rows: int, logits: int) -> float:
        """Seconds of the products and of what is computed between them."""
        arrays = self.work.arrays
        per_flop, per_byte, stored = self._rates
        of = np.where(arrays["of_logits"] > 0, logits, rows)
        unread = arrays["routed"] * self._unchosen(rows)
        read = (arrays["weights"] - unread) * stored * per_byte + arrays["row_bytes"] * of / self._read_rate
        computed = np.where(arrays["product"], arrays["flops"] * of * per_flop, 0.0)
        each = np.maximum(computed, read) + (arrays["launches"] + self._quantized) * self.engine.kernels.gap_s
        return float((each * arrays["times"]).sum())

    def _unchosen(self, rows: int) -> np.ndarray:
        """The share of each kernel's experts that no row chooses, by `KernelShares.uneven`."""
        popularity = np.exp(self.engine.kernels.uneven * _NORMAL)
        each = np.minimum(1.0, self.work.arrays["chosen"][:, None] * popularity / popularity.mean())
        return np.asarray(((1 - each) ** rows).mean(axis=1))

    def _attention(self, load: StepLoad) -> float:
        return sum(one.times * self._attends(one, load) for one in self.work.attention)

    def _attends(self, one: KernelWork, load: StepLoad) -> float:
        shares = self.engine.kernels
        read = load.sequences * min(load.positions, one.window) * one.position_bytes * self.cache_bytes / 2
        moved = read / (self.device.memory_bandwidth * shares.cache)
        flops = load.prompt * min(load.attended, one.window) * one.flops
        rows = (load.sequences + load.prompt) * one.row_bytes / self._read_rate
        return moved + flops / (self.device.rate(one.dtype) * shares.attention) + rows + shares.gap_s

    def _sums(self, rows: int) -> float:
        """Seconds of the all-reduces, in one round (each device reads all) or in two (each sums a part)."""
        members, link = self.work.members, self.device.inside
        if members == 1:
            return 0.0
        hop, rate, total = link.latency_s * self.engine.kernels.hops, link.bandwidth * link.efficiency, 0.0
        for one in self.work.kernels:
            if one.summed:
                size = one.summed * rows
                once = hop + size * (members - 1) / rate
                total += one.times * min(once, 2 * hop + 2 * size * (members - 1) / members / rate)
        return total
