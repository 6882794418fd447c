"""The sizes of a mesh on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Notes, Source


def misfit(mesh: Mapping[str, int], world: int, where: Source, also: Notes = ()) -> list[Diagnostic]:
    """The mistake, if any, of a mesh with another number of devices than `world`. `where`: the mesh's place."""
    product = math.prod(size for size in mesh.values() if size != -1)
    rest = -1 in mesh.values()
    if world % product == 0 if rest else product == world:
        return []
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
    near = [
        "{" + ", ".join(f"{axis}: {size}" for axis, size in other.items() if size != 1) + "}"
        for other in nearest_meshes(mesh, world)[:3]
    ]
    why = f"{product} does not divide {world}" if rest else f"the product is {product}"
    fix = "mesh: " + " or ".join(near) if near else f"sizes whose product is {world}"
    message = f"the mesh {sizes or '1'} does not fit {world} devices"
    return [Diagnostic(message, Exit.MACHINE, where, why, fix, also=also)]


def nearest_meshes(mesh: Mapping[str, int], world: int) -> list[dict[str, int]]:
    """Meshes on `world` devices that differ from `mesh` in one axis, closest first."""
    by_distance = []
    for axis, size in mesh.items():
        whole, left = divmod(world, math.prod(s for other, s in mesh.items() if other != axis and s != -1))
        if size != -1 and not left:
            legal = [n for n in range(1, whole + 1) if whole % n == 0] if -1 in mesh.values() else [whole]
            best = min(legal, key=lambda n: abs(math.log(n / size)))
            by_distance.append((abs(math.log(best / size)), {**mesh, axis: best}))
    return [candidate for _, candidate in sorted(by_distance, key=lambda pair: pair[0]) if candidate != mesh]
