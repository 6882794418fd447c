"""axolotl's configurations."""

from __future__ import annotations

import re
from typing import Any

from tpshard.recipes.foreign import model_names, yaml_settings
from tpshard.recipes.foreign.stacks import MESH, RankSizes
from tpshard.recipes.foreign.trainer_rows import (
    ALIASES,
    ALWAYS,
    ASIDE,
    FSDP,
    NO_MODEL,
    STORAGE,
    Kind,
    optimizer,
    ranks_of,
    schedule,
    storage,
    strategy_of,
    truth,
)
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid

KIND: dict[str, Any] = {
    "deepspeed": Maybe(object), "fsdp": Maybe(list), "fsdp_version": Maybe(int),
    "fsdp_config.auto_wrap_policy": Maybe(str), "dp_shard_size": Maybe(int), **FSDP,
}  # fmt: skip
"""What decides on how parameters are sharded."""
RANKS: dict[str, Any] = {
    **KIND, "dp_replicate_size": Maybe(int), "tensor_parallel_size": 1, "context_parallel_size": 1,
    "expert_parallel_size": 1, "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
}  # fmt: skip
"""What decides on the mesh."""
COMPUTED: dict[str, Any] = {"bf16": "auto", "fp16": False, "bfloat16": False, "float16": False}
STEPS: dict[str, Any] = {"max_steps": Maybe(int), "num_epochs": 1.0, "recipe.train.steps": Maybe(int)}
OURS = {"embed_tokens": "tok_embed", "lm_head": "output"}


def _kind(deepspeed: Any, fsdp: Any, version: Any, wrap: Any, shard: int | None, strategy: Any, reshard: Any) -> Kind:
    if deepspeed:
        stage = re.search(r"zero([123])", str(deepspeed))
        kinds: dict[str, Kind] = {"1": "zero1", "2": "zero2", "3": "zero3"}
        return kinds[stage[1]] if stage else "zero2"
    return "fsdp" if fsdp or version or wrap or (shard or 1) > 1 else "none"


def _ranks(*values: Any) -> RankSizes | Conflict:
    said = dict(zip(RANKS, values))
    kind = _kind(*values[: len(KIND)])
    tp, cp, ep = (said[f"{axis}_parallel_size"] for axis in ("tensor", "context", "expert"))
    dp, shard, each = said["dp_replicate_size"], said["dp_shard_size"], said["recipe.cluster.devices_per_node"]
    nodes = said["recipe.cluster.nodes"] or 1
    needed = (dp or 1) * (shard or 1) * tp * cp
    devices = nodes * each if each else max(needed, 8 if kind != "none" and not shard else ep)
    strategy = strategy_of(said["fsdp_config.sharding_strategy"], said["fsdp_config.reshard_after_forward"])[0]
    return ranks_of(kind, strategy if kind == "fsdp" else "", devices, nodes, dp, shard, tp, cp, ep)


def _mesh(*values: Any) -> Any:
    ranks = _ranks(*values)
    if isinstance(ranks, Conflict):
        return ranks
    said = dict(zip(RANKS, values))
    if said["recipe.cluster.devices_per_node"] is None and said["dp_shard_size"] is None:
        why = (
            f"how many devices there are: {ranks.devices} here; give cluster.nodes=... and cluster.devices_per_node=..."
        )
        return Unsaid(why, ranks.sections, ("devices",))
    return ranks.sections


def _model(base: str | None, bits8: bool, bits4: bool, adapter: str | None) -> Any:
    if base is None:
        return Unsaid(NO_MODEL, {"hf": "MODEL"})
    keys = model_names.named(base)
    if keys is None:
        return Unsaid(
            "its sizes are not known here; fetch its folder and give model.hf=FOLDER", {"hf": "MODEL"}, ("base_model",)
        )
    if (window := keys.pop("window", None)) is not None:
        why = f"its attention sees {window} tokens; all here, unless model.hf=FOLDER names its folder"
        return Unsaid(why, keys, ("base_model",))
    if truth(bits8) or truth(bits4) or adapter == "qlora":
        return Unsaid(
            "the base model is not kept in 8 or 4 bits in training", keys, ("load_in_8bit", "load_in_4bit", "adapter")
        )
    return keys


def _computed(bf16: Any, fp16: Any, bfloat16: Any, float16: Any) -> str:
    if truth(fp16) or truth(float16):
        return "fp16"
    return "bf16" if truth(bf16) or bf16 in ("auto", "full") or truth(bfloat16) else "fp32"


def _dtype(fp8: Any, *types: Any) -> str:
    return "fp8" if truth(fp8) else _computed(*types)


def _storage(adapter: str | None, bf16: Any, fp16: Any, bfloat16: Any, float16: Any, *kind: Any) -> dict[str, Any]:
    computed = _computed(bf16, fp16, bfloat16, float16)
    return storage(_kind(*kind), computed, adapter is not None, strategy_of(*kind[-2:])[1])


