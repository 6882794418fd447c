"""Building a pipeline's programs for pricing only: equal stages are built once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tpshard.parallelism.program import Program
from tpshard.parallelism.stages import Stage
from tpshard.parallelism.stretch import stretch_program
from tpshard.programs.alike import STACK, few_layers, micro
from tpshard.programs.memo import Memo, key_of_partition
from tpshard.programs.setting import Setting
from tpshard.programs.splitting import balance_stages, layers_of
from tpshard.programs.staged import (
    DevicePrograms,
    StagedPrograms,
    axis_of,
    device_programs,
    finished_stages,
    recompute_uncut,
    table_of,
)
from tpshard.recipes.parallel_keys import BucketFile, RematEvery
from tpshard.recipes.schema import Recipe


def build(setting: Setting, memo: Memo | None = None) -> tuple[Program, StagedPrograms] | None:
    """`staged.build` with equal middle stages built once. `memo` keeps programs of models with few layers.

    None if the model's layers differ, by themselves or in what the recipe does to them, or there are too few stages to
    gain. Raises Mistakes for what does not fit.
    """
    if _treats_layers_apart(setting.recipe):
        return None
    config, table, axis = setting.config, table_of(setting), axis_of(setting)
    if config is None:
        return None
    even = layers_of(setting, config.layers, table.stages)  # raises before anything is built
    memo = memo or Memo()
    if (few := few_layers(setting, memo=memo)) is None:
        return None
    deep = memo.of("deep", key_of_partition(setting), lambda: stretch_program(few, STACK, config.layers))
    if deep is None:
        return None
    cut = _Alike(setting, memo)
    if cut.built_layers(even) >= config.layers:
        return None
    layers, stages = balance_stages(setting, even, table.devices, cut.stages)
    names = [name for name, _ in setting.model.named_parameters()]
    ports = {p.name: p.layout for p in few.inputs if p.kind == "parameter"}
    storage = {name: ports[_in_few(name)] for name in names}
    base = replace(few, records=deep.records)
    of_stage = _names(names, layers, stages)
    held = []
    for device in range(table.devices):
        on_device = {name for stage in table.stages_of(device) for name in of_stage[stage]}
        held.append([name for name in names if name in on_device])
    noted = sum(p.shape[0] for p in few.outputs[2 + len(ports) :])
    built: dict[tuple[str, ...], DevicePrograms] = {}
    devices = []
    for i, own_names in enumerate(held):
        alike = tuple(_in_few(name) for name in own_names)
        if alike not in built:
            built[alike] = device_programs(setting, storage, base, held, i, noted, memo)
        devices.append(built[alike])
    return few, StagedPrograms(setting, axis, table, tuple(layers), stages, tuple(devices), storage)


def _treats_layers_apart(recipe: Recipe) -> bool:
    """Whether recomputation, units or buckets may differ between layers, and so between stages."""
    fsdp = recipe.fsdp
    if isinstance(recipe.remat, RematEvery) or isinstance(fsdp.bucket, BucketFile):
        return True
    patterns = [*fsdp.wrap, *(fsdp.bucket if isinstance(fsdp.bucket, tuple) else ())]
    names = [name for entry in patterns for name in ([entry] if isinstance(entry, str) else entry)]
    return any(re.search(r"[\d?\[]", name) for name in names)


class _Alike:
    """The stages of a model's splits, cut from models with fewer layers."""

    def __init__(self, setting: Setting, memo: Memo):
        self.setting, self.table, self.make = setting, table_of(setting), partial(micro, memo=memo)

    def _counts(self, split: Sequence[int]) -> tuple[int, list[int], int]:
        """The numbers of layers of the first stage, of each kind of middle stage, and of the last."""
        return split[0], sorted(set(split[1:-1])), split[-1]

    def built_layers(self, split: Sequence[int]) -> int:
        """The number of layers of the model from which a split is cut."""
        first, between, last = self._counts(split)
        return first + sum(between) + last

    def stages(self, split: Sequence[int]) -> tuple[Stage, ...]:
        first, between, last = self._counts(split)
        config = self.setting.config
        assert config is not None
        shorter = replace(self.setting, config=replace(config, layers=self.built_layers(split)))
        again = recompute_uncut(shorter, self.make(shorter), self.make)
        head, *inner, tail = finished_stages(shorter, again, self.table, [first, *between, last])
        kinds = dict(zip(between, inner))
        all_stages = [head, *(kinds[count] for count in split[1:-1]), tail]
        return tuple(replace(stage, index=i) for i, stage in enumerate(all_stages))


def _in_few(name: str) -> str:
    """The name of a parameter in the model with few layers."""
    stack, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    return f"{STACK}.1.{rest}" if stack == STACK and number.isdigit() else name


def _names(names: Sequence[str], layers: Sequence[int], stages: Sequence[Stage]) -> list[list[str]]:
    """The parameters of each stage: those of its layers, and those outside of layers of the first and the last."""
    stage_of: dict[int, int] = {}
    for place, count in enumerate(layers):
        for _ in range(count):
            stage_of[len(stage_of)] = place
    by_stage: list[list[str]] = [[] for _ in layers]
    for name in names:
        if _in_few(name) != name or name.startswith(f"{STACK}.1."):
            by_stage[stage_of[int(name.split(".")[1])]].append(name)
            continue
        for stage in (stages[0], stages[-1]):
            if name in stage.parameters:
                by_stage[stage.index].append(name)
    return by_stage


__all__ = ["build"]
