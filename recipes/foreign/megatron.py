"""Megatron-LM's launch scripts, and its YAML files of arguments."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.foreign.fp8_rows import MEGATRON as IN_FP8
from tpshard.recipes.foreign.fp8_rows import NO_EXPERTS
from tpshard.recipes.foreign.megatron_model import SIZES
from tpshard.recipes.foreign.stacks import MESH, RankSizes, product, rest_of
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Tool, Unsaid
from tpshard.recipes.settings import shell_flags, yaml_settings
from tpshard.recipes.settings.stated import StatedSettings, Unknown

HOSTS: dict[str, Any] = {
    "--nnodes": Maybe(object), "--nproc-per-node": Maybe(object), "recipe.cluster.nodes": Maybe(int),
    "recipe.cluster.devices_per_node": Maybe(int),
}  # fmt: skip
SPLIT = {
    "--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1, "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1, "--use-distributed-optimizer": False, "--use-megatron-fsdp": False,
    "--use-torch-fsdp2": False,
}  # fmt: skip
RANKS = {**SPLIT, **HOSTS}
RULES = {"--sequence-parallel": False, "--expert-tensor-parallel-size": Maybe(int),
         "--moe-shared-expert-intermediate-size": Maybe(int)}  # fmt: skip
WHOLE = {"--train-iters": Maybe(int), "--train-samples": Maybe(int), "--global-batch-size": Maybe(int),
         "--micro-batch-size": 1}  # fmt: skip
SUMS = {"--fp16": False, "--accumulate-allreduce-grads-in-fp32": False, "--grad-reduce-in-bf16": False,
        "--main-grads-dtype": "fp32"}  # fmt: skip
REMAT = ("--recompute-granularity", "--recompute-activations", "--recompute-modules")
STYLES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}


def read(data: bytes, file: str) -> StatedSettings:
    """The flags of a script, or the arguments of a YAML file, by their flags. Raises `Mistakes`."""
    if not file.endswith((".yaml", ".yml")):
        return shell_flags.read(data, file)
    settings = yaml_settings.read(data, file)
    filled = {key: replace(one, value=Unknown(one.value)) for key, one in settings.said.items()
              if isinstance(one.value, str) and re.fullmatch(r"\$\{?\w+\}?", one.value)}  # fmt: skip
    settings = replace(settings, said={**settings.said, **filled})
    flags = {_flag(key): replace(one, key=_flag(key)) for key, one in settings.said.items()}
    return replace(settings, said={key: one for key, one in flags.items() if one.value is not False})


def _flag(key: str) -> str:
    """The flag of an argument; a functional test's other settings, whose keys are in capitals, keep theirs."""
    if re.match(r"[A-Z_]+(\.|$)", key) and not key.startswith("MODEL_ARGS."):
        return key
    return "--" + key.rpartition(".")[2].removeprefix("--").replace("_", "-")


def _devices(nnodes: Any, each: Any, nodes: int | None, per_node: int | None) -> int | None:
    """The devices of the launcher; None where they are not known."""
    hosts = nodes if nodes is not None else nnodes if isinstance(nnodes, int) else 1 if nnodes is None else None
    count = per_node if per_node is not None else each if isinstance(each, int) else None
    return hosts * count if hosts is not None and count is not None else None


def _ranks(
    tp: int, pp: int, cp: int, ep: int, optimizer: bool, fsdp: bool, fsdp2: bool, *hosts: Any
) -> RankSizes | Conflict:
    """Experts have an axis of their own here, which Megatron-LM takes from the data ranks."""
    fixed, said = product({"tp": tp, "pp": pp, "cp": cp})
    devices = _devices(*hosts)
    data = rest_of(devices, fixed, said) if devices is not None else ep
    if isinstance(data, Conflict):
        return data
    experts, sharded = math.gcd(ep, data), optimizer or fsdp or fsdp2
    rest = data // experts
    sizes = RankSizes(1 if sharded else rest, rest if sharded else 1, experts, cp, tp, pp)
    return sizes if sharded else replace(sizes, stores=())


