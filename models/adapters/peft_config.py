"""PEFT's adapter_config.json as `Lora`, and back: each field is obeyed, or refused by its name. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpshard.files.folder_json import read_json
from tpshard.models.adapters.lora import Adapter, Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(one) in (int, float) and one > 0 for one in value.values())


READ: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda v: type(v) is int and v > 0, "a whole number above 0"),
    "lora_alpha": (lambda v: type(v) in (int, float) and v > 0, "a number above 0"),
    "target_modules": (lambda v: isinstance(v, str) or _names(v), "a list of names, or a regular expression"),
    "exclude_modules": (lambda v: v is None or isinstance(v, str) or _names(v), "names, or a regular expression"),
    "lora_dropout": (lambda v: type(v) in (int, float) and 0 <= v < 1, "a number from 0 to 1"),
    "use_rslora": (lambda v: isinstance(v, bool), "true or false"),
    "use_dora": (lambda v: isinstance(v, bool), "true or false"),
    "rank_pattern": (lambda v: v is None or _numbers(v), "a map of numbers"),
    "alpha_pattern": (lambda v: v is None or _numbers(v), "a map of numbers"),
    "modules_to_save": (lambda v: v is None or _names(v), "a list of names"),
    "layers_pattern": (
        lambda v: v is None or (isinstance(v, str | list) and all(isinstance(n, str) and re.fullmatch(r"\w*", n)
                                                                  for n in ([v] if isinstance(v, str) else v))),
        "a name of a list of layers, or several",
    ),
    "target_parameters": (lambda v: v is None or _names(v), "a list of names"),
    "layers_to_transform": (
        lambda v: v is None or type(v) is int or (isinstance(v, list) and all(type(n) is int for n in v)), "numbers",
    ),
}  # fmt: skip
"""The fields that are obeyed, each with what it may be."""
WHOLE: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "task_type": (None, "CAUSAL_LM"), "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "fan_in_fan_out": (False, True, None), "trainable_token_indices": (None, [], {}), "loftq_config": (None, {}),
    "layer_replication": (None,), "lora_bias": (False, None), "use_qalora": (False, None),
    "alora_invocation_tokens": (None,), "arrow_config": (None,),
    "megatron_config": (None,), "corda_config": (None,), "velora_config": (None,), "kasa_config": (None,),
    "monteclora_config": (None,), "use_bdlora": (None, False), "lora_ga_config": (None,),
}  # fmt: skip
"""The fields of which only these values are supported. Of the ways to begin, those that change the base (PiSSA, OLoRA)
are not."""
SAID = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "megatron_core",
    "runtime_config", "eva_config", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
"""The fields that do not change what an adapter computes: `ensure_weight_tying` is what happens here anyway."""


CHANGES = "it begins by changing the base, of which the folder holds nothing; PEFT can save it as plain LoRA"


def _shown(value: Any) -> str:
    """A value as the file has it, shortened."""
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's adapter_config.json. ValueError names a field whose value is not supported."""
    raw = read_json(folder, CONFIG)
    for name, value in raw.items():
        if name in READ:
            fits, legal = READ[name]
            if not fits(value):
                raise ValueError(f"{folder / CONFIG}: `{name}: {_shown(value)}` is not {legal}")
        elif name in WHOLE:
            if value not in WHOLE[name]:
                why = f": {CHANGES}" if name == "init_lora_weights" else ""
                raise ValueError(f"{folder / CONFIG}: `{name}: {_shown(value)}` is not supported{why}")
        elif name not in SAID and value not in (None, False, [], {}, ""):
            raise ValueError(f"{folder / CONFIG}: the field `{name}: {_shown(value)}` is not known")
    if "peft_type" not in raw:
        raise ValueError(f"{folder / CONFIG}: `peft_type` is missing")
    if "target_modules" not in raw:
        raise ValueError(f"{folder / CONFIG}: `target_modules` is missing")
    if raw.get("layers_pattern") and raw.get("layers_to_transform") in (None, []):
        raise ValueError(f"{folder / CONFIG}: `layers_pattern` needs `layers_to_transform`")
    if isinstance(raw["target_modules"], str) and raw.get("layers_to_transform") is not None:
        message = "`layers_to_transform` is for names in `target_modules`, not for a regular expression"
        raise ValueError(f"{folder / CONFIG}: {message}")
    return raw


def lora_of(raw: Mapping[str, Any]) -> Lora:
    """The adapters that `read_config` read."""
    targets, layers = raw["target_modules"], raw.get("layers_to_transform")
    excluded, lists = raw.get("exclude_modules") or (), raw.get("layers_pattern") or ()
    return Lora(
        rank=raw.get("r", 8), alpha=float(raw.get("lora_alpha", 8)),
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=float(raw.get("lora_dropout", 0.0)), dora=raw.get("use_dora", False),
        use_rslora=raw.get("use_rslora", False), rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {}, modules_to_save=tuple(raw.get("modules_to_save") or ()),
        exclude=excluded if isinstance(excluded, str) else tuple(excluded),
        layers=None if layers is None else (layers,) if isinstance(layers, int) else tuple(layers) or None,
        lists=(lists,) if isinstance(lists, str) else tuple(lists),
        parameters=tuple(raw.get("target_parameters") or ()), of_folder=True,
    )  # fmt: skip


def config_of(lora: Lora, adapters: Sequence[Adapter], every: Sequence[str], saved: Sequence[str],
              base: str) -> dict[str, Any]:  # fmt: skip
    """adapter_config.json of adapters. every: the folder's paths of all layers that could have one. saved: the folder's
    paths of the modules that are trained in full. ValueError for adapters that the format has no place for."""
    if fused := next((one.layer for one in adapters if one.layer.fused), None):
        raise ValueError(f"`{fused.path}` is a part of the folder's `{fused.theirs}`, which PEFT adapts as a whole")
    chosen = [(one.layer.theirs or one.layer.path).replace(".{}.", ".0.") for one in adapters]
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in chosen))
    short = {name for name in every if name.replace(".{}.", ".0.").rpartition(".")[2] in ends}
    stacked = any(one.layer.experts for one in adapters)
    exact = {name.replace(".{}.", ".0.") for name in short} == set(chosen)
    if stacked and not exact:
        raise ValueError("adapters of some experts' matrices cannot be told from those of others by their names")
    whole = lora.alpha
    ranks = {path: one.rank for path, one in zip(chosen, adapters) if one.rank != lora.rank}
    alphas = {path: one.scaling * (one.rank**0.5 if lora.use_rslora else one.rank)
              for path, one in zip(chosen, adapters)}  # fmt: skip
    alphas = {path: alpha for path, alpha in alphas.items() if abs(alpha - whole) > 1e-9 * whole}
    if other := next((one.layer.path for path, one in zip(chosen, adapters)
                      if one.layer.experts and (path in ranks or path in alphas)), None):  # fmt: skip
        raise ValueError(f"the experts `{other}` have a rank or an alpha of their own, which PEFT does not read")
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": _plain(whole), "lora_dropout": lora.dropout, "bias": "none",
        "target_modules": ends if exact else chosen, "exclude_modules": None,
        "fan_in_fan_out": any(one.layer.turned and not one.layer.table for one in adapters),
        "use_rslora": lora.use_rslora, "use_dora": lora.dora, "rank_pattern": ranks, "init_lora_weights": True,
        "alpha_pattern": {path: _plain(alpha) for path, alpha in alphas.items()},
        "modules_to_save": list(saved) or None, "layers_to_transform": None, "layers_pattern": None,
    }  # fmt: skip


def _plain(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if float(rounded).is_integer() else rounded
