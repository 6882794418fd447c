"""Small all-reduces on a CPU run as one exchange, with the expected messages, price and bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.devices.read import device
from tpshard.parallelism import Mesh, Program, partition
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.pricing.timeline import comm_cost
from tpshard.parallelism.resharding.exchange import LEAST_BYTES, MOST_BYTES, MOST_SENT, runs_as_exchange
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.parallelism.runtime.tally import Tally

ROWS, INNER = 3, 24
SMALL, LARGE = 1000, MOST_BYTES // 4 // ROWS + 1
"""Columns; three rows of 1000 do not divide among four ranks."""


def test_what_goes_as_an_exchange() -> None:
    assert runs_as_exchange("reduce_scatter", 1 << 30, 2)
    assert not runs_as_exchange("all_gather", 64, 4) and not runs_as_exchange("all_to_all", 64, 4)
    assert [runs_as_exchange("all_reduce", n, 4) for n in (8, LEAST_BYTES, MOST_BYTES, MOST_BYTES + 4)] == [0, 1, 1, 0]
    for members, most in ((2, MOST_SENT), (33, MOST_SENT // 32)):
        assert [runs_as_exchange("all_reduce", most + n, members) for n in (0, 1)] == [1, 0]


def product(columns: int, ranks: int) -> Program:
    """x @ w with the contracted dim sharded: one all-reduce of [ROWS, columns]."""
    inputs = [torch.empty(ROWS, INNER, device="meta"), torch.empty(INNER, columns, device="meta")]
    return partition(lambda x, w: x @ w, inputs, Mesh({"x": ranks}), [(None, "x"), ("x",)], [()])


def arguments(columns: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(columns)
    return [torch.randn(ROWS, INNER, generator=g), torch.randn(INNER, columns, generator=g)]


class Seen(TorchDispatchMode):
    """Names of the collectives as they are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(context: Context, columns: int, exchange: bool | None) -> tuple[torch.Tensor, dict[str, int], int]:
    program = product(columns, context.mesh.ranks)
    local = program.local(context.rank, *arguments(columns))
    executor, tally, recorder = Executor(program, context, exchange=exchange), Tally(local), Seen()
    with recorder, tally:
        (result,) = executor(*local)
    return result, dict(recorder.names), tally.sent_bytes


@pytest.mark.parametrize(
    ("ranks", "columns", "exchange", "name"),
    [
        (4, SMALL, None, "all_to_all_single"),
        (3, SMALL, None, "all_to_all_single"),
        (4, SMALL, False, "all_reduce"),
        (4, LARGE, None, "all_reduce"),
        (2, SMALL, None, "all_to_all_single"),
        (2, LARGE, None, "all_to_all_single"),
    ],
)
def test_ranks_agree_bit_for_bit_and_send_what_is_priced(
    pool: Any, ranks: int, columns: int, exchange: bool | None, name: str
) -> None:
    program = product(columns, ranks)
    (expected,) = program.simulate(*arguments(columns))
    results = pool.run(run, columns, exchange, world=ranks)
    for actual, names, _ in results:
        assert names == {name: 1, "wait_tensor": 1}
        assert actual.shape == expected.shape and torch.equal(actual, results[0][0])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        if name == "all_to_all_single":  # summed in rank order, as the simulation does
            assert torch.equal(actual, expected)
    if exchange is None:
        ((_, comm),) = program.issues()
        cost = comm_cost(device("cpu"), Topology(program.mesh, ranks), comm)
        assert {sent for *_, sent in results} == {cost.wire_bytes}
        assert cost.algorithm == ("all-to-all+sum" if name == "all_to_all_single" else "ring")


def test_an_exchange_is_cheaper_than_the_ring_where_latency_is_all() -> None:
    box = device("cpu")
    program = product(SMALL, 8)
    ((_, comm),) = program.issues()
    topology = Topology(program.mesh, 8)
    sent = comm_cost(box, topology, comm)
    ring = comm_cost(replace(box, kind="gpu"), topology, comm)
    assert sent.wire_bytes == 7 * comm.bytes > ring.wire_bytes and sent.seconds < ring.seconds
