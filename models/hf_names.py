"""Where each module's tensors live in a Hugging Face folder.

The same table serves dense and quantized folders: a module's `weight`, `bias`, `qweight`, `scales` are all found under
its home. Where several modules share one fused matrix, `Home` also says which of its output rows are whose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tpshard.models.presets import ModelConfig


@dataclass(frozen=True)
class Home:
    """`module` is the prefix of the tensors' names. With `part`, (groups, rows, start, stop): the fused matrix's
    outputs are seen as [groups, rows], and start:stop of each group are this module's."""

    module: str
    part: tuple[int, int, int, int] | None = None

    def take(self, fused: Tensor, dim: int = 0) -> Tensor:
        """This module's share of a tensor whose dim `dim` is the fused outputs."""
        if self.part is None:
            return fused
        groups, rows, start, stop = self.part
        return fused.unflatten(dim, (groups, rows)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)


def hf_modules(c: ModelConfig) -> dict[str, Home]:
    """The home of every module with parameters, by its path in the model: `layers.0.attention.wq` -> Home("model.
    layers.0.self_attn.q_proj")."""
    return _llama(c) if c.family == "llama" else _granite(c)


def hf_tensors(c: ModelConfig, parameters: list[str]) -> dict[str, list[tuple[str, Home]]]:
    """For every tensor of the folder the parameters that it is made of, in the order of their rows."""
    modules = hf_modules(c)
    tensors: dict[str, list[tuple[str, Home]]] = {}
    for parameter in parameters:
        module, _, leaf = parameter.rpartition(".")
        home = modules[module]
        tensors.setdefault(f"{home.module}.{leaf}", []).append((parameter, home))
    for parts in tensors.values():
        parts.sort(key=lambda entry: entry[1].part[2] if entry[1].part else 0)
    return tensors


def fuse(parts: list[tuple[Tensor, Home]]) -> Tensor:
    """The tensor of the folder from its parameters, in the order of `hf_tensors`."""
    first, home = parts[0]
    if home.part is None:
        return first
    return torch.cat([value.unflatten(0, (home.part[0], -1)) for value, _ in parts], 1).flatten(0, 1)


def _llama(c: ModelConfig) -> dict[str, Home]:
    homes = {"tok_embed": Home("model.embed_tokens"), "norm": Home("model.norm"), "output": Home("lm_head")}
    inside = {
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    for i in range(c.layers):
        homes |= {f"layers.{i}.{ours}": Home(f"model.layers.{i}.{theirs}") for ours, theirs in inside.items()}
    return homes


def _granite(c: ModelConfig) -> dict[str, Home]:
    homes = {
        "tok_embed": Home("transformer.wte"),
        "pos_embed": Home("transformer.wpe"),
        "norm": Home("transformer.ln_f"),
        "output": Home("lm_head"),
    }
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if c.kv_heads == 1:  # queries of all heads, then the key, then the value
        groups, cuts = 1, (0, q, q + kv, q + 2 * kv)
    else:  # head by head: query, key, value
        groups, cuts = c.heads, (0, c.head_dim, 2 * c.head_dim, 3 * c.head_dim)
    inside = {
        "attention_norm": "ln_1",
        "attention.wo": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(c.layers):
        there = f"transformer.h.{i}"
        homes |= {f"layers.{i}.{ours}": Home(f"{there}.{theirs}") for ours, theirs in inside.items()}
        for name, start, stop in zip(("wq", "wk", "wv"), cuts, cuts[1:]):
            homes[f"layers.{i}.attention.{name}"] = Home(f"{there}.attn.c_attn", (groups, cuts[-1], start, stop))
    return homes
