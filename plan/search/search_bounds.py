"""Bounds of a variant that are known before it is built: the least memory, the least time, and the layers to build.

The memory is a lower bound, not an estimate: parameters, gradients and moments divided by all axes but dp, plus the
activations, or the layers' gathered parameters where all are kept, that a device holds at once. The activations of one
layer are those in a model with few layers. The time is that of a priced step without what a change may save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.parallelism.depth import COMPARED, REPEATED
from tpshard.parallelism.passes.run import run
from tpshard.parallelism.pricing.fusion import Kernel, kernels
from tpshard.parallelism.pricing.liveness import liveness
from tpshard.parallelism.program import INFO, info
from tpshard.plan.step.pricing import Pricing
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.pass_choices import compiled_by
from tpshard.programs.parts.passes import saving
from tpshard.programs.setting import cluster
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.few_layers import shallow_program
from tpshard.programs.step.splitting import layers_of
from tpshard.programs.step.staged import table_of
from tpshard.recipes.keys.parallel_keys import RematEvery
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import with_changes

DEEP = 40
"""The number of layers from which on activations are bounded by building a few layers; fewer are priced as fast."""
MOST_LAYERS = 1_600
"""Layers that a search builds, of all variants together: 50 variants of a model with 32 layers."""
COPIES, CASTS, ONCE = "copies", "casts", "once"
SAVED_BY: dict[str, set[str]] = {
    "fsdp.prefetch": set(), "fsdp.bucket": {COPIES}, "fsdp.reshard_after_forward": {COPIES, CASTS},
    "fsdp.accumulate.gather": {COPIES, CASTS}, "mesh.dp": {COPIES, CASTS, ONCE}, "mesh.fsdp": {COPIES, CASTS, ONCE},
}  # fmt: skip
"""The computing that a change of these keys may save: copies into and out of buckets, casts of stored parameters, and
the programs that run once a step. All other computing stays as it is, and communication may hide behind it."""


def least_seconds(pricing: Pricing, changes: Iterable[str]) -> float:
    """A lower bound of a step's seconds with changes of how a priced step communicates; 0 for other changes, and for
    steps with stages, whose waiting may change. Changes of the mesh keep the product of dp and fsdp."""
    keys = {change.partition("=")[0] for change in changes}
    if pricing.pipeline is not None or not keys <= SAVED_BY.keys():
        return 0.0
    saved = {what for key in keys for what in SAVED_BY[key]}
    least_s = 0.0
    for part in pricing.parts:
        if ONCE in saved and part.part.times == 1 and part.part.name != "micro-batch":
            continue
        tasks = zip(part.priced.tasks, part.priced.kernels)
        avoidable_s = sum(task.seconds for task, kernel in tasks if task.kind == "compute" and _kind(kernel) in saved)
        least_s += part.part.times * (part.timeline.compute_s - avoidable_s)
    return least_s


def _kind(kernel: Kernel) -> str:
    """The key of `SAVED_BY` for a kernel's computing; "" for what no change of communication saves."""
    node, operands = kernel.node, kernel.node.all_input_nodes
    if INFO in node.meta and info(node).unit:
        return COPIES
    return CASTS if len(operands) == 1 and operands[0].op == "placeholder" else ""


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
        held = self.state(mesh) + device.context_bytes
        if held + (gathered := self._gathered(variant, mesh)) > device.memory_bytes:  # builds nothing
            return held + gathered
        return held + max(gathered, self._activations(variant))

    def _gathered(self, variant: Recipe, mesh: dict[str, int]) -> int:
        """A lower bound of the bytes of gathered parameters that a device holds at the end of the forward pass, besides
        those as they are stored: 0 where they are gathered again."""
        fsdp, setting = variant.fsdp, Setting.of(variant, devices_of(variant))
        kept = fsdp.reshard_after_forward is False or setting.gathers_once
        if not kept or setting.depth is None or "pp" in mesh or math.prod(mesh.get(axis, 1) for axis in fsdp.axes) == 1:
            return 0
        parameters = dict(setting.model.named_parameters())
        used = sum(p.numel() * setting.used_dtype(name).itemsize for name, p in parameters.items()
                   if setting.depth.layer(name) is not None)  # fmt: skip
        return used // math.prod(size for axis, size in mesh.items() if axis not in ("dp", *fsdp.axes))

    def _activations(self, variant: Recipe) -> int:
        """A lower bound of the bytes of activations that the fullest device holds at once."""
        setting, remat = Setting.of(variant, devices_of(variant)), variant.remat
        layers, pipeline = setting.layers, variant.pipeline
        if layers < DEEP or (pipeline is not None and pipeline.vectorized):
            return 0
        if isinstance(remat, RematEvery) and remat.first is None and not remat.modules and not variant.staged:
            none, full = (self._activations(with_changes(variant, [f"remat={one}"])) for one in ("none", "full"))
            return (none * (remat.every - 1) + full) // remat.every
        each = self._memo.of("activations of a layer", setting, lambda: _activations_of_layer(setting, self._memo))
        if not variant.staged:
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


def _activations_of_layer(setting: Setting, memo: Memo) -> int:
    """Bytes of activations of one layer and micro-batch: by how much they grow over a layer of a shallow model."""
    few, depth = shallow_program(setting, memo=memo), setting.depth
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
