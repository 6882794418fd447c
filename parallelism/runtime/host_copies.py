"""Copies between the memories of a GPU and its host, which run beside computation."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


class HostCopies:
    """The operations `offload`, `fetch` and `copied` of `parallelism.transfer` on a GPU.

    Each direction has a stream of its own, so that a copy starts when what is computed so far is there, and computation
    goes on. The host's memory is pinned; torch gives it away again only once copies that use it are done.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.done: dict[int, torch.cuda.Event] = {}
        """The end of each copy that nothing has waited for, by the address of its result."""

    def offload(self, x: Tensor) -> Tensor:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True)
        return self._start(copy, x, self.out)

    def fetch(self, x: Tensor) -> Tensor:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        return self._start(copy, x, self.back)

    def copied(self, copy: Tensor, source: Tensor) -> Tensor:
        """Makes the computing stream wait for a copy; until then the graph keeps `source`."""
        torch.cuda.current_stream(self.device).wait_event(self.done.pop(copy.data_ptr()))
        return copy

    def _start(self, copy: Tensor, x: Tensor, stream: torch.cuda.Stream) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copy.copy_(x, non_blocking=True)
            self.done[copy.data_ptr()] = stream.record_event()
        return copy


@cache
def host_copies(device: torch.device) -> HostCopies:
    """A device's copies, which all programs share."""
    return HostCopies(device)
