"""Sends and receives between pipeline stages, and copies to the host's memory and back, as nodes of a program."""

from __future__ import annotations

from torch import Tensor


def send(x: Tensor, to: int) -> Tensor:
    """Starts sending a value to the device `to` places further along the pipeline's axis (cyclically).

    Returns the value itself, which the program outputs so that it stays alive until it is sent.
    """
    return x


def recv(x: Tensor, source: int) -> Tensor:
    """Waits for a value that the device `source` places further along the pipeline's axis sends into `x`.

    `x` is an input of the program, whose caller has posted the receive ahead of time.
    """
    return x


def offload(x: Tensor) -> Tensor:
    """Starts copying a value to the host's memory; returns the copy, which is there once `copied` has waited for it.

    On a CPU, whose memory is the host's, it is a copy within that memory.
    """
    return x.clone()


def fetch(x: Tensor) -> Tensor:
    """Starts copying a value of the host's memory back to the device; returns the copy, as `offload` does."""
    return x.clone()


def copied(copy: Tensor, source: Tensor) -> Tensor:
    """Waits for a copy by `offload` or `fetch`, and returns it; until then its source must not be freed."""
    return copy


COPIES = (offload, fetch)
"""What starts a copy between the memories of a device and its host."""
HOST_COPIES = (*COPIES, copied)
"""All operations of such copies."""
