"""What a recipe's server serves: the model's numbers, the dtype, and how its weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from tpshard.kernels.blocked import CHUNK
from tpshard.kernels.gptq_config import GPTQConfig, read_config
from tpshard.kernels.packed import width_of
from tpshard.kernels.quantized import group_index
from tpshard.models import build
from tpshard.models.config import ModelConfig
from tpshard.models.hf_config import folder_config
from tpshard.models.hf_quantized import QuantizedParameters, quantizable
from tpshard.parallelism.program import INFO, Port, Program, Spec, info
from tpshard.programs.layouts import ActOrder, act_orders, planned_orders
from tpshard.programs.padding import shared_rows
from tpshard.programs.serving import Step
from tpshard.programs.setting import model_config
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import Quantize, Recipe

LATEST = "latest"


@dataclass(frozen=True)
class Quantization:
    """Weights that are served quantized."""

    settings: GPTQConfig
    weights: frozenset[str]
    orders: Mapping[str, ActOrder]
    """Of those that are act-ordered."""
    shared: int = 1
    """So many inputs of `down` share scales (see `programs.padding`)."""

    @staticmethod
    def of_folder(folder: Path, config: ModelConfig) -> Quantization | None:
        """What a folder holds; None where it holds a dense model. ValueError where it is not what it says."""
        settings = read_config(folder) if (folder / "config.json").is_file() else None
        if settings is None:
            return None
        model, stored = build(config), QuantizedParameters(folder, config)
        weights = frozenset(filter(stored.holds, config.parameters))
        orders = act_orders(model, config, stored.group)
        return Quantization(settings, weights, orders, shared_rows(config, stored.group))

    @staticmethod
    def planned(told: Quantize, config: ModelConfig) -> Quantization:
        """What `tpshard quantize` will write for this section of a recipe."""
        settings = GPTQConfig(bits=told.bits, group_size=told.group_size, sym=told.sym, desc_act=told.order != "none")
        weights = quantizable(config)
        orders = planned_orders(config, told.order, told.group_size)

        def groups(name: str) -> torch.Tensor | None:
            return group_index(config.shapes[name][1], told.group_size) if name in weights else None

        return Quantization(settings, weights, orders, shared_rows(config, groups))

    def __str__(self) -> str:
        size, ordered = self.settings.group_size, len(self.orders)
        groups = f"groups of {size}" if size > 0 else "one group a linear"
        return f"{self.settings.bits} bits in {groups}, {ordered} of {len(self.weights)} linears act-ordered"

    def row_bytes(self, whole: int, own: int, ragged: bool, device: str) -> int:
        """Bytes of one output of a weight, of whose `whole` inputs a `cpu` or `gpu` holds `own`: codes, scales, zeros.

        `ragged`: they are sorted by group from among all; each group is taken to have as many.
        """
        s = self.settings
        size = s.group_size if s.group_size > 0 else whole
        groups = min(-(-whole // size), own) if ragged else -(-own // size)
        if device == "gpu":
            return own * width_of(s.bits) // 8 + groups * (2 if s.sym else 3)
        sizes = [-(-own // groups)] * groups if ragged else [min(size, own - start) for start in range(0, own, size)]
        filled = sum(-(-each // CHUNK) * CHUNK for each in sizes)  # see `kernels.blocked`
        return filled * width_of(s.bits) // 8 + groups * 3

    def _ragged(self, name: str, step: Step) -> bool:
        """Whether a device's rows of a weight come from groups that others share: heads keep theirs to themselves."""
        taken, order = step.arrangement.rows.get(name), self.orders.get(name)
        return taken is not None and order is not None and order.blocks % taken.blocks != 0

    def held(self, step: Step, device: str) -> Program:
        """The step's program with its quantized weights as the bytes that are held, for whoever prices it."""
        program, ports = step.program, list[Port]()
        feeds = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, port in zip(feeds, program.inputs):
            if port.name in self.weights:
                (outputs, whole), own = port.shape, port.local[1]
                each = self.row_bytes(whole, own, self._ragged(port.name, step), device)
                port = replace(port, shape=(outputs, each * (whole // own)), dtype=torch.uint8)
                node.meta[INFO] = replace(info(node), specs=(Spec(port.local, port.dtype),))
            ports.append(port)
        return replace(program, inputs=tuple(ports))


def serving_dtype(recipe: Recipe, quantized: Quantization | None, stored: str, device: str) -> str:
    """The dtype to compute in: the recipe's for its own checkpoint, else that of the folder, or of a CPU's kernel."""
    if quantized is not None and device == "cpu":
        return "fp32"  # in which a CPU multiplies by codes; the weights take the same room in any
    if recipe.serve.checkpoint == LATEST and recipe.model.dtype is not None:
        return str(recipe.model.dtype)
    return stored


@dataclass(frozen=True)
class Served:
    """A server before anything is loaded."""

    config: ModelConfig
    dtype: str
    quantized: Quantization | None
    note: str = ""
    """What was assumed; empty where the files say it."""

    @cached_property
    def orders(self) -> Mapping[str, ActOrder]:
        return {} if self.quantized is None else self.quantized.orders


def served(recipe: Recipe, device: str) -> Served | None:
    """What `tpshard serve` would serve on a `cpu` or `gpu`; None for a module of the user's.

    Of a folder that is there the numbers and the orders of inputs are read, no weights. For one that is not, where the
    recipe says how to quantize or lay out, what `tpshard quantize` would write is assumed. Mistakes, exit 7, for a
    folder that cannot be read.
    """
    where, folder = recipe.where("serve.checkpoint"), Path(recipe.serve.checkpoint)
    if recipe.serve.checkpoint != LATEST and (folder / "config.json").is_file():
        try:
            config = folder_config(folder)
            found = Quantization.of_folder(folder, config)
        except (ValueError, OSError) as error:
            raise Mistakes.one(f"{folder} cannot be read", exit=Exit.CHECKPOINT, where=where, why=str(error)) from error
        return Served(config, serving_dtype(recipe, found, config.dtype, device), found)
    own = model_config(recipe)
    if own is None:
        return None
    said = any(recipe.where(key).line for key in ("quantize", "serve.layout"))
    if recipe.serve.checkpoint != LATEST and not folder.exists() and said:
        planned = Quantization.planned(recipe.quantize, own)
        note = f"{folder} is not there yet: planned as `tpshard quantize` would write it"
        return Served(own, serving_dtype(recipe, planned, "fp16", device), planned, note)
    return Served(own, str(recipe.model.dtype or own.dtype), None)