def _batch(micro: int, accumulated: int, *values: Any) -> Any:
    ranks = _ranks(*values)
    if isinstance(ranks, Conflict):
        return Omit
    return {"batch.global_sequences": micro * accumulated * ranks.data, "batch.per_device": micro}


def _adapter(
    kind: str | None, rank: int, alpha: int | None, dropout: float, linear: bool, targets: Any,
    saved: list[str] | None, dora: bool, rslora: bool,
) -> Any:  # fmt: skip
    if kind is None:
        return Omit
    if kind not in ("lora", "qlora"):
        return Unsaid("a recipe has low-rank adapters alone", Omit, ("adapter",))
    listed = (
        ["all-linear"] if truth(linear) or not targets else [targets] if isinstance(targets, str) else list(targets)
    )
    keys: dict[str, Any] = {"rank": rank, "alpha": float(alpha or 8), "targets": listed, "dropout": dropout}
    keys |= {"modules_to_save": [OURS.get(name, name) for name in saved]} if saved else {}
    keys |= {"dora": True} if truth(dora) else {}
    keys |= {"use_rslora": True} if truth(rslora) else {}
    plain = all(re.fullmatch(r"[\w.]+|all-linear", name) for name in listed)
    why = "targets are names of layers here, not a pattern"
    return keys if plain else Unsaid(why, {**keys, "targets": ["all-linear"]}, ("lora_target_modules",))


def _chunks(fused: bool, plugins: list[Any], seq: int) -> Any:
    """A loss whose logits are never whole, as Liger's and CutCrossEntropy's."""
    chunked = truth(fused) or "CutCrossEntropy" in str(plugins)
    return next((n for n in (8, 4, 2) if seq % n == 0), 1) if chunked else Omit


def _length(most: int | None, epochs: float, steps: int | None) -> Any:
    if steps or most:
        return {"train.steps": steps or most}
    whole = {"data.epochs": max(1, round(epochs))}
    return whole if epochs == whole["data.epochs"] else Unsaid("epochs are whole", whole, ("num_epochs",))


def _schedule(name: str, warmup: int | None, share: float | None, least: float, *steps: Any) -> Any:
    length = _length(*steps)
    total = length.get("train.steps") if isinstance(length, dict) else None
    share = warmup if warmup is not None and 0 < warmup < 1 else share
    if share is None and warmup is not None:
        return schedule(name, int(warmup), least, total)
    if total is None:
        why = "it is a share of the steps that the data makes; give schedule.warmup_steps=..."
        said = schedule(name, 100, least, None)
        return said if isinstance(said, Unsaid) else Unsaid(why, said, ("warmup_steps", "warmup_ratio"))
    return schedule(name, round(share * total) if share is not None else min(int(0.03 * total), 100), least, total)


def _evaluate(share: float, every: Any, per_epoch: Any) -> Any:
    if not share:
        return 0
    if type(every) is int:
        return every
    return Unsaid("evaluations are a number of steps apart", 500, ("evals_per_epoch", "eval_steps"))


def _data(datasets: list[Any], pretraining: Any, source: str | None) -> Any:
    listed = pretraining if isinstance(pretraining, list) else [pretraining] if pretraining else datasets
    if source or not listed:
        return source or "sample"
    first = listed[0].get("path") if isinstance(listed[0], dict) else listed[0]
    return Unsaid(f"give data.source, such as hub:{first}, and its columns (docs: finetune a chat model)", "sample")


