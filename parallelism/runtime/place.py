"""Where this process stands: one worker among several, or the process that has to start them. Knows no torch."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RENDEZVOUS = "TPSHARD_RENDEZVOUS"
"""Set by tpshard's own launcher: `file:PATH`, or `tcp:HOST:PORT` when there are several hosts."""


@dataclass(frozen=True)
class WorkerPlace:
    """One worker's place among `world` workers.

    `rendezvous` is where they find each other: `file:PATH` (nothing listens), `tcp:HOST:PORT` (rank 0 listens on that
    address), or `env:` (torchrun's own store).
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    rendezvous: str
    launcher: str
    """tpshard, torchrun or slurm."""

    @property
    def all_local(self) -> bool:
        """True when every worker runs on this host, so that nothing has to be reachable from outside."""
        return self.local_world == self.world

    def environment(self) -> dict[str, str]:
        """The variables that `find` reads back in a worker."""
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world), RENDEZVOUS: self.rendezvous,
        }  # fmt: skip


def nameless_file() -> tuple[int, str]:
    """A descriptor of an empty file that lives in memory as long as a process holds it, and its rendezvous.

    The workers must inherit the descriptor under its number. Nothing is left behind, however they all end.
    """
    descriptor = os.memfd_create("tpshard-store")
    return descriptor, f"file:/proc/self/fd/{descriptor}"


def find(env: Mapping[str, str]) -> WorkerPlace | None:
    """The place that a launcher gave this process, or None when nobody launched it.

    Own workers carry `TPSHARD_RENDEZVOUS`; torchrun sets RANK, WORLD_SIZE and MASTER_ADDR; SLURM's srun sets
    SLURM_PROCID and the number of tasks. ValueError names the variable that is missing or malformed.
    """
    if RENDEZVOUS in env:
        return _ranked(env, env[RENDEZVOUS], "tpshard")
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        return _ranked(env, "env:", "torchrun")
    if _is_slurm_task(env):
        return _slurm(env)
    return None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"the environment variable {name} is {text!r}, where a launcher sets a whole number") from None


def _checked(place: WorkerPlace) -> WorkerPlace:
    if not 0 <= place.rank < place.world or not 0 <= place.local_rank < place.local_world <= place.world:
        raise ValueError(
            f"the environment says rank {place.rank} of {place.world}, local rank {place.local_rank} of "
            f"{place.local_world}: ranks count from 0 and stay below the number of workers"
        )
    return place


def _ranked(env: Mapping[str, str], rendezvous: str, launcher: str) -> WorkerPlace:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK", 0 if world == 1 else None)
    # Started by hand with RANK and MASTER_ADDR alone, nothing says how many share this host: assume the least.
    local_world = _number(env, "LOCAL_WORLD_SIZE", local_rank + 1)
    return _checked(WorkerPlace(rank, world, local_rank, local_world, rendezvous, launcher))


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether this is one task of an srun step of several; a batch script sees SLURM_PROCID too, but is no step."""
    if "SLURM_PROCID" not in env or (env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env):
        return False
    return _tasks(env) > 1


def _tasks(env: Mapping[str, str]) -> int:
    return _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))


def _slurm(env: Mapping[str, str]) -> WorkerPlace:
    rank, world, local_rank = _number(env, "SLURM_PROCID"), _tasks(env), _number(env, "SLURM_LOCALID", 0)
    nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    step = "-".join(env.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    if nodes == 1:
        path = Path(tempfile.gettempdir()) / f"tpshard-{step}.store"
        return _checked(WorkerPlace(rank, world, local_rank, world, f"file:{path}", "slurm"))
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    here = _number(env, "SLURM_NODEID", 0)
    local_world = tasks_per_node(per_node)[here] if per_node else local_rank + 1
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    if not host:
        raise ValueError("SLURM gives no SLURM_STEP_NODELIST: set MASTER_ADDR to the address of the first node")
    # Two steps on one node must not meet: the port follows from job and step.
    port = _number(env, "MASTER_PORT", 20000 + sum(ord(c) * 31**i for i, c in enumerate(step)) % 20000)
    return _checked(WorkerPlace(rank, world, local_rank, local_world, f"tcp:{host}:{port}", "slurm"))


def tasks_per_node(text: str) -> list[int]:
    """SLURM's `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ValueError(f"not a SLURM task count: {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of SLURM's `gpu[03-05,9],head`: gpu03."""
    found = re.match(r"([^,\[]*)(?:\[([^\]]*)\]([^,]*))?", nodelist.strip())
    assert found is not None
    if found[2] is None:
        return found[1]
    return found[1] + re.split(r"[-,]", found[2])[0] + (found[3] or "")
