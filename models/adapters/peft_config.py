"""PEFT's adapter_config.json as `Lora`, and back: each field is obeyed, or refused by its name. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpshard.files.folder_json import read_json
from tpshard.models.adapters.lora import Adaptable, Adapter, Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(one) in (int, float) and one > 0 for one in value.values())


READ: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda v: type(v) is int and v > 0, "a whole number above 0"),
    "lora_alpha": (lambda v: type(v) in (int, float) and v > 0, "a number above 0"),
    "target_modules": (
        lambda v: v is None or isinstance(v, str) or _names(v), "a list of names, or a regular expression",
    ),
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
BEGINNINGS = {**dict.fromkeys(("pissa", "olora", "corda", "loftq", "lora_ga"), CHANGES),
              "mica": "its `lora_B` is frozen, and would be trained here"}  # fmt: skip
"""Why ways to begin are not supported, by the start of their names."""


def _begins(value: Any, way: str) -> bool:
    return isinstance(value, str) and value.lower().startswith(way)


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
                whys = [why for way, why in BEGINNINGS.items() if name == "init_lora_weights" and _begins(value, way)]
                why = f": {whys[0]}" if whys else ""
                raise ValueError(f"{folder / CONFIG}: `{name}: {_shown(value)}` is not supported{why}")
        elif name not in SAID and value not in (None, False, [], {}, ""):
            raise ValueError(f"{folder / CONFIG}: the field `{name}: {_shown(value)}` is not known")
    if "peft_type" not in raw:
        raise ValueError(f"{folder / CONFIG}: `peft_type` is missing")
    if raw.get("target_modules") is None and not raw.get("target_parameters"):
        raise ValueError(f"{folder / CONFIG}: `target_modules` is missing")
    if raw.get("layers_pattern") and raw.get("layers_to_transform") in (None, []):
        raise ValueError(f"{folder / CONFIG}: `layers_pattern` needs `layers_to_transform`")
    if isinstance(raw.get("target_modules"), str) and raw.get("layers_to_transform") is not None:
        message = "`layers_to_transform` is for names in `target_modules`, not for a regular expression"
        raise ValueError(f"{folder / CONFIG}: {message}")
    return raw


def lora_of(raw: Mapping[str, Any]) -> Lora:
    """The adapters that `read_config` read."""
    targets, layers = raw.get("target_modules") or (), raw.get("layers_to_transform")
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


def config_of(lora: Lora, adapters: Sequence[Adapter], every: Sequence[Adaptable], saved: Sequence[str],
              base: str) -> dict[str, Any]:  # fmt: skip
    """adapter_config.json of adapters. every: all layers that could have one. saved: the folder's paths of the modules
    that are trained in full. ValueError for adapters that the format has no place for."""
    if fused := next((one.layer for one in adapters if one.layer.fused and not one.wrapper), None):
        raise ValueError(
            f"`{fused.path}` is a part of the folder's `{fused.theirs}`, which PEFT adapts as a whole: name that"
        )
    by_module = [one for one in adapters if not _of_parameter(one)]
    by_parameter = list(dict.fromkeys(one.layer.parameter for one in adapters if _of_parameter(one)))
    chosen = list(dict.fromkeys(map(_module, (one.layer for one in by_module))))
    names, exact = _shortened(chosen, map(_module, every), 1)
    parameters, _ = _shortened(by_parameter, (one.parameter for one in every), 2)
    if any(one.layer.experts for one in by_module) and not exact:
        raise ValueError("adapters of some experts' matrices cannot be told from those of others by their names")
    whole = _plain(lora.alpha)
    paths = [one.layer.parameter if _of_parameter(one) else _module(one.layer) for one in adapters]
    ranks = {path: one.rank for path, one in zip(paths, adapters)}
    alphas = {path: _plain(one.scaling * (one.rank**0.5 if lora.use_rslora else one.rank))
              for path, one in zip(paths, adapters)}  # fmt: skip
    own = ((path, one.layer) for path, one in zip(paths, adapters) if one.layer.experts and not one.wrapper)
    if other := next((one.path for path, one in own if (ranks[path], alphas[path]) != (lora.rank, whole)), None):
        raise ValueError(f"the experts `{other}` have a rank or an alpha of their own, which PEFT does not read")
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": whole, "lora_dropout": lora.dropout, "bias": "none",
        "target_modules": names, "target_parameters": parameters or None, "exclude_modules": None,
        "fan_in_fan_out": any(one.layer.turned and not one.layer.table for one in adapters),
        "use_rslora": lora.use_rslora, "use_dora": lora.dora, "init_lora_weights": True,
        "rank_pattern": _patterns(ranks, lora.rank), "alpha_pattern": _patterns(alphas, whole),
        "modules_to_save": list(saved) or None, "layers_to_transform": None, "layers_pattern": None,
    }  # fmt: skip


def _of_parameter(adapter: Adapter) -> bool:
    """Whether PEFT names what is adapted in `target_parameters`."""
    return bool(adapter.wrapper) and not adapter.layer.fused


def _module(layer: Adaptable) -> str:
    """A layer's path in the folder; of stacked experts that of the first."""
    return (layer.theirs or layer.path).replace(".{}.", ".0.")


def _shortened(chosen: Sequence[str], every: Iterable[str], parts: int) -> tuple[list[str], bool]:
    """The last parts of names, and whether they pick these of all alone; otherwise the whole names."""
    short = {name: ".".join(name.split(".")[-parts:]) for name in (*chosen, *every)}
    ends = list(dict.fromkeys(short[name] for name in chosen))
    exact = {name for name, end in short.items() if end in ends} == set(chosen)
    return (ends if exact else list(chosen)), exact


def _patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """The values that are not the default by a name's last two parts, or the whole name where others of that end have
    another value."""
    patterns: dict[str, float] = {}
    for path, value in values.items():
        end = ".".join(path.split(".")[-2:])
        alike = all(other == value for name, other in values.items() if name == end or name.endswith(f".{end}"))
        patterns |= {end if alike else path: value} if value != default else {}
    return patterns


def _plain(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if float(rounded).is_integer() else rounded
