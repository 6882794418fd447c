"""The device that a recipe targets, which may differ from this machine's."""

from __future__ import annotations

from tpshard.devices.read import device
from tpshard.parallelism.cost import Device
from tpshard.programs.setting import devices_of
from tpshard.recipes.schema import Recipe

ASSUMED = "cpu"
"""The device of a recipe that names none; the planning machine is never inspected."""


def device_of(recipe: Recipe) -> tuple[Device, int, int]:
    """(device, hosts, devices per host) of a recipe. Raises `Mistakes` for an invalid device file."""
    if recipe.cluster is None:
        return device(ASSUMED), 1, devices_of(recipe)
    described = device(recipe.cluster.device, recipe.where("cluster.device"))
    return described, recipe.cluster.nodes, recipe.cluster.devices_per_node
