"""Process groups, one for each set of mesh (sub-)axes, under the name that a program's graph uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from tpshard.parallelism.mesh import Axes, Axis, Mesh
from tpshard.parallelism.program import group_name

# a NewType of str in some versions of torch, and str in others
_register: Callable[[str, dist.ProcessGroup], None] = c10d._register_process_group  # type: ignore[assignment]
_unregister: Callable[[str], None] = c10d._unregister_process_group  # type: ignore[assignment]


class Groups:
    """This rank's process groups over sets of mesh axes.

    Every rank creates the groups of one `ensure` in the same order. Within a group the ranks ascend, as in the mesh
    (`dist.new_group` would sort them anyway). Each group is registered under `group_name(axes)`, so that the
    `_c10d_functional` ops of a graph name the same group on every rank.

    >>> groups.ensure(collective.refs for collective in program.collectives)
    """

    def __init__(self, mesh: Mesh, *, backend: str | None = None, timeout: timedelta | None = None):
        """timeout: how long a collective may take, by default as long as the library lets it."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if mesh.ranks != world:
            raise ValueError(f"the mesh {mesh.axes} has {mesh.ranks} devices, but {world} workers were started")
        self.mesh = mesh
        self.backend, self.timeout = backend, timeout
        self._groups: dict[Axes, dist.ProcessGroup] = {}

    def ensure(self, sets: Iterable[Sequence[Axis]]) -> None:
        """Creates the missing groups over these sets of axes. Every rank must call it with the same sets."""
        missing = {axes for axes in map(self.mesh.sorted, sets) if axes and axes not in self._groups}
        for axes in sorted(missing, key=lambda axes: [self.mesh.key(axis) + (axis.size,) for axis in axes]):
            own_group = self.divide(self.mesh.groups(axes), group_name(axes))
            assert own_group is not None, "the groups over any axes cover every rank"
            _register(group_name(axes), own_group)
            self._groups[axes] = own_group

    def divide(self, members: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
        """This rank's group among several without common ranks, which are made at once; None if it is in none of them.

        Every rank must call it with the same ones. A communicator that is bound to devices is split once for all of
        them, where torch can leave the other backend's groups as they are; otherwise they are made one by one.
        """
        ascending = [sorted(ranks) for ranks in members]
        if self._splits:
            split: Any = dist.split_group  # whose `backend` torch 2.11 does not have
            return split(split_ranks=ascending, timeout=self.timeout, group_desc=name, backend="cuda:nccl")  # type: ignore[no-any-return]
        own = None
        for ranks in ascending:
            group = dist.new_group(ranks, self.timeout, self.backend, group_desc=name)
            if dist.get_rank() in ranks:
                own = group
        return own

    @property
    def _splits(self) -> bool:
        """Whether the default group's communicator can be split: it is bound to a device, by NCCL."""
        bound = self.backend == "nccl" and getattr(dist.group.WORLD, "bound_device_id", None) is not None
        return bound and "backend" in inspect.signature(dist.split_group).parameters

    def close(self) -> None:
        """Forgets the groups, so that another mesh can use the same names."""
        for axes in self._groups:
            _unregister(group_name(axes))
        self._groups.clear()
