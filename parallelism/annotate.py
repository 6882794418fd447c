"""Annotations inside a function: `mesh_split` for shardings, `boundary` between stored and used parameters, `role`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from numbers import Integral
from typing import Any

import torch
from tpshard.parallelism.mesh import Mesh, require_mesh
from tpshard.parallelism.sharding import Sharding

_library = torch.library.Library("tpshard", "FRAGMENT")
_library.define("mesh_split(Tensor(a) x, str sharding) -> Tensor(a)")
_library.define("boundary(Tensor(a) x, str kind, str name) -> Tensor(a)")
_library.define("role(Tensor(a) x, str role) -> Tensor(a)")
_library.define("grouped(Tensor(a) x, int group) -> Tensor(a)")
_library.define("propagation_barrier(Tensor(a) x, str allowed) -> Tensor(a)")


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.view(x.shape)


class _Annotated(torch.autograd.Function):
    """The identity op `op` with argument `arg`; the gradient passes the same op with `mirrored`, or no op for None."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, op: Any, arg: Any, mirrored: Any) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = op(x, arg)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.op, ctx.arg, ctx.mirrored = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return grad if ctx.mirrored is None else annotate(grad, ctx.op, ctx.mirrored, ctx.arg), None, None, None


def annotate(tensor: torch.Tensor, op: Any, arg: Any, mirrored: Any) -> torch.Tensor:
    """Passes a tensor through the identity op `op` with `arg`, and its gradient with `mirrored` (None: no op)."""
    result: torch.Tensor = _Annotated.apply(tensor, op, arg, mirrored)  # type: ignore[no-untyped-call]
    return result


for _name in ("mesh_split", "boundary", "role", "grouped", "propagation_barrier"):
    _library.impl(_name, _same, "CompositeExplicitAutograd")


def mesh_split(tensor: torch.Tensor, mesh: Mesh, dims_mapping: Sequence[Any] | str | Sharding) -> torch.Tensor:
    """Annotates a tensor and its gradient with a sharding (GSPMD, section 3.1), and returns the tensor.

    `dims_mapping` has one entry per dim: -1 (replicated) or the index of a mesh axis; or it is a sharding in any form
    of `partition`, such as `("x", None)` or the text `"[{x,?} {y:(1)2}]"`, with open dims, parts of axes, several
    axes of one dim and priorities. Outside of `partition` it does nothing. Raises ValueError for anything else.
    """
    if torch._C._functorch.is_batchedtensor(tensor):
        raise ValueError("mesh_split annotates whole tensors, not those of a manual region, or of vmap")
    require_mesh(mesh)
    if isinstance(dims_mapping, (tuple, list)) and all(
        isinstance(i, Integral) and not isinstance(i, bool) for i in dims_mapping
    ):
        mapping, names = [int(i) for i in dims_mapping], list(mesh.axes)
        if len(mapping) != tensor.dim():
            raise ValueError(f"dims_mapping {mapping} has {len(mapping)} entries for a tensor of {tensor.dim()} dims")
        if any(not -1 <= i < len(names) for i in mapping):
            raise ValueError(f"dims_mapping {mapping} names an axis that {mesh} does not have")
        dims_mapping = [None if i < 0 else names[i] for i in mapping]
    return split_as(tensor, mesh, Sharding.of(mesh, dims_mapping, tensor.dim()))


_groups = count()


def sharding_group(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Makes propagation give all these tensors one sharding: an axis that reaches one of them reaches all.

    Returns the tensors. Outside of `partition` it does nothing. Raises ValueError for shapes that differ.
    """
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"tensors of one sharding group have one shape, not {', '.join(map(str, sorted(shapes)))}")
    group = next(_groups)
    return tuple(annotate(tensor, torch.ops.tpshard.grouped, group, None) for tensor in tensors)


MIRRORED = {"none": "none", "forward": "backward", "backward": "forward", "both": "both"}
"""For each `allowed` of a propagation barrier, the one of the barrier between the gradients."""


def propagation_barrier(tensor: torch.Tensor, allowed: str = "none") -> torch.Tensor:
    """The same tensor, behind a barrier to propagation: shardings pass it only as `allowed` says.

    "forward": from what computes the tensor to what reads the result; "backward": the other way; "none": in neither;
    "both": it is no barrier. Outside of `partition` it changes nothing. ValueError for another word.
    """
    if allowed not in MIRRORED:
        raise ValueError(f"a propagation barrier allows {', '.join(MIRRORED)}, not {allowed!r}")
    return annotate(tensor, torch.ops.tpshard.propagation_barrier, allowed, MIRRORED[allowed])


def split_as(tensor: torch.Tensor, mesh: Mesh, sharding: Sharding) -> torch.Tensor:
    """Annotates a tensor and its gradient with a `Sharding`; unlike `mesh_split`, also inside of a manual region."""
    text = sharding.show(mesh)
    return annotate(tensor, torch.ops.tpshard.mesh_split, text, text)


def boundary(tensor: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """Marks where the parameter `name` leaves its storage (`kind` "parameter") or its gradient enters it
    ("gradient")."""
    return torch.ops.tpshard.boundary(tensor, kind, name)


def role(tensor: torch.Tensor, role: str) -> torch.Tensor:
    """States the role of a tensor and its gradient in a step, such as `logits`, for the plan's memory categories."""
    return annotate(tensor, torch.ops.tpshard.role, role, role)
