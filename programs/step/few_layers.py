"""Few layers for many: programs of a deep model from those of a shallow one, and equal pipeline stages built once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tpshard.parallelism.depth import Depth
from tpshard.parallelism.partitioning.stretch import renumbered, stretch_program, stretched_records
from tpshard.parallelism.pipeline.stages import Stage
from tpshard.parallelism.program import Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.checks import check_remat, check_reshards, control_flow_notes, traceable
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.step_programs import MicroMaker, counters_of, trained_by
from tpshard.programs.setting.naming import untrained_notes
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.device_programs import DevicePrograms, device_programs, held_by_devices
from tpshard.programs.step.splitting import balance_stages, layers_of
from tpshard.programs.step.staged import finished_stages, recompute_uncut, table_of
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.recipes.keys.parallel_keys import BucketFile, RematEvery
from tpshard.recipes.keys.schema import Recipe

FEWEST = 3
"""The smallest number of repetitions of a block (`Depth.copies`) for which a shallow model is built instead."""


def micro_program(setting: Setting, base: Program | None = None, memo: Memo | None = None) -> Program:
    """Builds the micro-batch's program: from that of a shallow model if its blocks are equal, else from all layers.

    base: as in `step_programs.micro_program`. memo: keeps the program; callers must not change it.
    """
    memo = memo or Memo()

    def make() -> Program:
        few, depth = shallow_program(setting, base, memo), setting.depth
        if few is not None and depth is not None:
            deep = stretch_program(few, depth)
            if deep is not None:
                return deep
        return step_programs.micro_program(setting, base, memo=memo)

    return memo.of("micro-batch", setting, make, *_once(setting, base))


def shallow_program(setting: Setting, base: Program | None = None, memo: Memo | None = None) -> Program | None:
    """The micro-batch's program of the same model with few layers; None if that saves nothing or layers may differ.

    memo: keeps the program; callers must not change it.
    """
    depth, pipeline = setting.depth, setting.recipe.pipeline
    if depth is None or depth.copies < FEWEST or _names_layers(setting):
        return None
    if pipeline is not None and pipeline.vectorized:  # its layers are stacked
        return None
    shallow = setting.keep(depth.stack, depth.kept)
    memo = memo or Memo()

    def make() -> Program:
        with traceable(setting):
            return step_programs.micro_program(shallow, base, memo=memo)

    return memo.of("micro-batch of few layers", shallow, make, *_once(shallow, base))


def _once(setting: Setting, base: Program | None) -> tuple[object, ...]:
    """What is done once for all micro-batches, with the layouts in `base` on which a program then depends."""
    if base is None:
        return ()
    names = [f"{name}.{form}" for form in ("used", "grad") for name, _ in setting.model.named_parameters()]
    layouts = [base.records[name].layout for name in names if name in base.records]
    return setting.gathers_once, setting.reduces_once, layouts


def _names_layers(setting: Setting) -> bool:
    """Whether the recipe names single layers, such as `layers.3`."""
    sharding = setting.recipe.sharding
    return any(part.isdigit() for name in (*sharding.annotate, *sharding.pin) for part in name.split("."))


def noted_micro(setting: Setting, base: Program, make: MicroMaker) -> Program:
    """The micro-batch's program with the recipe's gathering and reducing once per step, and with its notes. `base` is
    the program without them, of which only the records are read if it gathers or reduces once a step."""
    micro = make(setting, base) if setting.gathers_once or setting.reduces_once else base
    check_remat(setting, micro)
    notes = [*setting.notes, *untrained_notes(setting.model, trained_by(micro))]
    notes += [*micro.warnings, *check_reshards(setting, micro), *control_flow_notes(setting, micro)]
    return replace(micro, warnings=notes)


def priced_stages(setting: Setting, memo: Memo | None = None) -> TrainingPrograms | None:
    """`training.build` of a recipe with stages, with equal stages and equal devices' programs built once. `memo` keeps
    them for other schedules, and programs of models with few layers.

    None if the model's layers differ, by themselves or in what the recipe does to them. Raises Mistakes for what does
    not fit.
    """
    if _treats_layers_apart(setting.recipe):
        return None
    depth, table = setting.depth, table_of(setting)
    if len(setting.stacks) == 1:  # raises before anything is built
        layers_of(setting, setting.layers, table.stages)
    if depth is None or depth.period != 1 or depth.head:
        return None
    even = layers_of(setting, depth.layers, table.stages)
    memo = memo or Memo()
    if (few := shallow_program(setting, memo=memo)) is None:
        return None
    records = stretched_records(few, depth)
    if records is None:
        return None
    base = replace(few, records=records)
    cut = _AlikeStages(setting, depth, memo, base)
    layers, stages = balance_stages(setting, even, table.devices, cut.stages)
    names = [name for name, _ in setting.model.named_parameters()]
    ports = {p.name: p.layout for p in few.inputs if p.kind == "parameter"}
    storage = {name: ports[_in_few(depth, name)] for name in names}
    held = held_by_devices(table, _names(depth, names, layers, stages), names)
    trained_in_few = trained_by(few)
    trained = {name for name in names if _in_few(depth, name) in trained_in_few}
    devices = []
    for i, own_names in enumerate(held):
        alike = [(_in_few(depth, name), [j - i for j, names in enumerate(held) if name in names]) for name in own_names]
        make = partial(device_programs, setting, storage, base, held, i, trained, counters_of(few), memo)
        devices.append(memo.of("device's programs", setting, make, alike))
    return TrainingPrograms(setting, few, table, tuple(devices), storage, tuple(layers), stages)


def programs_of_devices(
    setting: Setting, storage: Mapping[str, Layout], base: Program, by_device: Sequence[Sequence[str]],
    trained: Collection[str], counters: int, memo: Memo,
) -> tuple[DevicePrograms, ...]:  # fmt: skip
    """What each device runs once per step (`device_programs`); where two hold alike layers alone, the second one's
    programs are the first one's with other numbers."""
    done: list[DevicePrograms] = []
    for i, names in enumerate(by_device):
        apart = _treats_layers_apart(setting.recipe) or _names_layers(setting)
        twins = (
            (other, _distance(setting, by_device[other], names, storage, trained)) for other in range(i * (not apart))
        )
        j, by = next((twin for twin in twins if twin[1] is not None), (0, None))
        programs = None if by is None else _renumbered(done[j], setting.depth, by)
        done.append(programs or device_programs(setting, storage, base, by_device, i, trained, counters, memo))
    return tuple(done)


