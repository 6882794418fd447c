"""DeepSpeed's JSON, which configurations of accelerate and axolotl name or hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.files.folder_json import read_named
from tpshard.recipes.foreign.translation import KeyRow, Maybe, Omit, Unsaid
from tpshard.recipes.settings.stated import Stated, StatedSettings, of_tree
from tpshard.recipes.text.nodes import compose, decode

LARGEST = 1 << 18
"""Bytes of a JSON."""
PLACE = "deepspeed_config"
"""Where its settings stand among those of a tool."""
NAMES = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
    "sequence_parallel_size": "sp_size",
    "tensor_parallel.autotp_size": "tp_size",
    "tensor_parallel.tp_size": "tp_size",
}
"""Settings by accelerate's names of them."""
ABSENT: Mapping[str, Any] = {"zero_optimization.stage": 0, "gradient_clipping": 0.0}
"""What a JSON says by leaving it out, where a tool's own default is another. `auto` leaves a setting to the tool."""
BUCKETS = (
    r"(zero_optimization|zero)\.(reduce_bucket_size|allgather_bucket_size|stage3_prefetch_bucket_size|sub_group_size|"
    r"(stage3_)?(param_persistence_threshold|model_persistence_threshold|max_live_parameters|max_reuse_distance))"
)
UNSAID = {
    rf"{PLACE}\.{BUCKETS}": "each layer is gathered by itself here, ahead of its use",
    rf"{PLACE}\.zero_optimization\.zero_(hpz|quantized|hpz_partition)_?.*": "gathers are not quantized or kept a node",
    rf"{PLACE}\.(optimizer|scheduler)\.type": "its class is the optimizer's or schedule's that is nearest",
    rf"{PLACE}\.offload_\w+_nvme_path|{PLACE}\.zero_optimization\.offload_.*|{PLACE}\.aio\..*":
        "a recipe offloads activations alone",
    rf"{PLACE}\.(activation_checkpointing|pipeline|compression_training|curriculum_learning|data_efficiency)\..*":
        "only a program that calls DeepSpeed for it has it",
}  # fmt: skip
ASIDE = (
    rf"{PLACE}\.((zero3_(init|save)|stage3_gather|deepspeed_(multi|host|incl|excl)).*|deepspeed_moe_layer_cls_names|"
    r"(zero_optimization\.)?(stage3_)?gather_(16bit|fp16)_weights_on_model_save|zero_optimization\.(overlap_comm|"
    r"contiguous_gradients|allgather_partitions|reduce_scatter|round_robin_gradients|cpu_offload|load_from_fp32_weights|"
    r"legacy_stage1|use_multi_rank_bucket_allreduce|stage3_gather_\w+)|(fp16|bf16)\.(?!enabled).*|amp\..*|"
    r"steps_per_print|wall_clock_breakdown|memory_breakdown|dump_state|flops_profiler\..*|(tensorboard|wandb|csv_monitor|"
    r"comet)\..*|zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|checkpoint\..*|elasticity\..*|"
    r"comms_logger\..*|prescale_gradients|gradient_predivide_factor|compile\..*|load_universal\w*|"
    r"optimizer\.params\.(torch_adam|adam_w_mode|fused))"
)


def with_file(settings: StatedSettings, key: str, file: str) -> StatedSettings:
    """Settings with those that a JSON of DeepSpeed adds: the file that `key` names, or the map that stands there. They
    count over the tool's own of the same name. Raises `Mistakes` for a damaged file."""
    said = dict(settings.said)
    inside = {name[len(key) + 1 :]: said.pop(name) for name in settings.said if name.startswith(f"{key}.")}
    named = said.get(key)
    if named is not None and isinstance(named.value, str):
        inside = named_json(named.value, file) or inside
    if not inside:
        return settings
    first = next(iter(inside.values())).where
    absent = {name: Stated(name, value, replace(first, line=1, col=1)) for name, value in ABSENT.items()}
    added = {f"{PLACE}.{NAMES.get(name, name)}": one for name, one in (absent | inside).items() if one.value != "auto"}
    given = said.pop(key, replace(next(iter(inside.values())), value=True))
    said |= {name: replace(one, key=name) for name, one in {f"{PLACE}.json": given, **added}.items()}
    return replace(settings, said=said)


def named_json(name: str, file: str, fix: str = "is this DeepSpeed's JSON?") -> dict[str, Stated] | None:
    """The settings of a JSON that a configuration in `file` names; None where there is none."""
    found = read_named(name, file, LARGEST)
    if found is None:
        return None
    data, place = found
    text = re.sub(r"(?m)^[ \t]+", lambda match: " " * len(match[0]), decode(data, place))
    tree = compose(text, place, mapping=False)
    if tree.kind != "map":
        raise Mistakes.one("the file holds no map of settings", where=tree.source, fix=fix)
    return dict(of_tree(tree))


def precision(mixed: Any, bf16: Any, fp16: Any) -> str:
    """The type of a computation: the JSON's, else that of `mixed_precision`."""
    on = [name for name, enabled in (("bf16", bf16), ("fp16", fp16)) if enabled is True]
    return on[0] if on else str(mixed)


def clipping(norm: Any) -> float | None:
    """The norm to which gradients are clipped; auto is the Trainer's default."""
    return (norm or None) if isinstance(norm, int | float) else 1.0


TYPES: dict[str, Any] = {
    f"{PLACE}.communication_data_type": Maybe(str), f"{PLACE}.data_types.grad_accum_dtype": Maybe(str),
}  # fmt: skip
"""The types in which gradients are reduced, and in which they are summed."""


def _warmup(
    kind: str | None, form: str, steps: Any, least: float | None, most: float | None, *rates: float | None
) -> Any:
    """Its schedules rise from a rate to another, by the logarithm of the step unless `linear`."""
    if kind is None or not kind.startswith("Warmup"):
        return Omit
    names = f"{PLACE}.scheduler.params."
    if least:
        return Unsaid("a recipe's rate rises from 0", keys=(names + "warmup_min_lr",))
    if most is not None and most not in rates:
        return Unsaid("a recipe's rate rises to optimizer.lr", keys=(names + "warmup_max_lr",))
    if form != "linear" and steps != 0:
        return Unsaid("the rate rises by the step here, by its logarithm there", keys=(names + "warmup_type",))
    return Omit


ROWS = (
    KeyRow((), {f"{PLACE}.offload_optimizer_device": "none", f"{PLACE}.offload_param_device": "none"},
        lambda *places: Unsaid("a recipe offloads activations alone")
        if any(str(p).lower() != "none" for p in places) else Omit),
    KeyRow((), {f"{PLACE}.json": Maybe(object)}, lambda _: Omit),
    KeyRow((), {
        f"{PLACE}.scheduler.type": Maybe(str), f"{PLACE}.scheduler.params.warmup_type": "log",
        f"{PLACE}.scheduler.params.warmup_num_steps": Maybe(object),
        f"{PLACE}.scheduler.params.warmup_min_lr": Maybe(float),
        f"{PLACE}.scheduler.params.warmup_max_lr": Maybe(float),
        f"{PLACE}.optimizer.params.lr": Maybe(float), "learning_rate": Maybe(float),
    }, _warmup),
)  # fmt: skip
"""Rows of all that use it."""
