"""What a recipe decides before any graph is captured: model, mesh, dtypes, and the division of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.adapters.packed_layers import dequantize_in
from tpshard.models.adapters.packed_model import is_quantized
from tpshard.models.dims import STAGE, Naming
from tpshard.models.families.dispatch import ExpertGroups
from tpshard.models.families.layers import multiply_in_fp8
from tpshard.models.families.mlp import group_experts
from tpshard.models.families.routing import balance_steps
from tpshard.models.folders.folder_tokenizer import mask_of
from tpshard.models.folders.foreign_formats import scaled_folder
from tpshard.models.folders.hf_folder import DTYPES
from tpshard.models.layer_stacks import LayerStack, keep_layers, layer_stacks, names_after
from tpshard.models.model_spec import ModelSpec
from tpshard.models.objectives.loss import PLAIN, LossTerms
from tpshard.models.objectives.tasks import Task, task_of
from tpshard.parallelism.depth import Depth
from tpshard.parallelism.mesh import Axes, Axis, Mesh, size_of
from tpshard.programs.fit.batching import BatchPlan, check_micro_batches, derive
from tpshard.programs.fit.fp8_fit import fp8_misfits
from tpshard.programs.fit.parameter_groups import groups_of
from tpshard.programs.fit.recipe_model import model_of
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.programs.setting import naming
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.dropless import Dropless, dropless
from tpshard.programs.setting.layer_matrices import matrices_of_layers
from tpshard.programs.setting.stacked_layers import StackedLayers
from tpshard.programs.setting.stacking import Stacking
from tpshard.recipes.keys.schema import Recipe

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "muon": ("exp_avg", "exp_avg_sq")}
"""Optimizer -> its moments, as checkpoints call them; muon has no `exp_avg_sq` of the matrices that it moves."""


@dataclass(frozen=True)
class Setting:
    """A recipe with everything needed to build its programs."""

    recipe: Recipe
    mesh: Mesh
    spec: ModelSpec
    kept: tuple[str, tuple[int, ...]] | None = None
    """If set, the only layers that are built, of a list; for models whose specification does not count layers."""

    @staticmethod
    def of(recipe: Recipe, devices: int | None = None) -> Setting:
        """The setting of a recipe.

        Raises Mistakes where the mesh does not fit the devices or the model does not exist.
        """
        sizes = recipe.mesh_on(devices if devices is not None else devices_of(recipe))
        return Setting(recipe, Mesh(sizes), model_of(recipe))

    @cached_property
    def model(self) -> nn.Module:
        """The module that a step computes, on `meta`, in the master dtype; the executor creates parameters shard by
        shard. In a vectorized pipeline its layers are stacked."""
        if self.stacking is None:
            return self.single
        stacked, layers = self._build_module(), list(self.single.get_submodule(self.stacking.path).children())
        parent, _, leaf = self.stacking.path.rpartition(".")
        stack = StackedLayers(layers, self.stacking, self.batch.data_ranks, self.spec.names_dims)
        setattr(stacked.get_submodule(parent), leaf, stack)
        return stacked

    @cached_property
    def single(self) -> nn.Module:
        """The unstacked module, with parameters of single layers, as checkpoints have them."""
        return self._build_module()

    def _build_module(self) -> nn.Module:
        if misfits := list(fp8_misfits(self.recipe, self.spec.outline, self.mesh.axes)):
            raise Mistakes(misfits)
        try:
            self.own_dtypes  # noqa: B018  (computed before a graph is captured)
            model = self.spec.build(dtype=self.master_dtype)
            self._store_frozen(model)
        except ValueError as error:
            raise wrong_model(self.recipe, error) from error
        dequantize_in(model, self.param_dtype)
        if self.recipe.model.dtype == "fp8":
            multiply_in_fp8(model)
        if self.expert_groups is not None:
            group_experts(model, self.expert_groups)
        if self.kept is not None:
            keep_layers(model, *self.kept)
        return model

    def _store_frozen(self, model: nn.Module) -> None:
        """Gives the parameters that the recipe freezes the dtype in which they are used: nothing changes them."""
        frozen = self.spec.frozen - balance_steps(model).keys() if self.spec.frozen else frozenset[str]()
        own = self.spec.own_dtypes(self.param_dtype) if frozen else {}
        for name, parameter in model.named_parameters():
            if name in frozen:
                parameter.data = parameter.data.to(own.get(name, self.param_dtype))

    def keep(self, stack: str, layers: Sequence[int]) -> Setting:
        """The setting of the same model with these layers of a stack alone."""
        fewer = self.spec.keep(layers)
        return replace(self, kept=(stack, tuple(layers))) if fewer is None else replace(self, spec=fewer)

    @cached_property
    def layers(self) -> int:
        """The number of the model's repeated layers, which stages of a pipeline share; 0 without any."""
        return max(map(len, self.stacks), default=0)

    @cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """The model's lists of layers that repeat."""
        return layer_stacks(self.single) if self.spec.stacks is None else self.spec.stacks

    @cached_property
    def depth(self) -> Depth | None:
        """The longest list of layers, if its layers repeat in blocks that stand for each other."""
        return Depth.of(stack.path, stack.kinds) if (stack := max(self.stacks, key=len, default=None)) else None

    @cached_property
    def stacking(self) -> Stacking | None:
        """How the layers of a vectorized pipeline are stacked; None without one.

        Raises Mistakes (exit 4) where layers and micro-batches do not fit the stages.
        """
        section, axis = self.recipe.pipeline, self.pipeline_axis
        if section is None or axis is None or not section.vectorized:
            return None
        check_micro_batches(self.recipe, self.division, axis.size)
        if len(self.stacks) != 1:
            paths = ", ".join(f"`{stack.path}`" for stack in self.stacks)
            raise Mistakes.one(
                "`pipeline.form: vectorized` stacks the layers of one list of equal modules", exit=Exit.FIT,
                where=self.recipe.where("pipeline.form"), why=f"this model has {paths or 'none'}",
                fix="form: staged, for any model with repeated layers; or a model with one nn.ModuleList of layers",
            )  # fmt: skip
        (layers,) = self.stacks
        if layers.differs:
            raise Mistakes.one(
                "`pipeline.form: vectorized` needs layers that differ only in their weights", exit=Exit.FIT,
                where=self.recipe.where("pipeline.form"), why=layers.differs, fix="form: staged",
            )  # fmt: skip
        stages = axis.size * section.stages_per_device
        if len(layers) % stages:
            fits = [n for n in range(2, len(layers) + 1) if len(layers) % (n * section.stages_per_device) == 0]
            fewer = len(layers) // stages * stages
            raise Mistakes.one(
                f"{stages} stages do not divide the {len(layers)} layers of the model", exit=Exit.FIT,
                where=self.recipe.where("pipeline"), why="stages of a vectorized pipeline have equally many layers",
                fix=(f"mesh.pp: {', '.join(map(str, fits))}; " if fits else "")
                + f"model.layers: {f'{fewer} or ' if fewer else ''}{fewer + stages}; or form: staged",
            )  # fmt: skip
        each = len(layers) // stages
        return Stacking(axis.size, section.stages_per_device, each, self.division.micro_batches, layers.path)

    def shape_in_layer(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a parameter in checkpoints, which hold a stacked parameter layer by layer."""
        return tuple(shape if self.members(name) is None else shape[1:])

    def members(self, name: str) -> list[str] | None:
        """The parameters of single layers that a vectorized pipeline stacks as `name`, by stage; None if it does not
        stack them."""
        return None if self.stacking is None else self.stacking.members(name)

    @cached_property
    def task(self) -> Task:
        """The training task."""
        loss = self.recipe.loss
        return self._task(LossTerms(loss.label_smoothing, loss.z_loss))

    @cached_property
    def evaluated(self) -> Task:
        """The task of an evaluation, whose loss has no terms beside the cross-entropy."""
        return self._task(PLAIN)

    def _task(self, terms: LossTerms) -> Task:
        mask = 0
        if self.recipe.task == "mlm":
            with suppress(Mistakes):  # a variable that is not set: a plan needs no tokenizer
                mask = mask_of(self.recipe.data.tokenizer_folder)
        try:
            return task_of(self.recipe.task, self.seq_len, terms, mask)
        except ValueError as error:
            fix = "correct the class, or task: lm, mlm, frames or volumes"
            raise Mistakes.one(str(error), exit=Exit.RECIPE, where=self.recipe.where("task"), fix=fix) from error

    @cached_property
    def named(self) -> dict[str, Naming]:
        """The dim names of the parameters that have some, and their source."""
        single = self._named_in_layers
        named: dict[str, Naming] = {}
        for name, parameter in self.model.named_parameters():
            members = self.members(name)
            if members is not None:
                dims, namer = single.get(members[0], Naming(("",) * (parameter.dim() - 1), ""))
                named[name] = Naming((STAGE, *dims), namer)
            elif name in single:
                named[name] = single[name]
        return named

    @cached_property
    def _named_in_layers(self) -> dict[str, Naming]:
        """`named` by the names of single layers' parameters."""
        return naming.dim_names(self.recipe, self.single, self.spec)

    @cached_property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The dim names of the parameters that have some."""
        return {name: named.dims for name, named in self.named.items()}

    @property
    def named_by(self) -> dict[str, str]:
        """The source of each parameter's dim names."""
        return {name: named.by for name, named in self.named.items() if named.by}

    @cached_property
    def notes(self) -> list[str]:
        """Notes for the user on how the model is treated."""
        own = {name: dtype for name, dtype in self.own_dtypes.items() if dtype != self.param_dtype
               and name not in self.spec.packed and name not in self.spec.added}  # fmt: skip
        notes = naming.notes(self.spec, self.model, self.named)
        if not self.spec.packed and is_quantized(self.spec):
            notes.append(f"{self.spec.source.name} is quantized: what it stands for is trained as dense weights; "
                         "adapters.lora trains beside its codes")  # fmt: skip
        folder = self.spec.source.folder
        notes += [scaled.note] if folder is not None and (scaled := scaled_folder(folder)) is not None else []
        return [*notes, *naming.dtype_notes(own, self.param_dtype, type(self.model).__name__)]

    @cached_property
    def dropless(self) -> Dropless | None:
        """How tokens travel to sharded experts without a capacity; None for other models and meshes. Raises Mistakes
        (exit 4) for a form that they do not have."""
        rows = lambda: self.batch.per_device  # noqa: E731
        return dropless(self.recipe, self.mesh, self.spec.outline, rows, self.param_dtype.itemsize)

    @property
    def expert_groups(self) -> ExpertGroups | None:
        """The groups of experts to which tokens travel by all-to-all; None where they do not."""
        return None if self.dropless is None else self.dropless.groups

    @property
    def master_dtype(self) -> torch.dtype:
        """dtype of stored parameters and optimizer state."""
        return DTYPES[self.recipe.fsdp.master_dtype]

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that the run may change: those that require a gradient. The others are stored, sharded and
        saved alike, but have no gradient, no moments and no decay. Of these a step trains those that a gradient
        reaches (`step_programs.trained_by`)."""
        return frozenset(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @cached_property
    def balanced(self) -> dict[str, float]:
        """Name of each router bias that balances experts -> its change per update. Biases are fp32: exact counts."""
        return balance_steps(self.model)

    def used_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a parameter is used."""
        if name in self.balanced:
            return torch.float32
        return self.own_dtypes.get((self.members(name) or [name])[0], self.param_dtype)

    @cached_property
    def own_dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the parameters that are used in one of their own."""
        own = self.spec.own_dtypes(self.param_dtype)
        return own if self.kept is None else names_after(own, *self.kept)

    def reduced_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a parameter's gradient is reduced."""
        return torch.float32 if name in self.balanced else self.reduce_dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which the optimizer's moments are stored."""
        return DTYPES[self.recipe.optimizer.state_dtype]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the optimizer's moments, such as `exp_avg`."""
        return STATES[self.recipe.optimizer.name]

    def moments(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """(moment, parameter) for everything that the optimizer keeps of these parameters, moment by moment."""
        both, squared = list(names), "exp_avg_sq"
        return [(state, n) for state in self.state_names for n in both if state != squared or n not in self.orthogonal]

    def moment_bytes(self, elements: Mapping[str, int]) -> int:
        """Bytes of the moments of parameters with these numbers of elements."""
        return sum(elements[name] for _, name in self.moments(elements)) * self.state_dtype.itemsize

    @cached_property
    def orthogonal(self) -> frozenset[str]:
        """The parameters that Muon moves by orthogonal matrices (`layer_matrices`)."""
        if self.recipe.optimizer.name != "muon":
            return frozenset()
        dims = {name: naming.dims for name, naming in self._named_in_layers.items()}
        called = self.spec.called() if self.recipe.optimizer.orthogonal else {}
        single = matrices_of_layers(self.single, self.recipe, dims, called)
        names = [name for name, _ in self.model.named_parameters()]
        return frozenset(name for name in names if (self.members(name) or [name])[0] in single)

    @cached_property
    def grouped(self) -> dict[str, tuple[float, float | None]]:
        """(factor of the learning rate, weight decay) of the parameters in a group of the optimizer. Raises Mistakes
        for a group that matches nothing that is trained."""
        if not self.recipe.optimizer.groups:
            return {}
        names = [name for name, _ in self.model.named_parameters() if name in self.trained]
        members = {name: self.members(name) or [name] for name in names}
        called = self.spec.called()
        every = {one: called.get(one, (one,)) for each in members.values() for one in each}
        found = groups_of(self.recipe, every, self.kept is None)
        for name, each in members.items():
            if len({found.get(one) for one in each}) > 1:
                raise Mistakes.one(
                    f"`pipeline.form: vectorized` stacks `{name}`, whose layers are in several groups", exit=Exit.FIT,
                    where=self.recipe.where("optimizer.groups"), fix="form: staged",
                )  # fmt: skip
        return {name: found[each[0]] for name, each in members.items() if each[0] in found}

    @property
    def param_dtype(self) -> torch.dtype:
        """dtype in which parameters are gathered and used."""
        return DTYPES[self.recipe.fsdp.param_dtype]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """dtype in which gradients are reduced."""
        return DTYPES[self.recipe.fsdp.reduce_dtype]

    @property
    def sum_dtype(self) -> torch.dtype:
        """dtype in which gradients are summed over micro-batches."""
        return DTYPES[self.recipe.fsdp.accumulate.dtype]

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered once for all micro-batches of a step."""
        return self.recipe.fsdp.accumulate.gather == "step" and self._accumulates

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once for all micro-batches of a step."""
        return self.recipe.fsdp.accumulate.reduce == "last" and self._accumulates

    @property
    def _accumulates(self) -> bool:
        return self.recipe.staged or self.batch.micro_batches > 1

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.recipe.model.seq_len

    @property
    def fsdp_axes(self) -> Axes:
        """The mesh axes of size above 1 that shard stored parameters, outer to inner."""
        return tuple(self.mesh.axis(name) for name in self.recipe.fsdp.axes if self.mesh.axes.get(name, 1) > 1)

    @property
    def pipeline_axis(self) -> Axis | None:
        """The axis of the pipeline's stages, if the recipe has a pipeline."""
        return self.mesh.axis("pp") if self.recipe.pipeline is not None and "pp" in self.mesh.axes else None

    @property
    def stage_axis(self) -> Axis:
        """The axis of the pipeline's stages of a recipe that has a pipeline."""
        axis = self.pipeline_axis
        assert axis is not None, "a law of recipes"
        return axis

    @cached_property
    def data_axes(self) -> Axes:
        """The axes over which the batch is sharded, outer to inner."""
        names = self.recipe.sharding.rules.get("batch")
        if names is None:
            names = next((dims[0] for pattern, dims in self.recipe.sharding.pin.items() if pattern == "tokens"), ())
        return tuple(self.mesh.axis(name) for name in names if self.mesh.axes.get(name, 1) > 1)

    @cached_property
    def batch(self) -> BatchPlan:
        """The division of a step's sequences; a vectorized pipeline takes all of a data rank's at once."""
        section = self.recipe.pipeline
        return self.division.at_once() if section is not None and section.vectorized else self.division

    @cached_property
    def division(self) -> BatchPlan:
        """The division of a step's sequences into micro-batches, also for a vectorized pipeline."""
        stages = self.pipeline_axis
        return derive(self.recipe, size_of(self.data_axes), stages.size if stages is not None else 1)
