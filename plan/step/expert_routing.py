"""A step with even and with uneven routing of tokens to experts, as figures and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tpshard.plan.step.units import gib, seconds


@dataclass(frozen=True)
class Routing:
    """The time and memory of a step under one routing of tokens to experts."""

    busiest: float
    """Tokens of the busiest expert over the mean."""
    busiest_device: float
    """Tokens of the busiest expert's device over the mean of all devices."""
    step_s: float
    workspace_bytes: int
    """Bytes of temporaries of the products, beyond the plan's peak: of the busiest expert, on a GPU of all experts at
    once; 0 with a capacity."""
    dropped: float
    """The share of choices without a slot if the other experts get equally many; random differences drop more."""


@dataclass(frozen=True)
class Skew:
    """A step with even and with uneven routing."""

    experts: int
    top_k: int
    capacity: float | None
    slack: float | None
    """The slots of a device over the mean, where tokens travel to experts by all-to-all without a capacity."""
    balanced: Routing
    skewed: Routing

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rows(skew: Skew) -> list[str]:
    """The lines of the screen on skew."""
    how = "dropless" if skew.capacity is None else f"capacity {skew.capacity:g}"
    lines = [f"SKEW  {skew.experts} experts, {skew.top_k} a token, {how}"]
    for name, one in (("balanced", skew.balanced), ("skewed", skew.skewed)):
        more = f", {one.dropped:.1%} of choices dropped" if skew.capacity is not None else (
            f", its device {one.busiest_device:.2f} of a mean, {gib(one.workspace_bytes)} to compute it"
        )  # fmt: skip
        if skew.slack is not None and one.busiest_device > 1:
            few = "more than its slots, so that tokens are gathered too" if one.busiest_device > skew.slack else ""
            more += f"; {few or 'further slots may be sent'}, which is not priced"
        lines.append(f"  {name:8} the busiest gets {one.busiest:.2f} of a mean: step {seconds(one.step_s)}{more}")
    return lines
