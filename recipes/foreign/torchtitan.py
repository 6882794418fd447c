"""torchtitan's TOML configurations, which its versions until 0.2.2 have."""

from __future__ import annotations

import re
from typing import Any

from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.foreign import model_names, toml_settings
from tpshard.recipes.foreign.stacks import MESH, RankSizes, product, rest_of
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid

NO_OPTIMIZER = Unsaid("a recipe has adamw, lion and muon", "adamw")
NO_DATA = Unsaid("give data.source, and data.tokenizer for training", "sample")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SCHEDULES = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved_1f1b", "LoopedBFS": "circular",
    "ZBVZeroBubble": "zero_bubble", "InterleavedZeroBubble": "zero_bubble",
}  # fmt: skip
EVERY_SECOND = ["attention", "wq", "wv", "gate", "down"]
"""What its policy `op` keeps of a layer: attention, and every second of the products wq, wk, wv, wo, gate, up, down."""
DEBUG = {
    "preset": "llama3-8b", "layers": 6, "width": 256, "heads": 16, "kv_heads": 16, "head_dim": 16, "mlp": 768,
    "vocab": 2048,
}  # fmt: skip
RANKS = {
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
    "NGPU": 8,
}
"""What decides on the mesh; NGPU is that of its run_train.sh."""


