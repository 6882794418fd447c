"""Runs `tpshard` in a process from this checkout, whether or not it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

TYPES = Path(__file__).parents[1] / "types"


def environment() -> dict[str, str]:
    paths = [str(TYPES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def tpshard(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tpshard.cli.main", *arguments], cwd=folder, env=environment(), capture_output=True,
        text=True, timeout=PATIENCE,
    )  # fmt: skip
