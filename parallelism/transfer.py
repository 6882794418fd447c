"""What a stage of a pipeline hands to the next: nodes of its program that send a value, or receive one."""

from __future__ import annotations

from torch import Tensor


def send(x: Tensor, to: int) -> Tensor:
    """Starts sending a value to the device `to` places further along the pipeline's axis (around it, at its end); the
    value itself, which the program returns so that it lives until it is sent."""
    return x


def recv(x: Tensor, source: int) -> Tensor:
    """Waits for a value that the device `source` places further along the pipeline's axis sends into `x`, an input of
    the program. Receiving was started by whoever calls the program, ahead of time."""
    return x