def _distance(
    setting: Setting, names: Sequence[str], others: Sequence[str], storage: Mapping[str, Layout],
    trained: Collection[str],
) -> int | None:  # fmt: skip
    """By how many layers the parameters of one device are further than another's; None where they are not alike."""
    depth = setting.depth
    if depth is None or depth.period != 1 or depth.head or len(names) != len(others):
        return None
    first, second = (depth.layer(each[0]) if each else None for each in (names, others))
    if first is None or second is None:
        return None
    by = second - first
    alike = all(
        depth.layer(name) is not None and depth.shift_name(name, by) == other and storage[name] == storage[other]
        and (name in trained) == (other in trained)
        for name, other in zip(names, others)
    )  # fmt: skip
    return by if alike else None


def _renumbered(of: DevicePrograms, depth: Depth | None, by: int) -> DevicePrograms | None:
    """The programs with other numbers of layers; None where their warnings name one."""
    if depth is None or any(depth.names_a_layer(text) for one in of.by_role.values() for text in one.warnings):
        return None
    moved = {role: renumbered(program, depth, by) for role, program in of.by_role.items()}
    names, trained = (tuple(depth.shift_name(name, by) for name in each) for each in (of.names, of.trained))
    return replace(of, names=names, trained=trained, **moved)


def _treats_layers_apart(recipe: Recipe) -> bool:
    """Whether recomputation, units or buckets may differ between layers, and so between stages: a limit leaves earlier
    stages less, which hold more activations."""
    fsdp = recipe.fsdp
    if fsdp.memory_limit is not None:
        return True
    if isinstance(recipe.remat, RematEvery) or isinstance(fsdp.bucket, BucketFile):
        return True
    patterns = [*fsdp.wrap, *(fsdp.bucket if isinstance(fsdp.bucket, tuple) else ())]
    names = [name for entry in patterns for name in ([entry] if isinstance(entry, str) else entry)]
    return any(re.search(r"[\d?\[]", name) for name in names)


