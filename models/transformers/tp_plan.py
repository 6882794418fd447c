"""Dim names for parameters of transformers' models, from the class's own tensor-parallel plan or its layers' names.

A plan (`base_model_tp_plan` of the configuration, `_tp_plan` of the class) says which linear layers are sharded by
their outputs (`colwise`) and which by their inputs (`rowwise`). Where it says nothing, the names that most classes give
to such layers decide (`_LAYERS`). The dim that a pair shares is named `heads` inside attention (`kv_heads` where there
are fewer) and `mlp` elsewhere. The rows of token tables are named `vocab`. Other dims have no name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from tpshard.models.dims import Naming

_OUTPUTS = ("colwise", "colwise_gather_output", "packed_colwise")
_INPUTS = ("rowwise", "rowwise_split_input", "packed_rowwise")


_LAYERS = {
    "heads": (
        "q_proj k_proj v_proj q_lin k_lin v_lin Wq Wk Wv query key value query_proj key_proj value_proj "
        "q_b_proj kv_b_proj gate_proj",
        "o_proj out_proj out_lin Wo dense",
    ),
    "mlp": (
        "gate_proj up_proj gate_up_proj w1 w3 fc1 lin1 dense_h_to_4h input_linear",
        "down_proj w2 fc2 lin2 dense_4h_to_h output_linear",
    ),
}
"""For attention and feed-forward modules: the layers that are sharded by their outputs, and those by their inputs."""
_EXPERTS = {"gate_up_proj": "packed_colwise", "up_proj": "colwise", "down_proj": "rowwise"}
"""The styles of experts' stacked matrices."""


def dims_of_plan(model: nn.Module) -> dict[str, Naming]:
    """The dim names of the parameters that the model's plan mentions, by parameter."""
    namings: dict[str, Naming] = {}
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        style = _style(plan, _general(path)) if leaf in ("weight", "bias") else None
        layer = path.rpartition(".")[2] if isinstance(modules[path], nn.Linear) else ""
        owner = modules[path.rpartition(".")[0]] if style or layer else modules[path]
        style = style or plan.get(_general(name))
        by = "the class's plan" if style else "its layer's name"
        style = style or _usual_style(owner, layer or leaf)
        if style == "colwise_gather_output" and path.endswith("out_proj"):  # of a mixer that each device computes whole
            style = "rowwise"
        if style in _OUTPUTS or style in _INPUTS:
            columns = _columns(model, owner, parameter.shape, style)
            bias = leaf.endswith("bias") or parameter.dim() < 2
            dims = _dims(columns, parameter.dim(), bias, style in _OUTPUTS)
            if getattr(owner, "is_transposed", False) and len(dims) == 3:
                dims = (dims[0], dims[2], dims[1])
            namings[name] = Naming(dims, f"a dim by {by}, {style}")
    for table in (model.get_output_embeddings(), model.get_input_embeddings()):  # type: ignore[operator]
        if table is not None:
            namings |= _vocabulary(model, table)
    return namings


def _style(plan: Mapping[str, str], layer: str) -> str | None:
    """The style in which the plan shards a linear layer: its own, or that of its namesake one module further out. So
    Qwen2-MoE's `mlp.shared_expert.gate_proj` has the style of `mlp.gate_proj`."""
    owner, _, leaf = layer.rpartition(".")
    return plan.get(layer) or plan.get(f"{owner.rpartition('.')[0]}.{leaf}")


def _usual_style(owner: nn.Module, layer: str) -> str | None:
    """The style of a module's linear layer, or of experts' stacked matrices, by its name; None for another name."""
    kind = type(owner).__name__
    if "Experts" in kind:
        return _EXPERTS.get(layer.removesuffix("_bias"))
    if layer == "dense" and kind.endswith(("Intermediate", "Output")):  # BERT's
        return "colwise" if kind.endswith("Intermediate") else "rowwise"
    dim = "heads" if _attends(owner) else "mlp"
    outward, inward = (names.split() for names in _LAYERS[dim])
    return "colwise" if layer in outward else "rowwise" if layer in inward else None


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention, linear attention included, or BERT's projection of its result."""
    return any(kind in type(module).__name__ for kind in ("Attention", "DeltaNet", "MLA", "SelfOutput"))


def _general(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _columns(model: nn.Module, owner: nn.Module, shape: Any, style: str) -> str:
    """The name of the dim that a column-parallel layer and its row-parallel partner share."""
    if not _attends(owner):
        return "mlp"
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[owner.layer_idx]
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
