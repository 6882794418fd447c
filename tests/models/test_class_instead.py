"""A folder with a setting that a family lacks is computed by transformers' class of that name, which is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.models import from_hf
from tpshard.models.folders.hf_config import class_reason, computes
from tpshard.models.open_model import open_model

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROTATIONS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32}, "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}  # fmt: skip


def folder(place: Path, kind: str, old: bool = False, **changes: Any) -> Path:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(place)
    raw = json.loads((place / "config.json").read_text())
    if old:
        rope = raw.pop("rope_parameters") | changes.pop("rope_parameters", {})
        theta, how = rope.pop("rope_theta"), rope.pop("rope_type")
        raw |= {"rope_theta": theta, "rope_scaling": rope | {"type": how}, "torch_dtype": raw.pop("dtype")}
    (place / "config.json").write_text(json.dumps(raw | changes))
    return place


@pytest.mark.parametrize("old", [False, True], ids=["keys of transformers 5", "keys of transformers 4"])
@pytest.mark.parametrize("how", ROTATIONS)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_other_rotations_are_those_of_the_class(kind: str, how: str, old: bool, tmp_path: Path) -> None:
    rope = {"rope_type": how, "rope_theta": 1e4, **ROTATIONS[how]}
    place = folder(tmp_path / "in", kind, old, rope_parameters=rope)
    model = open_model(str(place)).build(device="cpu")
    tokens = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    plain = from_hf(folder(tmp_path / "plain", kind))(tokens)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (model(tokens) - expected).abs().max() < 1e-5
    assert how == "dynamic" or (plain - expected).abs().max() > 1e-4, "the rotation matters"
    assert how in class_reason(json.loads((place / "config.json").read_text()))


def test_other_activations_too_but_wrong_numbers_are_still_told(tmp_path: Path) -> None:
    place = folder(tmp_path / "in", "Llama", hidden_act="gelu")
    assert not computes(place)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(place)(tokens).logits
        assert (open_model(str(place)).build(device="cpu")(tokens) - expected).abs().max() < 1e-5
    assert computes(folder(tmp_path / "bad", "Llama", num_hidden_layers=-1))


def test_a_partial_rotation_is_that_of_the_class_wherever_it_is_written(tmp_path: Path) -> None:
    tokens = torch.arange(24)[None]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    for name, changes in (("inside", {"rope_parameters": rope}), ("beside", {"partial_rotary_factor": 0.5})):
        place = folder(tmp_path / name, "Llama", old=name == "beside", **changes)
        with torch.no_grad():
            expected = transformers.AutoModelForCausalLM.from_pretrained(place)(tokens).logits
            assert (open_model(str(place)).build(device="cpu")(tokens) - expected).abs().max() < 1e-5
        assert "partial_rotary_factor: 0.5" in class_reason(json.loads((place / "config.json").read_text()))


def test_commands_say_which_class_computes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **ROTATIONS["yarn"]}
    place = folder(tmp_path / "in", "Llama", rope_parameters=rope)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{hf: {place}, seq_len: 32}}\ndata: {{source: c4}}\ncluster: {{device: cpu}}\n"
        "mesh: {dp: 1}\nbatch: {global_sequences: 1}\nserve: {requests: 2}\nsharding: {rules: {batch: [dp]}}\n"
    )
    said = "rope_type: yarn` is not supported; default and llama3 are: transformers' LlamaForCausalLM computes it"
    for command in (["plan", str(recipe), "--dry-run"], ["serve", str(recipe), "--check", "serve.mesh.tp=1"],
                    ["serve", "tiny", f"serve.checkpoint={place}", "--check", "cluster.device=cpu"]):  # fmt: skip
        assert run(command) == Exit.DONE, capsys.readouterr().err
        captured = capsys.readouterr()
        assert said in " ".join((captured.out + captured.err).split()), command
