"""What transformers' Trainer and accelerate do for those who build on them: how they shard, and in which types."""

from __future__ import annotations

import re
from typing import Any, Literal

from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.foreign import model_names
from tpshard.recipes.foreign.stacks import RankSizes, product, rest_of
from tpshard.recipes.foreign.translation import Conflict, KeyRow, Maybe, Omit, Unsaid

Kind = Literal["none", "fsdp", "zero1", "zero2", "zero3"]
"""How parameters, gradients and the optimizer are sharded over data ranks; none: not at all."""

FSDP: dict[str, Any] = {
    "fsdp_config.sharding_strategy": "FULL_SHARD",
    "fsdp_config.reshard_after_forward": "true",
}  # fmt: skip
"""FSDP's settings, with accelerate's defaults."""
NO_MODEL = "the file names no model; give model.preset=..., or a folder model.hf=..."
IN_FP8 = (
    "fp8 has a scale per 128 elements here, of all linear layers in blocks; there per tensor, without the first layer"
)
STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
SCHEDULERS = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip


def strategy_of(strategy: Any, reshard: Any) -> tuple[str, bool]:
    """FSDP's strategy, and whether parameters are freed after the forward pass; FSDP 1 has names in its second key."""
    by_name = isinstance(reshard, str) and reshard.upper() in STRATEGIES.values()
    name = str(reshard if by_name else STRATEGIES.get(str(strategy), strategy)).upper()
    return name, name in ("FULL_SHARD", "HYBRID_SHARD") and str(reshard).lower() != "false"


def ranks_of(
    kind: Kind, strategy: Any, devices: int, nodes: int, dp: int | None, shard: int | None, tp: int, cp: int, ep: int
) -> RankSizes | Conflict:
    """The mesh of so many devices. Experts have ranks of their own, over which nothing else is sharded."""
    sizes = {"dp": dp or 1, "shard": shard if shard and shard > 0 else 1, "tp": tp, "cp": cp, "ep": ep}
    fixed, said = product(sizes)
    times = rest_of(devices, fixed, said)
    if isinstance(times, Conflict):
        return times
    if shard and shard > 0 and dp and times > 1:
        message = f"{said} are {fixed} devices, and there are {devices}"
        return Conflict(message, fix="leave one of the sizes to follow", exit=Exit.FIT)
    if dp is None and shard is not None and shard > 0:
        replicas, shards = times, shard
    else:
        replicas, shards = dp or 1, sizes["shard"] * times
    if kind == "none" or strategy == "NO_SHARD":
        return RankSizes(replicas * shards, 1, ep, cp, tp, stores=())
    if strategy.startswith("HYBRID") and dp is None and shards % nodes == 0:
        replicas, shards = nodes, shards // nodes
    return RankSizes(replicas, shards, ep, cp, tp, stores=("fsdp", "cp"))


