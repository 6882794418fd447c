"""What the Triton kernels ask of a device: what it can do, how many programs it computes at once, and counters.

By the counters the programs of a launch know which of them finishes last, so that it adds up what all computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CAPTURED = -1
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
"""Counters by device and stream; those of captured graphs under the key _CAPTURED."""

_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_LEAST_SHARED = 99


def capability_of(x: Tensor) -> tuple[int, int]:
    """The compute capability of a tensor's device; in Triton's interpreter Hopper's."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def shared_kib(capability: tuple[int, int]) -> int:
    """KiB of shared memory that one program may use (CUDA C++ Programming Guide, technical specifications); that of
    devices for workstations where the capability is not known."""
    return _SHARED.get(capability, _LEAST_SHARED)


def programs_at_once(registers: int, shared: int, warps: int, capability: tuple[int, int]) -> int:
    """How many programs of so many registers a thread, bytes of shared memory and warps a multiprocessor holds (CUDA
    C++ Programming Guide, technical specifications; registers are dealt out in eights)."""
    threads, programs = (2048, 32) if shared_kib(capability) > _LEAST_SHARED else (1536, 24)
    of_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    of_shared = (shared_kib(capability) + 1 << 10) // (shared + 1024)  # 1 KiB of each is the system's
    return min(of_registers, of_shared, threads // (32 * warps), programs)


def whole_waves(blocks: int, places: int, most: int) -> int:
    """Into how many parts, up to `most`, the work of `blocks` programs is split for a device that computes `places` at
    once: the fewest whose waves take at most 5% more than the least, since a last wave of few programs costs as much as
    a full one, and each part leaves sums for others to add."""
    waves = {parts: -(-blocks * parts // places) / parts for parts in range(1, most + 1)}
    least = min(waves.values())
    return next(parts for parts, cost in waves.items() if cost <= 1.05 * least)


def arrivals(device: torch.device) -> Tensor:
    """Counters int32 [2**20], at zero. Every launch leaves them so; the launches of one stream share them.

    Captured launches have counters of their own, and their graphs must not be replayed on two streams at once. These
    are allocated by the first launch outside a capture: memory zeroed during a capture is zero only after the replay.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing:
        return _COUNTERS[device, _CAPTURED] if (device, _CAPTURED) in _COUNTERS else _zeros(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    for key in (_CAPTURED, stream):
        if (device, key) not in _COUNTERS:
            _COUNTERS[device, key] = _zeros(device)
    return _COUNTERS[device, stream]


def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(1 << 20, dtype=torch.int32, device=device)
