"""A blueprint describes one model, whatever the source of its values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_format import write_into
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models import Blueprint, build, from_hf, to_hf
from tpshard.models.families.presets import preset
from tpshard.models.folders.hf_config import write_config
from tpshard.models.folders.hf_folder import HFFolder
from tpshard.models.folders.hf_names import hf_modules

SMALL = {"layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96, "vocab": 40}


def test_a_preset() -> None:
    blueprint = Blueprint.of("tiny", overrides={**SMALL, "rope_scaling": {"factor": 4.0}})
    model = blueprint.build(device="cpu", seed=3)
    block = blueprint.initial_block("output.weight", (3, 5), (7, 11), seed=3)
    assert torch.equal(block, model.get_parameter("output.weight")[3:10, 5:16])
    again = Blueprint.from_json(json.loads(json.dumps(blueprint.to_json())))
    assert again == blueprint and again.config is not None and again.config.rope_scaling is not None


def test_a_folder(tmp_path: Path) -> None:
    original = build(preset("tiny", SMALL), device="cpu", seed=9)
    to_hf(original, tmp_path / "hf")
    blueprint = Blueprint.of(hf=str(tmp_path / "hf"), overrides={"rope_theta": 777.0})
    assert blueprint.config is not None and blueprint.config.rope_theta == 777.0
    for name, value in original.named_parameters():
        assert torch.equal(blueprint.build(device="cpu").get_parameter(name), value)
        block = blueprint.initial_block(name, (1,) * value.dim(), (2,) * value.dim(), 0)
        assert torch.equal(block, value[(slice(1, 3),) * value.dim()])
    assert Blueprint.from_json(blueprint.to_json()) == Blueprint(blueprint.config)
    with pytest.raises(ValueError, match=r"mlp.*do not fit the weights.*layers\.0\.mlp"):
        Blueprint.of(hf=str(tmp_path / "hf"), overrides={"mlp": 32})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"preset": "tiny", "hf": "x"}, "exactly one"),
        ({"preset": "tiny", "args": {"a": 1}}, "args"),
        ({"module": "a:B", "overrides": {"layers": 1}}, "layers"),
        ({"preset": "tiny", "overrides": {"experts": 4}}, "experts"),
        ({"hf": "/nowhere"}, "is not a folder on this machine"),
    ],
    ids=str,
)
def test_what_is_no_model(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blueprint.of(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not the description"):
        Blueprint.from_json({"config": {"family": "llama"}})


def quantize(outputs: int, inputs: int, seed: int) -> Quantized:
    g = torch.Generator().manual_seed(seed)
    group = torch.randint(2, (inputs,), generator=g, dtype=torch.int32)
    group[:2] = torch.tensor([0, 1])
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
