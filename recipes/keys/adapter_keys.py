"""The keys below `adapters`: low-rank adapters of a frozen model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from tpshard.recipes.keys.constraints import ALONE, Positive, limits
from tpshard.recipes.text.section import Section, derived

Rank = Annotated[int, limits(least=1, most=2**16)]


class LoraSection(Section):
    """Low-rank adapters (LoRA). They alone are trained, beside the frozen model; their names and meaning are PEFT's."""

    rank: Rank = 8
    """Rank of an adapter: it adds scaling x B A to a layer's weight, A [rank, inputs] and B [outputs, rank]."""
    alpha: Positive = derived(default="adapters.lora.rank")
    """The scaling is alpha / rank."""
    targets: Annotated[tuple[str, ...], ALONE] = ("all-linear",)
    """The layers with an adapter, by a pattern for the end of their path: wq, mlp.*, or by a folder's names "*_proj";
    all-linear is every linear layer but the head, and no experts, routers or embeddings. Of experts also a parameter of
    transformers' class: in gate_up_proj gate and up share lora_A."""
    dropout: Annotated[float, limits(least=0, below=1)] = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    dora: bool = False
    """Whether a layer's rows have a trained magnitude too (DoRA)."""
    use_rslora: bool = False
    """Whether the scaling is alpha / sqrt(rank)."""
    rank_pattern: Mapping[str, Rank] = field(default_factory=dict)
    """Other ranks, by a regular expression for the end of a layer's path."""
    alpha_pattern: Mapping[str, Positive] = field(default_factory=dict)
    """Other alphas, likewise."""
    modules_to_save: Annotated[tuple[str, ...], ALONE] = ()
    """Modules that are trained in full beside the adapters, by the end of their path, such as output."""


class Adapters(Section):
    """What is trained beside a frozen model."""

    lora: LoraSection | None = None
    """Low-rank adapters; null: none, and the model itself is trained."""
    packed: bool = False
    """Whether a preset stands for the folder that `tpshard quantize` writes of it by `quantize`, whose weights stay
    packed. For plans: nothing trains a preset so."""
