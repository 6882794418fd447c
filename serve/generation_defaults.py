"""The sampling settings that a model's folder asks for: `generation_config.json`, as other servers read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpshard.models.hf_json import read_json
from tpshard.serve.field_checks import Refused, whole_number
from tpshard.serve.fields import SAMPLING

FILE = "generation_config.json"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "length_penalty": (1,),
    "early_stopping": (False,), "diversity_penalty": (0,), "typical_p": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "renormalize_logits": (False,), "remove_invalid_values": (False,),
    "min_length": (0,), "min_new_tokens": (0,), "guidance_scale": (1,), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "bad_words_ids": ([],), "do_sample": (True, False),
}  # fmt: skip
"""Keys that change what is generated and are not obeyed, with the values that ask for nothing."""
_UNRELATED = (
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation", "cache_config", "max_length", "low_memory", "is_assistant", "token_healing",
)  # fmt: skip
"""Keys without an effect on what a server generates; stop tokens are read with the tokenizer."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Values of sampling fields that requests do not set, and the keys of the file that are not obeyed."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The request's fields, and `default_tokens` for `max_new_tokens`."""
    not_obeyed: tuple[str, ...] = ()


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """The defaults of a model's folder; none without the file. Raises ValueError where one has a wrong value."""
    read = read_json(folder, FILE) if (folder / FILE).exists() else {}
    config = {key: value for key, value in read.items() if value is not None}
    checks = {**SAMPLING, "max_new_tokens": whole_number(1, 2**31 - 1)}
    values: dict[str, Any] = {}
    for key in config.keys() & checks.keys():
        try:
            values["default_tokens" if key == "max_new_tokens" else key] = checks[key](config[key])
        except Refused as error:
            raise ValueError(f"{folder / FILE}: `{key}` {error.message}") from error
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    said = {key for key in config if not key.startswith(("_", "output_", "return_")) and key not in _UNRELATED}
    rest = {key for key in said - checks.keys() if config[key] not in _NEUTRAL.get(key, ())}
    return GenerationDefaults(dict(sorted(values.items())), tuple(sorted(rest)))
