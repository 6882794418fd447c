"""Adapters in PEFT's format: what is written is read, merged weights compute the same, other fields are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from safetensors.torch import load_file, save_file
from tpshard.cli.shared.adapted_sources import whole_blocks
from tpshard.files.folder_json import FolderError
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import Lora
from tpshard.models.adapters.merging import merged_blocks
from tpshard.models.adapters.peft_config import CONFIG, lora_of, read_config
from tpshard.models.adapters.peft_folder import PeftFolder, write_peft
from tpshard.models.initialization import fill
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import open_model
from tpshard.programs.fit.recipe_model import adapted
from tpshard.recipes.reading.load import loads
from tpshard.train.run.initial_values import values_of

torch.set_num_threads(1)
LORA = Lora(rank=4, alpha=6.0, rank_pattern={"layers.1.attention.wo": 2}, alpha_pattern={"wk": 3.0})


def noise(spec: AdaptedModel, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(spec.shapes[name], generator=generator) * 0.3


def written(tmp_path: Path, name: str, lora: Lora) -> tuple[ModelSpec, AdaptedModel, Path]:
    base = open_model(architectures.folder(tmp_path / "base", name, weights=True))
    spec = AdaptedModel(base, lora)
    write_peft(spec, lambda one: noise(spec, one), tmp_path / "peft", base=str(tmp_path / "base"))
    return base, spec, tmp_path / "peft"


def test_the_folders_names_mean_the_same_in_some_of_the_layers(tmp_path: Path) -> None:
    base = open_model(architectures.folder(tmp_path / "base", "llama", weights=True))
    spec = AdaptedModel(base, freeze=("model.layers.1", "layers.0.self_attn.q_proj"))
    for layer in (0, 1):
        fewer = spec.keep([layer])
        assert fewer is not None
        expected = {name.replace(f"layers.{layer}.", "layers.0.") for name in spec.frozen if f"layers.{layer}." in name}
        assert fewer.frozen == expected and len(expected) == (1, 9)[layer]
    lora = Lora(4, 4.0, ("q_proj", "model.layers.1.mlp.up_proj"), rank_pattern={"layers.1.attention.wq": 2})
    for layer, ranks in ((0, {"attention.wq": 4}), (1, {"attention.wq": 2, "mlp.up": 4})):
        fewer = AdaptedModel(base, lora).keep([layer])
        assert fewer is not None
        assert {path: one.rank for path, one in fewer.adapters.items()} == {
            f"layers.0.{n}": r for n, r in ranks.items()
        }


@pytest.mark.parametrize(("name", "lora"), [
    ("llama", LORA), ("mixtral", Lora(2, 2.0, ("q_*", "w[1-3]"), use_rslora=True)),
    ("qwen2", Lora(2, 2.0, ("down",), dora=True, modules_to_save=("norm",))), ("gpt2", Lora(2, 4.0, ("c_proj",))),
])  # fmt: skip
def test_what_is_written_is_read_and_merged(name: str, lora: Lora, tmp_path: Path) -> None:
    base, spec, folder = written(tmp_path, name, lora)
    adapters = PeftFolder.of(folder, base)
    assert {path: (one.rank, one.scaling) for path, one in adapters.spec.adapters.items()} == {
        path: (one.rank, pytest.approx(one.scaling)) for path, one in spec.adapters.items()
    }
    assert all(torch.equal(adapters.read(one), noise(spec, one)) for one in adapters.places)

    def block(one: str, starts: Any, sizes: Any) -> torch.Tensor:
        if one in adapters.places:
            return adapters.block(one, starts, sizes)
        assert base.weights is not None
        return base.weights.block(one, starts, sizes)

    tokens = torch.arange(12).reshape(2, 6) + 5
    model = fill(spec.build(), lambda n, a, b, dtype: block(n, a, b).to(dtype), "cpu").eval()
    merge = merged_blocks(adapters.spec, block)
    merged = fill(base.build(), lambda n, a, b, dtype: merge(n, a, b).to(dtype), "cpu").eval()
    with torch.no_grad():
        assert torch.allclose(model(tokens), merged(tokens), rtol=1e-4, atol=1e-5)
    path = next(iter(spec.adapters))
    weight = merge(f"{path}.weight", [0] * len(base.shapes[f"{path}.weight"]), base.shapes[f"{path}.weight"])
    part = merge(f"{path}.weight", [1] * weight.dim(), [1] * weight.dim())
    assert torch.allclose(part, weight[tuple(slice(1, 2) for _ in weight.shape)])


@pytest.mark.parametrize(("change", "says"), [
    ({"target_modules": None}, "`target_modules` is missing"), ({"init_lora_weights": "mica"}, "`lora_B` is frozen"),
    ({"init_lora_weights": "new"}, "`init_lora_weights: new` is not supported$"),
    ({"use_dora": 3}, "`use_dora: 3`"), ({"bias": "all"}, "`bias: all`"), ({"init_lora_weights": "pissa"}, "pissa"),
    ({"target_parameters": ["mlp.w"]}, "target_parameters"), ({"brand_new": 1}, "`brand_new: 1` is not known"),
    ({"peft_type": "IA3"}, "IA3"), ({"r": 5}, r"\[4, 32\], the model makes it \[5, 32\]"),
    ({"target_modules": ["q_proj"]}, "belongs to no adapter"), ({"target_modules": ["qq"]}, "`qq` is no linear layer"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"modules_to_save": ["lm_head"]}, "`lm_head.weight` is miss"), ({"target_modules": "(("}, "no regular expression"),
    ({"target_modules": r"(?!.*mlp)(\w+\.?)+q_proj"}, "repeats a group beside lookaround"),
    ({"target_modules": "q_proj", "layers_to_transform": [0]}, "is for names in `target_modules`"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    base, _, folder = written(tmp_path, "llama", Lora(4, 4.0, ("q_proj", "v_proj")))
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=says):
        PeftFolder.of(folder, base)


@pytest.mark.parametrize(("change", "chosen"), [
    ({"target_modules": r".*\.(q|v)_proj", "exclude_modules": r".*layers\.0\..*"}, {"layers.1.attention.wq",
        "layers.1.attention.wv"}), ({"target_modules": r"(?!.*mlp).*layers.0.*(up|q)_proj"}, {"layers.0.attention.wq"}),
    ({"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["mlp"], "layers_to_transform": 1},
        {"layers.1.attention.wq"}),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, {"layers.1.attention.wq"}),
])  # fmt: skip
def test_layers_are_chosen_as_by_peft(change: dict[str, Any], chosen: set[str], tmp_path: Path) -> None:
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "auto_mapping": {"base_model_class": "LlamaForCausalLM"}}
    (tmp_path / CONFIG).write_text(json.dumps(raw | change))
    base = open_model(architectures.folder(tmp_path / "base", "llama"))
    assert set(AdaptedModel(base, lora_of(read_config(tmp_path))).adapters) == chosen
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{key: value for key, value in (raw | change).items() if key in ("r", *change)})
    theirs = peft.get_peft_model(architectures.own("llama"), config)
    adapted = {name.partition(".model.layers")[2] for name, _ in theirs.named_modules() if name.endswith("lora_A")}
    assert len(adapted) == len(chosen)


def test_an_expression_without_end_in_pythons_engine_is_matched_in_linear_time(tmp_path: Path) -> None:
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": r"(\w+\.?)+q_proj"}
    (tmp_path / CONFIG).write_text(json.dumps(raw))
    adapted = AdaptedModel(open_model(architectures.folder(tmp_path / "base", "llama")), lora_of(read_config(tmp_path)))
    assert set(adapted.adapters) == {"layers.0.attention.wq", "layers.1.attention.wq"}


@pytest.mark.parametrize(("name", "settings"), [
    ("llama", {"target_modules": ["q_proj", "lm_head"]}),  # PEFT saves the head's own weight, too
    ("llama", {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),  # in each layer, too
    ("gpt2", {"target_modules": ["c_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    ("bloom", {"target_modules": ["dense"], "modules_to_save": ["word_embeddings", "lm_head"]}),
])  # fmt: skip
def test_heads_and_tied_embeddings_are_those_of_peft(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    place = architectures.folder(tmp_path / "base", name, weights=True)
    base, tokens, ours, theirs = open_model(place), torch.arange(12).reshape(2, 6) + 5, tmp_path / "a", tmp_path / "b"
    model = peft.get_peft_model(architectures.own(name).from_pretrained(place), peft.LoraConfig(r=2, **settings))
    for i, one in enumerate(p for p in model.parameters() if p.requires_grad):
        one.data = torch.randn(one.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    model.save_pretrained(ours)
    if len(settings.get("modules_to_save", ())) == 2:
        with pytest.raises(ValueError, match="without `ensure_weight_tying`"):
            PeftFolder.of(ours, base)
        return
    adapters = PeftFolder.of(ours, base)
    weights = base.weights
    assert weights is not None
    merge = merged_blocks(adapters.spec, lambda n, *at: (adapters if n in adapters.places else weights).block(n, *at))
    merged = fill(base.build(), lambda n, a, b, dtype: merge(n, a, b).to(dtype), "cpu").eval()
    write_peft(adapters.spec, adapters.read, theirs, base=str(place))
    again = peft.PeftModel.from_pretrained(architectures.own(name).from_pretrained(place), theirs)
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.allclose(merged(tokens), expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(again(tokens).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("targets", [["lm_head"], ["embeddings"], ["lm_head", "embeddings"]])
def test_tied_embeddings_have_adapters_of_their_own(
    name: str, targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not merged, since the other would have them too; PEFT saves the shared weight beside them."""
    peft = pytest.importorskip("peft")
    monkeypatch.setitem(architectures.CONFIGS, name, architectures.config_of(name) | {"tie_word_embeddings": True})
    place = architectures.folder(tmp_path / "base", name, weights=True)
    table = {"gpt2": "wte", "llama": "embed_tokens"}[name]
    targets = [table if one == "embeddings" else one for one in targets]
    model = peft.get_peft_model(
        architectures.own(name).from_pretrained(place), peft.LoraConfig(r=2, target_modules=targets)
    )
    for i, one in enumerate(p for p in model.parameters() if p.requires_grad):
        one.data = torch.randn(one.shape, generator=torch.Generator().manual_seed(i)) * 0.1
    model.save_pretrained(tmp_path / "peft")
    base, tokens = open_model(place), torch.arange(12).reshape(2, 6) + 5
    adapters, weights = PeftFolder.of(tmp_path / "peft", base), base.weights
    assert weights is not None

    def value(name: str, *at: Any) -> torch.Tensor:
        return (adapters if name in adapters.places else weights).block(name, *at)

    own = fill(adapters.spec.build(), lambda n, a, b, dtype: value(n, a, b).to(dtype), "cpu").eval()
    with torch.no_grad():
        assert torch.allclose(own(tokens), model(tokens).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="shares its weight"):
        merged_blocks(adapters.spec, value)
    write_peft(adapters.spec, adapters.read, tmp_path / "again", base=str(place))
    again = PeftFolder.of(tmp_path / "again", base)
    assert again.places == adapters.places
    raw = json.loads((tmp_path / "peft" / CONFIG).read_text())
    (tmp_path / "peft" / CONFIG).write_text(json.dumps(raw | {"ensure_weight_tying": True}))
    with pytest.raises(ValueError, match="`ensure_weight_tying` with an adapter of"):
        PeftFolder.of(tmp_path / "peft", base)


