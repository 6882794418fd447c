"""The device that a recipe is for, which need not be here."""

from __future__ import annotations

from tpshard.devices.read import device
from tpshard.parallelism.cost import Device
from tpshard.programs.setting import devices_of
from tpshard.recipes.schema import Recipe

ASSUMED = "cpu"
"""Device of a recipe that names none: the machine that plans is never looked at."""


def device_of(recipe: Recipe) -> tuple[Device, int, int]:
    """(device, hosts, devices on each) that a recipe asks for. Raises `Mistakes` for a device file that is wrong."""
    if recipe.cluster is None:
        return device(ASSUMED), 1, devices_of(recipe)
    found = device(recipe.cluster.device, recipe.where("cluster.device"))
    return found, recipe.cluster.nodes, recipe.cluster.devices_per_node
