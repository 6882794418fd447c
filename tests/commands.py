"""Runs `tpshard` in a process from this checkout, whether or not it is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from forked import Copied, python

TYPES = Path(__file__).parents[1] / "types"


def environment() -> dict[str, str]:
    paths = [str(TYPES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


COMMAND = "from tpshard.cli.main import main; main()"


def start(folder: Path, *arguments: str) -> Copied:
    """Starts a command in `folder`, and its workers, as copies of a process that has imported torch."""
    return Copied(COMMAND, *arguments, environment=environment(), folder=folder)


def tpshard(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, to its end."""
    return python(COMMAND, *arguments, environment=environment(), folder=folder)