def test_a_class_begins_from_a_folder_that_a_family_computes_too(tmp_path: Path) -> None:
    place = architectures.folder(tmp_path / "base", "llama", weights=True)
    section = loads(f"model: {{transformers: {place}}}").model
    base = open_model(section)
    assert base.weights is not None
    for spec in (base, AdaptedModel(base, Lora(targets=("q_proj",)))):
        begun = values_of(place, spec)
        assert begun.keys() == base.shapes.keys()
        name = "model.layers.1.mlp.up_proj.weight"
        at = (name, (0, 0), base.shapes[name])
        assert torch.equal(begun[name](*at), base.weights.block(*at))
    checkpoint: Any = SimpleNamespace(meta={}, tensors={})  # of a run with adapters, which leaves its base out
    assert torch.equal(whole_blocks(spec, checkpoint)(*at), base.weights.block(*at))


@pytest.mark.parametrize(("name", "settings"), [
    ("mixtral", {"target_modules": "all-linear", "r": 4}),  # experts and routers, as `target_parameters`
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "use_rslora": True}),
    ("llama", {"target_modules": [], "target_parameters": ["q_proj.weight", "down_proj.weight"]}),
    ("qwen3_moe", {"target_modules": [], "target_parameters": ["gate_up_proj", "o_proj.weight"]}),
    ("qwen3_next", {"target_modules": [], "target_parameters": ["gate_up_proj", "experts.down_proj"]}),
    ("qwen2_moe", {"target_modules": ["shared_expert_gate"]}),  # of one output, below the rank
])  # fmt: skip
def test_adapters_of_parameters_are_those_of_peft(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    place = architectures.folder(tmp_path / "base", name, weights=True)
    base, tokens, folder = open_model(place), torch.arange(12).reshape(2, 6) + 5, tmp_path / "peft"
    model = peft.get_peft_model(
        architectures.own(name).from_pretrained(place), peft.LoraConfig(**{"r": 2, "lora_alpha": 6, **settings})
    )
    for i, one in enumerate(p for p in model.parameters() if p.requires_grad):
        one.data = torch.randn(one.shape, generator=torch.Generator().manual_seed(i)) * 0.2
    model.save_pretrained(folder)
    adapters, weights = PeftFolder.of(folder, base), base.weights
    assert weights is not None
    with torch.no_grad():
        expected = model.eval()(tokens).logits

    def block(one: str, *at: Any) -> torch.Tensor:
        return (adapters if one in adapters.places else weights).block(one, *at).float()

    if not settings["target_modules"]:  # as PEFT writes it of a class that it does not know
        raw = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(raw | {"target_modules": None}))
        assert PeftFolder.of(folder, base).spec.adapters == adapters.spec.adapters
    for spec, read in ((base, merged_blocks(adapters.spec, block)), (adapters.spec, block)):
        filled = fill(spec.build(), lambda n, a, b, dtype, read=read: read(n, a, b).to(dtype), "cpu").eval()
        with torch.no_grad():
            assert torch.allclose(filled(tokens), expected, rtol=1e-4, atol=2e-5)
    write_peft(adapters.spec, adapters.read, tmp_path / "again", base=str(place))
    first, second = (load_file(one / "adapter_model.safetensors") for one in (folder, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    again = peft.PeftModel.from_pretrained(architectures.own(name).from_pretrained(place), tmp_path / "again")
    with torch.no_grad():
        assert torch.allclose(again.eval()(tokens).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), [
    ("mixtral", {"target_modules": "all-linear", "r": 4}),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "o_proj.weight"]}),
    ("llama", {"target_modules": r".*\.(q|v)_proj", "exclude_modules": r".*layers\.0\..*v_proj", "use_rslora": True}),
    ("llama", {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1], "lora_dropout": 0.1,
               "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"o_proj": 3}, "modules_to_save": ["lm_head"]}),
    ("llama", {"target_modules": ["down_proj"], "use_dora": True}),
])  # fmt: skip
def test_the_fix_of_other_adapters_in_a_folder_is_a_recipe_that_begins_from_it(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    place = architectures.folder(tmp_path / "base", name, weights=True)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 6, **settings})
    peft.get_peft_model(architectures.own(name).from_pretrained(place), config).save_pretrained(tmp_path / "peft")
    with pytest.raises(FolderError) as refused:
        values_of(tmp_path / "peft", AdaptedModel(open_model(place), Lora(1, 1.0, ("k_proj",))))
    said = refused.value.fix.removeprefix("adapters.lora as there: ")
    recipe = loads(f"model: {{hf: {place}}}\nadapters: {{lora: {said}}}\n")
    assert values_of(tmp_path / "peft", adapted(open_model(place), recipe)), said