def _mesh(sequence: bool, etp: int | None, shared: int | None, *sizes: Any) -> Any:
    ranks, (tp, _, _, ep, *_) = _ranks(*sizes), sizes
    if isinstance(ranks, Conflict):
        return ranks
    if etp == 1 and tp > 1 and ep > 1:
        ranks = ranks.with_whole_experts(ep)
    keys = replace(ranks, sequence=sequence).sections
    if _devices(*sizes[len(SPLIT) :]) is not None and ranks.devices % (needed := sizes[1] * ep * (etp or tp)):
        message = (
            f"pp {sizes[1]} x ep {ep} x tp {etp or tp} are {needed} ranks, which {ranks.devices} devices do not hold"
        )
        fix = "cluster.nodes=... says how many hosts there are"
        return Conflict(message, fix=fix, keys=(*list(SPLIT)[:4], *list(HOSTS)[:2]), exit=Exit.FIT)
    if ranks.ep < ep and not ranks.spread:
        why = f"experts are over {ranks.ep} ranks here: an axis of their own among data ranks, not over cp or tp"
        return Unsaid(why, keys, ("--expert-model-parallel-size",))
    if ranks.spread and shared:
        why = "shared experts are whole on each rank of tp, as the others are"
        return Unsaid(why, keys, ("--moe-shared-expert-intermediate-size",))
    if etp is not None and etp != tp and ep > 1 and not ranks.spread:
        return Unsaid(f"experts' matrices are divided over tp {tp}", keys, ("--expert-tensor-parallel-size",))
    if _devices(*sizes[len(SPLIT) :]) is None:
        why = f"how many devices there are is not known: {ranks.devices} here; give cluster.nodes and devices_per_node"
        return Unsaid(why, keys, ("--nnodes", "--nproc-per-node"))
    if not sequence and tp > 1 and ep > 1:
        return Conflict("tensor parallelism and experts need --sequence-parallel, without which it stops", keys)
    return keys


def _batch(whole: int | None, micro: int, ramp: Any, *sizes: Any) -> Any:
    ranks = _ranks(*sizes)
    if isinstance(ranks, Conflict):
        return Omit  # told of the mesh
    one = micro * ranks.data
    if whole is not None and whole % one:
        message = f"a global batch of {whole} is not divided by {micro} sequences on each of {ranks.data} data ranks"
        return Conflict(message, fix=f"a multiple of {one}", exit=Exit.RECIPE)
    keys = {"batch.global_sequences": whole or one, "batch.per_device": micro}
    if ramp is not None:
        return Unsaid("a recipe's batch does not grow", keys, ("--rampup-batch-size",))
    return keys


def _one_end(iters: int | None, samples: int | None, warm: int, share: float | None) -> Any:
    """What may stand once alone."""
    if iters is not None and samples is not None:
        keys = ("--train-iters", "--train-samples")
    elif warm and share is not None:
        keys = ("--lr-warmup-iters", "--lr-warmup-fraction")
    else:
        return Omit
    return Conflict(f"{' and '.join(keys)} together stop it", fix="keep one of them", keys=keys)