KINDS = 8
"""How many kinds of stages are kept."""
Kind = tuple[str, int]
"""The place of a stage (first, middle or last), and its number of layers: stages of a kind have equal prices."""


class _AlikeStages:
    """Builds the stages of a pipeline's splits from models with fewer layers, each kind of stage once."""

    def __init__(self, setting: Setting, depth: Depth, memo: Memo, base: Program):
        """base: the micro-batch's program of a model with few layers, with the records of all layers."""
        self.setting, self.depth, self.table, self.base = setting, depth, table_of(setting), base
        self.make = partial(micro_program, memo=memo)
        self.built: dict[Kind, Stage] = memo.of("stages by kind", setting, dict, self.table.splits_backward)

    def _kinds(self, split: Sequence[int]) -> list[Kind]:
        """The kind of the first stage, the kinds of middle stages, and that of the last, each once."""
        return [("first", split[0]), *(("middle", count) for count in sorted(set(split[1:-1]))), ("last", split[-1])]

    def stages(self, split: Sequence[int]) -> tuple[Stage, ...]:
        kinds = self._kinds(split)
        if any(kind not in self.built for kind in kinds):
            self._build([kinds[0], *(kind for kind in kinds[1:-1] if kind not in self.built), kinds[-1]])
        for kind in [kind for kind in self.built if kind not in kinds][: max(0, len(self.built) - KINDS)]:
            del self.built[kind]
        all_stages = [self.built["first", split[0]], *(self.built["middle", count] for count in split[1:-1])]
        return tuple(replace(stage, index=i) for i, stage in enumerate([*all_stages, self.built["last", split[-1]]]))

    def _build(self, kinds: Sequence[Kind]) -> None:
        """Builds the stages of those `kinds`, in the order of the model, that are not built yet."""
        layers = [count for _, count in kinds]
        shorter = self.setting.keep(self.depth.stack, range(sum(layers)))
        base = self.base if shorter.gathers_once or shorter.reduces_once else self.make(shorter)
        again = recompute_uncut(shorter, noted_micro(shorter, base, self.make))
        new = {i: kind for i, kind in enumerate(kinds) if kind not in self.built}
        self.built.update(zip(new.values(), finished_stages(shorter, again, self.table, layers, new)))


def _in_few(depth: Depth, name: str) -> str:
    """The name of a parameter in the model with few layers."""
    layer = depth.layer(name)
    return name if layer is None else depth.shift_name(name, 1 - layer)


def _names(depth: Depth, names: Sequence[str], layers: Sequence[int], stages: Sequence[Stage]) -> list[list[str]]:
    """The parameters of each stage: those of its layers, and those outside of layers of the first and the last."""
    stage_of: dict[int, int] = {}
    for place, count in enumerate(layers):
        for _ in range(count):
            stage_of[len(stage_of)] = place
    by_stage: list[list[str]] = [[] for _ in layers]
    for name in names:
        if (layer := depth.layer(name)) is not None:
            by_stage[stage_of[layer]].append(name)
            continue
        for stage in (stages[0], stages[-1]):
            if name in stage.parameters:
                by_stage[stage.index].append(name)
    return by_stage
