"""What quantizing measures: the error of each linear, and losses of held-out text."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinearResult:
    """The errors of one quantized linear, ||(W - Q) X|| / ||W X|| over the calibration text."""

    name: str
    shape: tuple[int, int]
    error: float
    nearest_error: float
    """The error of round-to-nearest, for comparison."""
    seconds: float


@dataclass
class Quantizing:
    """The report of quantizing, complete after the last layer. Losses are in nats per token of held-out text."""

    bits: int
    group_size: int
    order: str
    method: str
    linears: list[LinearResult] = field(default_factory=list)
    left_dense: list[str] = field(default_factory=list)
    """The modules in the folder whose sizes GPTQ cannot hold; `*` stands for the number of an expert."""
    unseen: list[str] = field(default_factory=list)
    """The experts' linears that no token of the calibration text reached, rounded to nearest."""
    short_of_tokens: dict[str, int] = field(default_factory=dict)
    """The linears with fewer calibration tokens than inputs, and their tokens: GPTQ fits these tokens, not the text."""
    loss_before: float | None = None
    loss_after: float | None = None
    loss_nearest: float | None = None
    """The loss with all linears rounded to nearest instead."""
    held_out_tokens: int = 0
