"""The model that a recipe's server serves: configuration, dtype, and quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.gptq_config import GPTQConfig, read_config
from tpshard.kernels.quantized.packed import ragged_chunk, width_of
from tpshard.kernels.quantized.quantized import group_index
from tpshard.kernels.quantized.quantized_linear import multiplies
from tpshard.models.families.config import ModelConfig
from tpshard.models.folders.foreign_formats import scaled_folder
from tpshard.models.folders.hf_folder import DTYPES
from tpshard.models.folders.hf_quantized import quantizable
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import manifest_of, open_model, saved_model
from tpshard.parallelism.words import IN_SEQUENCE
from tpshard.programs.fit.recipe_model import model_of
from tpshard.programs.server.act_order import ActOrder, Arrangement, act_orders, order_key, planned_orders
from tpshard.programs.server.padding import shared_rows
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.serving_keys import Quantize

LATEST = "latest"


@dataclass(frozen=True)
class Coded:
    """A quantized weight that a kernel of `kind` (`cpu` or `gpu`) multiplies as integer codes, on one device."""

    settings: GPTQConfig
    kind: str
    ragged: bool
    """Whether its rows on a device include parts of groups."""
    order: str
    """The order of its inputs; weights with one order have the same groups."""

    @property
    def alike(self) -> tuple[object, ...]:
        """A key that is equal for weights which can be joined into one matrix."""
        s = self.settings
        return s.bits, s.group_size, s.sym, self.order

    def row_bytes(self, whole: int, own: int) -> int:
        """Bytes of one output (codes, scales, zeros) on a device with `own` of its `whole` inputs.

        Groups that devices share are assumed to have equally many inputs on each.
        """
        s = self.settings
        size = s.group_size if s.group_size > 0 else whole
        groups = min(-(-whole // size), own) if self.ragged else -(-own // size)
        if self.kind == "gpu":
            if self.ragged:  # filled up to whole chunks
                chunk = ragged_chunk(width_of(s.bits))
                own = groups * chunk * -(-own // (groups * chunk))
            return own * width_of(s.bits) // 8 + groups * (2 if s.sym else 3)
        if self.ragged:
            return int4.row_bytes([-(-own // groups)] * groups)
        return int4.row_bytes([min(size, own - start) for start in range(0, own, size)])


@dataclass(frozen=True)
class Quantization:
    """The quantized weights of a served model."""

    settings: GPTQConfig
    weights: Mapping[str, GPTQConfig]
    """The settings of each quantized parameter's module."""
    orders: Mapping[str, ActOrder]
    """The order of each act-ordered parameter."""
    shared: int = 1
    """The number of inputs of `down` that share scales (see `programs.padding`)."""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each weight that is a stack of experts, the key of the input order of each matrix of the first expert ("" for
    groups in sequence). These orders concern no other operation."""

    @staticmethod
    def of_folder(folder: Path, spec: ModelSpec) -> Quantization | None:
        """The quantization of a folder with a model; None for a dense one, or one that is not quantized by GPTQ.
        ValueError where its files contradict each other."""
        settings = read_config(folder) if (folder / "config.json").is_file() else None
        if settings is None:
            return None
        stored, shapes = spec.quantized_modules(folder), spec.shapes
        dims = {**dict.fromkeys(shapes, ("", "")), **spec.parameter_dims}
        shared = shared_rows(dims, stored.group) if spec.names_dims else 1
        heads = spec.sizes.heads
        weights = {name: own for name in shapes if (own := stored.settings_of(name)) is not None}
        stacks = {
            name: tuple(order_key(group) for group in stored.groups_of_first_expert(name))
            for name in weights
            if len(shapes[name]) == 3
        }
        return Quantization(settings, weights, act_orders(dims, heads, stored.group), shared, stacks)

    @staticmethod
    def of_recipe(section: Quantize, config: ModelConfig) -> Quantization:
        """The quantization that `tpshard quantize` would write for this section of a recipe."""
        settings = GPTQConfig(
            bits=section.bits, group_size=section.group_size, sym=section.sym, desc_act=section.order != "none"
        )
        weights = dict.fromkeys(quantizable(config), settings)
        orders = planned_orders(config, section.order, section.group_size)

        def groups(name: str) -> torch.Tensor | None:
            return group_index(config.shapes[name][-1], section.group_size) if name in weights else None

        assumed = "of one Hessian" if settings.desc_act else ""
        stacks = {name: (assumed,) for name in weights if len(config.shapes[name]) == 3}
        return Quantization(settings, weights, orders, shared_rows(config.parameters, groups), stacks)

    @property
    def in_sequence(self) -> dict[str, str]:
        """What `Arrangement.between` says of linears whose groups are in sequence."""
        others = (name for name in self.weights if name not in self.orders and name not in self.stacks)
        return dict.fromkeys(others, IN_SEQUENCE)

    def __str__(self) -> str:
        size, ordered = self.settings.group_size, len(self.orders)
        groups = f"groups of {size}" if size > 0 else "one group a linear"
        if not self.weights:
            return f"{self.settings.bits} bits in {groups}, dequantized when loaded: the class has [inputs, outputs]"
        experts = f", and {len(self.stacks)} stacks of experts" if self.stacks else ""
        linears = len(self.weights) - len(self.stacks)
        return f"{self.settings.bits} bits in {groups}, {ordered} of {linears} linears act-ordered{experts}"


@dataclass(frozen=True)
class Served:
    """A server's model as plain values, before any weight is loaded: what it is, dtype and quantization."""

    spec: ModelSpec
    dtype: str
    quantized: Quantization | None = None
    note: str = ""
    """A note for the user on what was assumed; empty where the files say it."""

    @property
    def orders(self) -> Mapping[str, ActOrder]:
        return {} if self.quantized is None else self.quantized.orders

    def coded_weights(self, kind: str, arrangement: Arrangement) -> dict[str, Coded]:
        """The weights that a kind of device multiplies as codes; others are dequantized when loaded."""
        coded: dict[str, Coded] = {}
        if self.quantized is None:
            return coded
        for name, settings in self.quantized.weights.items():
            row_order, order = arrangement.rows.get(name), self.orders.get(name)
            # where the order stays within heads, no group spans two of them
            ragged = row_order is not None and order is not None and order.blocks % row_order.blocks != 0
            if multiplies(settings.bits, DTYPES[self.dtype], kind):
                coded[name] = Coded(settings, kind, ragged, "" if order is None else order.key)
        stacks = self.quantized.stacks
        coded |= {name: replace(coded[name], order=orders[0]) for name, orders in stacks.items() if name in coded}
        for name, part in arrangement.parts.items():
            if part.parameter in coded:
                orders = stacks.get(part.parameter, (coded[part.parameter].order,))
                coded[name] = replace(
                    coded[part.parameter], order=orders[min(part.start // part.shape[part.dim], len(orders) - 1)]
                )
        return coded


def serving_dtype(recipe: Recipe, quantized: Quantization | None, stored: str, kind: str) -> str:
    """The compute dtype: `serve.dtype`, else the recipe's for its own checkpoint, else the folder's.

    For quantized weights on a `cpu` it is fp32, in which they equal the file's. Mistakes, exit 4, for fp8.
    """
    if recipe.serve.dtype is not None:
        return recipe.serve.dtype
    if quantized is not None and kind == "cpu":
        return "fp32"
    own = recipe.serve.checkpoint == LATEST and recipe.model.dtype is not None
    dtype = str(recipe.model.dtype) if own else stored
    if dtype == "fp8":
        raise Mistakes.one(
            "a server does not multiply in fp8", exit=Exit.FIT, where=recipe.where("model.dtype"),
            why="`model.dtype: fp8` is for training", fix="serve.dtype: bf16",
        )  # fmt: skip
    return dtype


def stored_model(recipe: Recipe, spec: ModelSpec, folder: Path, stored: str, kind: str) -> Served:
    """The served form of the model in a folder. Mistakes, exit 7, where it cannot be read."""
    try:
        quantization = Quantization.of_folder(folder, spec)
    except (ValueError, OSError) as error:
        raise _unreadable(recipe, folder, error) from error
    scaled = scaled_folder(folder)
    note = "" if scaled is None else scaled.note
    return Served(spec, serving_dtype(recipe, quantization, stored, kind), quantization, note)


def _unreadable(recipe: Recipe, folder: Path, error: Exception) -> Mistakes:
    where, fix = recipe.where("serve.checkpoint"), getattr(error, "fix", "correct the folder, or name another")
    return Mistakes.one(f"{folder} cannot be read", exit=Exit.CHECKPOINT, where=where, why=str(error), fix=fix)


def model_to_serve(recipe: Recipe, kind: str) -> Served:
    """The model that `tpshard serve` would serve on a `cpu` or `gpu`.

    Of an existing folder only the configuration and the orders of inputs are read, of a run or a checkpoint its
    manifest. For a missing one, if the recipe says how to quantize or lay it out, the result of `tpshard quantize` is
    assumed. Mistakes, exit 7, for an unreadable folder, or one that is none of these.
    """
    folder, named = Path(recipe.serve.checkpoint), recipe.serve.checkpoint != LATEST
    if named:
        try:
            if (folder / "config.json").is_file():
                stored = open_model(folder, module=recipe.model.module)
                return stored_model(recipe, stored, folder, stored.dtype, kind)
            if (manifest := manifest_of(folder)) is not None:
                spec, dtype = saved_model(manifest, recipe.model.module)
                return Served(spec, serving_dtype(recipe, None, dtype, kind))
            if folder.exists():
                raise ValueError("it has no manifest.json, config.json or checkpoints")
        except (ValueError, OSError) as error:
            raise _unreadable(recipe, folder, error) from error
    own = model_of(recipe).plain  # adapters are merged as its checkpoint is read
    if (outline := own.outline) is not None:
        layout_given = any(recipe.where(key).line for key in ("quantize", "serve.layout"))
        if named and layout_given:
            planned = Quantization.of_recipe(recipe.quantize, outline)
            note = f"{folder} does not exist yet: planned as `tpshard quantize` would write it"
            return Served(own, serving_dtype(recipe, planned, "fp16", kind), planned, note)
    note = f"{folder} is not on this machine: planned as the recipe's model" if named else ""
    dtype = outline.dtype if outline else str(recipe.model.dtype)
    return Served(own, serving_dtype(recipe, None, dtype, kind), note=note)
