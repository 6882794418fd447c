"""Fields of OpenAI's and vLLM's APIs that tpshard does not support, each with the values that ask for nothing.

Clients send many fields with their defaults. A neutral value changes no answer and is accepted; any other value is
refused by name. Null is always neutral. Sources: the parameter types of the `openai` package, and vLLM's
`ChatCompletionRequest`, `CompletionRequest` and `TokenizeRequest` with the fields of its earlier releases.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpshard.serve.api.field_checks import Check, label, only, text

_SHARED: Mapping[str, tuple[object, ...]] = {
    # vLLM: sampling
    "use_beam_search": (False,), "early_stopping": (False,), "length_penalty": (1,), "bad_words": ([],),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (), "truncation_side": ("left", "right"), "allowed_token_ids": (),
    "prompt_logprobs": (), "logprob_token_ids": (), "logits_processors": ([],), "watermarking": (False,),
    "repetition_detection": (), "thinking_token_budget": (-1,),
    # vLLM: structured outputs
    "structured_outputs": (), "structural_tag": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "guided_decoding_backend": (), "guided_whitespace_pattern": (),
    # vLLM: scheduling, caches, and what an answer reports
    "priority": (0,), "cache_salt": (), "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},),
    "stream_interval": (1,), "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
    "return_token_offsets": (False,), "return_mm_kwargs": (True,), "return_prompt_text": (False,),
    "routed_experts_prompt_start": (0,), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
    # OpenAI
    "metadata": ({},), "store": (False,), "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"), "prompt_cache_options": ({}, {"mode": "implicit"}),
    "moderation": (),
}  # fmt: skip
_COMPLETION: Mapping[str, tuple[object, ...]] = {"suffix": ("",), "prompt_embeds": ()}
_TEMPLATE: Mapping[str, tuple[object, ...]] = {
    "chat_template": (), "tools": ([],), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
}  # fmt: skip
_CHAT: Mapping[str, tuple[object, ...]] = {
    "audio": (), "best_of": (1,), "documents": ([],), "echo": (False,), "function_call": ("none", "auto"),
    "functions": ([],), "include_reasoning": (True,), "modalities": (["text"],), "parallel_tool_calls": (True, False),
    "prediction": (), "tool_choice": ("none", "auto"), "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
_LABELS: dict[str, Check] = {
    "user": text, "safety_identifier": text, "prompt_cache_key": text, "session_id": text, "request_id": label,
}  # fmt: skip
"""Names that a client gives; they change no answer. `request_id` becomes a part of the answer's id."""


COMPLETION_VALUES = {**_SHARED, **_COMPLETION}
CHAT_VALUES = {**_SHARED, **_TEMPLATE, **_CHAT}


def _checks(table: Mapping[str, tuple[object, ...]]) -> dict[str, Check]:
    return {key: only(*values) for key, values in table.items()}


COMPLETION = _checks(COMPLETION_VALUES) | _LABELS
CHAT = _checks(CHAT_VALUES) | _LABELS
TOKENIZE = _checks(_TEMPLATE)

MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "reasoning": ("",), "reasoning_content": ("",),
    "refusal": ("",), "tool_calls": ([],),
}  # fmt: skip
"""Keys of a message; OpenAI's answers have them, and clients send answers back."""
PART: Mapping[str, tuple[object, ...]] = {"annotations": ([],)}
"""Keys of a text part of a message."""
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Marks where a client would cache a prompt. Every prefix is cached here, so they are ignored."""
