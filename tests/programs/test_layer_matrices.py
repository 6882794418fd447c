"""Muon moves the matrices of repeated layers, wherever their names have digits, and what the recipe says."""

from __future__ import annotations

import pytest
from torch import nn
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.programs.setting.layer_matrices import matrices_of_layers
from tpshard.recipes.reading.load import loads

LAYERS = {"blocks.0.0.weight", "blocks.0.2.weight", "blocks.1.0.weight", "blocks.1.2.weight"}


class Model(nn.Module):
    """Two layers, a head of two operations and one in a list of its own, a table for each layer, a lone block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(5, 4) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9))
        self.heads = nn.ModuleList([nn.Linear(4, 3)])
        self.stem = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        self.norm = nn.LayerNorm(4)
        self.blocks[1][2].requires_grad_(False)


def chosen(model: nn.Module, orthogonal: str = "{}") -> frozenset[str]:
    recipe = loads(f"model: {{module: 'a:B'}}\noptimizer: {{name: muon, orthogonal: {orthogonal}}}\n")
    return matrices_of_layers(model, recipe, {}, {})


def test_a_head_or_a_table_in_a_list_is_no_layer() -> None:
    assert chosen(Model()) == LAYERS - {"blocks.1.2.weight"}


def test_linears_of_one_shape_in_a_list_are_layers_and_their_head_is_none() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert chosen(model) == {"1.weight", "2.weight"}


def test_layers_of_several_classes_are_layers() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.TransformerEncoderLayer(4, 1, 4), nn.Bilinear(4, 4, 4)])})
    assert {name.split(".")[1] for name in chosen(model)} == {"0"}


def test_a_recipe_adds_matrices_and_removes_some() -> None:
    patterns = '{"blocks.*": false, "blocks.0.2": true, head.0: true}'
    assert chosen(Model(), patterns) == {"blocks.0.2.weight", "head.0.weight"}


@pytest.mark.parametrize(("pattern", "fix"), [("blocks.7", "blocks"), ("norm", ""), ("blocks.1.2", "blocks")])
def test_a_pattern_without_a_trained_matrix_is_a_mistake(pattern: str, fix: str) -> None:
    with pytest.raises(Mistakes) as error:
        chosen(Model(), f'{{"{pattern}": true}}')
    assert error.value.exit == Exit.RECIPE and f"`{pattern}` matches no matrix" in str(error.value)
    assert fix in error.value.diagnostics[0].fix


def test_a_model_without_layers_is_refused_unless_the_recipe_names_a_matrix() -> None:
    alone = nn.ModuleDict({"head": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9))})
    with pytest.raises(Mistakes) as error:
        chosen(alone)
    assert error.value.exit == Exit.FIT
    assert chosen(alone, "{head.0: true}") == {"head.0.weight"}
