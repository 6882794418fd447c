"""What propagation settled too early, or a price shared with readers that do not fetch, costs no communication."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from tpshard.parallelism import Mesh, partition

import partitioner_vs_xla
from partitioner_programs import CASES
from partitioner_vs_xla import ours

RECORD = json.loads((Path(partitioner_vs_xla.__file__).parent / "records/partitioner_vs_xla.json").read_text())


@pytest.mark.slow
def test_no_program_sends_more_than_xlas() -> None:
    recorded = {row["program"]: row.get("xla_bytes", row["bytes"]) for row in RECORD["rows"]}  # XLA refuses one
    for name, case in CASES.items():
        kinds, efficiency = ours(case)
        assert sum(size for _, size in kinds.values()) <= recorded[name], name
        assert efficiency > 0.98 or name in ("uneven heads", "shift by one", "convolution, ViT's patches, uneven"), name


def test_a_weights_columns_do_not_take_the_axis_of_the_batch() -> None:
    """Weights lie over x as in FSDP: the columns of one had sharded a result before its batch was known."""
    kinds, _ = ours(CASES["attention, fsdp and heads, gradients"])
    assert {kind: count for kind, (count, _) in kinds.items()} == {
        "all_gather": 4, "all_reduce": 1, "reduce_scatter": 4
    }  # fmt: skip


def test_readers_that_do_not_fetch_a_table_do_not_share_its_gather() -> None:
    """A lookup sends its rows rather than a larger table; the product with the same table reads it as it lies."""

    def scores(table: Tensor, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, table) @ table.t()

    generator = torch.Generator().manual_seed(0)
    args = [
        torch.randn(1024, 64, generator=generator, dtype=torch.float64),
        torch.randint(0, 1024, (96,), generator=generator),
    ]
    program = partition(scores, args, Mesh({"x": 4, "y": 2}), [(("y", "x"),), ("x",)], [(None, ("y", "x"))])
    assert not any(comm.value == ("arg0",) for comm in program.collectives)
    torch.testing.assert_close(program.simulate(*args)[0], scores(*args))


def added(x: Tensor, *factors: Tensor) -> Tensor:
    """A whole value and products whose contracted dim is sharded, one after the other, as gradients are summed."""
    for left, right in zip(factors[::2], factors[1::2]):
        x = x + left @ right
    return torch.relu(x)


@pytest.mark.parametrize(("rows", "kind"), [(None, "all_reduce"), ("y", "reduce_scatter")])
@pytest.mark.parametrize("products", [1, 2, 3])
def test_a_chain_of_sums_is_reduced_once(products: int, rows: str | None, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), *[(8, 12), (12, 8)] * products]
    args = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    shardings = [(rows, None), *[(None, "y"), ("y", None)] * products]
    program = partition(added, args, Mesh({"x": 2, "y": 4}), shardings, [(rows, None)])
    assert [comm.kind for comm in program.collectives] == [kind]
    torch.testing.assert_close(program.simulate(*args)[0], added(*args))