def storage(
    kind: Kind, computed: str, adapters: bool, reshard: bool, sent: str | None = None, summed: str | None = None,
    loaded: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The types in which parameters and gradients are stored, gathered and reduced, and when.

    Under FSDP and DeepSpeed, accelerate keeps trained parameters in fp32; alone or under DDP they stay as they were
    `loaded`, by default in the type of the computation. Gradients are reduced in that type, after the last micro-batch;
    DeepSpeed's stages 2 and 3 reduce each, and a JSON of it may name the types in which they are `sent` and `summed`.
    """
    names = {"bfp16": "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    sent, summed, loaded = (names.get(str(one), one) for one in (sent, summed, loaded))
    upcast = adapters or kind != "none" or computed == "fp16"
    stored = "fp32" if upcast else loaded if loaded in names.values() else computed
    reduced = computed if kind != "none" else stored
    zero = kind.startswith("zero")
    whole = kind in ("zero1", "zero2")
    return {
        "fsdp.param_dtype": computed, "fsdp.master_dtype": stored,
        "fsdp.reduce_dtype": sent if sent and zero else reduced,
        "optimizer.state_dtype": stored, "fsdp.reshard_after_forward": reshard and not whole,
        "fsdp.accumulate": {
            "gather": "step" if whole else "microbatch", "reduce": "each" if kind in ("zero2", "zero3") else "last",
            "dtype": summed if summed and zero else "fp32" if kind == "zero1" else reduced,
        },
    }  # fmt: skip


STORAGE = (
    "fsdp.param_dtype", "fsdp.master_dtype", "fsdp.reduce_dtype", "optimizer.state_dtype", "fsdp.reshard_after_forward",
    "fsdp.accumulate",
)  # fmt: skip
"""The keys of `storage`."""


def optimizer(name: str) -> Any:
    """The algorithm of an optimizer's name in transformers."""
    plain = name.lower()
    ours = next((ours for ours in ("lion", "muon", "adamw") if ours in plain), None)
    if ours is None:
        return Unsaid("a recipe has adamw, lion and muon", "adamw")
    if "8bit" in plain or "4bit" in plain or plain.startswith("paged") or "fp8" in plain:
        return Unsaid("moments are not kept in 8 bits or paged to the host here", ours)
    return ours


def model(key: str, base: str | None, revision: str | None = None) -> Any:
    """The keys of `model` for a published model or a folder, which the setting `key` names."""
    if base is None:
        return Unsaid(NO_MODEL, {"hf": "MODEL"}, ("model",))
    keys = model_names.named(base)
    if keys is None and base.startswith((".", "/", "~")):
        return {"hf": base}
    if keys is None:
        why = "its sizes are read from there, over the network; or give model.hf=FOLDER, or model.preset=..."
        return Unsaid(why, model_names.folder(base, revision), (key,))
    if (packed := re.search(r"nvfp4|mxfp4|awq|gptq|[48]-?bit|int[48]|w[48]a\d+|fp8", base, re.I)) is not None:
        return Unsaid(f"its weights are stored as {packed[0]}; here in the type of the computation", keys, (key,))
    if (window := keys.pop("window", None)) is not None:
        why = f"its attention sees {window} tokens; all here, unless model.hf=FOLDER names its folder"
        return Unsaid(why, keys, (key,))
    return keys


def schedule(
    name: str, warmup: int, least: float, steps: int | None, over: int | None = None, way: str = "cosine"
) -> Any:
    """The keys of `schedule`. steps: where it ends; None: where the run does. over, way: how warmup_stable_decay falls,
    num_decay_steps and decay_type of `lr_scheduler_kwargs`."""
    keys: dict[str, Any] = {"name": SCHEDULERS.get(name, "cosine"), "warmup_steps": warmup if name != "constant" else 0}
    if keys["name"] in ("cosine", "linear", "wsd") and steps is not None:
        keys |= {"decay_steps": steps}
    if keys["name"] != "constant":
        keys |= {"min_lr_ratio": least}
    if name not in SCHEDULERS:
        return Unsaid("no schedule here is that one", keys, ("lr_scheduler",))
    if keys["name"] != "wsd":
        return keys
    keys |= {"fall": {"1-sqrt": "sqrt"}.get(way, way)} | ({"decay_over": over} if over else {})
    why = "the file does not say over how many steps it falls: a tenth of all"
    return keys if over else Unsaid(why, keys, ("lr_scheduler_kwargs.num_decay_steps",))


ALWAYS = (
    KeyRow("fsdp.bucket", {}, lambda: "wrap"),
    KeyRow("sharding.on_uneven", {}, lambda: "error"),
    KeyRow((), {"fsdp_config.offload_params": False},
        lambda on: Unsaid("a recipe offloads activations alone") if truth(on) else Omit),
    KeyRow(
        "fsdp.prefetch",
        {"fsdp_config.backward_prefetch": "BACKWARD_PRE", "fsdp_config.forward_prefetch": False},
        lambda backward, forward: 0 if str(backward).upper() in ("NO_PREFETCH", "BACKWARD_POST", "2") else 1,
    ),
    KeyRow(
        (), {"fsdp_config.auto_wrap_policy": Maybe(str)},
        lambda policy: Omit if policy is None or str(policy).upper() == "TRANSFORMER_BASED_WRAP"
        else Unsaid("each layer is gathered by itself here"),
    ),
)  # fmt: skip
"""Rows of all that use FSDP."""

ASIDE = (
    r"fsdp_config\.(version|state_dict_type|use_orig_params|sync_module_states|cpu_ram_efficient_loading|"
    r"final_state_dict_type|limit_all_gathers|transformer_layer_cls_to_wrap)"
)
ALIASES = {
    f"fsdp_config.fsdp_{name}": f"fsdp_config.{name}"
    for name in (
        "version", "sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing",
        "auto_wrap_policy", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "state_dict_type",
        "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading", "final_state_dict_type",
        "limit_all_gathers", "transformer_layer_cls_to_wrap", "min_num_params",
    )
} | {"fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.backward_prefetch"}  # fmt: skip


def truth(value: Any) -> bool:
    """Whether a setting is on: YAML's and people's words for it."""
    return value is True or str(value).lower() in ("true", "yes", "on", "1")
