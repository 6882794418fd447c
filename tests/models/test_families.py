"""Modules, shapes, counts and folder names of a family follow from its one description."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.models import build
from tpshard.models.dims import name, param_dims
from tpshard.models.families import catalog, config, decoder, mlp, routing
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.family import Part
from tpshard.models.families.layers import Parts
from tpshard.models.families.presets import PRESETS, preset
from tpshard.models.folders.hf_names import hf_tensors

VARIANTS = {label: replace(PRESETS[label], layers=2) for label in PRESETS} | {
    "dropping": preset("tiny-moe", {"capacity": 1.0, "balance": "none", "shared_experts": 0}),
    "untied": preset("granite-tiny", {"tie_embeddings": False}),
    "biased": preset("tiny", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("label", VARIANTS)
def test_the_modules_are_those_described(label: str) -> None:
    described, model = VARIANTS[label], build(VARIANTS[label])
    assert described.parameters == param_dims(model)
    assert list(described.shapes.items()) == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert described.count == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("label", ["tiny", "granite-tiny", "tiny-moe", "dropping"])
def test_the_activations_are_those_described(label: str) -> None:
    names: set[tuple[str, ...]] = set()

    def note(x: Tensor, label: str, *dims: str) -> Tensor:
        names.add((label, *dims))
        return x

    described = VARIANTS[label]
    with ExitStack() as patches:
        for module in (decoder, mlp, routing):
            patches.enter_context(mock.patch.object(module, "name", note))
        build(described)(torch.zeros(1, 8, dtype=torch.int64, device="meta"))
    assert {(path.split(".")[-1], *dims) for path, dims in described.activations.items()} == names


@pytest.mark.parametrize("label", VARIANTS)
def test_every_parameter_has_one_place_in_a_folder(label: str) -> None:
    described = VARIANTS[label]
    tensors = hf_tensors(described, described.parameters)
    assert {name for parts in tensors.values() for name, _ in parts} == described.parameters.keys()
    for parameter, shape in described.shapes.items():
        members = [home.index for parts in tensors.values() for one, home in parts if one == parameter]
        assert members == (list(range(shape[0])) if ".experts." in parameter else [None])
    for parts in tensors.values():
        if not parts[0][1].stack:
            rows = [home.take(torch.arange(sum(described.shapes[name][0] for name, _ in parts))) for _, home in parts]
            assert sorted(torch.cat(rows).tolist()) == list(range(sum(map(len, rows))))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (12, 6), (6, 1), (7, 1)])
def test_a_divisor_of_heads_gives_every_device_whole_groups(heads: int, kv_heads: int) -> None:
    """Each device has as many query heads, and the KV heads that they read are as many on each device."""
    c = preset("tiny", {"heads": heads, "kv_heads": kv_heads})
    for ways in range(1, 2 * heads):
        share = heads // ways
        read = [{i * kv_heads // heads for i in range(r * share, (r + 1) * share)} for r in range(ways)]
        fits = (
            heads % ways == 0
            and len({len(actual) for actual in read}) == 1
            and (kv_heads % ways == 0 or all(len(actual) == 1 for actual in read))
        )
        assert c.divides("heads", ways) == fits, (ways, read)


class GeGLU(nn.Module):
    """down(gelu(gate(x)) * up(x))"""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(parts, ("gate", "up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(name(F.gelu(self.gate(x)) * self.up(x), "hidden", "batch", "seq", "mlp"))  # type: ignore[no-any-return]


@pytest.fixture
def geglu() -> Iterator[ModelConfig]:
    """What a family that differs by its MLP takes: an entry of the catalog and an MLP."""
    part = Part("geglu", catalog.SWIGLU.leaves, catalog.SWIGLU.activations)
    family = catalog.decoder("geglu", catalog.LLAMA.hf, numbers=("rope_theta", "rope_scaling"), mlp=part)
    with mock.patch.dict(config.FAMILIES, geglu=family), mock.patch.dict(mlp.MLPS, geglu=GeGLU):
        yield replace(PRESETS["tiny"], family="geglu")


def test_a_family_that_differs_by_its_mlp_is_an_entry_and_a_module(geglu: ModelConfig) -> None:
    tokens = torch.arange(8).unsqueeze(0)
    ours, llama = (build(c, device="cpu")(tokens) for c in (geglu, PRESETS["tiny"]))
    assert geglu.shapes == PRESETS["tiny"].shapes and not torch.allclose(ours, llama)


def test_a_number_that_a_family_does_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match="the granite family does not have `rope_theta`"):
        preset("granite-tiny", {"rope_theta": 1e6})


def test_a_leaf_that_is_not_described_is_not_made() -> None:
    parts = Parts(PRESETS["granite-tiny"]).inside("layers.0.mlp")
    assert parts.optional("gate") is None and parts.optional("up") is not None
    with pytest.raises(KeyError):
        parts("gate")


def test_descriptions_and_recipes_need_no_torch() -> None:
    modules = ("programs.fit.fit", "recipes.reading.document", "models.folders.hf_config", "cli.preflight.preflight")
    code = f"import sys, {', '.join(f'tpshard.{module}' for module in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
