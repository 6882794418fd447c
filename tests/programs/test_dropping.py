"""Dropout in a user's module draws the same numbers on every mesh and policy, and none in evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tpshard.parallelism.draws import RANDOM
from tpshard.programs.compare.equality import compare
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

OWN = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop = nn.Linear(16, 32, bias=False), nn.Dropout(0.3)
        self.down = nn.Linear(32, 16, bias=False)
        self.up.dims, self.down.dims = {"weight": ("mlp", "embed")}, {"weight": ("embed", "mlp")}

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.embed.dims = {"weight": ("vocab", "embed")}
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.output = nn.Linear(16, 40, bias=False)
        self.output.dims = {"weight": ("vocab", "embed")}

    def forward(self, tokens, documents=None, positions=None):
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.output(x)
"""
RECIPE = """
cluster: {device: cpu}
model: {module: 'own_dropping:Net', seq_len: 6, dtype: fp32}
batch: {global_sequences: 12}
"""


def setting(mesh: str, *overrides: str) -> Setting:
    return Setting.of(loads(RECIPE + f"mesh: {mesh}\n", overrides))


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_dropping.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [("{fsdp: 3}", ("remat=full",)), ("{fsdp: 2, tp: 2}", ()), ("{dp: 2, tp: 4}", ()),
     ("{pp: 2, fsdp: 2}", ("pipeline={schedule: zero_bubble}", "remat=full"))],
)  # fmt: skip
def test_training_drops_alike_on_every_mesh(mesh: str, overrides: tuple[str, ...]) -> None:
    compared = compare(setting(mesh, *overrides), setting("{dp: 1}"), steps=2)
    assert compared.equal, compared
    assert compared.losses[0] != compared.losses[1]


def test_steps_draw_anew_and_evaluation_drops_nothing() -> None:
    programs = training.build(setting("{dp: 2}"))
    assert [p.name for p in programs.micro.inputs if p.kind == "seed"] == ["seed"]
    assert not any(node.target is RANDOM for node in programs.evaluate.graph.nodes)
    assert not any(port.kind == "seed" for port in programs.evaluate.inputs)
