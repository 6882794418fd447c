"""Which modules compute in fp8, and how their values are scaled, as torchtitan and Megatron-LM say it.

A recipe's `model.dtype: fp8` is of the linear layers in a dense model's blocks, with a scale per 128 elements: what
says the same is left aside, and what says otherwise is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tpshard.models.families.presets import PRESETS
from tpshard.recipes.foreign.translation import KeyRow, Maybe, Omit, Unsaid

State = Literal["off", "on", "experts"]
"""Whether a file's linear layers compute in fp8; experts: there, but not here."""
FLOAT8 = "quantize.linear.float8"
"""torchtitan's converter of linear layers."""
CONVERTED: dict[str, Any] = {
    "model.converters": [], f"{FLOAT8}.enable_float8_linear": False, "model.name": "llama3",
    "model.flavor": "debugmodel",
}  # fmt: skip
"""What decides on torchtitan's state; enable_float8_linear is of its versions until 2024."""
MEGATRON_ON: dict[str, Any] = {"--fp8-format": Maybe(str), "--num-experts": Maybe(int)}
HEAD, ROUTER = ("output", "lm_head"), ("router.gate", "router", "gate.gate")
NO_EXPERTS = "fp8 is of dense models here"
SCALED = {
    "delayed": "tensor, from the steps before,", "tensorwise": "tensor", "mxfp8": "32 elements", "rowwise": "row",
    "rowwise_with_gw_hp": "row", "nvfp4": "16 elements",
}  # fmt: skip


def in_float8(converters: list[Any], older: Any) -> bool:
    """Whether torchtitan's linear layers compute in fp8."""
    return older is True or any(str(one) in ("float8", FLOAT8) for one in converters)


def dense(keys: Any) -> bool:
    """Whether the keys of a recipe's `model` are a dense preset's; True where the preset is not known."""
    return not (isinstance(keys, dict) and "preset" in keys and PRESETS[keys["preset"]].experts)


def _row(
    on: Mapping[str, Any], state: Callable[..., State], settings: Mapping[str, Any], why: Callable[..., str]
) -> KeyRow:
    """A row that names its settings for the reason that `why` makes of them; "" where it is so here."""

    def value(*values: Any) -> Any:
        match state(*values[: len(on)]):
            case "off":
                return Omit
            case "experts":
                reason = NO_EXPERTS if list(values[len(on) :]) != [_plain(one) for one in settings.values()] else ""
            case _:
                reason = why(*values[len(on) :])
        return Unsaid(reason, keys=tuple(settings)) if reason else Omit

    return KeyRow((), {**on, **settings}, value)


def _plain(default: Any) -> Any:
    return None if isinstance(default, Maybe) else default


def _skipped(names: Any) -> str:
    """torchtitan skips each linear layer whose path has one of these texts in it."""
    listed = [str(name) for name in (names if isinstance(names, list) else str(names).split(",")) if name]
    if inside := [name for name in listed if name not in (*HEAD, *ROUTER)]:
        small = "small layers" if "auto_filter_small_kn" in inside else ", ".join(inside)
        return f"{small} in bf16 there; here all linear layers of blocks are in fp8"
    return "" if set(listed) & set(HEAD) else "the head computes in fp8 too there, in bf16 here"


def torchtitan(model: Callable[[str, str], Any]) -> tuple[KeyRow, ...]:
    """The rows of torchtitan's fp8. model: the keys of a recipe's `model` for its name and flavor."""

    def state(converters: list[Any], older: Any, name: str, flavor: str) -> State:
        if not in_float8(converters, older):
            return "off"
        return "on" if dense(model(name, flavor)) else "experts"

    settings: tuple[tuple[str, Any, Callable[..., str]], ...] = (
        ("filter_fqns", [], _skipped),
        ("recipe_name", Maybe(str), lambda name: _scales(name or "tensorwise")),
        ("enable_fsdp_float8_all_gather", False, lambda on: "weights are gathered in bf16 here" if on else ""),
        ("precompute_float8_dynamic_scale_for_fsdp", False,
         lambda on: "scales follow from the values at hand here" if on else ""),
    )  # fmt: skip
    return tuple(_row(CONVERTED, state, {f"{FLOAT8}.{name}": default}, why) for name, default, why in settings)


def _scales(recipe: str) -> str:
    if recipe in ("blockwise", "custom"):
        return "" if recipe == "blockwise" else "its scales are another program's"
    return f"fp8 has a scale per 128 elements here, per {SCALED.get(recipe, recipe)} there"


def _megatron(fp8: str | None, experts: int | None) -> State:
    return "off" if not fp8 else "experts" if experts else "on"


MEGATRON = tuple(_row(MEGATRON_ON, _megatron, settings, why) for settings, why in (
    ({"--first-last-layers-bf16": False, "--num-layers-at-start-in-bf16": 1, "--num-layers-at-end-in-bf16": 1},
     lambda on, first, last: on and f"the first {first} and the last {last} layers compute in bf16 there; here the "
     "linear layers of all blocks are in fp8"),
    ({"--fp8-recipe": "delayed"}, _scales),
    ({"--fp8-param-gather": False}, lambda on: on and "parameters are gathered in bf16 here"),
    ({"--fp8-margin": 0, "--fp8-interval": 1, "--fp8-amax-history-len": 1, "--fp8-amax-compute-algo": "most_recent"},
     lambda *values: "scales follow from the values at hand here" if values != (0, 1, 1, "most_recent") else ""),
    ({"--fp8-wgrad": True}, lambda on: "" if on else "gradients of weights are in fp8 too"),
))  # fmt: skip
"""The rows of Megatron-LM's fp8."""
