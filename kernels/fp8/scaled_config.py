"""Folders whose weights are numbers of few bits with scales, read from `quantization_config`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8 of FBGEMM", "compressed-tensors": "compressed-tensors",
           "modelopt": "ModelOpt"}  # fmt: skip
"""The methods with such weights by `quant_method`; some of them have other forms too."""
Block = tuple[int, int]


@dataclass(frozen=True)
class ScaledConfig:
    """How a folder stores its weights: `N` in 8 bits, and its scales `N_scale_inv` or `N_scale`, which multiply it.

    name: what a sentence calls the format. block: the outputs and inputs that share a scale; None: the scales' shape
    says it, one for a weight or for each output. packed: the bits of numbers of which an int32 of `N_packed` holds
    several, the first in its lowest bits, each larger by half their range; 0: `N` is not packed.
    """

    name: str
    block: Block | None = None
    packed: int = 0

    @property
    def note(self) -> str:
        """What becomes of the folder's numbers, for a plan."""
        return (
            f"the folder's weights are {self.name}: read as dense weights of the model's dtype, equal up to its "
            "rounding; activations are not rounded"
        )


def is_scaled(settings: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is that of weights which `scaled_config` may describe."""
    return str(settings.get("quant_method")).lower() in METHODS


def scaled_config(settings: Mapping[str, Any]) -> ScaledConfig:
    """How the weights of a folder with this `quantization_config` are stored. ValueError names the key and value that
    no reader here obeys."""
    method = str(settings.get("quant_method")).lower()
    if method == "fp8":
        _only(settings, "expert_dtype", "fp8")
        _only(settings, "scale_fmt", "float", "ue8m0")
        block = settings.get("weight_block_size", (128, 128))
        return ScaledConfig("fp8 numbers", None if block is None else _block(block, "weight_block_size"))
    if method == "fbgemm_fp8":
        return ScaledConfig("fp8 numbers of FBGEMM")
    if method == "modelopt":
        _only({"quant_algo": "none", **settings}, "quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
        return ScaledConfig("fp8 numbers of ModelOpt")
    return _compressed(settings)


def _compressed(settings: Mapping[str, Any]) -> ScaledConfig:
    """The form of compressed-tensors: one for all of its groups of modules."""
    _only(settings, "quantization_status", "compressed")
    for key, format_of in (("sparsity_config", "dense"), ("transform_config", None)):
        other = settings.get(key)
        if other and not (isinstance(other, Mapping) and other.get("format", "") == format_of):
            raise ValueError(f"`{key}: {_short(other)}`")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"`config_groups: {_short(groups)}`")
    forms = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"`config_groups.{name}: {_short(group)}`")
        form = group.get("format") or settings.get("format")
        _only({"format": form}, "format", *_FORMATS, _PACKED)
        in_words = {"num_bits": (4, 8), "type": ("int",)} if form == _PACKED else {}
        for key, allowed in {**_WEIGHTS, **in_words}.items():
            _only(weights, key, *allowed, where=f"config_groups.{name}.weights.")
        bits = weights.get("num_bits", 8)
        forms.add((bits, _block_of(weights, f"config_groups.{name}.weights"), bits if form == _PACKED else 0))
    if len(forms) > 1:
        raise ValueError("`config_groups` with weights of several forms")
    ((bits, block, packed),) = forms
    return ScaledConfig(f"numbers of {bits} bits of compressed-tensors", block, packed)


_FORMATS, _PACKED = ("float-quantized", "int-quantized", "naive-quantized"), "pack-quantized"
_WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,), "symmetric": (True,), "dynamic": (False,), "actorder": ("weight", "static"),
    "strategy": ("tensor", "channel", "block", "group"), "type": ("float", "int"),
}  # fmt: skip
"""The values of a group's settings that are obeyed, None beside them."""


def _block_of(weights: Mapping[str, Any], where: str) -> Block | None:
    match weights.get("strategy"):
        case "block":
            return _block(weights.get("block_structure"), f"{where}.block_structure")
        case "group":
            return 1, _block([1, weights.get("group_size")], f"{where}.group_size")[1]
    return None


def _block(value: Any, key: str) -> Block:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ValueError(f"`{key}: {_short(value)}`")


def _only(settings: Mapping[str, Any], key: str, *allowed: Any, where: str = "") -> None:
    if settings.get(key) is not None and settings[key] not in allowed:
        raise ValueError(f"`{where}{key}: {_short(settings[key])}`")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