def _steps(iters: int | None, samples: int | None, whole: int | None, micro: int) -> Any:
    if iters is None and samples is None:
        return Unsaid("the file does not say when training ends; give train.steps=...", 1000, ("--train-iters",))
    return iters or -(-(samples or 0) // (whole or micro))


def _schedule(
    lr: float | None, least: float, style: str, end: int | None, end_samples: int | None, warm: int, warm_samples: int,
    warm_share: float | None, wsd: int | None, wsd_samples: int | None, wsd_style: str, *whole: Any,
) -> Any:  # fmt: skip
    steps, batch = _steps(*whole), whole[2] or whole[3]
    if style not in STYLES:
        return Unsaid("no schedule here is that one", {"name": "constant"}, ("--lr-decay-style",))
    last = end or -(-(end_samples or 0) // batch) or (steps if isinstance(steps, int) else 1000)
    warmup = round(warm_share * last) if warm_share is not None else warm or -(-warm_samples // batch)
    keys: dict[str, Any] = {"name": STYLES[style], "warmup_steps": warmup}
    if style in ("linear", "cosine", "WSD"):
        keys |= {"decay_steps": last}
    if style != "constant":
        keys |= {"min_lr_ratio": float(f"{least / lr:.6g}") if lr else 0.0}
    if style != "WSD":
        return keys
    keys["decay_over"] = wsd or -(-(wsd_samples or 0) // batch) or last
    return keys | {"fall": {"minus_sqrt": "sqrt"}.get(wsd_style, wsd_style)}


def _sums(fp16: bool, in_fp32: bool, in_bf16: bool, grads: str) -> str:
    """The type of gradients' sums: for bf16 that is fp32 in any case, for fp16 where a flag says so."""
    return "bf16" if in_bf16 or grads == "bf16" else "fp16" if grads == "fp16" or (fp16 and not in_fp32) else "fp32"


def _precision(
    fp16: bool, in_fp32: bool, in_bf16: bool, grads: str, bf16: bool, fp8: str | None, moments: str, squares: str,
    aware: bool, experts: int | None,
) -> Any:  # fmt: skip
    computed, sums = "bf16" if bf16 else "fp16" if fp16 else "fp32", _sums(fp16, in_fp32, in_bf16, grads)
    keys = {
        "model.dtype": "fp8" if fp8 and not experts else computed, "fsdp.param_dtype": computed,
        "fsdp.master_dtype": "fp32", "fsdp.reduce_dtype": sums,
        "optimizer.state_dtype": moments if moments in ("bf16", "fp16") else "fp32",
    }  # fmt: skip
    if bf16 and fp16:
        return Conflict("--bf16 and --fp16 together stop it", keys, "keep one of them", ("--bf16", "--fp16"))
    flags = {"--main-grads-dtype": grads, "--exp-avg-dtype": moments, "--exp-avg-sq-dtype": squares}
    if not aware and (other := [flag for flag, dtype in flags.items() if dtype != "fp32"]):
        message = f"{other[0]} {flags[other[0]]} needs --use-precision-aware-optimizer, without which it stops"
        return Conflict(message, keys, fix="add it", keys=tuple(other))
    if moments != squares:
        return Unsaid(f"both moments are kept in {moments}", keys, ("--exp-avg-sq-dtype",))
    return Unsaid(NO_EXPERTS, keys, ("--fp8-format",)) if fp8 and experts else keys


def _accumulate(fsdp: bool, fsdp2: bool, strategy: str, *sums: Any) -> dict[str, str]:
    each = fsdp2 or (fsdp and strategy == "optim_grads_params")
    return {"gather": "microbatch" if each else "step", "reduce": "each" if each else "last", "dtype": _sums(*sums)}


MODULES: dict[str, tuple[str, ...]] = {
    "core_attn": (), "moe_act": (), "layernorm": ("layers.*.attention_norm", "layers.*.mlp_norm"),
    "mlp": ("layers.*.mlp",), "moe": ("layers.*.mlp",), "shared_experts": ("layers.*.mlp.shared",),
}  # fmt: skip
"""What --recompute-modules recomputes, by patterns. The backward passes of attention and experts compute their scores
and activations again in any case."""


def _remat(
    granularity: str | None,
    activations: bool,
    method: str | None,
    number: int | None,
    modules: Any,
    layers: int | None,
    pp: int,
    older: str | None,
    oldest: bool,
) -> Any:
    if older is not None or oldest:
        granularity, method, number = granularity or "full", older or "uniform", number or 1
    if granularity != "full":
        if granularity is None and not activations:
            return "none"
        listed = modules if isinstance(modules, list) else [modules or "core_attn"]
        if listed == ["core_attn"]:
            return Unsaid("a fused attention computes its scores again in any case", "none", REMAT)
        patterns = [pattern for name in listed for pattern in MODULES.get(name, ())]
        recomputed: Any = {"modules": list(dict.fromkeys(patterns))} if patterns else "none"
        if wrong := [name for name in listed if name not in MODULES]:
            return Unsaid(f"no module here is {' or '.join(wrong)}", recomputed, ("--recompute-modules",))
        return recomputed
    if not number:
        message = f"full recomputation of {'no' if number is None else number} layers recomputes nothing"
        return Conflict(message, "none", fix="--recompute-method uniform --recompute-num-layers 1")
    if method is None:
        message = "full recomputation needs --recompute-method, without which it stops"
        return Conflict(message, "full", fix="--recompute-method uniform")
    if method == "block":
        if layers is not None and number * pp >= layers:
            return "full"
        if pp > 1:
            why = f"the first {number} layers of each stage are recomputed; a recipe names the model's first alone"
            return Unsaid(why, "full", ("--recompute-num-layers",))
        return {"first": number}
    if number > 1:
        return Unsaid(
            f"groups of {number} layers are recomputed together; here each alone", "full", ("--recompute-num-layers",)
        )
    return "full"


def _offload(number: int, pp: int, layers: int | None, granularity: str | None, activations: bool) -> Any:
    """The layers whose activations wait in the host's memory."""
    flags = ("--cpu-offloading-num-layers", "--pipeline-model-parallel-size", "--recompute-granularity", "--num-layers")
    if number < 1:
        return Omit
    if pp > 1:
        return Conflict("activations are not offloaded with a pipeline, at which it stops", keys=flags[:2])
    if granularity is not None or activations:
        message = "activations are not offloaded with recomputation, at which it stops"
        return Conflict(message, {"first": number}, keys=(flags[0], flags[2]))
    if layers is not None and number >= layers:
        message = f"{number} of {layers} layers are offloaded, at which it stops: one at least is not"
        return Conflict(message, "activations", f"{flags[0]} {layers - 1}", (flags[0], flags[3]))
    return {"first": number}


def _pipeline(
    pp: int, layers: int | None, each: int | None, rounds: int | None, first: int | None, last: int | None,
    embedding: bool, loss: bool,
) -> Any:  # fmt: skip
    """The embedding and the loss may count as layers of the first and the last stage."""
    if pp == 1:
        return Omit
    counted = (layers or 0) + embedding + loss
    per_stage = counted // pp
    rounds = rounds or (per_stage // each if each and per_stage % each == 0 else 1)
    keys: dict[str, Any] = {"schedule": "interleaved_1f1b" if rounds > 1 else "1f1b", "rounds": rounds}
    if layers is not None and first is None and last is None:
        if counted % (pp * rounds):
            message = f"{counted} layers are not divided by {pp} x {rounds} stages"
            return Conflict(message, keys, fix="a multiple, or --decoder-first-pipeline-num-layers")
        split = [counted // (pp * rounds)] * (pp * rounds)
        split[0], split[-1] = split[0] - embedding, split[-1] - loss
        if min(split) < 1:
            why = "a stage has the embedding or the loss alone there; here each has a layer"
            return Unsaid(why, {"schedule": "1f1b", "rounds": 1}, ("--account-for-embedding-in-pipeline-split",))
        keys["split"] = split
    elif layers is not None and rounds == 1 and pp > 2:
        inner = layers - (first or 0) - (last or 0)
        between = pp - (first is not None) - (last is not None)
        keys["split"] = [*[first] * (first is not None), *[inner // between] * between, *[last] * (last is not None)]
    return keys


def _every(iters: int, interval: int | None, whole: int | None, micro: int, *sizes: Any) -> Any:
    ranks = _ranks(*sizes)
    if not iters or not interval or isinstance(ranks, Conflict):
        return {"every_steps": 0}
    return {"every_steps": interval, "sequences": iters * (whole or micro * ranks.data)}


def _fsdp2(fsdp2: bool, pp: int, ep: int, optimizer: bool, untied: bool, fp16: bool) -> Any:
    """What --use-torch-fsdp2 does not stand beside."""
    wrong = {
        "--pipeline-model-parallel-size": pp > 1, "--expert-model-parallel-size": ep > 1,
        "--use-distributed-optimizer": optimizer, "--fp16": fp16,
    }  # fmt: skip
    beside = next((flag for flag, on in wrong.items() if on), None)
    key = "--use-torch-fsdp2"
    if fsdp2 and beside is not None:
        return Conflict(f"{key} stops it beside {beside}", fix="keep one of them", keys=(key, beside))
    needed = "--untie-embeddings-and-output-weights"
    return Conflict(f"{key} needs {needed}, without which it stops", fix="add it") if fsdp2 and not untied else Omit


def _decay(kind: str, first: float | None, last: float | None) -> Any:
    """The decay of weights that grows over a run."""
    flags = ("--start-weight-decay", "--end-weight-decay")
    if kind != "constant":
        return Unsaid("the decay of weights is constant here")
    if first is None and last is None:
        return Omit
    message = f"{flags[first is None]} needs --weight-decay-incr-style, without which it stops"
    return Conflict(message, fix="leave it out", keys=flags)


def _data(mock: bool, path: Any) -> Any:
    if mock or path is None:
        return "sample"
    return Unsaid(
        "a recipe reads text, not Megatron-LM's files of tokens; give data.source and data.tokenizer", "sample"
    )


def _overlap(grads: bool, params: bool, optimizer: bool) -> Any:
    off = [
        key
        for key, on in (("--overlap-grad-reduce", grads), ("--overlap-param-gather", params or not optimizer))
        if not on
    ]
    return (
        Unsaid("collectives overlap with computation here, which it does not do by default", keys=tuple(off))
        if off
        else Omit
    )


SCALES = ("--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis")
ROWS = (
    KeyRow(MESH, {**RULES, **RANKS}, _mesh),
    KeyRow(("cluster.nodes", "cluster.devices_per_node"), {"recipe.cluster.device": Maybe(str), **HOSTS},
        lambda device, nnodes, each, *_: {"cluster.nodes": nnodes, "cluster.devices_per_node": each}
        if device is not None and isinstance(nnodes, int) and isinstance(each, int) else Omit),
    *SIZES,
    KeyRow("model.seq_len", {"--seq-length": Maybe(int)},
        lambda seq: seq or Unsaid("the file does not say it; give model.seq_len=...", 4096)),
    KeyRow(
        ("model.dtype", "fsdp.param_dtype", "fsdp.master_dtype", "fsdp.reduce_dtype", "optimizer.state_dtype"),
        {**SUMS, "--bf16": False, "--fp8-format": Maybe(str), "--exp-avg-dtype": "fp32", "--exp-avg-sq-dtype": "fp32",
         "--use-precision-aware-optimizer": False, "--num-experts": Maybe(int)},
        _precision,
    ),
    *IN_FP8,
    KeyRow("fsdp.bucket", {}, lambda: "wrap"),
    KeyRow("fsdp.accumulate", {
        "--use-megatron-fsdp": False, "--use-torch-fsdp2": False, "--data-parallel-sharding-strategy": "no_shard",
        **SUMS,
    }, _accumulate),
    KeyRow("remat", {
        "--recompute-granularity": Maybe(str), "--recompute-activations": False, "--recompute-method": Maybe(str),
        "--recompute-num-layers": Maybe(int), "--recompute-modules": Maybe(object), "--num-layers": Maybe(int),
        "--pipeline-model-parallel-size": 1, "--activations-checkpoint-method": Maybe(str),
        "--checkpoint-activations": False,
    }, _remat),
    KeyRow("offload", {
        "--cpu-offloading-num-layers": 0, "--pipeline-model-parallel-size": 1, "--num-layers": Maybe(int),
        "--recompute-granularity": Maybe(str), "--recompute-activations": False,
    }, _offload),
    KeyRow("compile", {}, lambda: "inductor"),
    KeyRow("pipeline", {
        "--pipeline-model-parallel-size": 1, "--num-layers": Maybe(int),
        "--num-layers-per-virtual-pipeline-stage": Maybe(int), "--num-virtual-stages-per-pipeline-rank": Maybe(int),
        "--decoder-first-pipeline-num-layers": Maybe(int), "--decoder-last-pipeline-num-layers": Maybe(int),
        "--account-for-embedding-in-pipeline-split": False, "--account-for-loss-in-pipeline-split": False,
    }, _pipeline),
    KeyRow(("batch.global_sequences", "batch.per_device"),
        {"--global-batch-size": Maybe(int), "--micro-batch-size": 1, "--rampup-batch-size": Maybe(object), **RANKS},
        _batch),
    KeyRow("optimizer.name", {"--optimizer": "adam"},
        lambda name: "adamw" if name == "adam" else name if name in ("muon", "lion")
        else Unsaid("a recipe has adamw, lion and muon", "adamw")),
    KeyRow("optimizer.lr", {"--lr": Maybe(float)}, lambda lr: lr or Unsaid("the file does not say it", 3e-4)),
    KeyRow("optimizer.betas", {"--adam-beta1": 0.9, "--adam-beta2": 0.999}, lambda *betas: list(betas)),
    KeyRow("optimizer.eps", {"--adam-eps": 1e-8}),
    KeyRow("optimizer.weight_decay", {"--weight-decay": 0.01}),
    KeyRow("optimizer.groups", {"--decoupled-lr": Maybe(float), "--untie-embeddings-and-output-weights": False},
        lambda lr, untied: Omit if lr is None else [{"match": ["tok_embed", *["output"] * untied], "lr": lr}]),
    KeyRow("schedule", {
        "--lr": Maybe(float), "--min-lr": 0.0, "--lr-decay-style": "linear", "--lr-decay-iters": Maybe(int),
        "--lr-decay-samples": Maybe(int), "--lr-warmup-iters": 0, "--lr-warmup-samples": 0,
        "--lr-warmup-fraction": Maybe(float), "--lr-wsd-decay-iters": Maybe(int), "--lr-wsd-decay-samples": Maybe(int),
        "--lr-wsd-decay-style": "exponential", **WHOLE,
    }, _schedule),
    KeyRow("train.steps", WHOLE, _steps),
    KeyRow((), {"--train-iters": Maybe(int), "--train-samples": Maybe(int), "--lr-warmup-iters": 0,
                "--lr-warmup-fraction": Maybe(float)}, _one_end),
    KeyRow("train.clip_grad_norm", {"--clip-grad": 1.0}, lambda norm: norm or None),
    KeyRow("seed", {"--seed": 1234}),
    KeyRow("evaluate", {"--eval-iters": 100, "--eval-interval": 1000, "--global-batch-size": Maybe(int),
                     "--micro-batch-size": 1, **RANKS}, _every),
    KeyRow("data.source", {"--mock-data": False, "--data-path": Maybe(object)}, _data),
    KeyRow("checkpoint.every_steps", {"--save": Maybe(object), "--save-interval": Maybe(int)},
        lambda folder, interval: interval if folder and interval else 0),
    KeyRow("logging.every_steps", {"--log-interval": 100}),
    KeyRow("logging.wandb", {"--wandb-project": Maybe(str)}, lambda name: {"project": name} if name else None),
    KeyRow("logging.tensorboard", {"--tensorboard-dir": Maybe(object)}, lambda folder: folder is not None),
    KeyRow((), {"--use-torch-fsdp2": False, "--pipeline-model-parallel-size": 1, "--expert-model-parallel-size": 1,
                "--use-distributed-optimizer": False, "--untie-embeddings-and-output-weights": False, "--fp16": False},
        _fsdp2),
    KeyRow((), {"--weight-decay-incr-style": "constant", "--start-weight-decay": Maybe(float),
                "--end-weight-decay": Maybe(float)}, _decay),
    KeyRow((), {"--fp16": False, "--loss-scale": Maybe(float), "--initial-loss-scale": Maybe(float),
                "--min-loss-scale": Maybe(float), "--loss-scale-window": Maybe(float), "--hysteresis": Maybe(int)},
        lambda fp16, *scales: Unsaid("the scale of the loss is no key of a recipe", keys=SCALES)
        if fp16 and any(one is not None for one in scales) else Omit),
    KeyRow((), {"--distribute-saved-activations": False, "--sequence-parallel": False},
        lambda spread, sequence: Conflict("what is saved is not distributed with --sequence-parallel: it stops")
        if spread and sequence else Unsaid("each rank of tp keeps all that is saved here") if spread else Omit),
    KeyRow((), {"--rotary-percent": 1.0},
        lambda share: Omit if share == 1 else Unsaid("rotary positions turn all of a head here")),
    KeyRow((), {"--calculate-per-token-loss": False}, lambda _: Omit),
    KeyRow((), {"--attention-dropout": 0.1, "--hidden-dropout": 0.1},
        lambda *shares: Unsaid("a recipe drops out nothing") if any(shares) else Omit),
    KeyRow((), {"--overlap-grad-reduce": False, "--overlap-param-gather": False, "--use-distributed-optimizer": False},
        _overlap),
)  # fmt: skip

LOGS = (
    r"log|tensorboard|wandb|timing|profile|save|load|ckpt|async-save|no-save|no-load|auto-detect|exit|master|node-rank|"
    r"rdzv|data-cache|cache-path|split|num-workers|no-mmap|dataloader|no-create-attention|tiktoken|eod-mask|vocab-file|"
    r"merge-file|distributed-(timeout|backend)|manual-gc|empty-unused|finetune|use-mcore|transformer-impl|no-check|nccl|"
    r"max-restarts|tee|dist-ckpt|override-opt|use-checkpoint|check-for-nan|inprocess|te-rng|no-initialization|"
    r"no-async-tensor|init-model-with-meta|tokenizer-(hf|metadata)|use-legacy|legacy|trust-remote|reset-|per-split"
)
TOOL = Tool(
    "megatron",
    "core 0.20",
    read,
    ROWS,
    aliases={
        "--model-parallel-size": "--tensor-model-parallel-size", "--batch-size": "--micro-batch-size",
        "--use-custom-fsdp": "--use-megatron-fsdp", "--warmup": "--lr-warmup-fraction",
        "--nproc-per-nodes": "--nproc-per-node", "--activations-checkpoint-num-layers": "--recompute-num-layers",
        "--activations-checkpoint-granularity": "--recompute-granularity", "--fp8-hybrid": "--fp8-format",
        "--num-nodes": "--nnodes", "--pad-vocab-size-to": "--padded-vocab-size",
    },
    unsaid={
        r"--fp8-.*|--fp4-.*": "fp8 here has a scale per 128 elements",
        r"--(q-lora-rank|kv-lora-rank|qk-head-dim|qk-pos-emb-head-dim|v-head-dim|mscale.*|rotary-scaling-factor)":
            "no family here has latent attention",
        r"--(deepspeed.*|zero-stage)": "DeepSpeed's sharding is not read here: --use-distributed-optimizer is stage 1",
        r"--pipeline-model-parallel-layout": "give pipeline.split=[...]; a stage has layers here, not the loss alone",
        r"--init-method-std": "weights begin as the model's family has it",
        r"--(optimizer-cpu-offload|optimizer-offload-fraction|cpu-offloading.*|fine-grained-activation-offloading|"
        r"offload-modules|use-torch-optimizer-for-cpu-offload)": "a recipe offloads whole layers' activations alone",
        r"--(no-)?[\w-]*fusion[\w-]*|--attention-backend|--use-(te|flash-attn)[\w-]*|--[\w-]*cuda-graph[\w-]*|"
        r"--attention-softmax-in-fp32|--tp-comm-[\w-]*|--moe-(token-dispatcher-type|grouped-gemm|use-legacy[\w-]*|"
        r"shared-expert-overlap|enable-deepep|permute[\w-]*)|--cp-comm-type|--ddp-(bucket|num|pad|average)[\w-]*|--DDP-impl|"
        r"--overlap-[\w-]*|--use-nccl-ub|--fsdp-(double|manual)[\w-]*|--batch-p2p[\w-]*|--defer-embedding[\w-]*|--delay-wgrad[\w-]*|--disable-gloo[\w-]*":
            "how a kernel or a collective is done is the compiler's here",
    },
    aside=rf"--({LOGS})[\w-]*|[\w.$-]+ --.*|"
    r"[A-Z][A-Z_]+(\..*)?|--no-position-embedding|--ckpt-[\w-]*|--use-mcore-models",
)  # fmt: skip
