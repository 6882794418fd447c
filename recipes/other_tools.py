"""Keys of other trainers and servers, and the recipe's keys for the same settings."""

from __future__ import annotations

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
    ("report_to",): ("logging.wandb",),
}  # fmt: skip

KEYS = {word: keys for words, keys in _TABLE.items() for word in words}
"""Another tool's key -> the recipe's keys for it. `serve.tp` is meant in that section only, `tp` in any."""


def fix(key: str) -> str:
    """The fix of a mistake that used another tool's key, such as `serve.tp`: the recipe's own key for it; "" for any
    other key."""
    keys = KEYS.get(key) or KEYS.get(key.rpartition(".")[2], ())
    if len(keys) == 1:
        return f"here it is `{keys[0]}`"
    return f"here it follows from {' and '.join(f'`{key}`' for key in keys)}" if keys else ""
