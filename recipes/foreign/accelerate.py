"""accelerate's configurations, as `accelerate config` writes them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Exit
from tpshard.recipes.foreign import deepspeed, launch_scripts
from tpshard.recipes.foreign.adapter_rows import adapter
from tpshard.recipes.foreign.stacks import MESH, RankSizes, product, rest_of
from tpshard.recipes.foreign.trainer_rows import (
    ALIASES,
    ALWAYS,
    ASIDE,
    FSDP,
    IN_FP8,
    STORAGE,
    Kind,
    model,
    ranks_of,
    schedule,
    storage,
    strategy_of,
    truth,
)
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid
from tpshard.recipes.settings import yaml_settings
from tpshard.recipes.settings.stated import StatedSettings

MEGATRON: dict[str, Any] = {
    "megatron_lm_config.tp_degree": 1, "megatron_lm_config.pp_degree": 1, "megatron_lm_config.context_parallel_size": 1,
    "megatron_lm_config.sequence_parallelism": False, "megatron_lm_config.use_distributed_optimizer": False,
    "megatron_lm_config.num_micro_batches": 1,
}  # fmt: skip
"""Of MEGATRON_LM alone."""
RANKS: dict[str, Any] = {
    "distributed_type": "NO", "deepspeed_config.zero_stage": 2, **FSDP, "num_processes": 1, "num_machines": 1,
    "parallelism_config.dp_replicate_size": Maybe(int), "parallelism_config.dp_shard_size": Maybe(int),
    "parallelism_config.tp_size": 1, "parallelism_config.cp_size": 1, "parallelism_config.sp_size": 1,
    "deepspeed_config.tp_size": 1, "deepspeed_config.sp_size": 1, **MEGATRON, "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
}  # fmt: skip
"""What decides on the mesh. deepspeed_config.zero_stage counts under DeepSpeed, fsdp_config under FSDP."""
FILE = "deepspeed_config.deepspeed_config_file"
ALONE = ("mixed_precision", *(f"deepspeed_config.{name}" for name in (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "zero3_save_16bit_model",
)))  # fmt: skip
"""What a DeepSpeed JSON alone may say."""
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
PRECISION: dict[str, Any] = {
    "mixed_precision": "no", "deepspeed_config.bf16.enabled": Maybe(object),
    "deepspeed_config.fp16.enabled": Maybe(object),
}  # fmt: skip


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a YAML, or of a script that starts a program, with those of the DeepSpeed JSON that it names. A
    JSON alone is DeepSpeed's."""
    if launch_scripts.is_script(data, file):
        settings = launch_scripts.read(data, file)
    else:
        settings = launch_scripts.of_program(yaml_settings.read(data, file), file)
    own = [settings.said[key] for key in ALONE if key in settings.said and not settings.said[key].of_program]
    if FILE in settings.said and own:
        message = f"`{own[0].name}` stands beside a DeepSpeed JSON, where accelerate stops"
        also = tuple((one.where, "") for one in own[1:])
        clash = Diagnostic(message, where=own[0].where, fix="say it in the JSON", severity="warning", also=also)
        settings = replace(settings, diagnostics=(*settings.diagnostics, clash))
    if any(key.startswith("zero_optimization") for key in settings.said):
        whole = {f"whole.{key}": replace(one, key=f"whole.{key}") for key, one in settings.said.items()}
        kind = replace(next(iter(whole.values())), key="distributed_type", value="DEEPSPEED")
        settings = replace(settings, said={"distributed_type": kind, **whole})
        return deepspeed.with_file(settings, "whole", file)
    return deepspeed.with_file(settings, FILE, file)


def _kind(distributed: str, stage: int) -> Kind:
    if distributed.upper() == "FSDP":
        return "fsdp"
    zero: dict[int, Kind] = {1: "zero1", 2: "zero2", 3: "zero3"}
    return zero.get(stage, "none") if distributed.upper() == "DEEPSPEED" else "none"


