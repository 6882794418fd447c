"""Sends and receives between pipeline stages, as nodes of a program."""

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
