"""A model is one value, whatever names it."""

from __future__ import annotations

import json
from pathlib import Path

import architectures
import pytest
import torch
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_format import write_into
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models import build, from_hf, to_hf
from tpshard.models.families.presets import preset
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders.hf_config import write_config
from tpshard.models.folders.hf_folder import HFFolder
from tpshard.models.folders.hf_names import hf_modules
from tpshard.models.open_model import DOORS, from_json, open_model
from transformers import AutoModelForCausalLM

SMALL = {"layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96, "vocab": 40}


class Section(dict[str, object]):
    """A recipe's section with these keys."""

    named_by = property(lambda self: next((key for key in DOORS if key in self), None))
    args = property(lambda self: self.get("args", {}))

    def overrides(self) -> dict[str, object]:
        return {key: value for key, value in self.items() if key not in (*DOORS, "args")}

    def __getattr__(self, key: str) -> object:
        return self[key]


def test_a_preset() -> None:
    spec = FamilyModel.of_preset("tiny", {**SMALL, "rope_scaling": {"factor": 4.0}})
    model = spec.build(device="cpu", seed=3)
    block = spec.initial_block("output.weight", (3, 5), (7, 11), seed=3)
    assert torch.equal(block, model.get_parameter("output.weight")[3:10, 5:16])
    again = from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec and again.config is not None and again.config.rope_scaling is not None


def test_a_folder(tmp_path: Path) -> None:
    original = build(preset("tiny", SMALL), device="cpu", seed=9)
    to_hf(original, tmp_path / "hf")
    spec = FamilyModel.of_folder(str(tmp_path / "hf"), {"rope_theta": 777.0})
    assert spec.config is not None and spec.config.rope_theta == 777.0
    for name, value in original.named_parameters():
        assert torch.equal(spec.build(device="cpu").get_parameter(name), value)
        block = spec.initial_block(name, (1,) * value.dim(), (2,) * value.dim(), 0)
        assert torch.equal(block, value[(slice(1, 3),) * value.dim()])
    assert from_json(spec.to_json()) == FamilyModel(spec.config)
    with pytest.raises(ValueError, match=r"mlp.*do not fit the weights.*layers\.0\.mlp"):
        FamilyModel.of_folder(str(tmp_path / "hf"), {"mlp": 32})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"preset": "tiny", "args": {"a": 1}}, "args"),
        ({"module": "a:B", "layers": 1}, "layers"),
        ({"preset": "tiny", "experts": 4}, "experts"),
        ({"hf": "/nowhere"}, "is not a folder on this machine"),
    ],
    ids=str,
)
def test_what_is_no_model(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_model(Section(arguments))
    with pytest.raises(ValueError, match="not the description"):
        from_json({"config": {"family": "llama"}})


def test_a_folder_of_a_class_is_a_model_too(tmp_path: Path) -> None:
    """gemma2 has no family of tpshard; transformers' class computes it."""
    folder = architectures.folder(tmp_path, "gemma2", weights=True)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(tokens).logits
        torch.testing.assert_close(from_hf(folder)(tokens), expected, rtol=1e-5, atol=1e-5)


def quantize(outputs: int, inputs: int, seed: int) -> Quantized:
    g = torch.Generator().manual_seed(seed)
    group = (torch.randperm(inputs, generator=g) // 48).int()
    codes = torch.randint(16, (inputs, outputs), generator=g, dtype=torch.uint8)
    scales = (torch.rand(2, outputs, generator=g) * 0.1).half()
    zeros = torch.randint(1, 16, (2, outputs), generator=g, dtype=torch.uint8)
    return Quantized(codes, scales, zeros, group, 4)


@pytest.mark.parametrize("kind", ["tiny", "granite-tiny"])
def test_a_quantized_folder_reads_as_its_dense_weights(kind: str, tmp_path: Path) -> None:
    config = preset(kind, {**SMALL, "kv_heads": 1 if kind != "tiny" else 2})
    to_hf(build(config, device="cpu", seed=1), tmp_path / "dense")
    dense = HFFolder(tmp_path / "dense")
    homes = {h.module for path, h in hf_modules(config).items() if ".mlp." in path or ".w" in path}
    linears, expected = {}, {}
    for number, module in enumerate(sorted(homes & {n.removesuffix(".weight") for n in dense.tensors.names()})):
        outputs, inputs = dense.tensors.shape(f"{module}.weight")
        linear = quantize(outputs, inputs, number)
        bias = f"{module}.bias"
        if bias in dense.tensors:
            linear = Quantized(**{**vars(linear), "bias": dense.tensors.block(bias).half()})
        linears[module], expected[module] = linear, linear.dequantize().T
    rest = [n for n in dense.tensors.names() if n.rpartition(".")[0] not in linears]
    (tmp_path / "gptq").mkdir()
    write_into(
        tmp_path / "gptq",
        write_config(config, "fp16"),
        linears.items(),
        [(name, dense.tensors.block(name)) for name in rest],
        GPTQConfig(bits=4, group_size=48, desc_act=True, sym=False),
    )
    model = from_hf(tmp_path / "gptq", dtype=torch.float32)
    assert len(linears) == (7 if kind == "tiny" else 4)
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        home = hf_modules(config)[module]
        if home.module in linears and leaf == "weight":
            assert torch.equal(parameter, home.take(expected[home.module]).float()), name
        else:
            close = 1e-3 if home.module in linears else 0.0
            reference = dense.read(name)
            torch.testing.assert_close(parameter.detach(), reference, atol=close, rtol=close)


@pytest.mark.parametrize("name", ["llama", "jetmoe"])
def test_tokens_beyond_a_folders_begin_as_the_mean_and_are_written(name: str, tmp_path: Path) -> None:
    """Of a family and of a class of transformers, read by any blocks."""
    base, vocab = architectures.folder(tmp_path / "base", name, weights=True), architectures.VOCAB
    spec = open_model(Section(hf=str(base), vocab=vocab + 5))
    module, theirs = spec.build(device="cpu"), AutoModelForCausalLM.from_pretrained(base)
    assert any(f"adds 5 tokens to {vocab}" in note for note in spec.notes(module))
    longer = {name: value for name, value in module.named_parameters() if value.shape[0] == vocab + 5}
    table = theirs.get_input_embeddings().weight
    wider = torch.cat([table, table.double().mean(0).float().expand(5, -1)])
    assert any(torch.equal(value, wider) for value in longer.values())
    for name, value in longer.items():
        assert torch.equal(spec.initial_block(name, (vocab - 2, 3), (6, 7), 0), value[vocab - 2 : vocab + 4, 3:10])
    assert from_json(json.loads(json.dumps(spec.to_json()))).vocab == vocab + 5

    spec.write(lambda name: module.get_parameter(name).detach(), tmp_path / "out", dtype=torch.float32, base=base)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert written.config.vocab_size == open_model(tmp_path / "out").vocab == vocab + 5
    ids = torch.arange(vocab, vocab + 5)[None]
    assert torch.allclose(written(ids).logits[..., :vocab], from_hf(tmp_path / "out")(ids)[..., :vocab], atol=1e-5)
    with pytest.raises(ValueError, match=f"is less than the {vocab} tokens"):
        open_model(Section(hf=str(base), vocab=vocab - 1))
