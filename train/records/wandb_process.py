"""The process that runs wandb: it passes JSON lines from stdin to wandb and reports on stdout. See `wandb_sink`.

Run as a script, without importing tpshard. If stdin ends without a `finish`, the run has died: the process gives wandb
a few seconds and exits, whatever wandb is doing.
"""

from __future__ import annotations

import json
import netrc
import os
import queue
import threading
import urllib.parse
from typing import Any

ORPHAN_S = 5.0
"""Seconds that wandb may keep writing after the run has died."""
INIT_S = 30.0

PRIVATE: dict[str, Any] = {
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "disable_job_creation": True,
    "console": "off",
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "program": "tpshard",
    "program_relpath": "tpshard",
    "program_abspath": "",
    "host": "",
    "username": "",
    "email": "",
    "silent": True,
}
"""Settings: configuration, metrics and summary are sent; code, diff, host name and environment are not, unless wandb's
own variables ask for them (WANDB_DISABLE_CODE=false, ...)."""


def main() -> None:
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    tell = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # wandb's prints go to its log
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    first = messages.get()
    if first is None:
        return
    try:
        run = _init(first, tell)
        while (message := messages.get()) is not None:
            if "finish" in message:
                run.summary.update(message["finish"])
                run.finish(exit_code=message["exit"])
                break
            row = message["row"]
            run.log({k: v for k, v in row.items() if v is not None and k != "step"}, step=row.get("step"))
        tell.close()
    except BaseException as error:  # reported to the run, which shows it once
        _tell(tell, {"failed": f"failed: {type(error).__name__}: {str(error).strip()[:300]}"})
        os._exit(1)


def _read(messages: queue.Queue[dict[str, Any] | None]) -> None:
    finished = False
    rest = b""
    while data := os.read(0, 1 << 16):  # not by sys.stdin: its lock would be held when the interpreter ends
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            finished = finished or "finish" in message
            messages.put(message)
    if not finished:
        messages.put(None)
        threading.Event().wait(ORPHAN_S)
        os._exit(1)


def _init(first: dict[str, Any], tell: Any) -> Any:
    import wandb

    settings_sent = first["init"]
    mode = settings_sent["mode"]
    if mode == "auto":
        env_mode = os.environ.get("WANDB_MODE", "")
        mode = env_mode if env_mode in ("online", "offline", "disabled") else "online" if _has_login() else "offline"
    settings = {k: v for k, v in PRIVATE.items() if f"WANDB_{k.removeprefix('x_').upper()}" not in os.environ}

    def begin(mode: Any) -> Any:
        return wandb.init(
            project=settings_sent["project"],
            entity=settings_sent["entity"],
            name=settings_sent["name"],
            group=settings_sent["name"],
            id=first["id"],
            resume="allow" if first["id"] and mode == "online" else None,  # offline no server can be asked
            config=settings_sent["config"],
            dir=first["dir"],
            mode=mode,
            settings=wandb.Settings(init_timeout=INIT_S, finish_timeout=INIT_S, **settings),
        )

    try:
        run = begin(mode)
    except Exception as error:
        if mode != "online":
            raise
        _tell(tell, {"failed": f"cannot reach its server ({type(error).__name__}), and writes offline"})
        run = begin("offline")
    _tell(tell, {"where": str((not run.offline and run.url) or os.path.dirname(run.dir))})
    return run


def _has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _tell(tell: Any, message: dict[str, str]) -> None:
    try:
        tell.write(json.dumps(message) + "\n")
        tell.flush()
    except (OSError, ValueError):
        pass  # the run has closed its end


if __name__ == "__main__":
    main()