def _ranks(*values: Any) -> RankSizes | Conflict:
    said = dict(zip(RANKS, values))
    distributed, machines, each = said["distributed_type"].upper(), said["num_machines"], said[list(RANKS)[-1]]
    processes = said["num_processes"]
    if each is not None:
        machines = said["recipe.cluster.nodes"] or 1
        processes = machines * each
    if distributed == "NO" and each is None:
        processes = 1
    if processes < 1 or processes % machines:
        message = f"{processes} processes are not divided by {machines} machines"
        fix = "cluster.nodes=... and cluster.devices_per_node=... say how many there are"
        return Conflict(message, fix=fix, keys=("num_processes", "num_machines"), exit=Exit.FIT)
    if distributed == "MEGATRON_LM":
        return _megatron(processes, *(said[key] for key in MEGATRON))
    kind = _kind(distributed, said["deepspeed_config.zero_stage"])
    strategy, _ = strategy_of(*(said[key] for key in FSDP))
    sizes = {axis: said[f"parallelism_config.{axis}_size"] for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    tp = max(sizes["tp"], said["deepspeed_config.tp_size"])
    cp = sizes["cp"] * max(sizes["sp"], said["deepspeed_config.sp_size"])
    return ranks_of(
        kind, strategy if kind == "fsdp" else "", processes, machines,
        sizes["dp_replicate"] or (1 if sizes["dp_shard"] else None), sizes["dp_shard"], tp, cp, 1,
    )  # fmt: skip


def _megatron(processes: int, tp: int, pp: int, cp: int, sequence: Any, optimizer: Any, _: int) -> RankSizes | Conflict:
    data = rest_of(processes, *product({"tp": tp, "pp": pp, "cp": cp}))
    if isinstance(data, Conflict):
        return data
    sharded = truth(optimizer)
    return RankSizes(
        1 if sharded else data, data if sharded else 1, 1, cp, tp, pp, sequence=truth(sequence),
        stores=("fsdp", "cp") if sharded else (),
    )  # fmt: skip


def _mesh(*values: Any) -> Any:
    ranks = _ranks(*values)
    return ranks if isinstance(ranks, Conflict) else ranks.sections


def _cluster(device: str | None, processes: int, machines: int, nodes: int | None) -> Any:
    if device is None or nodes is not None or processes % machines:
        return Omit
    return {"cluster.nodes": machines, "cluster.devices_per_node": processes // machines}


def _storage(
    sent: str | None, summed: str | None, loaded: str | None, distributed: str, stage: int, strategy: Any, reshard: Any,
    optimizer: Any, *precision: Any,
) -> Any:  # fmt: skip
    kind = _kind(distributed, stage)
    if distributed.upper() == "MEGATRON_LM":
        kind = "zero1" if truth(optimizer) else "none"
    computed = PRECISIONS.get(deepspeed.precision(*precision), "fp32")
    return storage(kind, computed, False, strategy_of(strategy, reshard)[1], sent, summed, loaded)


def _dtype(*precision: Any) -> Any:
    chosen = deepspeed.precision(*precision)
    return Unsaid(IN_FP8, "fp8", ("mixed_precision",)) if chosen == "fp8" else PRECISIONS.get(chosen, "fp32")


def _batch(accumulated: Any, micro: int | None, of_json: Any, whole: Any, *values: Any) -> Any:
    ranks = _ranks(*values)
    if isinstance(ranks, Conflict):
        return Omit
    times = accumulated if isinstance(accumulated, int) else 1
    if values[0].upper() == "MEGATRON_LM":
        times = dict(zip(RANKS, values))["megatron_lm_config.num_micro_batches"]
    if micro is None and isinstance(of_json, int):
        micro = of_json
    if micro is None and isinstance(whole, int) and whole % (times * ranks.data) == 0:
        micro = whole // (times * ranks.data)
    if isinstance(whole, int) and micro is not None and whole != (product := micro * times * ranks.data):
        message = f"train_batch_size {whole} is not {micro} x {times} x {ranks.data} data ranks, {product}"
        return Conflict(message, {"batch.global_sequences": product, "batch.per_device": micro}, fix=str(product))
    keys = {"batch.global_sequences": (micro or 1) * times * ranks.data, "batch.per_device": micro or 1}
    why = "the program says it, not the file; give batch.per_device=... and batch.global_sequences=..."
    return keys if micro is not None else Unsaid(why, keys, ("per_device_train_batch_size",))


def _compile(backend: Any, other: Any) -> str:
    return "blocks" if str(backend or other or "no").lower() not in ("no", "eager") else "eager"


def _remat(
    fsdp: Any, distributed: str, granularity: str | None, method: str | None, layers: int | None, stage: str | None,
    disabled: bool,
) -> Any:  # fmt: skip
    """What is recomputed. stage: LLaMA-Factory's, which recomputes unless it is disabled."""
    if distributed.upper() != "MEGATRON_LM":
        return "full" if truth(fsdp) or (stage is not None and not truth(disabled)) else "none"
    if granularity != "full":
        return "none"
    return {"first": layers} if method == "block" and layers else "full"


def _schedule(
    rate: float,
    last_rate: float | None,
    default: str,
    kind: str | None,
    warmup: float,
    share: float,
    of_json: Any,
    total: Any,
    least: float,
    over: int | None,
    way: str,
    steps: int | None,
    epochs: float | None,
) -> Any:
    names = {"WarmupDecayLR": "linear", "WarmupLR": "constant_with_warmup", "WarmupCosineLR": "cosine"}
    name = names.get(kind, kind) if kind else default
    least = last_rate / rate if last_rate is not None and rate else least
    share = warmup if 0 < warmup < 1 else share if not warmup else 0.0
    end = steps or (math.floor(total) if total else None if epochs else 1000)
    if isinstance(of_json, int) or not share:
        return schedule(name, of_json if isinstance(of_json, int) else int(warmup), least, end, over, way)
    if end is not None:
        return schedule(name, math.ceil(share * end), least, end, over, way)
    why = "it is a share of the steps that the data makes; give schedule.warmup_steps=..."
    keys = schedule(name, 100, least, None, over, way)
    return keys if isinstance(keys, Unsaid) else Unsaid(why, keys, ("warmup_ratio", "warmup_steps"))


def _length(steps: int | None, epochs: float | None) -> Any:
    if steps:
        return {"train.steps": steps}
    if epochs is None:
        return Unsaid("the program says it, not the file; give train.steps=...", {"train.steps": 1000}, ("max_steps",))
    whole = {"data.epochs": max(1, round(epochs))}
    return whole if epochs == whole["data.epochs"] else Unsaid("epochs are whole", whole, ("num_train_epochs",))


def _saved(strategy: str, every: Any) -> Any:
    if strategy == "no":
        return 0
    if strategy in ("epoch", "best") or type(every) is not int:
        return Unsaid("checkpoints are a number of steps apart", 500, ("save_strategy", "save_steps"))
    return every


def _adapter(on: Any, kind: str | None, *values: Any) -> Any:
    """TRL's `use_peft` or LLaMA-Factory's `finetuning_type`, each with its own defaults."""
    rank, alpha, dropout, *rest = values
    if not truth(on) and kind in (None, "full"):
        given = any(value is not None and value is not False for value in values)
        why = "without --use_peft it has no effect: the whole model is trained"
        return Unsaid(why, Omit, tuple(list(PEFT)[2:])) if given else Omit
    if kind is None:
        rank, alpha, dropout = rank or 16, alpha or 32, 0.05 if dropout is None else dropout
    else:
        rank, dropout = rank or 8, dropout or 0.0
    targets, *rest = rest
    targets = None if targets in ("all", "all-linear") else targets
    return adapter(kind or "lora", "finetuning_type", rank, float(alpha or 2 * rank), dropout, False, targets, *rest)


PEFT: dict[str, Any] = {
    "use_peft": False, "finetuning_type": Maybe(str), "lora_r": Maybe(int), "lora_alpha": Maybe(int),
    "lora_dropout": Maybe(float), "lora_target_modules": Maybe(object), "lora_target_parameters": Maybe(object),
    "lora_modules_to_save": Maybe(object), "use_dora": False, "use_rslora": False,
}  # fmt: skip


def _evaluate(strategy: str, every: int | None, logged: int) -> Any:
    if strategy == "epoch":
        return Unsaid("held-out rows are evaluated each number of steps", 0, ("eval_strategy",))
    return (every or logged) if strategy == "steps" else 0


def _own(default: Any, of_json: Any) -> Any:
    return default if of_json is None else of_json


def _optimizer(default: str, of_json: str | None) -> Any:
    plain = (of_json or default).lower()
    ours = next((ours for ours in ("lion", "muon") if ours in plain), "adamw")
    return ours if ours in plain or plain == "adam" else Unsaid("a recipe has adamw, lion and muon", "adamw")


def _wrapped(policy: str, distributed: str) -> Any:
    if distributed.upper() != "FSDP" or str(policy).upper() == "TRANSFORMER_BASED_WRAP":
        return Omit
    return Unsaid("each layer is gathered by itself here", keys=("fsdp_config.auto_wrap_policy",))


def _plugins(distributed: str, stage: Any, version: Any, strategy: Any) -> Any:
    """Sections of a plugin that is not the one that runs, and keys of the other version of FSDP."""
    kind, keys = distributed.upper(), list(PLUGINS)[1:]
    if stage is not None and kind != "DEEPSPEED":
        return Conflict(f"deepspeed_config has no effect under {distributed}", keys=(keys[0],), fix="DEEPSPEED")
    if (version is not None or strategy is not None) and kind != "FSDP":
        return Conflict(f"fsdp_config has no effect under {distributed}", keys=tuple(keys[1:]), fix="FSDP")
    if version == 2 and strategy is not None:
        message = "fsdp_version 2 has no sharding_strategy, but reshard_after_forward"
        return Conflict(message, keys=(keys[2],), fix="leave it out")
    return Omit


PLUGINS: dict[str, Any] = {
    "distributed_type": "NO", "deepspeed_config.zero_stage": Maybe(object), "fsdp_config.version": Maybe(int),
    "fsdp_config.sharding_strategy": Maybe(object),
}  # fmt: skip


def _sequence(*sizes: int) -> Any:
    on = max(sizes) > 1
    return Unsaid("heads are exchanged for tokens there; here keys and values are gathered over cp") if on else Omit


JSON = "deepspeed_config.optimizer"
ROWS = (
    KeyRow(MESH, RANKS, _mesh),
    KeyRow(("cluster.nodes", "cluster.devices_per_node"),
        {"recipe.cluster.device": Maybe(str), "num_processes": 1, "num_machines": 1,
         "recipe.cluster.nodes": Maybe(int)},
        _cluster),
    KeyRow("model", {"model_name_or_path": Maybe(str)}, partial(model, "model_name_or_path")),
    KeyRow("model.seq_len", {"recipe.model.seq_len": Maybe(int)},
        lambda seq: seq or Unsaid("the program says it, not the file; give model.seq_len=...", 2048, ("seq_len",))),
    KeyRow("model.dtype", PRECISION, _dtype),
    KeyRow("adapters.lora", PEFT, _adapter),
    KeyRow(STORAGE,
        {**deepspeed.TYPES, "dtype": Maybe(str), "distributed_type": "NO", "deepspeed_config.zero_stage": 2, **FSDP,
         "megatron_lm_config.use_distributed_optimizer": False, **PRECISION},
        _storage),
    *ALWAYS,
    *deepspeed.ROWS,
    KeyRow((), {"fsdp_config.auto_wrap_policy": "NO_WRAP", "distributed_type": "NO"}, _wrapped),
    KeyRow((), PLUGINS, _plugins),
    KeyRow((), {"parallelism_config.sp_size": 1, "deepspeed_config.sp_size": 1}, _sequence),
    KeyRow("remat", {
        "fsdp_config.activation_checkpointing": False, "distributed_type": "NO",
        "megatron_lm_config.recompute_granularity": Maybe(str), "megatron_lm_config.recompute_method": Maybe(str),
        "megatron_lm_config.recompute_num_layers": Maybe(int), "stage": Maybe(str),
        "disable_gradient_checkpointing": False,
    }, _remat),
    KeyRow("offload", {"activation_offloading": False}, lambda on: "activations" if truth(on) else Omit),
    KeyRow("pipeline", {"distributed_type": "NO", "megatron_lm_config.pp_degree": 1},
        lambda kind, pp: {"schedule": "1f1b"} if kind.upper() == "MEGATRON_LM" and pp > 1 else Omit),
    KeyRow("sharding.overlap", {"parallelism_config.tp_size": 1, "deepspeed_config.tp_size": 1},
        lambda *sizes: False if max(sizes) > 1 else Omit),
    KeyRow("compile", {"dynamo_config.dynamo_backend": Maybe(str), "dynamo_backend": Maybe(str)}, _compile),
    KeyRow(("batch.global_sequences", "batch.per_device"), {
        "deepspeed_config.gradient_accumulation_steps": 1, "recipe.batch.per_device": Maybe(int),
        "deepspeed_config.train_micro_batch_size_per_gpu": Maybe(object),
        "deepspeed_config.train_batch_size": Maybe(object), **RANKS,
    }, _batch),
    KeyRow("optimizer.name", {"optim": "adamw_torch", f"{JSON}.type": Maybe(str)}, _optimizer),
    KeyRow("optimizer.lr", {"learning_rate": 5e-5, f"{JSON}.params.lr": Maybe(float)}, _own),
    KeyRow("optimizer.betas", {"adam_beta1": 0.9, "adam_beta2": 0.999, f"{JSON}.params.betas": Maybe(list)},
        lambda one, two, own: own or [one, two]),
    KeyRow("optimizer.eps", {"adam_epsilon": 1e-8, f"{JSON}.params.eps": Maybe(float)}, _own),
    KeyRow("optimizer.weight_decay", {"weight_decay": 0.0, f"{JSON}.params.weight_decay": Maybe(float)}, _own),
    KeyRow("schedule", {
        "learning_rate": 5e-5, "lr_scheduler_kwargs.min_lr": Maybe(float),
        "lr_scheduler_type": "linear", "deepspeed_config.scheduler.type": Maybe(str), "warmup_steps": 0.0,
        "warmup_ratio": 0.0,
        "deepspeed_config.scheduler.params.warmup_num_steps": Maybe(object),
        "deepspeed_config.scheduler.params.total_num_steps": Maybe(float), "lr_scheduler_kwargs.min_lr_ratio": 0.0,
        "lr_scheduler_kwargs.num_decay_steps": Maybe(int), "lr_scheduler_kwargs.decay_type": "cosine",
        "recipe.train.steps": Maybe(int), "num_train_epochs": Maybe(float),
    }, _schedule),
    KeyRow(("train.steps", "data.epochs"), {"recipe.train.steps": Maybe(int), "num_train_epochs": Maybe(float)},
        _length),
    KeyRow("train.clip_grad_norm",
        {"deepspeed_config.gradient_clipping": "auto", "megatron_lm_config.gradient_clipping": "auto"},
        lambda norm, other: deepspeed.clipping(other if norm == "auto" else norm)),
    KeyRow("seed", {"seed": 42}),
    KeyRow("data.source", {"recipe.data.source": Maybe(str)}, lambda source: source or "sample"),
    KeyRow("evaluate.every_steps", {"eval_strategy": "no", "eval_steps": Maybe(int), "logging_steps": 500}, _evaluate),
    KeyRow("checkpoint.every_steps", {"save_strategy": "steps", "save_steps": Maybe(object)},
        lambda strategy, every: _saved(strategy, 500 if every is None else every)),
    KeyRow("checkpoint.keep_last", {"save_total_limit": Maybe(int)}, lambda most: Omit if most is None else most),
    KeyRow("logging.every_steps", {"logging_steps": 500}),
    KeyRow("logging.wandb", {"report_to": Maybe(object)},
        lambda names: {"mode": "auto"} if re.search(r"\b(wandb|all)\b", str(names)) else None),
    KeyRow((), {"stage": "sft"},
        lambda stage: Omit if stage in ("sft", "pt") else Unsaid("a recipe learns the next token alone")),
    KeyRow((), {"config_file": Maybe(str)},
        lambda file: Omit if file is None else Unsaid("there is no such file here; defaults in its place")),
    KeyRow((), {"config": Maybe(str)}, lambda file: Omit if file is None else Unsaid("there is no such file here")),
    KeyRow((), {"deepspeed_config.deepspeed_config_file": Maybe(str)},
        lambda file: Omit if file is None else Unsaid("there is no such file here; stage 2 in its place")),
)  # fmt: skip

MESSAGES = "give data.source=hub:NAME, and for conversations data.messages=COLUMN"
TOOL = Tool(
    "accelerate",
    "1.9",
    read,
    ROWS,
    aliases={
        **ALIASES,
        "lr_scheduler_kwargs.min_lr_rate": "lr_scheduler_kwargs.min_lr_ratio", "torch_dtype": "dtype",
        **{f"parallelism_config.parallelism_config_{name}": f"parallelism_config.{name}"
           for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_comm_strategy")},
        **{f"megatron_lm_config.megatron_lm_{name.rpartition('.')[2]}": name for name in (
            *MEGATRON, "megatron_lm_config.gradient_clipping", "megatron_lm_config.recompute_granularity",
            "megatron_lm_config.recompute_method", "megatron_lm_config.recompute_num_layers",
            "megatron_lm_config.recompute_activations",
        )},
    },
    unsaid={
        **deepspeed.UNSAID,
        r"fp8_config\..*": "fp8 here has a scale per 128 elements",
        r"parallelism_config\.sp_.*": "sequences are cut over cp here, whose keys and values are gathered",
        r"megatron_lm_config\.recompute_activations": "a fused attention computes its scores again in any case",
        r"megatron_lm_config\..*": "the flags of Megatron-LM's own script say more: recipes from megatron",
        r"fsdp_config\.(ignored_modules|min_num_params)": "each layer is gathered by itself here",
        r"(eval_)?dataset(_name|_config|_dir|_mixer|_text_field|_train_split|_test_split)?|template|val_size": MESSAGES,
        r"chat_template|eos_token|pad_token": "tokens and templates are the tokenizer's folder's",
        r"quantization_(bit|method|type)|double_quantization|load_in_(4|8)bit|bnb_.*":
            "codes of 4 bits are GPTQ's; to train, name the folder that `tpshard quantize` writes, model.hf=...",
        r"flash_attn|attn_implementation|(use|enable)_(liger_kernel|unsloth|v1_kernels)":
            "kernels are the compiler's here",
        r"(image|video|audio|freeze_(vision|multi|language))_.*": "a recipe trains on text alone",
        r"packing": "sequences are filled, as with packing",
        r"(oft|galore|badam|apollo|loraplus|pissa|kt)_.*|use_(badam|apollo|galore|adam_mini|llama_pro|kt|\w+_loss)|"
        r"mixture_of_depths": "a recipe has no such method",
    },
    aside=(
        rf"{ASIDE}|{deepspeed.ASIDE}|compute_environment|debug|machine_rank|main_.*|rdzv_.*|same_network|tpu_.*|use_cpu|"
        r"gpu_ids|enable_cpu_affinity|downcast_bf16|command.*|mpirun_config\..*|parallelism_config\.cp_comm_strategy|"
        r"(ec2|iam|image|profile|region|base_job|pytorch_version|transformers_version|py_version|sagemaker)_?.*|"
        r"dynamo_config\.dynamo_(mode|use_.*)|launcher\..*|output_dir|logging_(dir|strategy|first_step)|run_name|hub_.*|"
        r"push_to_hub|do_(train|eval)|overwrite_(output_dir|cache)|per_device_eval_batch_size|eval_accumulation_steps|tf32|"
        r"(dataloader|preprocessing|dataset)_num_(workers|proc)|(remove_unused|ddp|log_level|save_(only|safe)|metric_for)"
        r"_?.*|gradient_checkpointing_kwargs.*|trust_remote_code|use_fast_tokenizer|cache_dir|plot_loss|disable_tqdm|"
        r"load_best_model_at_end|greater_is_better|include_num_input_tokens_seen|local_rank|max_samples"
    ),
    program="transformers' Trainer, whose program says what the file does not",
)  # fmt: skip
