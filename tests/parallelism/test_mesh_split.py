"""`mesh_split` annotates a dim with one mesh axis or several, and refuses what no mesh has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tpshard.parallelism import Mesh, mesh_split, partition

MESH = Mesh({"a": 2, "b": 2})


def test_several_axes_shard_one_dim() -> None:
    program = partition(lambda x: mesh_split(x, MESH, "[{} {b,a}]") * 2, [torch.empty(4, 8)], MESH)
    assert program.records["mul"].layout.dims == ((), (MESH.axis("b"), MESH.axis("a")))


@pytest.mark.parametrize(("mapping", "why"), [([0, 0], "twice"), ([2, -1], "does not have"), ([0], "1 entries")])
def test_a_mapping_that_does_not_fit_is_refused(mapping: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mesh_split(torch.empty(4, 8), MESH, mapping)


@pytest.mark.parametrize("sharding", [("a", None), ["a"], [("a",), "?"], "[{a} {}]"], ids=str)
def test_every_form_of_a_sharding_is_taken(sharding: object) -> None:
    program = partition(lambda x: mesh_split(x, MESH, sharding) * 2, [torch.empty(4, 8)], MESH)  # type: ignore[arg-type]
    assert program.records["mul"].layout.dims == ((MESH.axis("a"),), ())


def test_numpys_whole_numbers_are_indices_too() -> None:
    mapping = list(np.array([1, -1]))
    program = partition(lambda x: mesh_split(x, MESH, mapping) * 2, [torch.empty(4, 8)], MESH)
    assert program.records["mul"].layout.dims == ((MESH.axis("b"),), ())


@pytest.mark.parametrize("text", ["[{a:(2)1} {}]", "[{a:(1)1} {}]"])
def test_a_part_of_an_axis_has_more_than_one_device(text: str) -> None:
    with pytest.raises(ValueError, match="has one device, along which nothing is sharded"):
        mesh_split(torch.empty(4, 8), MESH, text)


@pytest.mark.parametrize("wrong", [5, [None, 0], ["a", "a"], ["c", None], [True, -1], [0.0, -1], {"a": 0}], ids=str)
def test_what_is_no_sharding_is_told_what_is(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"give|used twice|the mesh has no axis `c`"):
        mesh_split(torch.empty(4, 8), MESH, wrong)  # type: ignore[arg-type]


def test_stacked_tensors_keep_their_shardings() -> None:
    """Whole matrices on each device take one all-to-all of the stack."""

    def whole(*matrices: torch.Tensor) -> torch.Tensor:
        return mesh_split(torch.stack(matrices), MESH, [0, -1, -1])

    program = partition(whole, [torch.empty(4, 8)] * 2, MESH, in_shardings=[["a", None]] * 2)
    assert [c.kind for c in program.collectives] == ["all_to_all"]
