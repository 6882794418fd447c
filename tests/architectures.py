"""Small random transformers models, and the loss and gradients of one step by transformers itself in one process."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tpshard.models.transformers.architecture import Architecture

ROWS, LENGTH, VOCAB = 8, 12, 64
FIRST_WORD = 3
"""The first token id that is not special; RoBERTa gives padding no position of its own."""
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "index_n_heads": 8, "index_head_dim": 8, "index_topk": 3,
}  # fmt: skip
"""Latent attention to three keys that an indexer selects. With fewer heads, the scores of several keys are often 0: of
these, transformers selects others when it computes a prompt in chunks."""
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_LLAMA},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_LLAMA},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_LLAMA, "head_dim": 8},
    "mistral": {"architectures": ["MistralForCausalLM"], **_LLAMA, "sliding_window": 5},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **_LLAMA, "head_dim": 8, "sliding_window": 5},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], **_LLAMA, "head_dim": 8, "sliding_window": 5},
    "phi3": {"architectures": ["Phi3ForCausalLM"], **_LLAMA},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **_LLAMA},
    "granite": {"architectures": ["GraniteForCausalLM"], **_LLAMA, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT, "n_embd": 32, "n_positions": 64},
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"], **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"], **_GPT, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": False,
    },
    "falcon_alibi": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], **_GPT, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "multi_query": False, "parallel_attn": False,
    },
    "bloom": {"architectures": ["BloomForCausalLM"], **_GPT, "hidden_size": 32},
    "mpt": {
        "architectures": ["MptForCausalLM"], "vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2,
        "max_seq_len": 64, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gptj": {"architectures": ["GPTJForCausalLM"], **_GPT, "n_embd": 32, "n_positions": 64, "rotary_dim": 4},
    "codegen": {"architectures": ["CodeGenForCausalLM"], **_GPT, "n_embd": 32, "n_positions": 64, "rotary_dim": 4},
    "gpt_neo": {
        "architectures": ["GPTNeoForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "window_size": 5, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "stablelm": {"architectures": ["StableLmForCausalLM"], **_LLAMA},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], **_LLAMA, **_MOE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **_LLAMA, **_MOE, "head_dim": 8},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], **_LLAMA, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 5,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"], **_GPT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4
    },
}  # fmt: skip


MORE: dict[str, dict[str, Any]] = {
    "roberta": {
        "architectures": ["RobertaForCausalLM"], **_LLAMA, "is_decoder": True, "max_position_embeddings": 66,
        "pad_token_id": 1, "bos_token_id": 0,
    },
    "nemotron": {"architectures": ["NemotronForCausalLM"], **_LLAMA},
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"], **_LLAMA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 4, "mamba_chunk_size": 8, "ssm_multipliers": [0.5, 1.5, 2.0, 0.25, 1.0],
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"], **_LLAMA, **_MOE, "head_dim": 8,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], **_LLAMA, "layer_types": ["conv", "full_attention"]},
    "bert": {"architectures": ["BertLMHeadModel"], **_LLAMA},
    "openai-gpt": {"architectures": ["OpenAIGPTLMHeadModel"], **_GPT, "n_embd": 32},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"], **_LLAMA, **_LATENT, "num_key_value_heads": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "hy_v4": {
        "architectures": ["HYV4ForCausalLM"], **_LLAMA, **_LATENT, "num_key_value_heads": 4,
        "num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    },
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"], **_LLAMA, **_LATENT, "num_key_value_heads": 4,
        "indexer_types": ["full", "shared"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "dots3_note_text": {
        "architectures": ["Dots3NoteForCausalLM"], **_LLAMA, **_LATENT, "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "indexed_attention"], "sliding_window": 5, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "llama4_text": {
        "architectures": ["Llama4ForCausalLM"], **_LLAMA, "head_dim": 8, "intermediate_size_mlp": 48,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1], "no_rope_layers": [1, 0],
        "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.5,
    },
    "longcat_flash": {
        "architectures": ["LongcatFlashForCausalLM"],
        **{k: v for k, v in _LLAMA.items() if k not in ("num_hidden_layers", "intermediate_size")},
        **{k: v for k, v in _LATENT.items() if not k.startswith("index")}, "num_layers": 2, "ffn_hidden_size": 48,
        "num_key_value_heads": 4, "head_dim": 4, "moe_topk": 3, "n_routed_experts": 4, "zero_expert_num": 4,
        "expert_ffn_hidden_size": 16,
    },
    "jetmoe": {
        "architectures": ["JetMoeForCausalLM"], "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        **{k: v for k, v in _LLAMA.items() if k != "num_attention_heads"},
    },
    "trocr": {
        "architectures": ["TrOCRForCausalLM"], "vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "cross_attention_hidden_size": 32,
        "use_learned_position_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "doge": {"architectures": ["DogeForCausalLM"], **_LLAMA, "keep_window_size": 3},
    "longrope": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **_LLAMA,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5],
        },
    },
    "dynamic": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **_LLAMA, "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    },
}  # fmt: skip
"""Classes that are not in the gallery."""


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **(MORE | CONFIGS)[name]}


def folder(place: Path, name: str, *, weights: bool | Mapping[str, Tensor] = False, **changes: Any) -> Path:
    """A folder with a config.json, and with random or given weights as transformers saves them."""
    place.mkdir(parents=True, exist_ok=True)
    if weights:
        model = own(name)
        with torch.no_grad():
            stored = values(name) if weights is True else weights
            for path, parameter in model.named_parameters():
                parameter.copy_(stored[path])
        model.save_pretrained(place)
        changes = {**json.loads((place / "config.json").read_text()), **changes}
    (place / "config.json").write_text(json.dumps({**config_of(name), **changes}))
    return place


def own(name: str) -> Any:
    """transformers' own module, unchanged, with the same initial values at every call, in torch's default dtype."""
    return copy.deepcopy(_built(json.dumps(config_of(name)))).to(torch.get_default_dtype())


@cache
def _built(config: str) -> Any:
    import transformers

    values = json.loads(config)
    cls = getattr(transformers, values["architectures"][0])
    own_config = cls.config_class.from_dict(values)
    own_config._experts_implementation = "eager"  # grouped products have no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(own_config).eval()


def values(name: str) -> dict[str, Tensor]:
    """Values for its parameters, large enough for soft caps and gates to bend; norms near 1, decays of a state and
    buffers that folders store as they begin."""
    generator = torch.Generator().manual_seed(7)
    model = own(name)
    begun = dict(model.named_parameters()) | dict(model.named_buffers())
    result = {}
    for path in Architecture(config_of(name)).shapes:
        noise = torch.randn(begun[path].shape, generator=generator)
        if path.endswith("A_log") or not isinstance(begun[path], torch.nn.Parameter):
            result[path] = begun[path].detach().clone()
        elif begun[path].dim() < 2:
            result[path] = 0.3 * noise + (0.0 if path.endswith("bias") else 1.0)
        else:
            result[path] = 0.25 * noise
    return result


def batch(several: bool) -> dict[str, Tensor]:
    """A batch of tokens with documents and positions; rows have two documents if `several`."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(FIRST_WORD, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    place = torch.arange(LENGTH)
    documents, positions = torch.zeros(LENGTH, dtype=torch.int64), place
    if several:
        documents, positions = (place >= 7).long(), torch.where(place >= 7, place - 7, place)
        targets[:, 6] = -100
    whole = {"documents": documents, "positions": positions}
    rows = {key: row.expand(ROWS, LENGTH).contiguous() for key, row in whole.items()}
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets, **rows}


