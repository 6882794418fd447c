"""Dim names for parameters of transformers' models, derived from the class's own tensor-parallel plan.

A plan (`base_model_tp_plan` of the configuration, `_tp_plan` of the class) says which linear layers are sharded by
their outputs (`colwise`) and which by their inputs (`rowwise`). The dim that such a pair shares is named `heads` inside
attention (`kv_heads` where there are fewer) and `mlp` elsewhere. The rows of token tables are named `vocab`. Other dims
have no name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

_OUTPUTS = ("colwise", "colwise_gather_output", "packed_colwise")
_INPUTS = ("rowwise", "rowwise_split_input", "packed_rowwise")


class Naming(NamedTuple):
    """The dim names of a parameter ("" for none), and where they come from."""

    dims: tuple[str, ...]
    by: str


def dims_of_plan(model: nn.Module) -> dict[str, Naming]:
    """The dim names of the parameters that the model's plan mentions, by parameter."""
    namings: dict[str, Naming] = {}
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        style = _style(plan, _general(path)) if leaf in ("weight", "bias") else None
        owner = modules[path.rpartition(".")[0]] if style else modules[path]
        style = style or plan.get(_general(name))
        if style == "colwise_gather_output" and path.endswith("out_proj"):  # of a mixer that each device computes whole
            style = "rowwise"
        if style in _OUTPUTS or style in _INPUTS:
            columns = _columns(model, owner, parameter.shape, style)
            bias = leaf.endswith("bias") or parameter.dim() < 2
            dims = _dims(columns, parameter.dim(), bias, style in _OUTPUTS)
            if getattr(owner, "is_transposed", False) and len(dims) == 3:
                dims = (dims[0], dims[2], dims[1])
            namings[name] = Naming(dims, f"a dim by the class's plan, {style}")
    for table in (model.get_output_embeddings(), model.get_input_embeddings()):  # type: ignore[operator]
        if table is not None:
            namings |= _vocabulary(model, table)
    return namings


def _style(plan: Mapping[str, str], layer: str) -> str | None:
    """The style in which the plan shards a linear layer: its own, or that of its namesake one module further out. So
    Qwen2-MoE's `mlp.shared_expert.gate_proj` has the style of `mlp.gate_proj`."""
    owner, _, leaf = layer.rpartition(".")
    return plan.get(layer) or plan.get(f"{owner.rpartition('.')[0]}.{leaf}")


def _general(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _columns(model: nn.Module, owner: nn.Module, shape: Any, style: str) -> str:
    """The name of the dim that a column-parallel layer and its row-parallel partner share."""
    if not any(kind in type(owner).__name__ for kind in ("Attention", "DeltaNet")):
        return "mlp"
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = getattr(config, "num_attention_heads", 1)
    few = getattr(config, "num_key_value_heads", None) or heads
    widest = max((layer.weight.shape[0] for layer in owner.children() if isinstance(layer, nn.Linear)), default=0)
    grouped = few < heads and style in _OUTPUTS and shape[0] * heads == widest * few
    return "kv_heads" if grouped else "heads"


def _dims(columns: str, rank: int, bias: bool, outputs: bool) -> tuple[str, ...]:
    if bias:
        return (*("expert",) * (rank - 1), columns if outputs else "embed")
    return (*("expert",) * (rank - 2), *((columns, "embed") if outputs else ("embed", columns)))


def _vocabulary(model: nn.Module, table: nn.Module) -> dict[str, Naming]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = {"weight": ("vocab", "embed"), "bias": ("vocab",)}
    return {
        names[id(parameter)]: Naming(rows[leaf], "a dim of the table of tokens")
        for leaf, parameter in table.named_parameters(recurse=False)
        if leaf in rows and id(parameter) in names and parameter.dim() == len(rows[leaf])
    }
