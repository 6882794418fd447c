"""A recipe's keys with type, default and allowed values. The docstring below a field is its documentation.

The sections are in `model_keys`, `adapter_keys`, `data_keys`, `parallel_keys`, `training_keys` and `serving_keys`.
`tpshard recipes keys` prints all keys, `tpshard recipes schema` as JSON Schema; docs/recipes.md explains recipes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from tpshard.diagnostics.diagnostic import Mistakes, Source
from tpshard.recipes.keys import training_keys as training
from tpshard.recipes.keys.adapter_keys import Adapters
from tpshard.recipes.keys.constraints import RUN_NAME, AxisName, AxisSize, form, limits, name_or_file
from tpshard.recipes.keys.data_keys import Data
from tpshard.recipes.keys.mesh_sizes import misfit
from tpshard.recipes.keys.model_keys import Model
from tpshard.recipes.keys.parallel_keys import Fsdp, OffloadFirst, Pipeline, RematEvery, ShardingSection
from tpshard.recipes.keys.serving_keys import Quantize, Serve
from tpshard.recipes.text.section import Section, derived

SCHEMA_VERSION = 1

DEVICES = tuple(sorted(path.stem for path in (Path(__file__).parents[2] / "devices").glob("*.yaml")))
"""Names of the shipped device files."""


class Cluster(Section):
    """The machines that the recipe is for: `plan` prices them, and `train` compares its machine with them."""

    paths: ClassVar[tuple[str, ...]] = ("device",)

    device: Annotated[str, name_or_file(DEVICES, ".yaml")]
    """The name of a device, or a file that describes one."""
    nodes: Annotated[int, limits(least=1, most=2**17)] = 1
    """Number of hosts."""
    devices_per_node: Annotated[int, limits(least=1, most=1024)] = derived(default="what the mesh needs", saved=False)
    """Devices per host."""


class Recipe(Section):
    """A complete recipe. Everything except `model` has a default."""

    schema: int = SCHEMA_VERSION
    """Version of these keys."""
    name: Annotated[str, RUN_NAME] = derived(default="the file's name")
    """Name of the run."""
    seed: Annotated[int, limits(least=0, most=2**63 - 1)] = 42
    """Seed of initialization, data order and sampling."""
    cluster: Cluster | None = None
    """The machines it is for. Default: this machine, with as many devices as the mesh needs."""
    mesh: Mapping[AxisName, AxisSize] = field(default_factory=lambda: {"dp": 1, "fsdp": -1, "tp": 1})
    """The size of each mesh axis, outer to inner; -1: all remaining devices. Omitted dp, fsdp and tp have size 1."""
    model: Model
    adapters: Adapters = field(default_factory=Adapters)
    task: Annotated[str, form(r"lm|mlm|frames|volumes|[\w.]+:[\w.]+", "lm, mlm, frames, volumes or package:Class")] = (
        "lm"
    )
    """The training task: next token, masked tokens, classes of frames, classes of voxels, or your own task as
    package:Class. Frames and volumes are generated, seq_len long."""
    loss: training.Loss = field(default_factory=training.Loss)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    fsdp: Fsdp = field(default_factory=Fsdp)
    remat: Literal["none", "full", "selective"] | RematEvery | tuple[str, ...] = "selective"
    """What is recomputed in the backward pass: nothing, everything, everything except matmul and attention outputs,
    every n-th layer ({every: 2}), the first n layers ({first: 8}), some modules ({modules: layers.*.mlp}), or
    everything except a list of operations."""
    offload: Literal["none", "activations"] | OffloadFirst = "none"
    """What waits for the backward pass in pinned memory of the host: nothing; activations, all that `remat` saves of
    layers but the last; or those of the first n layers ({first: 8}). Copies run beside computation. On a CPU, whose
    memory is the host's, they save nothing. Not with a pipeline."""
    compile: Literal["auto", "inductor", "blocks", "eager"] = "auto"
    """What is compiled of a device's program: all of it; only its layers, while the rest (the loss, the optimizer) runs
    eagerly; or nothing. `auto` is inductor, or blocks for a program of so many operations that inductor would take
    minutes, which the plan says."""
    pipeline: Pipeline | None = None
    """Pipeline stages; needs a mesh axis `pp`."""
    data: Data = field(default_factory=Data)
    batch: training.Batch = field(default_factory=training.Batch)
    optimizer: training.Optimizer = field(default_factory=training.Optimizer)
    schedule: training.Schedule = field(default_factory=training.Schedule)
    train: training.Train = field(default_factory=training.Train)
    evaluate: training.Evaluate = field(default_factory=training.Evaluate)
    timeout_s: training.Timeout = field(default_factory=training.Timeout)
    launch: training.Launch = field(default_factory=training.Launch)
    run: training.Run = field(default_factory=training.Run)
    resume: Literal["auto", "never", "force"] = derived(default="checkpoint.resume", saved=False)
    """Short for checkpoint.resume, and stronger: `resume=force` for one command. A run's recipe.yaml omits it."""
    checkpoint: training.Checkpoint = field(default_factory=training.Checkpoint)
    logging: training.Logging = field(default_factory=training.Logging)
    quantize: Quantize = field(default_factory=Quantize)
    serve: Serve = field(default_factory=Serve)

    file: ClassVar[str] = ""
    """The file from which the recipe was read."""
    _places: ClassVar[Mapping[str, tuple[Source, Source]]] = {}
    """The places of each written key and its value."""
    _origin: ClassVar[Any] = None
    """What it was loaded from: `load.Origin`."""

    def where(self, key: str) -> Source:
        """The place where a key got its value: the value, or the key if the value spans lines.

        For a default, a source without a line that names it.
        """
        if key in self._places:
            name, value = self._places[key]
            return value if value.line == name.line and value.text == name.text else name
        return Source(f"<default {key}>", 0, 0, key)

    def source_key(self, number: int) -> str:
        """The key that names one of `data.all_sources`."""
        return f"data.sources.{number}.source" if self.data.sources else "data.source"

    def source_place(self, number: int) -> Source:
        """The place that names one of `data.all_sources`."""
        return self.where(self.source_key(number))

    def changes(self, key: str) -> tuple[tuple[Source, str], ...]:
        """The places elsewhere that changed entries of a map, each with the entry."""
        where = self.where(key)
        entries: Any = reduce(getattr, key.split("."), self)
        places = {name: self.where(f"{key}.{name}") for name in entries}
        elsewhere = {name: place for name, place in places.items() if place.line and place.file != where.file}
        return tuple((place, f"{name}: {entries[name]}") for name, place in elsewhere.items()) if where.line else ()

    def to_yaml(self, *, resolved: bool = False, pins: Mapping[str, Any] | None = None) -> str:
        """The recipe as YAML that loads to the same: complete, with interpolations, or `resolved` to known values.

        `pins` are added to those of `sharding.pin`. Secrets are masked.
        """
        from tpshard.recipes.text.write import as_data, dump

        data = as_data(self, resolved=resolved)
        if pins is not None:
            data["sharding"]["pin"] |= as_data(pins)
        return dump(data)

    @property
    def staged(self) -> bool:
        """Whether devices run programs of their own stages."""
        return self.pipeline is not None and not self.pipeline.vectorized

    def mesh_on(self, devices: int) -> dict[str, int]:
        """The mesh with -1 replaced by the remaining `devices`. Raises `Mistakes` (exit 5) when they do not fit."""
        if wrong := misfit(self.mesh, devices, self.where("mesh"), self.changes("mesh")):
            raise Mistakes(wrong)
        rest = devices // math.prod(size for size in self.mesh.values() if size != -1)
        return {axis: rest if size == -1 else size for axis, size in self.mesh.items()}
