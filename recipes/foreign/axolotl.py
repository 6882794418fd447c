"""axolotl's configurations."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from tpshard.models.families.presets import PRESETS
from tpshard.recipes.foreign import deepspeed, model_names
from tpshard.recipes.foreign.adapter_rows import adapter
from tpshard.recipes.foreign.fp8_rows import NO_EXPERTS, dense
from tpshard.recipes.foreign.stacks import MESH, RankSizes
from tpshard.recipes.foreign.trainer_rows import (
    ALIASES,
    ALWAYS,
    ASIDE,
    FSDP,
    IN_FP8,
    STORAGE,
    Kind,
    model,
    optimizer,
    ranks_of,
    schedule,
    storage,
    strategy_of,
    truth,
)
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid
from tpshard.recipes.settings import yaml_settings
from tpshard.recipes.settings.stated import StatedSettings

KIND: dict[str, Any] = {
    "deepspeed": Maybe(object), "deepspeed_config.zero_stage": Maybe(int), "fsdp": Maybe(list),
    "fsdp_version": Maybe(int), "fsdp_config.auto_wrap_policy": Maybe(str), "dp_shard_size": Maybe(int), **FSDP,
}  # fmt: skip
"""What decides on how parameters are sharded."""
RANKS: dict[str, Any] = {
    **KIND, "dp_replicate_size": Maybe(int), "tensor_parallel_size": 1, "context_parallel_size": 1,
    "expert_parallel_size": 1, "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
}  # fmt: skip
"""What decides on the mesh."""
COMPUTED: dict[str, Any] = {"bf16": "auto", "fp16": False, "bfloat16": False, "float16": False}
LORA: dict[str, Any] = {
    "adapter": Maybe(str), "lora_r": 8, "lora_alpha": Maybe(int), "lora_dropout": 0.0, "lora_target_linear": False,
    "lora_target_modules": Maybe(object), "lora_target_parameters": Maybe(object), "lora_modules_to_save": Maybe(list),
    "peft_use_dora": False, "peft_use_rslora": False,
}  # fmt: skip
STEPS: dict[str, Any] = {"max_steps": Maybe(int), "num_epochs": 1.0, "recipe.train.steps": Maybe(int)}


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a YAML, with those of the DeepSpeed JSON that it names or holds."""
    return deepspeed.with_file(yaml_settings.read(data, file), "deepspeed", file)


def _kind(
    file: Any, stage: int | None, fsdp: Any, version: Any, wrap: Any, shard: int | None, strategy: Any, reshard: Any
) -> Kind:
    if file or stage is not None:
        by_name = re.search(r"zero([123])", str(file))
        kinds: dict[int, Kind] = {0: "none", 1: "zero1", 2: "zero2", 3: "zero3"}
        return kinds.get(stage if stage is not None else int(by_name[1]) if by_name else 2, "none")
    return "fsdp" if fsdp or version or wrap or (shard or 1) > 1 else "none"


