"""The worker processes of test_launch.py: `python launched_worker.py MODE [FOLDER]`.

MODE `crash SIGNAL RANK STEP...`: that rank sends itself the signal after that step, at its n-th start after the n-th.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from patience import PATIENCE
from tpshard.parallelism.runtime import crash, messages
from tpshard.parallelism.runtime import place as places
from tpshard.parallelism.runtime.place import WorkerPlace
from tpshard.parallelism.runtime.stop import StopRequest, exit_code
from tpshard.parallelism.runtime.worker import run_worker


def describe(error: BaseException) -> tuple[str, int]:
    return f"error: {error}", getattr(error, "exit", 1)


def work(mode: str, place: WorkerPlace, folder: Path) -> int:
    if mode == "environment":
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED")
        print(*(os.environ[name] for name in names))
        return 0
    if mode == "silent-exit":
        print("something only a native library says", file=sys.stderr)
        os._exit(7 if place.rank == 1 else 0)
    if mode in ("until-signal", "deaf"):
        stopping = StopRequest()
        time.sleep(0.3)  # A signal that comes before `listen` is held, not lost.
        stopping.listen()
        (folder / f"ready-{place.rank}").write_text(str(os.getpid()))
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline and (mode == "deaf" or stopping.signal is None):
            time.sleep(0.02)
        return exit_code(stopping.urgency)
    if mode.startswith("crash"):
        return crashing(mode, place, folder)
    return connected(mode, place, folder)


def crashing(mode: str, place: WorkerPlace, folder: Path) -> int:
    name, rank, *steps = mode.split()[1:]
    starts = crash.restarts()
    if starts < len(steps) and place.rank == int(rank):
        for step in range(1, int(steps[starts]) + 1):
            messages.send("step", progress=step)
        print("a library says why", file=sys.stderr, flush=True)
        os.kill(os.getpid(), getattr(signal, name))
    (folder / f"ready-{place.rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 2 * PATIENCE
    while starts < len(steps) and time.monotonic() < deadline:
        time.sleep(0.02)
    return 0


def connected(mode: str, place: WorkerPlace, folder: Path) -> int:
    import torch
    import torch.distributed as dist
    from tpshard.parallelism.mesh import Axis, Mesh
    from tpshard.parallelism.runtime.context import connect
    from tpshard.parallelism.runtime.watchdog import Doing

    with connect(place, Mesh({"tp": place.world}), start_s=PATIENCE, step_s=PATIENCE) as context:
        if mode == "raise" and place.rank == 1:
            raise ValueError("planted before the first collective")
        context.groups.ensure([(Axis("tp", 1, place.world),)])
        context.watchdog.limit_s = PATIENCE
        for step in range(100_000):
            if step == 5 and mode in ("hang", "frozen"):
                context.watchdog.limit_s = 1.5
            context.watchdog.beat(step)
            if step == 3:
                (folder / f"ready-{place.rank}").write_text(str(os.getpid()))
            if mode == "frozen" and place.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGSTOP)
            if mode == "two-hosts" and step == 5:
                return 0
            if mode == "hang" and place.rank == 1 and step == 5:
                context.watchdog.doing = Doing("reading data")
                time.sleep(2 * PATIENCE)
            context.watchdog.doing = Doing("all_reduce over tp", "layers.0.mlp", waiting=True)
            dist.all_reduce(torch.ones(4))
            time.sleep(0.01)
    return 0


if __name__ == "__main__":
    place = places.find(os.environ)
    assert place is not None
    arguments = sys.argv[1:] + ["."]
    run_worker(lambda: work(arguments[0], place, Path(arguments[1])), place, describe)
