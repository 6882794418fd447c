"""Low-rank adapters as the settings of trainers that use PEFT say them."""

from __future__ import annotations

import re
from typing import Any

from tpshard.files.linear_regex import matches_start
from tpshard.recipes.foreign.trainer_rows import truth
from tpshard.recipes.foreign.translation import Omit, Unsaid

OURS = {"embed_tokens": "tok_embed", "lm_head": "output"}
LINEARS = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
PLACES = ("", "model.", "model.language_model.", "language_model.model.", "model.text_model.")
"""Where the layers of published classes are."""


def adapter(
    kind: str, key: str, rank: int, alpha: float, dropout: float, linear: bool, targets: Any, parameters: Any,
    saved: Any, dora: bool, rslora: bool,
) -> Any:  # fmt: skip
    """The keys of `adapters.lora`. kind: the adapter's, which the setting `key` names; linear: on all linear layers;
    targets: names of layers, a name or names with commas, or a pattern of paths. parameters: names of parameters."""
    if kind not in ("lora", "qlora"):
        return Unsaid("a recipe has low-rank adapters alone", Omit, (key,))
    listed = ["all-linear"] if truth(linear) or not (targets or parameters) else _names(targets or [])
    listed += [name.removesuffix(".weight") for name in _names(parameters or [])]
    keys: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": listed, "dropout": dropout}
    keys |= {"modules_to_save": [OURS.get(name, name) for name in _names(saved)]} if saved else {}
    keys |= {"dora": True} if truth(dora) else {}
    keys |= {"use_rslora": True} if truth(rslora) else {}
    if all(re.fullmatch(r"[\w.]+|all-linear", name) for name in listed):
        return keys
    if len(listed) == 1 and (names := _matched(listed[0])):
        return {**keys, "targets": names}
    why = "targets are names of layers here, not a pattern"
    return Unsaid(why, {**keys, "targets": ["all-linear"]}, ("lora_target_modules",))


def _matched(pattern: str) -> list[str]:
    """The linear layers of a decoder that a pattern of whole paths matches, if it does so in every layer."""
    found = [[name for name in LINEARS if any(_fits(pattern, f"{place}layers.{n}.{name}") for place in PLACES)]
             for n in (0, 1, 9)]  # fmt: skip
    return [name.rpartition(".")[2] for name in found[0]] if found[0] == found[1] == found[2] else []


def _fits(pattern: str, path: str) -> bool:
    try:
        return matches_start(f"(?:{pattern})$", path)
    except ValueError:
        return False


def _names(value: Any) -> list[str]:
    """Names in a list, or in a text with commas that is no pattern."""
    if not isinstance(value, str):
        return list(value)
    return value.split(",") if re.fullmatch(r"[\w.,-]+", value) else [value]
