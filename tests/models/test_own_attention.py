"""Attention of transformers' classes that do not use its interface keeps documents apart, and biases exact."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import architectures
import pytest
import torch
from tpshard.models.transformers import patch_attention
from tpshard.models.transformers.architecture import Architecture

import every_class
import every_switch


@pytest.mark.parametrize("name", ["falcon", "falcon_alibi", "bloom", "mpt", "gptj", "codegen", "gpt_neo", "stablelm"])
def test_documents_of_a_row_are_computed_as_alone(name: str, tmp_path: Path) -> None:
    architecture = Architecture.of(architectures.folder(tmp_path, name))
    module, own, values = architecture.build(), architectures.own(name), architectures.values(name)
    tokens = torch.arange(24).view(2, 12) * 7 % 64
    places = torch.arange(12).expand(2, 12)
    documents, positions = (places >= 7).long(), torch.where(places >= 7, places - 7, places)
    with torch.no_grad():
        actual = torch.func.functional_call(module, values, (tokens, documents, positions), tie_weights=True)
        parts = [torch.func.functional_call(own, values, (part,)).logits for part in tokens.split([7, 5], dim=1)]
    torch.testing.assert_close(actual, torch.cat(parts, 1), rtol=1e-4, atol=1e-4)
    assert not architecture.notes(module)


def test_slopes_times_late_positions_are_exact_in_bf16() -> None:
    """Between keys 2000 and 2001 of a slope of 0.1 lies less than bf16 holds in one number."""
    rows, heads, width = 2048, 2, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, heads, width, generator=generator).bfloat16() for _ in range(3))
    slopes = torch.tensor([0.1, 0.003])
    out = patch_attention._alibi(q, k, v, patch_attention.Step(), lambda positions: slopes * positions, 0.5)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 0.5
    scores += slopes.double()[:, None, None] * torch.arange(rows)
    scores.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    assert (out.double() - expected).abs().max() < 0.02


@pytest.mark.parametrize("name", ["doge", "phimoe", "qwen2_moe"])
def test_a_window_that_a_class_says_by_its_mask_alone_is_obeyed(name: str) -> None:
    """Logits are transformers' own, and other ones without the window."""
    config = every_class.small(every_class.classes()[name]) | {"sliding_window": 3}
    if "use_sliding_window" in config:
        config |= {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    assert isinstance(every_switch.outcome(name, config), float)
    with mock.patch.object(patch_attention, "_window_of_mask", lambda model, module: None):
        apart = every_switch.outcome(name, config)
    assert name == "doge" or "wrong" in apart, "the comparison can fail"
