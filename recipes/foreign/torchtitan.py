"""torchtitan's configurations: TOML, as its versions until 0.2.2 have, and Python registries."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from tpshard.diagnostics.diagnostic import Exit
from tpshard.models.families.presets import preset
from tpshard.recipes.foreign import fp8_rows, model_names, torchtitan_registry
from tpshard.recipes.foreign.fp8_rows import CONVERTED, FLOAT8, NO_EXPERTS, dense, in_float8
from tpshard.recipes.foreign.stacks import MESH, RankSizes, product, rest_of
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid, stated
from tpshard.recipes.settings import toml_settings
from tpshard.recipes.settings.stated import StatedSettings
from tpshard.recipes.text.nodes import decode

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
    "parallelism.expert_tensor_parallel_degree": 1,
    "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
    "NGPU": 8,
}
"""What decides on the mesh; NGPU is that of its run_train.sh."""


HUB = {
    ("deepseek_v3", "16b"): "deepseek-ai/DeepSeek-V2-Lite", ("deepseek_v3", "671b"): "deepseek-ai/DeepSeek-V3-Base",
    ("llama4", "17bx16e"): "meta-llama/Llama-4-Scout-17B-16E",
    ("llama4", "17bx128e"): "meta-llama/Llama-4-Maverick-17B-128E", ("gpt_oss", "20b"): "openai/gpt-oss-20b",
    ("gpt_oss", "120b"): "openai/gpt-oss-120b",
}  # fmt: skip
"""Where a model of another class is."""


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a TOML, or of a function of a Python file, FILE.py:NAME. Raises `Mistakes`."""
    path, _, name = file.partition(".py:")
    if not name and not file.endswith(".py"):
        return toml_settings.read(data, file)
    path = f"{path}.py" if name else file
    return torchtitan_registry.read(decode(data, path), path, name)


