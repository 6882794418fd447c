"""What recomputation saves a step that trains adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import tpshard

RECIPE = """
name: lora
cluster: {device: h100-sxm-80g, devices_per_node: 1}
mesh: {fsdp: 1}
model: {preset: llama3-8b, layers: 2, seq_len: 2048}
adapters: {lora: {rank: 16}}
batch: {global_sequences: 1}
"""


@pytest.mark.parametrize("targets", ["[q_proj, v_proj, down_proj]", "all-linear"])
def test_selective_recomputation_takes_less_memory_than_none(targets: str, tmp_path: Path) -> None:
    """Of an adapted product all that is read later is the sum: its two parts must not both be kept."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    peaks = []
    for remat in ("full", "selective", "none"):
        recipe = tpshard.load(tmp_path / "recipe.yaml", f"remat={remat}", f"adapters.lora.targets={targets}")
        peaks.append(tpshard.plan(recipe).to_json()["memory"]["peak_bytes"])
    assert peaks[0] + 2**28 < peaks[1] < peaks[2] - 2**28
