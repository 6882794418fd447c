"""Weights of transformers models are read by block, written bit for bit, and initialized as by their class."""

from __future__ import annotations

import json
from pathlib import Path

import architectures
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tpshard.models.open_model import from_json
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.class_weights import FolderWeights, write_folder
from tpshard.models.transformers_model import TransformersModel

import every_class


def open_folder(folder: Path) -> tuple[Architecture, FolderWeights]:
    architecture = Architecture.of(folder)
    return architecture, FolderWeights(folder, architecture, architecture.build())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba"])
def test_a_folder_goes_in_by_blocks_and_out_bit_for_bit(name: str, tmp_path: Path) -> None:
    """gpt2 ties its tables; mixtral's experts are saved one by one."""
    architecture, weights = open_folder(architectures.folder(tmp_path / "in", name, weights=True))
    values = architectures.values(name)
    assert set(architecture.shapes) == set(values)
    for path, value in values.items():
        starts, sizes = [n // 3 for n in value.shape], [n - n // 3 for n in value.shape]
        cut = tuple(slice(start, start + size) for start, size in zip(starts, sizes))
        assert torch.equal(weights.block(path, starts, sizes), value[cut]), path
        assert torch.equal(weights.block(path, (), ()), value), path
    write_folder(architecture, values.__getitem__, tmp_path / "out", dtype=torch.float32, shard_bytes=9000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    back, loading = architecture.cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    actual = dict(back.named_parameters())
    assert set(actual) == set(values) and all(torch.equal(actual[path], value) for path, value in values.items())


def test_a_base_models_folder_is_read(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "gpt2", weights=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({key.removeprefix("transformer."): value for key, value in tensors.items()}, folder / "model.safetensors")
    _, weights = open_folder(folder)
    value = architectures.values("gpt2")["transformer.wte.weight"]
    assert torch.equal(weights.block("transformer.wte.weight", (), ()), value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": torch.ones(31)}, "`model.norm.weight` is [31], config.json makes it [32]"),
        ({"model.extra": torch.ones(3)}, "`model.extra` is no parameter of LlamaForCausalLM"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, "of dtype I32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama", weights=True)
    save_file(load_file(folder / "model.safetensors") | change, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        TransformersModel.of_folder(str(folder))
    assert message in str(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama", weights=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing keys for LlamaForCausalLM: model\.norm\.weight"):
        TransformersModel.of_folder(str(folder))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "llama")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="pickle"):
        TransformersModel.of_folder(str(folder))


def test_without_weights_parameters_begin_as_the_class_begins_them(tmp_path: Path) -> None:
    spec = TransformersModel.of_folder(str(architectures.folder(tmp_path, "mamba", initializer_range=0.1)))
    model = spec.build(device="cpu", seed=5)
    theirs = dict(architectures.own("mamba").named_parameters())
    actual = {path: parameter.detach() for path, parameter in model.named_parameters()}
    for path in ("backbone.layers.0.mixer.A_log", "backbone.layers.1.mixer.D", "backbone.norm_f.weight"):
        assert torch.equal(actual[path], theirs[path]), path
    table = actual["backbone.embeddings.weight"]
    assert float(table.std()) == pytest.approx(0.1, rel=0.1) and abs(float(table.mean())) < 0.01
    part = spec.initial_block("backbone.embeddings.weight", (5, 3), (7, 9), seed=5)
    assert torch.equal(part, table[5:12, 3:12])
    other = spec.build(device="cpu", seed=6)
    assert not torch.equal(dict(other.named_parameters())["backbone.embeddings.weight"], table)


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "mamba", "falcon_mamba", "jamba", "bamba", "rwkv", "modernbert-decoder"]
)
def test_without_weights_parameters_have_the_distributions_of_the_classs_own_rule(tmp_path: Path, kind: str) -> None:
    """Constants are equal; random values have the same spread, mean and kurtosis, also where the rule of a module above
    sets them: GPT-2's residual writers, Mamba's time steps, the zero row of padding, truncated normals."""
    config = every_class.small(every_class.classes()[kind])
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = TransformersModel.of_folder(str(tmp_path))
    model = spec.build(device="cpu", seed=5)
    assert spec.architecture is not None
    draws = []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        draws.append(dict(spec.architecture.cls(spec.architecture.config).named_parameters()))
    for path, parameter in model.named_parameters():
        ours, several = parameter.detach().double(), torch.stack([drawn[path].detach().double() for drawn in draws])
        if torch.equal(several[0], several[1]):
            assert torch.equal(ours, several[0]), path
            continue
        few = 4.0 / ours.numel() ** 0.5
        assert torch.equal(ours == 0, (several == 0).all(0)), path
        assert float(ours.std(correction=0) / several.std(correction=0)) == pytest.approx(1, abs=0.06 + few), path
        assert abs(float(ours.mean() - several.mean())) <= 1.25 * few * float(several.std(correction=0)), path
        if ours.numel() > 500:
            kurtosis, theirs = (float(((x - x.mean()) / x.std()).pow(4).mean()) for x in (ours, several))
            assert kurtosis == pytest.approx(theirs, abs=0.5 + 4 * few), path
        cut = tuple(slice(size // 3, size) for size in parameter.shape)
        starts = [size // 3 for size in parameter.shape]
        part = spec.initial_block(path, starts, [n - a for n, a in zip(parameter.shape, starts)], seed=5)
        assert torch.equal(part, parameter.detach()[cut]), path


def test_a_checkpoint_says_which_model_it_is(tmp_path: Path) -> None:
    spec = TransformersModel.of_folder(str(architectures.folder(tmp_path, "gemma2")))
    again = from_json(spec.to_json())
    assert again.architecture is not None and spec.architecture is not None
    assert again.architecture.shapes == spec.architecture.shapes


def test_a_stored_vector_is_a_parameter_without_a_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3 stores the biases of its routers as buffers, which change the experts chosen but are not learned."""
    sizes = {
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }  # fmt: skip
    config = {**architectures.CONFIGS["llama"], "architectures": ["DeepseekV3ForCausalLM"], **sizes}
    monkeypatch.setitem(architectures.CONFIGS, "deepseek_v3", config)
    bias, folder = "model.layers.1.mlp.gate.e_score_correction_bias", architectures.folder(tmp_path, "deepseek_v3")
    own, module = architectures.own("deepseek_v3"), Architecture.of(folder).build()
    leaves = {name: value.detach().requires_grad_() for name, value in own.state_dict().items()}
    assert set(dict(module.named_parameters())) == set(leaves)
    tokens, logits = torch.arange(12).view(1, 12), []
    for chosen in (0, 1):
        with torch.no_grad():
            leaves[bias].copy_(10.0 * torch.nn.functional.one_hot(torch.tensor(chosen), 4))
        logits.append(torch.func.functional_call(module, dict(leaves), (tokens, torch.zeros_like(tokens), tokens)))
        expected = torch.func.functional_call(own, leaves, (), {"input_ids": tokens}).logits
        torch.testing.assert_close(logits[-1], expected)
    assert not torch.equal(*logits)
    assert torch.autograd.grad(logits[0].sum(), leaves[bias], allow_unused=True) == (None,)


def test_stored_matrices_of_numbers_are_parameters_and_tables_of_ids_are_refused(tmp_path: Path) -> None:
    """MiniMax stores the decays of its lightning attention; DeepSeek-V4 the experts of each token."""
    architecture = Architecture(every_class.small(transformers.MiniMaxForCausalLM))
    module, own = architecture.build(), architecture.cls(architecture.config).eval()
    values = {name: value.detach() * 0.7 for name, value in own.state_dict().items()}
    assert dict(module.named_parameters()).keys() == values.keys()
    tokens = torch.arange(12).view(1, 12)
    logits = torch.func.functional_call(module, values, (tokens, torch.zeros_like(tokens), tokens))
    torch.testing.assert_close(logits, torch.func.functional_call(own, values, (), {"input_ids": tokens}).logits)
    with pytest.raises(ValueError, match=r"`model\.layers\.0\.mlp\.gate\.tid2eid` of torch\.int64"):
        Architecture(every_class.small(transformers.DeepseekV4ForCausalLM)).build()


def test_a_window_without_keys_is_refused() -> None:
    kinds = {"sliding_window": 0, "layer_types": ["sliding_attention", "full_attention"]}
    for name, more in (("mistral", {"sliding_window": 0}), ("qwen2", kinds | {"use_sliding_window": True})):
        with pytest.raises(ValueError, match="`sliding_window: 0`"):
            Architecture({**architectures.CONFIGS[name], **more}).config  # noqa: B018
