"""A plan beside the programs that it describes, for the questions that only they answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tpshard.parallelism.program import Program
from tpshard.plan.report.causes import causes, peak_values
from tpshard.plan.report.drawing import Drawing
from tpshard.plan.report.report import Report
from tpshard.plan.report.rows import drawn_part
from tpshard.plan.step.pricing import Pricing
from tpshard.programs.step.training_step import TrainingPrograms


@dataclass(frozen=True)
class Planned:
    """A report with its priced programs, in memory only."""

    report: Report
    pricing: Pricing
    step: TrainingPrograms | None = None
    """What a training run executes; None for a server."""

    @property
    def program(self) -> Program:
        """The program whose shardings the report has."""
        return self.pricing.parts[0].part.program

    @cached_property
    def drawing(self) -> Drawing:
        """What the report's pictures show."""
        parts, worst = self.pricing.parts, self.pricing.worst
        return Drawing(
            [drawn_part(entry) for entry in parts], drawn_part(worst), causes(self.pricing, self.report.tensors),
            peak_values(worst),
        )  # fmt: skip

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each program that the plan prices, by part of the step."""
        if self.step is not None and self.step.cuts:
            named = self.step.fingerprints
            return {name: fingerprint for name, fingerprint in named.items() if not name.startswith("layouts")}
        return {entry.part.name: entry.part.program.fingerprint for entry in self.pricing.parts}
