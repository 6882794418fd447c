"""Bounds of a variant that the search computes before it builds it: the least memory, and the layers to build.

The memory is a lower bound, not an estimate: parameters, gradients and moments divided by all axes but dp, plus the
activations that a device holds at once. The activations of one layer are those in a model with few layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.depth import COMPARED, REPEATED
from tpshard.parallelism.passes.run import run
from tpshard.parallelism.pricing.fusion import kernels
from tpshard.parallelism.pricing.liveness import liveness
from tpshard.parallelism.program import info
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.parts.passes import saving
from tpshard.programs.setting import cluster
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.few_layers import shallow_program
from tpshard.programs.step.splitting import layers_of
from tpshard.programs.step.staged import table_of
from tpshard.recipes.keys.schema import Recipe

DEEP = 40
"""The number of layers from which on activations are bounded by building a few layers; fewer are priced as fast."""
MOST_LAYERS = 1_600
"""Layers that a search builds, of all variants together: 50 variants of a model with 32 layers."""


@dataclass
class Bounds:
    """Computes the least memory of a recipe's variants; keeps a layer's activations."""

    recipe: Recipe
    _memo: Memo = field(default_factory=Memo)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all parameters as they are stored, and of the gradients and moments of those to be trained, on all
        devices together."""
        setting = Setting.of(self.recipe, devices_of(self.recipe))
        parameters = dict(setting.model.named_parameters())
        trained = {name: p.numel() for name, p in parameters.items() if name in setting.trained}
        sums = setting.sum_dtype.itemsize * sum(trained.values()) + setting.moment_bytes(trained)
        return sum(p.numel() * p.dtype.itemsize for p in parameters.values()) + sums

    def state(self, mesh: dict[str, int]) -> int:
        """The least bytes of state per device: those if all axes but dp divide it; 0 where others might."""
        recipe = self.recipe
        named = {axis for dim, axes in recipe.sharding.rules.items() if dim != "batch" for axis in axes}
        if "dp" in named or "dp" in recipe.fsdp.axes or recipe.sharding.pin:
            return 0
        return self.state_bytes // math.prod(size for axis, size in mesh.items() if axis != "dp")

    def needed(self, variant: Recipe, mesh: dict[str, int]) -> int:
        """The least bytes that a device needs for a variant. Raises `Mistakes` for one that contradicts itself."""
        device = cluster.device_of(variant)[0]
        held = self.state(mesh) + self._activations(Setting.of(variant, devices_of(variant)))
        return held + device.context_bytes

    def _activations(self, setting: Setting) -> int:
        """A lower bound of the bytes of activations that the fullest device holds at once."""
        layers, pipeline = setting.layers, setting.recipe.pipeline
        if layers < DEEP or (pipeline is not None and pipeline.vectorized):
            return 0
        each = self._memo.of("activations of a layer", setting, lambda: _activations_of_layer(setting))
        if not setting.recipe.staged:
            return layers * each
        table = table_of(setting)
        pairs = [table.most_held(device) for device in range(table.devices)]
        if table.rounds > 1:  # a stage has a layer or more
            return max(pairs) * each
        # the maximum is least where all devices hold equally much: layers of a device x most = layers / sum(1 / most)
        return int(layers * each / sum(1 / most for most in pairs))

    def layers_built(self, variant: Recipe) -> int:
        """The number of layers that are built to price a variant: equal stages of a pipeline are built once."""
        setting = Setting.of(variant, devices_of(variant))
        layers = setting.layers
        if not variant.staged:
            return layers or DEEP
        try:
            split = layers_of(setting, layers, table_of(setting).stages)
        except Mistakes:
            return 0
        return min(layers, split[0] + sum(set(split[1:-1])) + split[-1])


def _activations_of_layer(setting: Setting) -> int:
    """Bytes of activations of one layer and micro-batch: by how much they grow over a layer of a shallow model."""
    few, depth = shallow_program(setting), setting.depth
    if few is None or depth is None or depth.period != 1 or depth.head:
        return 0
    program = run(saving(setting, setting.recipe.fsdp.reshard_after_forward is not False), few)
    # a stage's backward is another program, which gets every saved value, as in a program that is not compiled
    compiled = "none" if setting.recipe.staged else compiled_by(setting.recipe)
    memory = liveness(program, kernels(program, compiled=compiled))
    held = memory.by_category.get("activations", [])
    ends: dict[int, int] = {}
    for i, node in enumerate(program.nodes):
        place = info(node).place
        for layer in (COMPARED, REPEATED):
            if place.phase == "forward" and place.module.startswith(f"{depth.stack}.{layer}."):
                ends[layer] = i
    return max(0, held[ends[REPEATED]] - held[ends[COMPARED]]) if held and len(ends) == 2 else 0
