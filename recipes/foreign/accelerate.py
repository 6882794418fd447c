"""accelerate's configurations, as `accelerate config` writes them."""

from __future__ import annotations

from typing import Any

from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.foreign import yaml_settings
from tpshard.recipes.foreign.stacks import MESH, RankSizes
from tpshard.recipes.foreign.trainer_rows import (
    ALIASES,
    ALWAYS,
    ASIDE,
    FSDP,
    NO_MODEL,
    STORAGE,
    Kind,
    ranks_of,
    schedule,
    storage,
    strategy_of,
    truth,
)
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid

RANKS: dict[str, Any] = {
    "distributed_type": "NO", "deepspeed_config.zero_stage": 2, **FSDP, "num_processes": 1, "num_machines": 1,
    "parallelism_config.dp_replicate_size": Maybe(int), "parallelism_config.dp_shard_size": Maybe(int),
    "parallelism_config.tp_size": 1, "parallelism_config.cp_size": 1, "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
}  # fmt: skip
"""What decides on the mesh. deepspeed_config.zero_stage counts under DeepSpeed, fsdp_config under FSDP."""
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}


def _kind(distributed: str, stage: int) -> Kind:
    if distributed.upper() == "FSDP":
        return "fsdp"
    zero: dict[int, Kind] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return zero.get(stage, "none") if distributed.upper() == "DEEPSPEED" else "none"


def _ranks(
    distributed: str, stage: int, strategy: Any, reshard: Any, processes: int, machines: int, dp: int | None,
    shard: int | None, tp: int, cp: int, nodes: int | None, each: int | None,
) -> RankSizes | Conflict:  # fmt: skip
    if each is not None:
        processes, machines = (nodes or 1) * each, nodes or 1
    if distributed.upper() == "NO":
        processes = 1
    if processes % machines:
        message = f"{processes} processes are not divided by {machines} machines"
        return Conflict(message, keys=("num_processes", "num_machines"), exit=Exit.FIT)
    kind = _kind(distributed, stage)
    return ranks_of(
        kind, strategy_of(strategy, reshard)[0] if kind == "fsdp" else "", processes, machines, dp, shard, tp, cp, 1
    )


def _mesh(*values: Any) -> Any:
    ranks = _ranks(*values)
    return ranks if isinstance(ranks, Conflict) else ranks.sections


