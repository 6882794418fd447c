"""The pool, the context and the process groups of mesh axes work on real gloo processes."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from torch.distributed import distributed_c10d
from tpshard.parallelism.mesh import Axis, Mesh, size_of
from tpshard.parallelism.program import group_name
from tpshard.parallelism.runtime import groups
from tpshard.parallelism.runtime.context import Context, disagreement
from tpshard.parallelism.runtime.gloo import all_gather
from tpshard.parallelism.runtime.messages import WorkerFault

FSDP, TP = Axis("fsdp", 1, 2), Axis("tp", 1, 2)


def members(context: Context) -> dict[str, list[int]]:
    expected = [(TP,), (FSDP,), (TP, FSDP)]
    # Each rank asks in another order: creation must not follow it.
    context.groups.ensure(expected[context.rank % 3 :] + expected[: context.rank % 3])
    result = {}
    for axes in expected:
        mine, ordered = torch.tensor([context.rank]), context.mesh.sorted(axes)
        name = group_name(ordered)
        result[name] = torch.ops._c10d_functional.wait_tensor(all_gather(mine, size_of(axes), name)).tolist()
        assert result[name][context.mesh.linear_index(ordered, context.rank)] == context.rank
    return result


def test_groups_are_those_of_the_mesh_on_every_rank(pool: Any) -> None:
    mesh = Mesh({"fsdp": 2, "tp": 2})
    for rank, actual in enumerate(pool.run(members, mesh=mesh.axes)):
        for axes in ((TP,), (FSDP,), (FSDP, TP)):
            expected = next(ranks for ranks in mesh.groups(axes) if rank in ranks)
            assert actual[group_name(axes)] == expected


def sub_axis(context: Context) -> list[int]:
    inner = Axis("x", 2, 2)
    context.groups.ensure([(inner,), (Axis("x", 1, 2),)])
    return dist.get_process_group_ranks(distributed_c10d._resolve_process_group(group_name([inner])))


def test_a_sub_axis_has_groups_of_its_own(pool: Any) -> None:
    assert pool.run(sub_axis, mesh={"x": 4}) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_gpus_groups_of_one_axis_are_made_by_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch's calls: no communicator is here to split."""
    made: list[tuple[str, list[list[int]]]] = []

    def split_group(*, split_ranks: Any, timeout: timedelta, group_desc: str, backend: str) -> str | None:
        assert timeout.seconds == 9 and backend == "cuda:nccl"
        made.append((group_desc, split_ranks))
        return group_desc if any(5 in ranks for ranks in split_ranks) else None

    world = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cuda:5")))
    torchs = SimpleNamespace(
        is_initialized=lambda: True, get_world_size=lambda: 8, group=world, split_group=split_group
    )
    monkeypatch.setattr(groups, "dist", torchs)
    monkeypatch.setattr(groups, "_register", lambda name, group: None)
    own = groups.Groups(Mesh({"fsdp": 4, "tp": 2}), backend="nccl", timeout=timedelta(seconds=9))
    own.ensure([(TP,), (Axis("fsdp", 1, 4),), (TP,)])
    assert made == [("fsdp:(1)4", [[0, 2, 4, 6], [1, 3, 5, 7]]), ("tp:(1)2", [[0, 1], [2, 3], [4, 5], [6, 7]])]
    assert [own.divide([[2, 0], [3, 1]], "edge"), own.divide([[6, 4], [7, 5]], "edge")] == [None, "edge"]


def decide(context: Context) -> tuple[bool, bool, int, list[int], str]:
    if context.rank == 1:
        context.stopping.signal = signal.SIGTERM
    first = context.stop()
    return (
        context.any(context.rank == 1),
        context.any(False),
        first,
        context.gather(context.rank),
        context.from_main(f"from {context.rank}"),
    )


def test_ranks_decide_alike(pool: Any) -> None:
    assert pool.run(decide, world=2) == [(True, False, 75, [0, 1], "from 0")] * 2


def differ(context: Context) -> tuple[str, int]:
    context.agree({"recipe": "a"})
    try:
        context.agree({"recipe": "a", "program": "same" if context.rank != 2 else "other"})
    except WorkerFault as fault:
        return fault.message, fault.exit
    return "", 0


def test_the_rank_that_differs_is_named_on_all(pool: Any) -> None:
    answers = pool.run(differ)
    assert len(set(answers)) == 1
    message, code = answers[0]
    assert code == 5 and "program" in message and "rank 2" in message and "rank 1" not in message


def test_disagreement_names_the_minority() -> None:
    values = [{"torch": "2.11"}, {"torch": "2.13"}, {"torch": "2.13"}]
    assert "rank 0 on a has 2.11" in disagreement(values, ["a", "b", "c"])
    assert disagreement(values[1:], ["b", "c"]) == ""


def listening(context: Context) -> list[str]:
    context.groups.ensure([(Axis("x", 1, context.world),)])
    return [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]


def test_workers_of_one_host_listen_on_loopback_only(pool: Any) -> None:
    addresses = [ip for actual in pool.run(listening, world=2) for ip in actual]
    assert addresses and set(addresses) <= {"127.0.0.1", "::1"}


def fail_on_one(context: Context, culprit: int) -> int:
    if context.rank == culprit:
        raise ValueError("planted on one rank")
    context.barrier()
    return context.rank


def die_on_one(context: Context, culprit: int) -> None:
    if context.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    context.barrier()


def wrong_world(context: Context) -> None:
    time.sleep(PATIENCE)


def test_the_pool_survives_what_it_runs(pool: Any) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2(?s:.*)planted on one rank"):
        pool.run(fail_on_one, 1, world=2)
    assert pool.run(fail_on_one, -1, world=2) == [0, 1]
    with pytest.raises(AssertionError, match="worker 0 died"):
        pool.run(die_on_one, 0, world=1)
    with pytest.raises(AssertionError, match="no answer within"):
        pool.run(wrong_world, world=1, timeout=1)
    assert pool.run(fail_on_one, -1, world=2) == [0, 1]


def test_a_mesh_of_another_size_is_refused(pool: Any) -> None:
    with pytest.raises(AssertionError, match="has 4 devices, but 2 workers were started"):
        pool.run(fail_on_one, -1, world=2, mesh={"fsdp": 4})
