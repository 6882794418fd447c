"""Annotations inside a function: `mesh_split` for shardings, `boundary` between stored and used parameters, `role`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from tpshard.parallelism.mesh import Mesh

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define("mesh_split(Tensor(a) x, str[] axes, int[] dims_mapping) -> Tensor(a)")
_library.define("boundary(Tensor(a) x, str kind, str name) -> Tensor(a)")
_library.define("role(Tensor(a) x, str role) -> Tensor(a)")
_library.define("grouped(Tensor(a) x, int group) -> Tensor(a)")
_library.define("propagation_barrier(Tensor(a) x, str allowed) -> Tensor(a)")


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.view(x.shape)


class _Split(torch.autograd.Function):
    """An identity whose gradient has the same annotation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axes: list[str], mapping: list[int]) -> torch.Tensor:
        ctx.axes, ctx.mapping = axes, mapping
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tpshard.mesh_split(x, axes, mapping)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return torch.ops.tpshard.mesh_split(grad, ctx.axes, ctx.mapping), None, None


class _Role(torch.autograd.Function):
    """An identity whose gradient has the same role."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, role: str) -> torch.Tensor:
        ctx.role = role
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tpshard.role(x, role)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.ops.tpshard.role(grad, ctx.role), None


class _Grouped(torch.autograd.Function):
    """An identity whose gradient is in no group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: int) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tpshard.grouped(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


MIRRORED = {"none": "none", "forward": "backward", "backward": "forward", "both": "both"}
"""What a barrier lets pass, and what the same barrier lets pass between the gradients."""


class _Barrier(torch.autograd.Function):
    """An identity whose gradient has the same barrier, seen from the other side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, allowed: str) -> torch.Tensor:
        ctx.allowed = allowed
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tpshard.propagation_barrier(x, allowed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return torch.ops.tpshard.propagation_barrier(grad, MIRRORED[ctx.allowed]), None


for _name in ("mesh_split", "boundary", "role", "grouped", "propagation_barrier"):
    _library.impl(_name, _same, "CompositeExplicitAutograd")
_library.impl("mesh_split", _Split.apply, "Autograd")
_library.impl("role", _Role.apply, "Autograd")
_library.impl("grouped", _Grouped.apply, "Autograd")
_library.impl("propagation_barrier", _Barrier.apply, "Autograd")


def mesh_split(tensor: torch.Tensor, mesh: Mesh, dims_mapping: Sequence[int]) -> torch.Tensor:
    """Annotates a tensor and its gradient with a sharding (GSPMD, section 3.1), and returns the tensor.

    `dims_mapping` has one entry per dim: -1 (replicated) or the index of a mesh axis. Outside of `partition` it does
    nothing. Raises ValueError for an invalid mapping.
    """
    names = list(mesh.axes)
    mapping = list(dims_mapping)
    if len(mapping) != tensor.dim():
        raise ValueError(f"dims_mapping {mapping} has {len(mapping)} entries for a tensor of {tensor.dim()} dims")
    if any(not -1 <= i < len(names) for i in mapping):
        raise ValueError(f"dims_mapping {mapping} names an axis that {mesh} does not have")
    used = [i for i in mapping if i >= 0]
    if len(set(used)) != len(used):
        raise ValueError(f"dims_mapping {mapping} uses a mesh axis twice")
    if torch._C._functorch.is_batchedtensor(tensor):
        raise ValueError("mesh_split annotates whole tensors, not those of a manual region, or of vmap")
    return split_as(tensor, mesh, mapping)


_groups = count()


def sharding_group(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Makes propagation give all these tensors one sharding: an axis that reaches one of them reaches all.

    Returns the tensors. Outside of `partition` it does nothing. Raises ValueError for shapes that differ.
    """
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"tensors of one sharding group have one shape, not {', '.join(map(str, sorted(shapes)))}")
    group = next(_groups)
    return tuple(torch.ops.tpshard.grouped(tensor, group) for tensor in tensors)


def propagation_barrier(tensor: torch.Tensor, allowed: str = "none") -> torch.Tensor:
    """The same tensor, behind a barrier to propagation: shardings pass it only as `allowed` says.

    "forward": from what computes the tensor to what reads the result; "backward": the other way; "none": in neither;
    "both": it is no barrier. Outside of `partition` it changes nothing. ValueError for another word.
    """
    if allowed not in MIRRORED:
        raise ValueError(f"a propagation barrier allows {', '.join(MIRRORED)}, not {allowed!r}")
    return torch.ops.tpshard.propagation_barrier(tensor, allowed)


OPEN = -2
"""In a mapping: a dim that propagation may shard further."""


def split_as(tensor: torch.Tensor, mesh: Mesh, mapping: Sequence[int]) -> torch.Tensor:
    """`mesh_split` for a valid mapping, in which dims may be `OPEN`."""
    return torch.ops.tpshard.mesh_split(tensor, list(mesh.axes), list(mapping))


def boundary(tensor: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """Marks where the parameter `name` leaves its storage (`kind` "parameter") or its gradient enters it
    ("gradient")."""
    return torch.ops.tpshard.boundary(tensor, kind, name)


def role(tensor: torch.Tensor, role: str) -> torch.Tensor:
    """States the role of a tensor and its gradient in a step, such as `logits`, for the plan's memory categories."""
    return torch.ops.tpshard.role(tensor, role)