def _ranks(*values: Any) -> RankSizes | Conflict:
    said = dict(zip(RANKS, values))
    kind = _kind(*values[: len(KIND)])
    tp, cp, ep = (said[f"{axis}_parallel_size"] for axis in ("tensor", "context", "expert"))
    dp, shard, each = said["dp_replicate_size"], said["dp_shard_size"], said["recipe.cluster.devices_per_node"]
    nodes = said["recipe.cluster.nodes"] or 1
    needed = (dp or 1) * (shard or 1) * tp * cp * ep
    devices = nodes * each if each else needed * (max(1, 8 // needed) if kind != "none" and not shard else 1)
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


def _packed(base: str | None, bits8: Any, bits4: Any, gptq: Any, adapter: str | None) -> Any:
    """A frozen base in few bits, which a preset stands for in plans."""
    bits = 4 if truth(bits4) or truth(gptq) or adapter == "qlora" else 8 if truth(bits8) else None
    if bits is None or adapter not in ("lora", "qlora"):
        return Omit
    group = 128 if bits == 4 else -1
    keys = {"adapters.packed": True, "quantize": {"bits": bits, "group_size": group, "order": "none"}}
    by = "load_in_8bit" if bits == 8 else "load_in_4bit" if truth(bits4) else "gptq" if truth(gptq) else "adapter"
    model = model_names.named(base or "")
    sayable = model is not None and not PRESETS[model["preset"]].experts
    why = f"codes of {bits} bits are GPTQ's; to train, name the folder that `tpshard quantize` writes, model.hf=..."
    return Unsaid(why, keys if sayable else Omit, (by,))


def _computed(bf16: Any, fp16: Any, bfloat16: Any, float16: Any) -> str:
    if truth(fp16) or truth(float16):
        return "fp16"
    return "bf16" if truth(bf16) or bf16 in ("auto", "full") or truth(bfloat16) else "fp32"


def _dtype(fp8: Any, base: str | None, *types: Any) -> Any:
    keys = model_names.named(base or "")
    if truth(fp8) and not dense(keys):
        return Unsaid(NO_EXPERTS, _computed(*types), ("fp8",))
    return Unsaid(IN_FP8, "fp8", ("fp8",)) if truth(fp8) else _computed(*types)


def _storage(
    sent: str | None, summed: str | None, adapter: str | None, bf16: Any, fp16: Any, bfloat16: Any, float16: Any,
    *kind: Any,
) -> dict[str, Any]:  # fmt: skip
    computed = _computed(bf16, fp16, bfloat16, float16)
    return storage(_kind(*kind), computed, adapter is not None, strategy_of(*kind[-2:])[1], sent, summed)


def _batch(micro: int, accumulated: int | None, of_rank: int | None, *values: Any) -> Any:
    ranks = _ranks(*values)
    if isinstance(ranks, Conflict):
        return Omit
    accumulated = accumulated or (of_rank // micro if of_rank else 1)
    return {"batch.global_sequences": micro * accumulated * ranks.data, "batch.per_device": micro}


def _adapter(*values: Any) -> Any:
    kind, rank, alpha, dropout, *rest = values
    if kind is None:
        given = rank != 8 or alpha or any(rest)
        why = "without an adapter it has no effect: the whole model is trained"
        return Unsaid(why, Omit, tuple(list(LORA)[1:])) if given else Omit
    return adapter(kind, "adapter", rank, float(alpha or 8), dropout, *rest)


CLASHES: tuple[tuple[str, str], ...] = (
    ("warmup_steps", "warmup_ratio"), ("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch"),
    ("load_in_8bit", "load_in_4bit"), ("bf16", "fp16"), ("fsdp", "deepspeed"), ("fsdp_config.version", "deepspeed"),
    ("gradient_accumulation_steps", "batch_size"),
)  # fmt: skip
"""Settings of which axolotl takes one."""


def _clash(*values: Any) -> Any:
    said = dict(zip(ONCE, values))
    said["deepspeed"] = said["deepspeed"] or said["deepspeed_config.zero_stage"]
    for pair in CLASHES:
        if all(said[key] is not None and str(said[key]).lower() not in ("false", "[]", "auto") for key in pair):
            return Conflict(f"{' and '.join(pair)} are given, and axolotl takes one", fix="keep one", keys=pair)
    if said["adapter"] == "qlora" and said["load_in_4bit"] is not None and not truth(said["load_in_4bit"]):
        return Conflict("adapter: qlora needs load_in_4bit: true, without which axolotl stops", keys=("load_in_4bit",))
    return Omit


ONCE: dict[str, Any] = dict.fromkeys(
    ("adapter", "deepspeed_config.zero_stage", *(key for pair in CLASHES for key in pair)), Maybe(object)
)


def _chunks(fused: Any, cut: Any, chunked_loss: Any, plugins: list[Any], seq: int) -> Any:
    """A loss whose logits are never whole, as Liger's and CutCrossEntropy's."""
    plugin = "CutCrossEntropy" in str(plugins) and str(cut).lower() != "false"
    chunked = truth(fused) or truth(cut) or truth(chunked_loss) or plugin
    return next((n for n in (8, 4, 2) if seq % n == 0), 1) if chunked else Omit


def _length(most: int | None, epochs: float, steps: int | None) -> Any:
    if steps or most:
        return {"train.steps": steps or most}
    whole = {"data.epochs": max(1, round(epochs))}
    return whole if epochs == whole["data.epochs"] else Unsaid("epochs are whole", whole, ("num_epochs",))


def _schedule(
    name: str, warmup: int | None, share: float | None, least: float, over: int | None, way: str, *steps: Any
) -> Any:
    length = _length(*steps)
    total = length.get("train.steps") if isinstance(length, dict) else None
    share = warmup if warmup is not None and 0 < warmup < 1 else share
    if share is None and warmup is not None:
        return schedule(name, int(warmup), least, total, over, way)
    if total is None:
        why = "it is a share of the steps that the data makes; give schedule.warmup_steps=..."
        said = schedule(name, 100, least, None, over, way)
        return said if isinstance(said, Unsaid) else Unsaid(why, said, ("warmup_steps", "warmup_ratio"))
    first = round(share * total) if share is not None else min(int(0.03 * total), 100)
    return schedule(name, first, least, total, over, way)


def _saved(strategy: Any, every: Any, per_epoch: Any) -> Any:
    if strategy is False or strategy == "no":
        return 0
    if strategy in (None, "steps") and type(every) is int:
        return every
    keys = ("saves_per_epoch", "save_steps") if strategy in (None, "steps") else ("save_strategy",)
    return Unsaid("checkpoints are a number of steps apart", 500, keys)


def _evaluate(strategy: Any, share: float, every: Any, per_epoch: Any) -> Any:
    if not share or strategy is False or strategy == "no":
        return 0
    if strategy not in (None, "steps"):
        return Unsaid("evaluations are a number of steps apart", 500, ("eval_strategy",))
    if type(every) is int:
        return every
    return Unsaid("evaluations are a number of steps apart", 500, ("evals_per_epoch", "eval_steps"))


def _data(datasets: list[Any], pretraining: Any, source: str | None) -> Any:
    listed = pretraining if isinstance(pretraining, list) else [pretraining] if pretraining else datasets
    if source or not listed:
        return source or "sample"
    first = listed[0] if isinstance(listed[0], dict) else {"path": listed[0], "type": "completion"}
    path, kind = str(first.get("path")), str(first.get("type"))
    place = path if os.path.exists(path) or path.startswith((".", "/")) or path.count("/") != 1 else f"hub:{path}"
    column = "as prompt and completion, or text: data.prompt=... data.completion=..."
    if kind.startswith(("chat_template", "sharegpt")):
        column = f"data.messages={first.get('field_messages', 'messages')}, of maps with role and content"
    elif kind.startswith(("completion", "pretrain")):
        column = f"data.column={first.get('text_column') or first.get('field') or 'text'}"
    more = f"; the other {len(listed) - 1} as data.sources" if len(listed) > 1 else ""
    return Unsaid(f"give data.source={place} {column}{more}", "sample")


def _offload(where: Any, trainer: Any) -> Any:
    """Where activations wait. Older files say it of gradient_checkpointing: offload or offload_disk."""
    if "disk" in f"{where} {trainer}":
        return Unsaid("they wait in the host's memory here, not on its disk", "activations")
    return "activations" if truth(where) or where in ("legacy", "hidden_states") or "offload" in str(trainer) else Omit


ROWS = (
    KeyRow(MESH, RANKS, _mesh),
    KeyRow("model", {"base_model": Maybe(str), "revision_of_model": Maybe(str)}, partial(model, "base_model")),
    KeyRow(("adapters.packed", "quantize"), {
        "base_model": Maybe(str), "load_in_8bit": False, "load_in_4bit": False, "gptq": False, "adapter": Maybe(str),
    }, _packed),
    KeyRow("model.seq_len", {"sequence_len": 512}),
    KeyRow("model.dtype", {"fp8": False, "base_model": Maybe(str), **COMPUTED}, _dtype),
    KeyRow("adapters.lora", LORA, _adapter),
    KeyRow("loss.chunks", {
        "liger_fused_linear_cross_entropy": False, "cut_cross_entropy": Maybe(object), "chunked_cross_entropy": False,
        "plugins": [], "sequence_len": 512,
    }, _chunks),
    KeyRow(STORAGE, {**deepspeed.TYPES, "adapter": Maybe(str), **COMPUTED, **KIND}, _storage),
    *ALWAYS,
    KeyRow("remat", {"gradient_checkpointing": Maybe(object), "fsdp_config.activation_checkpointing": False},
        lambda trainer, fsdp: "full" if truth(trainer) or truth(fsdp) or "offload" in str(trainer) else "none"),
    KeyRow("offload", {"activation_offloading": Maybe(object), "gradient_checkpointing": Maybe(object)}, _offload),
    KeyRow("sharding.overlap", {"tensor_parallel_size": 1}, lambda tp: False if tp > 1 else Omit),
    KeyRow("compile", {"torch_compile": False}, lambda on: "blocks" if truth(on) or on == "auto" else "eager"),
    KeyRow(("batch.global_sequences", "batch.per_device"),
        {"micro_batch_size": 1, "gradient_accumulation_steps": Maybe(int), "batch_size": Maybe(int), **RANKS}, _batch),
    KeyRow("optimizer.name", {"optimizer": "adamw_torch_fused"}, optimizer),
    KeyRow("optimizer.lr", {"learning_rate": Maybe(float)}, lambda lr: 5e-5 if lr is None else lr),
    KeyRow("optimizer.betas", {"adam_beta1": 0.9, "adam_beta2": 0.999}, lambda *betas: list(betas)),
    KeyRow("optimizer.eps", {"adam_epsilon": 1e-8}),
    KeyRow("optimizer.weight_decay", {"weight_decay": 0.0}),
    KeyRow("schedule", {
        "lr_scheduler": "cosine", "warmup_steps": Maybe(float), "warmup_ratio": Maybe(float),
        "cosine_min_lr_ratio": 0.0, "lr_scheduler_kwargs.num_decay_steps": Maybe(int),
        "lr_scheduler_kwargs.decay_type": "cosine", **STEPS,
    }, _schedule),
    KeyRow(("train.steps", "data.epochs"), STEPS, _length),
    KeyRow("train.clip_grad_norm", {"max_grad_norm": 1.0, "deepspeed_config.gradient_clipping": Maybe(object)},
        lambda norm, own: (norm if own is None else deepspeed.clipping(own)) or None),
    KeyRow("seed", {"seed": 42}),
    KeyRow("evaluate.every_steps",
        {"eval_strategy": Maybe(object), "val_set_size": 0.0, "eval_steps": Maybe(object),
         "evals_per_epoch": Maybe(object)}, _evaluate),
    KeyRow("data.source",
        {"datasets": [], "pretraining_dataset": Maybe(object), "recipe.data.source": Maybe(str)}, _data),
    KeyRow("checkpoint.every_steps",
        {"save_strategy": Maybe(object), "save_steps": Maybe(object), "saves_per_epoch": Maybe(object)}, _saved),
    KeyRow("checkpoint.keep_last", {"save_total_limit": 4}),
    KeyRow("logging.every_steps", {"logging_steps": 10}),
    KeyRow("logging.wandb", {"wandb_project": Maybe(str)}, lambda name: {"project": name} if name else None),
    KeyRow((), ONCE, _clash),
    *deepspeed.ROWS,
    KeyRow((), {"deepspeed": Maybe(object)},
        lambda file: Omit if file is None else Unsaid("there is no such file here; its stage is its name's")),
    KeyRow((), {"sample_packing": False},
        lambda on: Omit if truth(on) else Unsaid("sequences are filled, as with packing")),
    KeyRow("train.freeze", {"unfrozen_parameters": Maybe(list)},
        lambda kept: Omit if kept is None else Unsaid("a recipe names what is frozen, train.freeze")),
)  # fmt: skip

TOOL = Tool(
    "axolotl",
    "0.18",
    read,
    ROWS,
    aliases={
        **ALIASES,
        "lr_scheduler_kwargs.min_lr_ratio": "cosine_min_lr_ratio",
        "sequence_parallel_degree": "context_parallel_size",
        "torch_compile.enable": "torch_compile",
        "rl.type": "rl",
    },
    unsaid={
        r"deepspeed_config\.(train_.*|gradient_acc.*|optimizer\..*|scheduler\..*|(bf16|fp16)\.enabled)":
            "the file's own setting is here; where that differs, the trainer stops",
        **deepspeed.UNSAID,
        r"(liger|lora|flash_attn)_\w*(kernel|norm|glu_activation|rope|fuse)\w*|use_(kernels|scattermoe|sonicmoe)|flex_attn.*|"
        r"experts_implementation|fused_attn_kernel|gemma4_hybrid_attn_impl|tiled_mlp\w*":
            "kernels are the compiler's here",
        r"processor_type|skip_prepare_dataset|freeze_mm_modules|image_.*": "a recipe trains on text alone",
        r"fp8_.*": "weights are gathered in bf16 and quantized behind it here",
        r"rl|dpo.*|kto.*|trl\..*|reward_model|process_reward_model|num_labels": "a recipe learns no preferences",
        r"qat\..*|quantization\..*": "training does not simulate quantized weights",
        r"model_config\..*": "sizes of the model are given as model.KEY=...",
        r"special_tokens\..*|tokens(\..*)?|added_tokens.*|chat_template.*|eot_tokens":
            "tokens and templates are the tokenizer's folder's",
        r"lisa.*|relora.*|loraplus.*|galore.*": "a recipe has no such method",
    },
    aside=(
        rf"{ASIDE}|{deepspeed.ASIDE}|wandb_(?!project).*|output_dir|dataset_prepared_path|hub_.*|lora_model_dir|"
        r"resume_from_checkpoint|"
        r"model_type|tokenizer_type|strict|debug|auto_resume.*|save_safetensors|save_first_step|save_only_model|"
        r"eval_table_size|eval_max_new_tokens|early_stopping_patience|loss_watchdog.*|trust_remote_code|tf32|use_tensorboard|"
        r"is_.*_derived_model|eval_sample_packing|pad_to_sequence_len|gradient_checkpointing_kwargs\..*|use_ray|ray_.*|"
        r"use_otel.*|otel_.*|dataloader_.*|dataset_processes|use_wandb|use_mlflow|mlflow.*|swanlab.*|remove_unused_columns|"
        r"ddp_.*|flash_attention|attn_implementation|sdp_attention|xformers_attention|group_by_length"
    ),
)  # fmt: skip
