"""The settings of a GPTQ folder, read from `quantization_config` in its old and new spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpshard.files.folder_json import read_json
from tpshard.files.linear_regex import matches_start
from tpshard.kernels.fp8.scaled_config import is_scaled

BITS = (2, 3, 4, 8)
# Spellings of each key in published folders, newest first.
_SPELLINGS = {
    "bits": ("bits", "wbits", "w_bit"),
    "group_size": ("group_size", "q_group_size", "groupsize"),
    "desc_act": ("desc_act",),
    "sym": ("sym",),
    "checkpoint_format": ("checkpoint_format", "format"),
    "method": ("quant_method", "method"),
}
_MOST_PATTERNS, _LONGEST_PATTERN = 1000, 1000


@dataclass(frozen=True)
class GPTQConfig:
    """The settings of a GPTQ folder.

    bits: 2, 3, 4 or 8. group_size: inputs per group; -1 is one group for all inputs. desc_act: act-order as the folder
    claims it (the stored g_idx decides). checkpoint_format: "gptq" stores zero - 1, "gptq_v2" the zero. dynamic:
    overrides by regular expression (RE2) on the start of the module's name; `-:pattern` leaves modules dense.
    """

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    true_sequential: bool = True
    static_groups: bool = False
    damp_percent: float = 0.01
    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, module: str) -> GPTQConfig | None:
        """The settings of one module, or None where `dynamic` leaves it dense. The first matching pattern wins."""
        for pattern, overrides in self.dynamic.items():
            if matches_start(_expression(pattern), module):
                if pattern.startswith("-:"):
                    return None
                return _settings(replace(self, dynamic={}).to_json() | _canonical(overrides), pattern)
        return self

    def to_json(self) -> dict[str, Any]:
        """The settings as the `quantization_config` that transformers, GPTQModel and vLLM read."""
        return {"quant_method": "gptq"} | {k: v for k, v in asdict(self).items() if k != "dynamic" or v}


def _canonical(raw: Mapping[str, Any]) -> dict[str, Any]:
    newest = {old: names[0] for names in _SPELLINGS.values() for old in names}
    return {newest.get(key, key): value for key, value in raw.items()}


def _expression(pattern: str) -> str:
    """The regular expression of a pattern of `dynamic`."""
    return pattern[2:] if pattern[:2] in ("-:", "+:") else pattern


def _settings(raw: Mapping[str, Any], where: str) -> GPTQConfig:
    def get(key: str, default: Any = None) -> Any:
        return next((raw[name] for name in _SPELLINGS.get(key, (key,)) if raw.get(name) is not None), default)

    method = str(get("method", "gptq")).lower()
    if method != "gptq":
        raise ValueError(f"{where}: quant_method {_short(method)} is not GPTQ.")
    if raw.get("is_marlin_format"):
        raise ValueError(f"{where}: Marlin's layout is not the GPTQ format; convert the folder to GPTQ first.")
    form = str(get("checkpoint_format", "gptq")).lower()
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"{where}: checkpoint_format {_short(form)} is not supported; gptq and gptq_v2 are.")
    bits, group_size = get("bits"), get("group_size", -1)
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"{where}: bits {_short(bits)} is not supported; {', '.join(map(str, BITS))} are.")
    if type(group_size) is not int or not (group_size == -1 or 0 < group_size < 1 << 31):
        raise ValueError(f"{where}: group_size {_short(group_size)} is neither -1 nor positive.")
    dynamic = get("dynamic", {})
    if not isinstance(dynamic, Mapping) or len(dynamic) > _MOST_PATTERNS:
        raise ValueError(f"{where}: dynamic must map patterns, at most {_MOST_PATTERNS}, to settings.")
    for pattern, overrides in dynamic.items():
        _check_dynamic(pattern, overrides, where)
    switches = {"desc_act": False, "sym": True, "lm_head": False, "true_sequential": True, "static_groups": False}
    flags = {key: get(key, default) for key, default in switches.items()}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {key} {_short(value)} is neither true nor false.")
    damping = get("damp_percent", 0.01)
    if isinstance(damping, bool) or not isinstance(damping, (int, float)) or not math.isfinite(damping):
        raise ValueError(f"{where}: damp_percent {_short(damping)} is not a number.")
    return GPTQConfig(
        bits=bits, group_size=group_size, checkpoint_format=form, damp_percent=float(damping), dynamic=dict(dynamic),
        **flags,
    )  # fmt: skip


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_dynamic(pattern: str, overrides: Any, where: str) -> None:
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"{where}: dynamic pattern {_short(pattern)} has more than {_LONGEST_PATTERN} characters.")
    try:
        matches_start(_expression(pattern), "")
    except ValueError as error:
        raise ValueError(
            f"{where}: dynamic pattern {_short(pattern)} is not a regular expression of RE2: {error}."
        ) from None
    if pattern.startswith("-:"):
        return
    if not isinstance(overrides, Mapping):
        raise ValueError(f"{where}: dynamic {pattern!r} must hold settings, not {_short(overrides)}.")
    # The tensors' layout depends on these. The other keys only describe how the codes were computed.
    unknown = {"checkpoint_format", "format", "quant_method", "method", "pack_dtype"} & set(overrides)
    if unknown:
        raise ValueError(
            f"{where}: dynamic {pattern!r} changes {sorted(unknown)}, which cannot differ between modules."
        )


def read_config(folder: str | Path) -> GPTQConfig | None:
    """The GPTQ settings of an HF folder, or None where it is not quantized, or in 8 bits with scales (`scaled_config`).

    Reads `config.json: quantization_config`, else `quantize_config.json`. Raises ValueError naming the unreadable key.
    """
    folder = Path(folder)
    for path, key in ((folder / "config.json", "quantization_config"), (folder / "quantize_config.json", None)):
        if not path.is_file():
            continue
        content = read_json(folder, path.name)
        raw = content.get(key) if key else content
        if raw is not None:
            if not isinstance(raw, dict):
                raise ValueError(f"{path.name}: {key} must be an object.")
            return None if is_scaled(raw) else _settings(raw, path.name)
    return None
