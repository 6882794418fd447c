"""Keys of other trainers and servers, and the recipe's keys for the same settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

AXES = {
    "dp": ("data_parallel", "data_parallel_size", "data_parallel_replicate_degree", "dp_size"),
    "fsdp": ("data_parallel_shard_degree", "fsdp_size"),
    "tp": ("tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tp_size"),
    "pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree", "pp_size"),
    "cp": ("context_parallel", "context_parallel_size", "context_parallel_degree", "cp_size"),
    "ep": ("expert_parallel", "expert_parallel_size", "expert_parallel_degree", "ep_size"),
}
"""Mesh axis -> the keys with which other tools set its size."""


_TABLE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    **{(axis, *words): (f"mesh.{axis}",) for axis, words in AXES.items()},
    tuple(f"serve.{word}" for word in ("tp", *AXES["tp"])): ("serve.mesh.tp",),
    ("recompute", "activation_checkpointing", "activation_checkpoint", "gradient_checkpointing"): ("remat",),
    ("dtype", "precision", "mixed_precision"): ("model.dtype",),
    ("fsdp.dtype", "fsdp.precision", "fsdp.mixed_precision"): ("fsdp.param_dtype", "fsdp.reduce_dtype"),
    ("optimizer.dtype", "optimizer.precision"): ("optimizer.state_dtype",),
    ("batch_size", "global_batch_size", "train_batch_size"): ("batch.global_sequences",),
    ("micro_batch_size", "local_batch_size", "per_device_train_batch_size"): ("batch.per_device",),
    ("grad_accum", "accumulation_steps", "gradient_accumulation_steps"): ("batch.global_sequences", "batch.per_device"),
    ("serve.batch_size", "serve.max_batch_size", "serve.max_num_seqs"): ("serve.requests",),
    ("serve.max_num_batched_tokens",): ("serve.step_tokens",),
    ("learning_rate", "max_lr"): ("optimizer.lr",),
    ("max_steps", "train_steps"): ("train.steps",),
    ("epochs", "num_epochs", "num_train_epochs"): ("train.steps", "batch.global_sequences"),
    ("max_norm", "max_grad_norm", "grad_clip", "gradient_clipping"): ("train.clip_grad_norm",),
    ("sequence_length", "max_seq_len", "max_model_len", "block_size"): ("model.seq_len",),
    ("lr_scheduler", "lr_schedule"): ("schedule.name",),
    ("warmup", "warmup_ratio"): ("schedule.warmup_steps",),
    ("gpus_per_node", "nproc_per_node"): ("cluster.devices_per_node",),
    ("gpus", "num_gpus", "world_size"): ("cluster.nodes", "cluster.devices_per_node"),
    ("num_nodes", "nnodes", "hosts"): ("cluster.nodes",),
    ("dataset", "dataset_path"): ("data.source",),
    ("train_file", "data_path", "dataset_name"): ("data.source",),
    ("text_column", "text_field", "dataset_text_field"): ("data.column",),
    ("tokenizer_path", "tokenizer_name", "tokenizer_name_or_path"): ("data.tokenizer",),
    ("model_name_or_path", "pretrained_model_name_or_path"): ("model.hf",),
    ("output_dir", "out_dir", "save_dir", "checkpoint_dir"): ("run.dir",),
    ("save_steps", "save_interval", "checkpoint_interval"): ("checkpoint.every_steps",),
    ("save_total_limit",): ("checkpoint.keep_last",),
    ("resume_from_checkpoint", "resume_from"): ("resume",),
    ("eval_steps", "eval_interval"): ("evaluate.every_steps",),
    ("logging_steps", "log_interval", "log_freq"): ("logging.every_steps",),
    ("max_iters", "train_iters", "total_steps", "num_steps", "iterations"): ("train.steps",),
    ("num_warmup_steps", "lr_warmup_steps", "warmup_iters"): ("schedule.warmup_steps",),
    ("adam_beta1", "adam_beta2", "beta1", "beta2"): ("optimizer.betas",),
    ("adam_epsilon",): ("optimizer.eps",),
    ("num_layers", "n_layers", "n_layer", "num_hidden_layers"): ("model.layers",),
    ("hidden_size", "d_model", "n_embd"): ("model.width",),
    ("num_heads", "n_heads", "n_head", "num_attention_heads"): ("model.heads",),
    ("n_kv_heads", "num_key_value_heads"): ("model.kv_heads",),
    ("intermediate_size", "ffn_hidden_size"): ("model.mlp",),
    ("vocab_size",): ("model.vocab",),
    ("wandb_project",): ("logging.wandb.project",),
    ("report_to",): ("logging.wandb",),
}  # fmt: skip

KEYS = {word: keys for words, keys in _TABLE.items() for word in words}
"""Another tool's key -> the recipe's keys for it. `serve.tp` is meant in that section only, `tp` in any."""

MADE_TOKENIZERS = "data.tokenizer: {train: 8192} trains one on the text; bytes needs no training"
"""What `data.tokenizer` offers where a tokenizer's folder is asked for."""


def hub_fix(text: str) -> str:
    """The fix where a folder is asked for and `text` looks like the name of a model on the Hugging Face hub; "" for
    other text."""
    if os.path.exists(text):
        return ""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) or text.endswith((".yaml", ".yml", ".json")):
        return ""
    return f"`hf:{text}` names the model of the Hugging Face hub"


def fix(key: str) -> str:
    """The fix of a mistake that used another tool's key, such as `serve.tp`: the recipe's own key for it; "" for any
    other key."""
    keys = KEYS.get(key) or KEYS.get(key.rpartition(".")[2], ())
    if len(keys) == 1:
        return f"here it is `{keys[0]}`"
    return f"here it follows from {' and '.join(f'`{key}`' for key in keys)}" if keys else ""
