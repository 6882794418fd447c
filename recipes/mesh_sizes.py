"""The sizes of a mesh on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpshard.recipes.diagnostic import Diagnostic, Exit, Mistakes, Source


def mesh_on(mesh: Mapping[str, int], devices: int, where: Source) -> dict[str, int]:
    """The mesh with -1 replaced by the remaining `devices`. Raises `Mistakes` (exit 5) when they do not fit."""
    wrong = misfit(mesh, devices, where)
    if wrong is not None:
        raise Mistakes([wrong])
    rest = devices // math.prod(size for size in mesh.values() if size != -1)
    return {axis: rest if size == -1 else size for axis, size in mesh.items()}


def misfit(
    mesh: Mapping[str, int], world: int, where: Source, also: tuple[tuple[Source, str], ...] = ()
) -> Diagnostic | None:
    """The mistake of a mesh with another number of devices than `world`; None if it fits. `where`: the mesh's place."""
    product = math.prod(size for size in mesh.values() if size != -1)
    rest = -1 in mesh.values()
    if world % product == 0 if rest else product == world:
        return None
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
    near = [
        "{" + ", ".join(f"{axis}: {size}" for axis, size in other.items() if size != 1) + "}"
        for other in nearest_meshes(mesh, world)[:3]
    ]
    return Diagnostic(
        f"the mesh {sizes or '1'} does not fit {world} devices",
        exit=Exit.MACHINE,
        where=where,
        why=f"{product} does not divide {world}" if rest else f"the product is {product}",
        fix="mesh: " + " or ".join(near) if near else f"sizes whose product is {world}",
        also=also,
    )


def nearest_meshes(mesh: Mapping[str, int], world: int) -> list[dict[str, int]]:
    """Meshes on `world` devices that differ from `mesh` in one axis, closest first."""
    fixed = {axis: size for axis, size in mesh.items() if size != -1}
    by_distance = []
    for axis in mesh:
        others = math.prod(size for other, size in fixed.items() if other != axis)
        if world % others == 0:
            size = world // others
            by_distance.append((abs(math.log(size / max(fixed.get(axis, size), 1))), {**mesh, axis: size}))
    if -1 in mesh.values():
        for axis, size in fixed.items():
            others = math.prod(s for a, s in fixed.items() if a != axis)
            legal = [d for d in range(1, world + 1) if world % (d * others) == 0]
            if legal:
                best = min(legal, key=lambda d: abs(math.log(d / size)))
                by_distance.append((abs(math.log(best / size)), {**mesh, axis: best}))
    meshes: list[dict[str, int]] = []
    for _, candidate in sorted(by_distance, key=lambda pair: pair[0]):
        if candidate not in meshes and candidate != mesh:
            meshes.append(candidate)
    return meshes
