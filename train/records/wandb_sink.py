"""A wandb sink that cannot disturb the run: wandb runs in its own process, behind a non-blocking pipe.

Whatever wandb does there (hang, crash, fill the disk), the run sees a full or broken pipe, reports it once, and goes
on. See `wandb_process` for the other side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from tpshard.recipes.keys.training_keys import Wandb

logger = logging.getLogger(__name__)

PATIENCE = 4 << 20
"""Bytes that may wait for a process that does not read."""


class WandbSink:
    """Passes configuration, rows and summary to wandb. Never raises, and blocks only in `close`.

    Args:
        folder: the run's; wandb writes below `folder`/wandb, its messages go to `folder`/logs/wandb.log.
        options: the recipe's `logging.wandb`.
        config: JSON, without secrets.
        run_id: the wandb run to create or continue; None: a new one.
        warn: called with the first failure; default: a log message.
    """

    def __init__(
        self,
        folder: Path,
        options: Wandb,
        *,
        name: str,
        config: Mapping[str, Any],
        run_id: str | None = None,
        warn: Callable[[str], None] | None = None,
    ):
        self._warn = warn or logger.warning
        self._child: subprocess.Popen[bytes] | None = None
        self._said = False
        self._where = ""
        self._unsent = b""
        if options.mode == "disabled":
            return
        try:
            self._start(folder)
        except (OSError, ValueError) as error:
            self._give_up(f"cannot be started: {error}")
        init = {key: getattr(options, key) for key in ("project", "entity", "mode")}
        init |= {"name": name, "config": dict(config)}
        self._send({"init": init, "dir": str(folder.resolve()), "id": run_id})

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Passes on a row of metrics.jsonl."""
        self._send({"row": dict(row)})
        self._listen()

    @property
    def where(self) -> str:
        """The folder or address of the wandb run, once known; "" before."""
        self._listen()
        return self._where

    def close(self, summary: Mapping[str, Any], *, exit_code: int = 0, wait_s: float = 30.0) -> None:
        """Gives wandb `wait_s` seconds to finish, then ends its process."""
        if self._child is None:
            return
        self._send({"finish": dict(summary), "exit": exit_code})
        child = self._child
        if child is None:
            return
        deadline = time.monotonic() + wait_s
        while child.poll() is None and time.monotonic() < deadline and self._child is child:
            self._push()
            self._listen()
            time.sleep(0.05)
        if self._child is not child:
            return
        self._listen()
        if child.poll() is None:
            self._give_up(f"did not finish within {wait_s:g} s")
        elif child.returncode:
            self._give_up(f"ended with code {child.returncode}")
        self._end()

    def _start(self, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # the sink is not a worker of the run
        with (folder / "logs" / "wandb.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("wandb_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is handled by the run
            )
        for pipe in (self._child.stdin, self._child.stdout):
            os.set_blocking(cast(IO[bytes], pipe).fileno(), False)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._child is None or self._child.stdin is None:
            return
        self._unsent += json.dumps(message, default=str).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        """Writes as much as the pipe accepts."""
        if self._child is None or self._child.stdin is None:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._child.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > PATIENCE:
                self._give_up("stopped reading")
        except (OSError, ValueError) as error:
            self._listen()
            self._give_up(f"has died: {error}")

    def _listen(self) -> None:
        if self._child is None or self._child.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            while data := self._child.stdout.read(1 << 16):
                for line in data.splitlines():
                    with contextlib.suppress(ValueError):
                        message = json.loads(line)
                        self._where = message.get("where", self._where)
                        if "failed" in message:
                            self._say(message["failed"])

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            self._warn(f"wandb {what}; the run goes on, metrics.jsonl has everything")

    def _give_up(self, why: str) -> None:
        self._say(why)
        self._end()

    def _end(self) -> None:
        """Ends the wandb process and its children."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            import psutil

            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(child.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            child.kill()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError, ValueError):
                cast(IO[bytes], pipe).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
