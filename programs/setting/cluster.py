"""The device that a recipe targets, which may differ from this machine's."""

from __future__ import annotations

import math

import torch
from tpshard.devices.read import device
from tpshard.diagnostics.diagnostic import Exit, Mistakes, join
from tpshard.parallelism.pricing.cost import Device
from tpshard.programs.fit.fit import devices
from tpshard.recipes.keys.schema import DEVICES, Recipe

ASSUMED = "cpu"
"""The device of a recipe that names none; the planning machine is never inspected."""


def devices_of(recipe: Recipe) -> int:
    """The number of devices that the recipe names; an axis of -1 without a cluster has those of this machine, or 1."""
    if (named := devices(recipe)) is not None:
        return named
    return max(math.prod(size for size in recipe.mesh.values() if size != -1), torch.cuda.device_count())


def device_of(recipe: Recipe) -> tuple[Device, int, int]:
    """(device, hosts, devices per host) of a recipe. Raises `Mistakes` for an invalid device file."""
    if recipe.cluster is None:
        return device(ASSUMED), 1, devices_of(recipe)
    described = device(recipe.cluster.device, recipe.where("cluster.device"))
    return described, recipe.cluster.nodes, recipe.cluster.devices_per_node


def check_fp8(recipe: Recipe) -> None:
    """Raises `Mistakes` where a recipe trains in fp8 on a GPU whose file has no rate for it."""
    target = device_of(recipe)[0]
    if recipe.model.dtype != "fp8" or target.kind != "gpu" or "fp8" in target.rates:
        return
    able = [name for name in DEVICES if "fp8" in device(name).rates]
    raise Mistakes.one(
        f"{target.name} cannot multiply fp8: its file has no rate for it",
        exit=Exit.FIT,
        where=recipe.where("model.dtype"),
        fix=f"cluster.device: {join(able)}; or dtype: bf16",
    )
