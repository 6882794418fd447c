"""Runs `tpshard` in processes of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

COMMAND = [sys.executable, "-m", "tpshard.cli.main"]


def tpshard(*arguments: str, **options: Any) -> str:
    """The output of a command, which ends this script if it fails. Options are those of `subprocess.run`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([*COMMAND, *arguments], **pipes | options)
    if done.returncode:
        sys.exit(f"tpshard {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr or done.stdout}")
    return str(done.stdout)


@contextmanager
def serving(command: Sequence[str], **options: Any) -> Iterator[str]:
    """The address `http://.../v1` of a server, which ends with the block. Options are those of `subprocess.Popen`."""
    without_key = {name: value for name, value in os.environ.items() if name != "TPSHARD_API_KEY"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=without_key, **options) as server:
        try:
            assert server.stdout is not None
            words = server.stdout.readline().split()
            if not words:
                raise SystemExit("the server did not start")
            yield words[-1]
        finally:
            server.terminate()