def _cluster(device: str | None, processes: int, machines: int, nodes: int | None) -> Any:
    if device is None or nodes is not None or processes % machines:
        return Omit
    return {"cluster.nodes": machines, "cluster.devices_per_node": processes // machines}


def _storage(precision: str, distributed: str, stage: int, strategy: Any, reshard: Any) -> Any:
    return storage(
        _kind(distributed, stage), PRECISIONS.get(str(precision), "fp32"), False, strategy_of(strategy, reshard)[1]
    )


def _batch(accumulated: Any, micro: int | None, *values: Any) -> Any:
    ranks = _ranks(*values)
    if isinstance(ranks, Conflict):
        return Omit
    times = accumulated if isinstance(accumulated, int) else 1
    keys = {"batch.global_sequences": (micro or 1) * times * ranks.data, "batch.per_device": micro or 1}
    why = "the program says it, not the file; give batch.per_device=... and batch.global_sequences=..."
    return keys if micro is not None else Unsaid(why, keys, ("per_device_train_batch_size",))


def _compile(backend: Any, other: Any) -> str:
    return "blocks" if str(backend or other or "no").lower() not in ("no", "eager") else "eager"


ROWS = (
    KeyRow(MESH, RANKS, _mesh),
    KeyRow(("cluster.nodes", "cluster.devices_per_node"),
        {"recipe.cluster.device": Maybe(str), "num_processes": 1, "num_machines": 1,
         "recipe.cluster.nodes": Maybe(int)},
        _cluster),
    KeyRow("model", {"recipe.model.preset": Maybe(str), "recipe.model.hf": Maybe(str)},
        lambda preset, folder: Omit if preset or folder else Unsaid(NO_MODEL, {"hf": "MODEL"}, ("model",))),
    KeyRow("model.seq_len", {"recipe.model.seq_len": Maybe(int)},
        lambda seq: seq or Unsaid("the program says it, not the file; give model.seq_len=...", 2048, ("seq_len",))),
    KeyRow("model.dtype", {"mixed_precision": "no"},
        lambda precision: "fp8" if precision == "fp8" else PRECISIONS.get(str(precision), "fp32")),
    KeyRow(STORAGE, {"mixed_precision": "no", "distributed_type": "NO", "deepspeed_config.zero_stage": 2, **FSDP},
        _storage),
    *ALWAYS,
    KeyRow("remat", {"fsdp_config.activation_checkpointing": False}, lambda on: "full" if truth(on) else "none"),
    KeyRow("compile", {"dynamo_config.dynamo_backend": Maybe(str), "dynamo_backend": Maybe(str)}, _compile),
    KeyRow(("batch.global_sequences", "batch.per_device"),
        {"deepspeed_config.gradient_accumulation_steps": 1, "recipe.batch.per_device": Maybe(int), **RANKS}, _batch),
    KeyRow("optimizer.name", {"optim": "adamw_torch"}, lambda name: "adamw"),
    KeyRow("optimizer.lr", {"learning_rate": 5e-5}),
    KeyRow("optimizer.betas", {"adam_beta1": 0.9, "adam_beta2": 0.999}, lambda *betas: list(betas)),
    KeyRow("optimizer.eps", {"adam_epsilon": 1e-8}),
    KeyRow("optimizer.weight_decay", {"weight_decay": 0.0}),
    KeyRow("schedule", {"lr_scheduler_type": "linear", "warmup_steps": 0, "recipe.train.steps": Maybe(int)},
        lambda name, warmup, steps: schedule(name, warmup, 0.0, steps or 1000)),
    KeyRow("train.steps", {"recipe.train.steps": Maybe(int)},
        lambda steps: steps or Unsaid("the program says it, not the file; give train.steps=...", 1000, ("max_steps",))),
    KeyRow("train.clip_grad_norm", {"deepspeed_config.gradient_clipping": 1.0},
        lambda norm: norm if isinstance(norm, int | float) and norm else 1.0),
    KeyRow("seed", {"seed": 42}),
    KeyRow("data.source", {"recipe.data.source": Maybe(str)}, lambda source: source or "sample"),
    KeyRow("evaluate.every_steps", {"eval_strategy": "no"}, lambda _: 0),
    KeyRow("checkpoint.every_steps", {"save_steps": 500}),
    KeyRow("logging.every_steps", {"logging_steps": 500}),
    KeyRow("logging.wandb", {"report_to": "none"}, lambda _: None),
    KeyRow((), {"deepspeed_config.offload_optimizer_device": "none", "deepspeed_config.offload_param_device": "none"},
        lambda *places: Unsaid("a recipe offloads nothing") if any(str(p).lower() != "none" for p in places) else Omit),
    KeyRow((), {"deepspeed_config.deepspeed_config_file": Maybe(str)},
        lambda file: Omit if file is None else Unsaid("its settings are in that file; stage 2 here")),
)  # fmt: skip

TOOL = Tool(
    "accelerate",
    "1.9",
    yaml_settings.read,
    ROWS,
    aliases={
        **ALIASES,
        **{f"parallelism_config.parallelism_config_{name}": f"parallelism_config.{name}"
           for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_comm_strategy")},
    },
    unsaid={
        r"fp8_config\..*": "fp8 here has a scale per 128 elements",
        r"parallelism_config\.sp_.*": "sequences are cut over cp here, whose keys and values are gathered",
        r"megatron_lm_config\..*": "the flags of Megatron-LM's own script say more: recipes from megatron",
    },
    aside=(
        rf"{ASIDE}|compute_environment|debug|machine_rank|main_.*|rdzv_.*|same_network|tpu_.*|use_cpu|gpu_ids|"
        r"enable_cpu_affinity|downcast_bf16|command.*|deepspeed_config\.(zero3_(init|save).*|deepspeed_multinode_launcher|"
        r"deepspeed_hostfile)|parallelism_config\.cp_comm_strategy"
    ),
    program="transformers' Trainer, whose program says what the file does not",
)  # fmt: skip
