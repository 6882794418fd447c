"""Finds a process's rank and rendezvous from environment variables, without importing torch."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

RENDEZVOUS = "TPSHARD_RENDEZVOUS"
"""Set by tpshard's launcher: `file:PATH`, or `tcp:HOST:PORT` with several hosts."""


@dataclass(frozen=True)
class WorkerPlace:
    """One worker's place among `world` workers.

    `rendezvous` is how they connect: `file:PATH` or `unix:NAME` (no port), `tcp:HOST:PORT#RUN` (rank 0 listens there;
    the run's name may be left out), or `env:` (MASTER_ADDR and MASTER_PORT). See `rendezvous`.
    """

    rank: int
    world: int
    local_rank: int
    """The worker's number on its host; -1 where the environment does not say it and the workers have to find out."""
    local_world: int
    rendezvous: str
    launcher: str
    """tpshard, torchrun or slurm."""

    @property
    def all_local(self) -> bool:
        """Whether all workers run on this host, so that nothing must be reachable from outside."""
        return self.local_world == self.world

    def gpu(self, visible: int) -> int:
        """The number of this worker's GPU among those that it sees: other launchers may give each worker one of its own
        (srun --gpus-per-task=1), which is the only one that it sees."""
        return 0 if visible == 1 and self.launcher != "tpshard" else self.local_rank

    def environment(self) -> dict[str, str]:
        """The environment variables from which `find` reads the place in a worker."""
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world), RENDEZVOUS: self.rendezvous,
        }  # fmt: skip


def nameless_file() -> tuple[int, str]:
    """Creates an empty file without a name; returns its descriptor and its rendezvous.

    The workers must inherit the descriptor under its number. The file disappears when the last process closes it.
    """
    descriptor = os.memfd_create("tpshard-store")
    return descriptor, f"file:/proc/self/fd/{descriptor}"


def find(env: Mapping[str, str]) -> WorkerPlace | None:
    """The place that a launcher gave this process; None if there is no launcher.

    tpshard's workers have `TPSHARD_RENDEZVOUS`; torchrun sets RANK, WORLD_SIZE and MASTER_ADDR; SLURM's srun sets
    SLURM_PROCID and the number of tasks. Raises ValueError with the name of a missing or malformed variable.
    """
    if RENDEZVOUS in env:
        return _from_ranks(env, env[RENDEZVOUS], "tpshard")
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        _number(env, "MASTER_PORT")
        return _from_ranks(env, "env:", "torchrun")
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


def _check(place: WorkerPlace) -> WorkerPlace:
    if not 0 <= place.rank < place.world or not -1 <= place.local_rank < place.local_world <= place.world:
        raise ValueError(
            f"the environment says rank {place.rank} of {place.world}, local rank {place.local_rank} of "
            f"{place.local_world}: ranks count from 0 and stay below the number of workers"
        )
    return place


def _from_ranks(env: Mapping[str, str], rendezvous: str, launcher: str) -> WorkerPlace:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK", 0 if world == 1 else -1)
    # with RANK and MASTER_ADDR set by hand, the number of workers on this host is unknown: assume the least
    local_world = _number(env, "LOCAL_WORLD_SIZE", max(1, local_rank + 1))
    return _check(WorkerPlace(rank, world, local_rank, local_world, rendezvous, launcher))


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether this is one task of an srun step of several; a batch script has SLURM_PROCID too, but is not a step."""
    if "SLURM_PROCID" not in env or (env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env):
        return False
    return _tasks(env) > 1


def _tasks(env: Mapping[str, str]) -> int:
    return _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))


def _slurm(env: Mapping[str, str]) -> WorkerPlace:
    """The place of a task of an srun step."""
    rank, world, local_rank = _number(env, "SLURM_PROCID"), _tasks(env), _number(env, "SLURM_LOCALID", 0)
    nodes = _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1))
    step = "-".join(env.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    # of several commands that one step starts, each has its own store
    command = hashlib.sha256("\0".join([os.getcwd(), *sys.argv[1:]]).encode(errors="replace")).hexdigest()[:16]
    if nodes == 1:
        return _check(WorkerPlace(rank, world, local_rank, world, f"unix:{step}-{command}", "slurm"))
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    node = _number(env, "SLURM_NODEID", 0)
    local_world = tasks_per_node(per_node)[node] if per_node else local_rank + 1
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    if not host:
        raise ValueError("SLURM gives no SLURM_STEP_NODELIST: set MASTER_ADDR to the address of the first node")
    # two steps on one node must not share a port, so it follows from job and step
    port = _number(env, "MASTER_PORT", 20000 + sum(ord(c) * 31**i for i, c in enumerate(step)) % 20000)
    return _check(WorkerPlace(rank, world, local_rank, local_world, f"tcp:{host}:{port}#{step}-{command}", "slurm"))


def tasks_per_node(text: str) -> list[int]:
    """Parses the tasks of each node in SLURM's form: `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ValueError(f"not a SLURM task count: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[03-05,9],head` -> gpu03."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\]([^,]*))?", nodelist.strip())
    assert match is not None
    if match[2] is None:
        return match[1]
    return match[1] + re.split(r"[-,]", match[2])[0] + (match[3] or "")
