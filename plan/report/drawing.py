"""What the pictures of a plan show beside its report: timelines, memory over time, and the reasons behind both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpshard.plan.step.figures import DrawnPart


@dataclass(frozen=True)
class Drawing:
    """The data of a plan's page, trace and picture, as plain data. It is many times as large as the report, and made
    only where one of them is drawn."""

    parts: Sequence[DrawnPart]
    worst: DrawnPart
    """The part in which memory peaks."""
    causes: dict[str, list[Any]]
    """The reasons of the report's tensors by group and those of its lines of collectives."""
    alive: list[dict[str, Any]]
    """The values in memory at the peak."""
