"""Each key of a config.json is obeyed, refused, named or harmless; what changes training is never passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import transformers
from tpshard.models.families.catalog import FAMILIES
from tpshard.models.families.config_keys import DEFAULTS, training_notes, treatment
from tpshard.models.folders.hf_folder import HFFolder, write_hf
from tpshard.models.open_model import open_model
from tpshard.models.transformers.architecture import Architecture
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

BY_TYPE = {family.hf.model_type: family for family in FAMILIES.values()}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
BIGCODE = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}


def folder(place: Path, kind: str, **more: Any) -> Path:
    torch.manual_seed(3)
    sizes = (
        BIGCODE if kind == "GPTBigCode" else {k: v for k, v in SIZES.items() if "expert" not in k or kind == "Mixtral"}
    )
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(place)
    return place


@pytest.mark.parametrize("kind", BY_TYPE)
def test_the_table_has_every_key_of_the_families_configurations(kind: str) -> None:
    values = transformers.CONFIG_MAPPING[kind]().to_dict()
    assert [key for key in values if treatment(key, BY_TYPE[kind]) is None] == []
    family = BY_TYPE[kind]
    rates = {key: value for key, value in values.items() if treatment(key, family) == "named" and value}
    assert rates == DEFAULTS.get(kind, {}), "a config.json without the key stands for these"


@pytest.mark.parametrize("pad", [5, 0, -1, None])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Qwen3", "Mixtral", "GPTBigCode"])
def test_the_row_of_padding_gets_the_gradient_that_it_gets_in_transformers(
    kind: str, pad: int | None, tmp_path: Path
) -> None:
    place = folder(tmp_path / "in", kind, pad_token_id=pad, tie_word_embeddings=False)
    tokens = torch.tensor([[1, 5, 0, 63, 2, 5, 0, 63]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    ours = open_model(str(place)).build(device="cpu")
    for model in (theirs, ours):
        out = model(tokens)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    expected, actual = theirs.get_input_embeddings().weight.grad, ours.tok_embed.weight.grad
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    untrained = [row for row in (5, 0, 63) if not bool(actual[row].any())]
    assert untrained == ([] if pad is None or kind == "GPTBigCode" else [pad % 64])


def setting(place: Path, key: str = "hf") -> Setting:
    text = f"model: {{{key}: {place}, seq_len: 32}}\ncluster: {{device: cpu}}\nmesh: {{dp: 1}}\n"
    return Setting.of(loads(text + "sharding: {rules: {batch: [dp]}}\nbatch: {global_sequences: 1}\n"))


NAMED = [
    ("Llama", {"attention_dropout": 0.1}, "dropout is not applied: attention_dropout: 0.1"),
    ("Mixtral", {"router_jitter_noise": 0.2}, "no noise is added to the router's inputs: router_jitter_noise: 0.2"),
    ("GPTBigCode", {"resid_pdrop": 0.3}, "attn_pdrop: 0.1, embd_pdrop: 0.1, resid_pdrop: 0.3"),
]


@pytest.mark.parametrize("key", ["hf", "transformers"])
@pytest.mark.parametrize(("kind", "changes", "note"), NAMED)
def test_what_is_not_applied_in_training_is_named_and_kept(
    kind: str, changes: dict[str, Any], note: str, key: str, tmp_path: Path
) -> None:
    place = folder(tmp_path / "in", kind)
    raw = json.loads((place / "config.json").read_text()) | changes
    if kind == "GPTBigCode":
        del raw["attn_pdrop"], raw["embd_pdrop"]
    (place / "config.json").write_text(json.dumps(raw))
    notes = setting(place, key).notes
    for part in note.split(", "):
        assert any(part in one for one in notes), notes
    opened = HFFolder(place)
    write_hf(opened.config, opened.read, tmp_path / "out", dtype=torch.float32, base=place)
    before, after = (transformers.AutoConfig.from_pretrained(path) for path in (place, tmp_path / "out"))
    for name in (*changes, *DEFAULTS.get(before.model_type, {})):
        assert getattr(before, name) == getattr(after, name)


def test_nothing_is_named_that_is_obeyed_or_zero() -> None:
    mixtral = BY_TYPE["mixtral"]
    assert training_notes({"output_router_logits": True, "attention_dropout": 0.0}, mixtral) == []
    assert training_notes({"output_router_logits": True}), "a class of transformers adds a loss of its own"
    assert training_notes({"classifier_dropout": 0.1, "hidden_dropout_prob": None}) == []
    llama = Architecture(transformers.LlamaConfig(**SIZES).to_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert llama.notes(llama.build()) == []


@pytest.mark.parametrize("name", ["mixtral", "jetmoe"])
def test_a_class_that_returns_its_routers_logits_computes_the_same(name: str) -> None:
    raw = architectures.config_of(name)
    plain, returning = (Architecture(raw | {"output_router_logits": flag}) for flag in (False, True))
    tokens = torch.arange(8)[None]
    values = architectures.values(name)
    first, second = (torch.func.functional_call(one.build(), values, (tokens,)) for one in (plain, returning))
    assert torch.equal(first, second) and any("output_router_logits" in note for note in returning.notes(plain.build()))