def _ranks(
    dp: int, fsdp: int, tp: int, cp: int, pp: int, ep: int, nodes: int | None, each: int | None, ngpu: int
) -> RankSizes | Conflict:
    """Experts take their ranks from those of fsdp."""
    fixed, said = product({"dp": dp, "fsdp": max(fsdp, 1), "tp": tp, "cp": cp, "pp": pp})
    times = rest_of((nodes or 1) * each if each is not None else max(ngpu, fixed), fixed, said)
    if isinstance(times, Conflict):
        return times
    if fsdp > 0 and times > 1 and each is not None:
        message = f"{said} are {fixed} devices, and the cluster has {fixed * times}"
        return Conflict(message, fix="parallelism.data_parallel_shard_degree = -1 takes the rest", exit=Exit.FIT)
    shards = fsdp if fsdp > 0 else times
    if shards % ep:
        message = f"experts over {ep} ranks do not divide the {shards} of parallelism.data_parallel_shard_degree"
        return Conflict(message, exit=Exit.FIT)
    return RankSizes(dp, shards // ep, ep, cp, tp, pp)


def _mesh(*sizes: Any) -> Any:
    ranks = _ranks(*sizes)
    return ranks if isinstance(ranks, Conflict) else ranks.sections


def _batch(local: int, whole: int, micro: int, *sizes: Any) -> Any:
    """A pipeline divides the local batch; without one, a larger global batch is accumulated."""
    ranks = _ranks(*sizes)
    if isinstance(ranks, Conflict):
        return Omit  # told of the mesh
    one = local * ranks.data
    if whole > 0 and whole % one:
        message = f"a global batch of {whole} is not divided by {local} sequences on each of {ranks.data} data ranks"
        return Conflict(message, fix=f"a multiple of {one}", exit=Exit.RECIPE)
    if ranks.pp > 1 and local % micro:
        message = f"a local batch of {local} is not divided by micro-batches of {micro}"
        return Conflict(message, fix=f"a multiple of {micro}", exit=Exit.RECIPE)
    total = whole if whole > 0 else one
    return {"batch.global_sequences": total, "batch.per_device": micro if ranks.pp > 1 else local}


def _pipeline(schedule: str, pp: int, each: int | None, *layers: Any) -> Any:
    if pp == 1:
        return Omit
    name = next((ours for theirs, ours in SCHEDULES.items() if theirs.lower() == schedule.lower()), None)
    if name is None:
        return Unsaid(
            "a recipe has no such schedule", {"schedule": "1f1b"}, ("parallelism.pipeline_parallel_schedule",)
        )
    looped = {"rounds": 2} if name in ("interleaved_1f1b", "circular") else {}
    if each is not None:
        why = "a recipe gives each stage's number of layers, pipeline.split"
        return Unsaid(why, {"schedule": name, **looped}, ("parallelism.pipeline_parallel_layers_per_stage",))
    if "zerobubble" in schedule.lower():
        why = "its stages, two a device, are one a device here"
        return Unsaid(why, {"schedule": name}, ("parallelism.pipeline_parallel_schedule",))
    return {"schedule": name, **looped}


def _model(name: str, flavor: str) -> Any:
    size = re.sub("_(flex|varlen)(_attn)?$", "", flavor)
    if name in ("llama3", "llama3_ft") and size == "debugmodel":
        return DEBUG
    prefix = {"llama3": "llama-3.1-", "llama3_ft": "llama-3.1-", "qwen3": "qwen3-"}.get(name)
    keys = model_names.named(prefix + size) if prefix is not None else None
    if keys is None:
        return Unsaid("its sizes are not known here; give model.preset=..., or a folder model.hf=...", {"hf": "MODEL"})
    return keys


def _decay(optimizer: str, weight_decay: float) -> Any:
    """Its optimizers decay every parameter, norms and biases too."""
    norms = ["layers.*.attention_norm", "layers.*.mlp_norm", "norm"]
    return [{"match": norms, "weight_decay": weight_decay}] if weight_decay else Omit


def _schedule(warmup: int, total: int | None, ratio: float | None, kind: str, least: float, steps: int) -> Any:
    end = total or steps
    keys: dict[str, Any] = {"warmup_steps": warmup, "decay_steps": end, "min_lr_ratio": least}
    if ratio is None:
        name = {"linear": "linear", "cosine": "cosine"}.get(kind)
        keys = {"name": name or "linear", **keys}
    else:
        keys = {"name": "wsd", **keys, "decay_over": max(1, round(end * ratio))}
    if (ratio is None and kind == "sqrt") or (ratio is not None and kind != "linear"):
        return Unsaid(f"the fall of {keys['name']} is a line here", keys, ("lr_scheduler.decay_type",))
    return keys


def _remat(mode: str, option: str | int) -> Any:
    if mode in ("none", "full"):
        return mode
    if mode == "selective" and str(option).isdigit():
        return {"every": int(option)} if int(option) > 1 else "full"
    if mode == "selective":
        return EVERY_SECOND
    return Unsaid("a recipe has no budget of memory for recomputation", "selective", ("activation_checkpoint.mode",))


def _compile(enable: bool, components: list[str]) -> Any:
    return "blocks" if enable and "model" in components else "eager"


def _precision(dtype: str, param: str, converters: list[str]) -> Any:
    master, computed = DTYPES.get(dtype, "fp32"), DTYPES.get(param, "bf16")
    named = ["float8"] if "float8" in str(converters) else []
    keys = {
        "model.dtype": "fp8" if named else computed, "fsdp.param_dtype": computed, "fsdp.master_dtype": master,
        "optimizer.state_dtype": master,
    }  # fmt: skip
    return keys


def _reshard(policy: str, pp: int) -> bool:
    return policy == "always" or (policy == "default" and pp == 1)


def _evaluate(enable: bool, freq: int, steps: int, local: int) -> Any:
    if not enable:
        return {"every_steps": 0}
    if steps < 0:
        return Unsaid("a recipe has a number of sequences", {"every_steps": freq}, ("validation.steps",))
    return {"every_steps": freq, "sequences": steps * local}


ROWS = (
    KeyRow(MESH, RANKS, _mesh),
    KeyRow("model", {"model.name": "llama3", "model.flavor": "debugmodel"}, _model),
    KeyRow("model.seq_len", {"training.seq_len": 2048}),
    KeyRow(
        ("model.dtype", "fsdp.param_dtype", "fsdp.master_dtype", "optimizer.state_dtype"),
        {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16", "model.converters": []}, _precision,
    ),
    KeyRow("fsdp.reduce_dtype", {"training.mixed_precision_reduce": "float32"}, DTYPES.get),
    KeyRow("fsdp.bucket", {}, lambda: "wrap"),
    KeyRow("fsdp.prefetch", {}, lambda: 1),
    KeyRow(
        "fsdp.reshard_after_forward",
        {"parallelism.fsdp_reshard_after_forward": "default", "parallelism.pipeline_parallel_degree": 1}, _reshard,
    ),
    KeyRow("fsdp.accumulate", {}, lambda: {"gather": "microbatch", "reduce": "each", "dtype": "fp32"}),
    KeyRow("remat", {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
        _remat),
    KeyRow("compile", {"compile.enable": False, "compile.components": ["model", "loss"]}, _compile),
    KeyRow(
        "pipeline",
        {
            "parallelism.pipeline_parallel_schedule": "1F1B", "parallelism.pipeline_parallel_degree": 1,
            "parallelism.pipeline_parallel_layers_per_stage": Maybe(int),
        },
        _pipeline,
    ),
    KeyRow(
        ("batch.global_sequences", "batch.per_device"),
        {
            "training.local_batch_size": 8, "training.global_batch_size": -1,
            "parallelism.pipeline_parallel_microbatch_size": 1, **RANKS,
        },
        _batch,
    ),
    KeyRow("optimizer.name", {"optimizer.name": "AdamW"}, lambda name: "adamw" if name == "AdamW" else NO_OPTIMIZER),
    KeyRow("optimizer.lr", {"optimizer.lr": 8e-4}),
    KeyRow("optimizer.betas", {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95}, lambda *betas: list(betas)),
    KeyRow("optimizer.eps", {"optimizer.eps": 1e-8}),
    KeyRow("optimizer.weight_decay", {"optimizer.weight_decay": 0.1}),
    KeyRow("optimizer.groups", {"optimizer.name": "AdamW", "optimizer.weight_decay": 0.1}, _decay),
    KeyRow(
        "schedule",
        {
            "lr_scheduler.warmup_steps": 200, "lr_scheduler.total_steps": Maybe(int),
            "lr_scheduler.decay_ratio": Maybe(float), "lr_scheduler.decay_type": "linear",
            "lr_scheduler.min_lr_factor": 0.0, "training.steps": 10000,
        },
        _schedule,
    ),
    KeyRow("train.steps", {"training.steps": 10000}),
    KeyRow("train.clip_grad_norm", {"training.max_norm": 1.0}, lambda norm: norm or None),
    KeyRow("train.on_nonfinite", {}, lambda: "stop"),
    KeyRow(
        "evaluate",
        {
            "validation.enable": False, "validation.freq": 10, "validation.steps": -1, "validation.local_batch_size": 8,
        },
        _evaluate,
    ),
    KeyRow("seed", {"debug.seed": Maybe(int)}, lambda seed: seed if seed is not None else Omit),
    KeyRow("data.source", {"training.dataset": "c4_test", "training.dataset_path": Maybe(str)},
        lambda name, path: path or {"c4": "c4", "c4_test": "sample"}.get(name) or NO_DATA),
    KeyRow(
        "checkpoint.every_steps", {"checkpoint.enable": False, "checkpoint.interval": 500},
        lambda enable, interval: interval if enable else 0,
    ),
    KeyRow(
        "checkpoint.keep_last", {"checkpoint.enable": False, "checkpoint.keep_latest_k": 10},
        lambda enable, keep: keep or 10**6 if enable else Omit,
    ),
    KeyRow("logging.every_steps", {"metrics.log_freq": 10}),
    KeyRow("logging.wandb", {"metrics.enable_wandb": False}, lambda on: {"mode": "auto"} if on else None),
    KeyRow("logging.tensorboard", {"metrics.enable_tensorboard": False}),
    KeyRow((), {"training.enable_cpu_offload": False}, lambda on: Unsaid("a recipe offloads nothing") if on else Omit),
    KeyRow((), {"optimizer.early_step_in_backward": False}, lambda on: Unsaid("no key says it") if on else Omit),
    KeyRow((), {"parallelism.disable_loss_parallel": False}, lambda on: Unsaid("the loss is parallel") if on else Omit),
    KeyRow((), {"parallelism.enable_async_tensor_parallel": False},
        lambda on: Unsaid("products are not overlapped in parts with their collectives") if on else Omit),
)  # fmt: skip

TOOL = Tool(
    "torchtitan",
    "0.2.2",
    toml_settings.read,
    ROWS,
    aliases={
        "training.batch_size": "training.local_batch_size",
        "training.warmup_steps": "lr_scheduler.warmup_steps",
        "training.compile": "compile.enable",
        "training.seed": "debug.seed",
        "training.deterministic": "debug.deterministic",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "checkpoint.enable_checkpoint": "checkpoint.enable",
        **{
            f"{old}.{name}": f"parallelism.{name}"
            for old in ("training", "experimental")
            for name in (
                "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
                "context_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule",
                "enable_async_tensor_parallel", "fsdp_reshard_after_forward",
            )
        },
    },
    unsaid={
        r"(quantize\.linear\.float8|float8)\..*": "fp8 here has a scale per 128 elements, in all layers",
        r"quantize\..*": "of quantized training a recipe has model.dtype: fp8 alone",
    },
    aside=(
        r"(job|profiling|comm|memory_estimation)\..*|metrics\.(?!log_freq).*|model\.(hf_assets_path|tokenizer_path|"
        r"print_after_conversion)|checkpoint\..*|training\.(gc_freq|gc_debug|dataloader\..*)|debug\.deterministic.*|"
        r"optimizer\.implementation|.*\.(save_.*_folder|description)"
    ),
)  # fmt: skip