def keeps_apart(name: str) -> bool:
    """Whether transformers' own module keeps documents apart by positions that restart: the second document of a row
    has the logits that it has alone."""
    model = own(name)
    if "position_ids" not in inspect.signature(type(model).forward).parameters or not model._supports_attention_backend:
        return False
    first = Architecture(config_of(name)).first_position

    def logits(row: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": row["tokens"], "position_ids": row["positions"] + first, "use_cache": False}
        return torch.func.functional_call(model, values(name), (), inputs).logits

    return bool(torch.allclose(*second_document(logits), rtol=1e-3, atol=1e-3))


def second_document(logits: Callable[[dict[str, Tensor]], Tensor]) -> list[Tensor]:
    """The logits of a row's second document, behind the first one and alone."""
    row = batch(True)
    second = row["positions"][0].tolist().index(0, 1)
    with torch.no_grad():
        return [logits({k: v[:, start:] for k, v in row.items()})[0, second - start :] for start in (0, second)]


def reference(name: str, batch: Mapping[str, Tensor], several: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss and its gradients by transformers' module and torch's cross-entropy, of the parameters that have
    one: not of buffers, nor of what the loss does not depend on."""
    model, leaves = own(name), values(name)
    asked = {path: leaves[path].requires_grad_(p.requires_grad) for path, p in model.named_parameters()}
    asked = {path: leaf for path, leaf in asked.items() if leaf.requires_grad}
    inputs = {"input_ids": batch["tokens"], "use_cache": False}
    if several:
        inputs["position_ids"] = batch["positions"] + Architecture(config_of(name)).first_position
    logits = torch.func.functional_call(model, leaves, (), inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="sum")
    gradients = zip(asked, torch.autograd.grad(loss, list(asked.values()), allow_unused=True))
    return loss.detach(), {path: grad for path, grad in gradients if grad is not None}
