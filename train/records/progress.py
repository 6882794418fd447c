"""The display of a run's progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any


class Progress:
    """The display of a run's progress. This one shows nothing: it is for ranks other than 0."""

    def step(self, row: Mapping[str, Any], *, logged: bool) -> None:
        """Shows a finished step; `logged` rows are also recorded."""

    def note(self, text: str) -> None:
        """Prints a permanent line."""

    def close(self) -> None:
        """Ends the display."""


class Lines(Progress):
    """A line per logged step: for files, pipes and terminals without cursor movement."""

    def __init__(self, steps: int, stream: IO[str] | None = None):
        self.steps, self.stream = steps, stream or sys.stderr
        self._first: tuple[int, float] | None = None
        """Step and time from which speed is measured: after the first step, which compiles and opens files."""

    def step(self, row: Mapping[str, Any], *, logged: bool) -> None:
        step, now = int(row["step"]), time.monotonic()
        if logged:
            self.note(f"step {step}/{self.steps}  {measures(row)}{self._time_left(step, now)}")
        if self._first is None or step <= self._first[0]:
            self._first = step, now

    def _time_left(self, step: int, now: float) -> str:
        if self._first is None or step <= self._first[0]:
            return ""
        return f"  {duration((now - self._first[1]) / (step - self._first[0]) * (self.steps - step))} left"

    def note(self, text: str) -> None:
        with suppress(OSError, ValueError):  # stderr is closed: the run continues.
            self.stream.write(text + "\n")
            self.stream.flush()


class Bar(Progress):
    """A progress bar with loss and tokens/s, by rich."""

    def __init__(self, steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(stderr=True, markup=False, highlight=False)
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("{task.fields[measures]}", markup=False), TimeRemainingColumn(compact=True),
            console=self._console, expand=True,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=steps, measures="")
        self._bar.start()

    def step(self, row: Mapping[str, Any], *, logged: bool) -> None:
        self._bar.update(self._task, completed=row["step"], measures=measures(row))

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def progress_for(steps: int, *, main: bool) -> Progress:
    """The display for this rank and this stderr."""
    if not main:
        return Progress()
    from rich.console import Console

    return Bar(steps) if Console(stderr=True).is_terminal and sys.stderr.isatty() else Lines(steps)


def measures(row: Mapping[str, Any]) -> str:
    """`loss 3.2145  12.3k tokens/s`, and with experts the busiest one's tokens over the mean."""
    absent = "loss not finite" if row["tokens_per_s"] else "no target"
    loss = absent if row["loss"] is None else f"loss {row['loss']:.4f}"
    experts = row.get("experts")
    even = "" if experts is None else f"  busiest expert {experts['busiest']:.2f}x, {experts['dropped']:.1%} dropped"
    even += f", {experts['gathered']:.1%} gathered" if experts is not None and "gathered" in experts else ""
    return f"{loss}  {short(row['tokens_per_s'])} tokens/s{even}"


def short(number: float) -> str:
    """A short form of a number: 12345 -> 12.3k"""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as a clock: 75 -> 1:15, 3725 -> 1:02:05"""
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
