"""What variants share is keyed by exactly the parts of a setting on which it depends."""

from __future__ import annotations

import pytest
from tpshard.programs.parts.memo import PARTS, PRODUCTS, Memo, key
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

RECIPE = """
name: small
cluster: {device: cpu}
mesh: {fsdp: 4}
model: {preset: tiny, layers: 2}
batch: {global_sequences: 16, per_device: 1}
"""
DECIDED = {
    "model.mlp=64": {"model", "recipe"},
    "fsdp.reduce_dtype=bf16": {"model", "recipe"},
    "batch.per_device=2": {"rows", "recipe", "layer"},
    "mesh={fsdp: 2, dp: 2}": {"mesh", "recipe"},
    "sharding.rules.mlp=fsdp": {"shardings", "recipe", "layer"},
    "optimizer.name=lion": {"optimizer", "recipe"},
    "train.clip_grad_norm=2": {"optimizer", "recipe"},
    "remat=full": {"remat"},
}
"""Change of a recipe -> the parts of its setting that it changes."""


def setting(*overrides: str) -> Setting:
    return Setting.of(loads(RECIPE, overrides))


@pytest.mark.parametrize("change", DECIDED)
def test_a_key_changes_with_what_its_product_depends_on_and_with_nothing_else(change: str) -> None:
    one, other = setting(), setting(change)
    parts = {part: value for part, value in PARTS.items() if part != "server"}
    assert {part for part, value in parts.items() if repr(value(one)) != repr(value(other))} == DECIDED[change]
    for product, (_, names) in PRODUCTS.items():
        if "server" not in names:
            assert (key(one, product) != key(other, product)) is bool(DECIDED[change] & set(names)), product


def test_the_last_used_results_of_a_product_are_shared() -> None:
    memo, made = Memo(), list[int]()
    product, most = "update", PRODUCTS["update"][0]

    def result(i: int) -> int:
        return memo.of(product, setting(), lambda: made.append(i) or i, i)

    for i in (*range(most), 0, most, 0, 1):
        assert result(i) == i
    assert made == [*range(most + 1), 1], "the first was used again, so the second was dropped"