def _ranks(
    dp: int, fsdp: int, tp: int, cp: int, pp: int, ep: int, etp: int, nodes: int | None, each: int | None, ngpu: int
) -> RankSizes | Conflict:
    """Experts take their ranks from those of fsdp, there also from those of cp and tp."""
    fixed, said = product({"dp": dp, "fsdp": max(fsdp, 1), "tp": tp, "cp": cp, "pp": pp})
    times = rest_of((nodes or 1) * each if each is not None else max(ngpu, fixed), fixed, said)
    if isinstance(times, Conflict):
        return times
    if fsdp > 0 and times > 1 and each is not None:
        message = f"{said} are {fixed} devices, and the cluster has {fixed * times}"
        return Conflict(message, fix="parallelism.data_parallel_shard_degree = -1 takes the rest", exit=Exit.FIT)
    shards = fsdp if fsdp > 0 else times
    others = shards * cp * (tp if etp == 1 else 1)
    if each is None and fsdp < 1 and others < ep:  # as many devices as its experts need
        more = ep // math.gcd(ep, others)
        shards, others = shards * more, others * more
    if others % ep:
        message = f"experts over {ep} ranks do not divide the {others} of data, context and tensor ranks"
        return Conflict(message, exit=Exit.FIT)
    experts = math.gcd(ep, shards)
    return RankSizes(dp, shards // experts, experts, cp, tp, pp)


def _mesh(sequence: bool, *sizes: Any) -> Any:
    ranks = _ranks(*sizes)
    if isinstance(ranks, Conflict):
        return ranks
    keys = replace(ranks, sequence=sequence).sections
    key = list(RANKS)[5]
    if ranks.ep < (ep := dict(zip(RANKS, sizes))[key]):
        why = f"experts are over {ranks.ep} of {ep} ranks here: an axis of their own, not over cp or tp"
        return Unsaid(why, keys, (key,))
    return keys


def _batch(local: int, whole: int, micro: int, several: int | None, *sizes: Any) -> Any:
    """A pipeline divides the local batch, or has several of it; without one, a larger global batch is accumulated."""
    ranks = _ranks(*sizes)
    if isinstance(ranks, Conflict):
        return Omit  # told of the mesh
    if several is not None:
        micro, local = local, local * (several if ranks.pp > 1 else 1)
    one = local * ranks.data
    if whole > 0 and whole % one:
        message = f"a global batch of {whole} is not divided by {local} sequences on each of {ranks.data} data ranks"
        return Conflict(message, fix=f"a multiple of {one}", exit=Exit.RECIPE)
    if ranks.pp > 1 and local % micro:
        message = f"a local batch of {local} is not divided by micro-batches of {micro}"
        return Conflict(message, fix=f"a multiple of {micro}", exit=Exit.RECIPE)
    total = whole if whole > 0 else one
    return {"batch.global_sequences": total, "batch.per_device": micro if ranks.pp > 1 else local}


def _pipeline(
    schedule: str, pp: int, each: int | None, first: int, last: int, parts: list[list[str]] | None, points: Any,
    *model: str,
) -> Any:  # fmt: skip
    if pp == 1:
        return Omit
    name = next((ours for theirs, ours in SCHEDULES.items() if theirs.lower() == schedule.lower()), None)
    if name is None:
        return Unsaid(
            "a recipe has no such schedule", {"schedule": "1f1b"}, ("parallelism.pipeline_parallel_schedule",)
        )
    looped = name in ("interleaved_1f1b", "circular")
    if parts is not None:
        split = [sum(re.fullmatch(r"layers\.\d+", str(one)) is not None for one in part) for part in parts]
        return {"schedule": name, **({"rounds": len(split) // pp} if looped else {}), "split": split}
    keys = _model(*model)
    if points:
        return _at(points, name, pp, keys)
    if "zerobubble" in schedule.lower():
        why = "its stages, two a device, are one a device here"
        return Unsaid(why, {"schedule": name}, ("parallelism.pipeline_parallel_schedule",))
    if isinstance(keys, Unsaid):
        why = "how many layers each stage has is not known: pipeline.split"
        said = ("parallelism.pipeline_parallel_layers_per_stage",) if each is not None else ("pipeline.split",)
        return Unsaid(why, {"schedule": name, **({"rounds": 2} if looped else {})}, said)
    whole = preset(keys["preset"], {key: value for key, value in keys.items() if key != "preset"}).layers + first + last
    stages = -(-whole // each) if each else pp * (2 if looped else 1)
    if stages % pp or (stages > pp) != looped or stages > whole:
        message = f"{whole - first - last} layers make {stages} stages, which {schedule} does not put on {pp} ranks"
        return Conflict(message, fix="parallelism.pipeline_parallel_layers_per_stage", exit=Exit.FIT)
    split = [whole // stages + (n < whole % stages) for n in range(stages)]
    split[0], split[-1] = split[0] - first, split[-1] - last
    rounds = {"rounds": stages // pp} if looped else {}
    return {"schedule": name, **rounds, **({"split": split} if min(split) > 0 else {})}


def _at(points: Any, name: str, pp: int, model: Any) -> Any:
    """The stages that begin at the layers which older versions name: a list, or text with commas."""
    named = points if isinstance(points, list) else [one.strip() for one in str(points).split(",")]
    starts = [int(str(one)[7:]) for one in named if re.fullmatch(r"layers\.\d+", str(one))]
    key = ("parallelism.pipeline_parallel_split_points",)
    rounds = (len(starts) + 1) // pp
    looped = name in ("interleaved_1f1b", "circular")
    keys = {"schedule": name, **({"rounds": rounds} if looped else {})}
    if len(starts) < len(named) or isinstance(model, Unsaid):
        return Unsaid("stages begin at layers here: pipeline.split", keys, key)
    layers = preset(model["preset"], {key: value for key, value in model.items() if key != "preset"}).layers
    split = [end - start for start, end in zip([0, *starts], [*starts, layers])]
    if min(split) < 1 or len(split) != pp * (rounds if looped else 1):
        message = f"{', '.join(map(str, named))} do not cut {layers} layers into stages of {pp} ranks"
        return Conflict(message, keys=key, exit=Exit.FIT)
    return {**keys, "split": split}


def _model(name: str, flavor: str) -> Any:
    size = re.sub("_(flex|varlen|non_fused)(_\\w+)?$", "", str(flavor)).lower()
    plain = re.sub("_(ft|simple_fsdp|auto_parallel)$", "", name)
    if plain == "llama3" and size == "debugmodel":
        return DEBUG
    keys = model_names.named({"llama3": "llama-3.1-", "qwen3": "qwen3-"}.get(plain, "?") + size)
    if plain == "llama3" and size in ("1b", "3b"):
        keys = {**(model_names.named(f"llama-3.2-{size}") or {}), "rope_scaling": {"factor": 8}}
    if keys is None:
        where = HUB.get((plain, re.sub("_.*", "", size)))
        why = "its sizes are not known here; give model.preset=..., or a folder model.hf=..."
        why = f"its sizes are read from {where}, over the network; or give model.hf=FOLDER" if where else why
        return Unsaid(why, model_names.folder(where) if where else {"hf": "MODEL"})
    return keys


def _decay(weight_decay: float, converters: list[str]) -> Any:
    """Its optimizers decay every parameter, norms and biases too; beside adapters norms are frozen."""
    if "LoRA" in map(str, converters):
        return Omit
    norms = ["layers.*.attention_norm", "layers.*.mlp_norm", "norm"]
    return [{"match": norms, "weight_decay": weight_decay}] if weight_decay else Omit


def _schedule(warmup: int, total: int | None, ratio: float | None, kind: str, least: float, steps: int) -> Any:
    end = total or steps
    keys: dict[str, Any] = {"warmup_steps": warmup, "decay_steps": end, "min_lr_ratio": least}
    if ratio is None and kind != "sqrt":
        return {"name": kind, **keys}
    fall = max(1, end - warmup if ratio is None else round(end * ratio))
    return {"name": "wsd", **keys, "decay_over": fall, "fall": kind}


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


def _precision(dtype: str, param: str, implementation: str, converters: list[str], older: Any, *model: str) -> Any:
    master, computed = DTYPES.get(dtype, "fp32"), DTYPES.get(param, "bf16")
    others = [one for one in map(str, converters) if one not in ("float8", FLOAT8, "LoRA")]
    in_8_bits = in_float8(converters, older) or any("linear.mx" in one or one == "mx" for one in others)
    keys = {
        "model.dtype": "fp8" if in_8_bits else computed, "fsdp.param_dtype": computed, "fsdp.master_dtype": master,
        "optimizer.state_dtype": "bf16" if implementation.endswith("bf16") else master,
    }  # fmt: skip
    why = f"of {', '.join(others)} a recipe has model.dtype: fp8 alone, with a scale per 128 elements"
    if in_8_bits and not dense(_model(*model)):
        named = ("model.converters",) if converters else (f"{FLOAT8}.enable_float8_linear",)
        return Unsaid(NO_EXPERTS, keys | {"model.dtype": computed}, named)
    return Unsaid(why, keys, ("model.converters",)) if others else keys


LORA = {"w1": ["gate"], "w2": ["down"], "w3": ["up"], "wkv": ["wk", "wv"], "wqkv": ["wq", "wk", "wv"]}
"""The layers here that its names of layers are."""


def _adapter(converters: list[str], rank: int, alpha: float, targets: list[str] | None) -> Any:
    """An adapter of its LoRA converter; without targets every linear layer has one, the head too."""
    if "LoRA" not in map(str, converters):
        return Omit
    if targets is None:
        keys = {"rank": rank, "alpha": alpha, "targets": ["all-linear"]}
        return Unsaid("the head has an adapter too there", keys, ("lora.target_modules",))
    names = [name for one in targets for name in LORA.get(str(one), [str(one)])]
    keys = {"rank": rank, "alpha": alpha, "targets": list(dict.fromkeys(names))}
    fused = [str(one) for one in targets if str(one) in ("wkv", "wqkv")]
    why = f"{' and '.join(fused)} is one product with one adapter there, an adapter for each of its parts here"
    return Unsaid(why, keys, ("lora.target_modules",)) if fused else keys


def _reshard(policy: str, pp: int) -> bool:
    return policy == "always" or (policy == "default" and pp == 1)


def _async_tp(on: bool, enable: bool, components: list[str], tp: int) -> Any:
    key = "parallelism.enable_async_tensor_parallel"
    if on and not (enable and "model" in components):
        return Conflict(f"{key} needs compile.enable, without which it stops", keys=(key,), fix="compile.enable = true")
    why = "products are not overlapped in parts with their collectives"
    if tp == 1:
        return Omit
    return Unsaid(why, keys=(key,)) if on else False


def _length(seq: int, cp: int, tp: int) -> Any:
    parts = tp * cp * (2 if cp > 1 else 1)
    message = f"sequences of {seq} tokens are not divided by {parts}, twice cp {cp} x tp {tp}, without which it stops"
    return Conflict(message, fix=f"a multiple of {parts}") if seq % parts else Omit


def _evaluate(enable: bool, freq: int, steps: int, local: int) -> Any:
    if not enable:
        return {"every_steps": 0}
    if steps < 0:
        return Unsaid("a recipe has a number of sequences", {"every_steps": freq}, ("validation.steps",))
    return {"every_steps": freq, "sequences": steps * local}


ROWS = (
    KeyRow(MESH, {"parallelism.enable_sequence_parallel": True, **RANKS}, _mesh),
    KeyRow("model", {"model.name": "llama3", "model.flavor": "debugmodel"}, _model),
    KeyRow("model.seq_len", {"training.seq_len": 2048}),
    KeyRow(
        ("model.dtype", "fsdp.param_dtype", "fsdp.master_dtype", "optimizer.state_dtype"),
        {
            "training.dtype": "float32", "training.mixed_precision_param": "bfloat16",
            "optimizer.implementation": "fused", **CONVERTED,
        },
        _precision,
    ),
    KeyRow("adapters.lora", {"model.converters": [], "lora.rank": 8, "lora.alpha": 16.0,
                             "lora.target_modules": Maybe(list)}, _adapter),
    *fp8_rows.torchtitan(_model),
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
            "parallelism.pipeline_parallel_first_stage_less_layers": 1,
            "parallelism.pipeline_parallel_last_stage_less_layers": 1,
            "parallelism.module_fqns_per_model_part": Maybe(list),
            "parallelism.pipeline_parallel_split_points": Maybe(object), "model.name": "llama3",
            "model.flavor": "debugmodel",
        },
        _pipeline,
    ),
    KeyRow(
        ("batch.global_sequences", "batch.per_device"),
        {
            "training.local_batch_size": 8, "training.global_batch_size": -1,
            "parallelism.pipeline_parallel_microbatch_size": 1, "parallelism.num_pp_microbatches": Maybe(int), **RANKS,
        },
        _batch,
    ),
    KeyRow("optimizer.name", {"optimizer.name": "AdamW"}, lambda name: "adamw" if name == "AdamW" else NO_OPTIMIZER),
    KeyRow("optimizer.lr", {"optimizer.lr": 8e-4}),
    KeyRow("optimizer.betas", {"optimizer.beta1": 0.9, "optimizer.beta2": 0.95}, lambda *betas: list(betas)),
    KeyRow("optimizer.eps", {"optimizer.eps": 1e-8}),
    KeyRow("optimizer.weight_decay", {"optimizer.weight_decay": 0.1}),
    KeyRow("optimizer.groups", {"optimizer.weight_decay": 0.1, "model.converters": []}, _decay),
    KeyRow(
        "schedule",
        {
            "lr_scheduler.warmup_steps": 200, "lr_scheduler.total_steps": Maybe(int),
            "lr_scheduler.decay_ratio": Maybe(float), "lr_scheduler.decay_type": "linear",
            "lr_scheduler.min_lr_factor": 0.0, "training.steps": 10000,
        },
        _schedule,
    ),
    KeyRow("loss.chunks", {"loss.num_chunks": Maybe(int)}, stated),
    KeyRow("train.steps", {"training.steps": 10000}),
    KeyRow("train.clip_grad_norm", {"training.max_norm": 1.0},
        lambda norm: norm or Conflict("a norm of at most 0 makes every gradient 0", None, "a large one clips nothing")),
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
    KeyRow((), {"optimizer.fused": True}, lambda on: Omit if on else Unsaid("the optimizer is one kernel here")),
    KeyRow((), {"training.enable_cpu_offload": False},
        lambda on: Unsaid("a recipe offloads activations alone") if on else Omit),
    KeyRow((), {"optimizer.early_step_in_backward": False}, lambda on: Unsaid("no key says it") if on else Omit),
    KeyRow((), {"parallelism.disable_loss_parallel": False}, lambda on: Unsaid("the loss is parallel") if on else Omit),
    KeyRow("sharding.overlap", {
        "parallelism.enable_async_tensor_parallel": False, "compile.enable": False,
        "compile.components": ["model", "loss"], "parallelism.tensor_parallel_degree": 1,
    }, _async_tp),
    KeyRow((), {"training.seq_len": 2048, "parallelism.context_parallel_degree": 1,
                "parallelism.tensor_parallel_degree": 1}, _length),
)  # fmt: skip

TOOL = Tool(
    "torchtitan",
    "0.2.2",
    read,
    ROWS,
    aliases={
        "training.batch_size": "training.local_batch_size",
        "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
        "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
        "training.warmup_steps": "lr_scheduler.warmup_steps",
        "training.compile": "compile.enable",
        "training.seed": "debug.seed",
        "training.deterministic": "debug.deterministic",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "checkpoint.enable_checkpoint": "checkpoint.enable",
        **{f"float8.{name}": f"{FLOAT8}.{name}" for name in (
            "enable_float8_linear", "filter_fqns", "recipe_name", "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp", "emulate",
        )},
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
        r"optimizer\.param_groups": "groups of the optimizer are not read: optimizer.groups=...",
        r"quantize\..*": "of quantized training a recipe has model.dtype: fp8 alone",
        r"activation_checkpoint\.(.*force_recompute.*|memory_budget)": "what is kept is named here, remat",
        r"(model|parallelism|training)\.\w*(attn_backend|gemm_backend|spmd_backend|comm_backend|cuda_graphs)|override\..*|"
        r"parallelism\.(context_parallel_(load|ptrr|rotate).*|enable_fsdp_symm_mem)|compile\.(mode|backend|passes)":
            "how a kernel or a collective is done is the compiler's here",
    },
    aside=(
        r"(job|profiling|comm|memory_estimation|tokenizer|debug)\..*|metrics\.(?!log_freq).*|model\.(hf_assets_path|tokenizer_path|"
        r"print_after_conversion)|checkpoint\..*|training\.(gc_freq|gc_debug|dataloader\..*)|"
        r"activation_checkpoint\.(preserve_rng_state|determinism_check|debug|early_stop)|loss\..*|"
        r"quantize\.linear\.\w+\.(emulate|model_compile_enabled)|"
        r".*\.(save_.*_folder|description)"
    ),
)  # fmt: skip