ROWS = (
    KeyRow(MESH, RANKS, _mesh),
    KeyRow("model", {"base_model": Maybe(str), "load_in_8bit": False, "load_in_4bit": False, "adapter": Maybe(str)},
        _model),
    KeyRow("model.seq_len", {"sequence_len": 512}),
    KeyRow("model.dtype", {"fp8": False, **COMPUTED}, _dtype),
    KeyRow("adapters.lora", {
        "adapter": Maybe(str), "lora_r": 8, "lora_alpha": Maybe(int), "lora_dropout": 0.0, "lora_target_linear": False,
        "lora_target_modules": Maybe(object), "lora_modules_to_save": Maybe(list), "peft_use_dora": False,
        "peft_use_rslora": False,
    }, _adapter),
    KeyRow("loss.chunks", {"liger_fused_linear_cross_entropy": False, "plugins": [], "sequence_len": 512}, _chunks),
    KeyRow(STORAGE, {"adapter": Maybe(str), **COMPUTED, **KIND}, _storage),
    *ALWAYS,
    KeyRow("remat", {"gradient_checkpointing": Maybe(object), "fsdp_config.activation_checkpointing": False},
        lambda trainer, fsdp: "full" if truth(trainer) or truth(fsdp) else "none" if "offload" not in str(trainer)
        else Unsaid("activations are not offloaded", "full", ("gradient_checkpointing",))),
    KeyRow("compile", {"torch_compile": False}, lambda on: "blocks" if truth(on) or on == "auto" else "eager"),
    KeyRow(("batch.global_sequences", "batch.per_device"),
        {"micro_batch_size": 1, "gradient_accumulation_steps": 1, **RANKS}, _batch),
    KeyRow("optimizer.name", {"optimizer": "adamw_torch_fused"}, optimizer),
    KeyRow("optimizer.lr", {"learning_rate": Maybe(float)}, lambda lr: 5e-5 if lr is None else lr),
    KeyRow("optimizer.betas", {"adam_beta1": 0.9, "adam_beta2": 0.999}, lambda *betas: list(betas)),
    KeyRow("optimizer.eps", {"adam_epsilon": 1e-8}),
    KeyRow("optimizer.weight_decay", {"weight_decay": 0.0}),
    KeyRow("schedule", {
        "lr_scheduler": "cosine", "warmup_steps": Maybe(float), "warmup_ratio": Maybe(float),
        "cosine_min_lr_ratio": 0.0, **STEPS,
    }, _schedule),
    KeyRow(("train.steps", "data.epochs"), STEPS, _length),
    KeyRow("train.clip_grad_norm", {"max_grad_norm": 1.0}, lambda norm: norm or None),
    KeyRow("seed", {"seed": 42}),
    KeyRow("evaluate.every_steps",
        {"val_set_size": 0.0, "eval_steps": Maybe(object), "evals_per_epoch": Maybe(object)}, _evaluate),
    KeyRow("data.source",
        {"datasets": [], "pretraining_dataset": Maybe(object), "recipe.data.source": Maybe(str)}, _data),
    KeyRow("checkpoint.every_steps", {"save_steps": Maybe(object), "saves_per_epoch": Maybe(object)},
        lambda steps, each: steps if type(steps) is int else
        Unsaid("checkpoints are a number of steps apart", 500, ("saves_per_epoch", "save_steps"))),
    KeyRow("checkpoint.keep_last", {"save_total_limit": 4}),
    KeyRow("logging.every_steps", {"logging_steps": 10}),
    KeyRow("logging.wandb", {"wandb_project": Maybe(str)}, lambda name: {"project": name} if name else None),
    KeyRow((), {"activation_offloading": Maybe(object)},
        lambda on: Unsaid("a recipe offloads nothing") if on else Omit),
    KeyRow((), {"deepspeed": Maybe(object)},
        lambda file: Omit if file is None else Unsaid("its settings are in that file; its stage is its name's here")),
    KeyRow((), {"sample_packing": False},
        lambda on: Omit if truth(on) else Unsaid("sequences are filled, as with packing")),
    KeyRow("train.freeze", {"unfrozen_parameters": Maybe(list)},
        lambda kept: Omit if kept is None else Unsaid("a recipe names what is frozen, train.freeze")),
)  # fmt: skip

TOOL = Tool(
    "axolotl",
    "0.18",
    yaml_settings.read,
    ROWS,
    aliases={
        **ALIASES,
        "sequence_parallel_degree": "context_parallel_size",
        "torch_compile.enable": "torch_compile",
        "rl.type": "rl",
    },
    unsaid={
        r"rl|dpo.*|kto.*|trl\..*|reward_model|process_reward_model|num_labels": "a recipe learns no preferences",
        r"qat\..*|quantization\..*": "training does not simulate quantized weights",
        r"model_config\..*": "sizes of the model are given as model.KEY=...",
        r"special_tokens\..*|tokens|chat_template.*|eot_tokens": "tokens and templates are the tokenizer's folder's",
        r"lisa.*|relora.*|loraplus.*|galore.*": "a recipe has no such method",
    },
    aside=(
        rf"{ASIDE}|wandb_(?!project).*|output_dir|dataset_prepared_path|hub_.*|resume_from_checkpoint|lora_model_dir|"
        r"model_type|tokenizer_type|strict|debug|auto_resume.*|save_safetensors|save_first_step|save_strategy|save_only_model|"
        r"eval_table_size|eval_max_new_tokens|early_stopping_patience|loss_watchdog.*|trust_remote_code|tf32|use_tensorboard|"
        r"is_.*_derived_model|eval_sample_packing|pad_to_sequence_len|gradient_checkpointing_kwargs\..*|use_ray|ray_.*|"
        r"use_otel.*|otel_.*|dataloader_.*|dataset_processes|use_wandb|use_mlflow|mlflow.*|swanlab.*|remove_unused_columns|"
        r"ddp_.*|flash_attention|attn_implementation|sdp_attention|xformers_attention|group_by_length"
    ),
)  # fmt: skip
