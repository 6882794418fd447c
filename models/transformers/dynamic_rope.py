"""Rotary frequencies that depend on the length of sequences (longrope, dynamic NTK), chosen before a step is captured.

transformers chooses them in every step by the largest position of the batch, which a captured step does not know.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from tpshard.models.transformers.patch_attention import Step

KINDS = ("longrope", "dynamic")
"""The types of rotation whose frequencies depend on the length."""


def take_place(model: nn.Module, step: Step) -> None:
    """Makes the model's rotary modules of KINDS use the frequencies for sequences of `step.length` tokens."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in KINDS:
            module.rope_type = "default"  # type: ignore[assignment]
            module.register_forward_pre_hook(partial(_set_frequencies, kind, step))


def original_length(config: Any) -> int | None:
    """The sequence length above which a configuration's rotary frequencies change; None if they never do."""
    rotation = getattr(config, "rope_parameters", None) or {}
    if rotation.get("rope_type") not in KINDS:
        return None
    return int(rotation.get("original_max_position_embeddings") or config.max_position_embeddings)


def _set_frequencies(kind: str, step: Step, module: Any, _: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with _disable_current_modes():  # constants of the captured step
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=step.length)
    module._buffers["inv_freq"] = frequencies.to(module.inv_freq.device)