def test_a_weight_that_peft_saves_too_is_the_bases_own_also_rounded(tmp_path: Path) -> None:
    """Such as over the quantized folder of a base, whose embeddings are of another type."""
    _, _, folder = written(tmp_path, "llama", Lora(2, 2.0, ("embed_tokens",)))
    file = folder / "adapter_model.safetensors"
    tensors, own = load_file(file), architectures.values("llama")["model.embed_tokens.weight"].float()
    rounded = architectures.folder(tmp_path / "half", "llama", weights=True)
    save_file({name: one.half() for name, one in load_file(rounded / "model.safetensors").items()},
              rounded / "model.safetensors")  # fmt: skip
    for weight, says in ((own, None), (own + 0.01, "is not the base's own")):
        save_file(tensors | {"base_model.model.model.embed_tokens.base_layer.weight": weight}, file)
        if says is None:
            assert PeftFolder.of(folder, open_model(rounded)).places
            continue
        with pytest.raises(ValueError, match=says):
            PeftFolder.of(folder, open_model(rounded))


def test_experts_with_a_rank_of_their_own_are_not_written(tmp_path: Path) -> None:
    """PEFT fuses gate and up of all experts, and takes one rank for them."""
    with pytest.raises(ValueError, match="which PEFT does not read"):
        written(tmp_path, "mixtral", Lora(4, 4.0, ("w1", "w3"), rank_pattern={"w1": 2}))


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    _, _, folder = written(tmp_path, "llama", LORA)
    other = open_model(architectures.folder(tmp_path / "other", "llama", hidden_size=64))
    with pytest.raises(ValueError, match="adapters of another model"):
        PeftFolder.of(folder, other)
