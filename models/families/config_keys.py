"""What becomes of each key of a config.json: it is obeyed, refused, named, or changes neither logits nor training. No
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from tpshard.models.families.family import Family

Treatment = Literal["obeyed", "named", "harmless"]

_DROPOUT = re.compile(
    r"(?!classifier|summary).*(dropout|pdrop|drop_rate|dropout_prob|drop_path|layer_?drop)(_rate|_prob)?"
)
_NOISE = re.compile(r".*(jitter|router).*noise|.*noise_(std|eps|epsilon)")
_LOSS = re.compile(r"output_router_logits|.*z_loss.*|.*mtp_loss.*|label_smoothing.*")

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "gpt_bigcode": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
}  # fmt: skip
"""Rates that a config.json without the key stands for, by `model_type`; all others are 0."""

_ROTATION = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
_WINDOWS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_READ = frozenset({"architectures", "model_type", "vocab_size", "dtype", "torch_dtype", "pad_token_id",
                   "bos_token_id", "eos_token_id", "quantization_config"})  # fmt: skip
HARMLESS = frozenset(
    {
        "_name_or_path", "transformers_version", "id2label", "label2id", "problem_type", "return_dict", "use_cache",
        "output_attentions", "output_hidden_states", "is_encoder_decoder", "add_cross_attention", "pretraining_tp",
        "initializer_range", "chunk_size_feed_forward", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
        "task_specific_params", "torchscript", "classifier_dropout", "finetuning_task", "num_labels",
        "tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id", "use_flash_attn",
    }
)  # fmt: skip
"""Keys that change what is returned, another task, memory or rounding, but neither logits nor gradients."""

_UNUSED = {
    "qwen3_moe": ("intermediate_size",), "dots1": ("intermediate_size",), "gpt_bigcode": ("num_key_value_heads",),
}  # fmt: skip
"""Keys of layers that these families do not have, or that follow from others, by `model_type`."""


def treatment(key: str, family: Family) -> Treatment | None:
    """What becomes of a key where a family computes; None for one that the table does not know.

    Obeyed keys are read with the values that they may have; other values are refused.
    """
    hf = family.hf
    read = {name for entry in hf.keys for name in (entry.theirs, entry.alias)} | set(hf.fixed) | _READ
    read |= _ROTATION if family.positions == "rotary" else set()
    read |= _WINDOWS if hf.windows is not None else set()
    if key in read:
        return "obeyed"
    if key in HARMLESS or key in _UNUSED.get(hf.model_type, ()):
        return "harmless"
    return "named" if changes_training(key) else None


def changes_training(key: str) -> bool:
    """Whether a key has a rate or a term of the loss that changes training and not the logits."""
    return key == "pad_token_id" or any(pattern.fullmatch(key) for pattern in (_DROPOUT, _NOISE, _LOSS))


def training_notes(values: Mapping[str, Any], family: Family | None = None) -> list[str]:
    """Sentences on the keys of a config.json that change its authors' training and not this one.

    values: the keys, with the defaults of their class. family: the family that computes, whose keys are obeyed.
    """

    def active(pattern: re.Pattern[str]) -> str:
        said = [
            f"{key}: {value}" for key, value in values.items()
            if pattern.fullmatch(key) and value and isinstance(value, (int, float, list))
            and not (family is not None and treatment(key, family) == "obeyed")
        ]  # fmt: skip
        return ", ".join(said)

    sentences = {
        "dropout is not applied: {} in config.json": active(_DROPOUT),
        "no noise is added to the router's inputs: {} in config.json": active(_NOISE),
        "further terms of the loss are not added, such as the router's: {} in config.json": active(_LOSS),
    }
    return [sentence.format(keys) for sentence, keys in sentences.items() if keys]
