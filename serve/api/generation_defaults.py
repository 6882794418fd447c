"""The sampling settings that a model's folder asks for: `generation_config.json`, as other servers read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tpshard.models.folders.hf_json import read_json
from tpshard.serve.api.field_checks import Check, Refused, check_part, show, stops, tokens, whole_number
from tpshard.serve.api.fields import SAMPLING

FILE = "generation_config.json"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "length_penalty": (1,),
    "early_stopping": (False,), "diversity_penalty": (0,), "typical_p": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "renormalize_logits": (False,), "remove_invalid_values": (False,),
    "guidance_scale": (1,), "do_sample": (True, False), "stop_strings": ("", []), "bad_words_ids": ([],),
    "watermarking_config": ({},), "prompt_lookup_num_tokens": (), "constraints": ([],), "force_words_ids": ([],),
    "sequence_bias": ({}, []), "forced_decoder_ids": ([],), "exponential_decay_length_penalty": ([],),
}  # fmt: skip
"""Keys that change what is generated and are not obeyed, with the values that ask for nothing."""
_UNRELATED = (
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation", "cache_config", "low_memory", "is_assistant", "compile_config", "disable_compile",
    "prefill_chunk_size", "max_time", "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind",
    "assistant_confidence_threshold", "assistant_lookbehind", "assistant_early_exit", "max_matching_ngram_size",
)  # fmt: skip
"""Keys without an effect on what a server generates; stop tokens are read with the tokenizer."""


_LENGTHS = {"max_new_tokens": "max_tokens", "max_length": "max_length", "min_new_tokens": "min_tokens",
            "min_length": "min_length"}  # fmt: skip
"""Keys about an answer's length -> the fields of `AnswerLength`."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Values of sampling fields that requests do not set, and the keys of the file that are not obeyed."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Request's fields, `usual_` and a field of `AnswerLength`, `model_stop`, and fields of `Sampling`."""
    not_obeyed: tuple[str, ...] = ()


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """The defaults of a model's folder; none without the file. Raises ValueError where one has a wrong value."""
    read = read_json(folder, FILE) if (folder / FILE).exists() else {}
    config = {key: value for key, value in read.items() if value is not None}
    ends = config.get("eos_token_id")
    own: dict[str, tuple[str, Check]] = {key: (key, check) for key, check in SAMPLING.items()}
    own |= {
        key: (f"usual_{name}", whole_number(int(key.startswith("max")), 2**31 - 1)) for key, name in _LENGTHS.items()
    }
    own |= {
        "stop_strings": ("model_stop", stops),
        "suppress_tokens": ("suppress_tokens", tokens),
        "begin_suppress_tokens": ("not_first", tokens),
        "bad_words_ids": ("excluded", partial(_words, ends=ends if isinstance(ends, list) else [ends])),
    }
    values: dict[str, Any] = {}
    for key in config.keys() & own.keys():
        name, check = own[key]
        try:
            values[name] = check(config[key])
        except Refused as error:
            raise ValueError(f"{folder / FILE}: `{key}` {error.message}") from error
    single = tuple((token,) for token in values.pop("suppress_tokens", ()))
    if words := (*values.pop("excluded", ()), *single):
        values["excluded"] = words
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    said = {key for key in config if not key.startswith(("_", "output_", "return_")) and key not in _UNRELATED}
    rest = {key for key in said - own.keys() if config[key] not in _NEUTRAL.get(key, ())}
    values = {key: value for key, value in values.items() if value != () and (value or not key.startswith("usual_"))}
    return GenerationDefaults(dict(sorted(values.items())), tuple(sorted(rest)))


def _words(value: Any, ends: list[Any]) -> tuple[tuple[int, ...], ...]:
    """Checks `bad_words_ids`; as in transformers, no single token that ends a text is one."""
    if not isinstance(value, list):
        raise Refused(f"is not a list of lists of token ids: {show(value)}")
    words = [check_part("has an item that", tokens, word) for word in value]
    if not all(words):
        raise Refused("has an empty list")
    return tuple(word for word in words if not (len(word) == 1 and word[0] in ends))
