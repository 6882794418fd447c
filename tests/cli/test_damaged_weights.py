"""Weights that only reading tells to be wrong are mistakes for whatever reads them, with the folder's name."""

from __future__ import annotations

from pathlib import Path

import architectures
import gptq_folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.programs.fit.recipe_model import model_of
from tpshard.recipes.reading.load import loads
from tpshard.train.run.initial_values import initial_values


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quantized model in which one matrix names a group that its scales do not have."""
    wider = architectures.config_of("llama") | gptq_folders.WIDER
    monkeypatch.setitem(architectures.CONFIGS, "llama", wider)
    gptq_folders.quantized("llama", tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.g_idx"))
    save_file(tensors | {name: torch.full_like(tensors[name], 99)}, file, metadata={"format": "pt"})
    return tmp_path / "model"


def test_what_evaluates_names_the_folder(folder: Path) -> None:
    model = open_source(str(folder))
    name = next(name for name in model.spec.shapes if name.endswith("attention.wq.weight"))
    with pytest.raises(Mistakes, match=r"g_idx names groups outside") as refused:
        model.read_block(name, (0, 0), (2, 2))
    assert refused.value.exit == Exit.CHECKPOINT and str(folder) in str(refused.value)


def test_what_begins_from_it_names_the_key(folder: Path) -> None:
    recipe = loads(f"model: {{hf: {folder}, seq_len: 8}}\ntrain: {{init_from: {folder}}}\ndata: {{source: sample}}")
    spec = model_of(recipe)
    name = next(name for name in spec.shapes if name.endswith("attention.wq.weight"))
    with pytest.raises(Mistakes, match="a run cannot begin from") as refused:
        initial_values(recipe, spec, str(folder))(name, (0, 0), (2, 2), seed=1)
    assert refused.value.exit == Exit.CHECKPOINT and refused.value.diagnostics[0].where.line == 2
