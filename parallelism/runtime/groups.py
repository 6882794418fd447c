"""Process groups, one for each set of mesh (sub-)axes, under the name that a program's graph uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

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
            own_group = None
            for ranks in self.mesh.groups(axes):
                group = dist.new_group(ranks, self.timeout, self.backend, group_desc=group_name(axes))
                if dist.get_rank() in ranks:
                    own_group = group
            assert own_group is not None, "the groups over any axes cover every rank"
            _register(group_name(axes), own_group)
            self._groups[axes] = own_group

    def close(self) -> None:
        """Forgets the groups, so that another mesh can use the same names."""
        for axes in self._groups:
            _unregister(group_name(axes))
        self._groups.clear()
