"""Folders of fp8 and int8 weights with scales are read as dense ones, equal to what their tools dequantize."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from safetensors.torch import load_file, save_file
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.files.folder_json import FolderError
from tpshard.models.folders.hf_config import read_raw
from tpshard.models.open_model import open_model
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

Scales = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function from a weight to the scales that are stored and the scale of each element."""
BLOCK = 24, 20


def of_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, columns), (high, wide) = weight.shape, BLOCK
    count = -(-rows // high), -(-columns // wide)
    padded = torch.zeros(count[0] * high, count[1] * wide)
    padded[:rows, :columns] = weight.abs()
    scales = padded.view(count[0], high, count[1], wide).amax((1, 3)) / 448
    return scales, scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def of_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return scales, scales


def of_all(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax().view(1) / 448
    return scale, scale


def of_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().unflatten(-1, (-1, 8)).amax(-1) / 7
    return scales, scales.repeat_interleave(8, 1)


def in_exponents(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales, _ = of_blocks(weight)
    scales = scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)
    (rows, columns), (high, wide) = weight.shape, BLOCK
    return scales, scales.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "sparsity_config": {},
    }  # fmt: skip


FORMS: dict[str, tuple[dict[str, Any], str, Scales, torch.dtype]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}, "weight_scale_inv",
            of_blocks, torch.float8_e4m3fn),
    "exponents": ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": BLOCK}, "weight_scale_inv",
                  in_exponents, torch.float8_e4m3fn),
    "whole": ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, "weight_scale_inv",
              of_all, torch.float8_e5m2),
    "blocks": (compressed("block", block_structure=BLOCK), "weight_scale", of_blocks, torch.float8_e4m3fn),
    "channels": (compressed("channel"), "weight_scale", of_outputs, torch.float8_e4m3fn),
    "integers": (compressed("channel", type="int") | {"format": "int-quantized"}, "weight_scale", of_outputs,
                 torch.int8),
    "packed": (compressed("group", type="int", num_bits=4, group_size=8) | {"format": "pack-quantized"}, "weight_scale",
               of_groups, torch.int32),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale", of_outputs,
               torch.float8_e4m3fn),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", of_all, torch.float8_e4m3fn),
}  # fmt: skip


def write(place: Path, form: str, family: str = "qwen3") -> dict[str, torch.Tensor]:
    """Writes a folder whose layers' linears are in 8 bits; returns the tensors for which it stands."""
    settings, leaf, scales_of, dtype = FORMS[form]
    folder = architectures.folder(place, family, weights=True)
    tensors, dense = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name, value in list(tensors.items()):
        if value.dim() != 2 or ".layers." not in name or "mlp.gate." in name:
            dense[name] = value
            continue
        scales, of_each = scales_of(value.float())
        codes = value.float() / of_each
        tensors[name] = (codes if dtype.is_floating_point else codes.round()).to(dtype)
        tensors[f"{name.removesuffix('weight')}{leaf}"] = scales
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(())
        dense[name] = tensors[name].float() * of_each
        if form == "packed":  # eight numbers of 4 bits in an int32, the first in its lowest bits
            numbers = (tensors.pop(name) + 8).view(value.shape[0], -1, 8).long()
            words = sum(numbers[..., i] << 4 * i for i in range(8))
            tensors[f"{name}_packed"] = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
            tensors[f"{name}_shape"] = torch.tensor(value.shape)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return dense


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_the_numbers_stand_for(form: str, tmp_path: Path) -> None:
    dense = write(tmp_path, form)
    stored = open_model(str(tmp_path)).weights
    assert stored is not None and not stored.quantized
    whole = stored.block("layers.0.mlp.gate.weight", (0, 0), (48, 32))
    assert torch.equal(whole, dense["model.layers.0.mlp.gate_proj.weight"])
    part = stored.block("layers.1.mlp.down.weight", (3, 17), (20, 23))
    assert torch.equal(part, dense["model.layers.1.mlp.down_proj.weight"][3:23, 17:40])


def test_experts_of_a_class_of_transformers_are_read(tmp_path: Path) -> None:
    dense = write(tmp_path, "fp8", "qwen2_moe")
    stored = open_model(str(tmp_path)).weights
    assert stored is not None
    up = stored.block("model.layers.1.mlp.experts.gate_up_proj", (2, 16, 3), (1, 16, 29))[0]
    assert torch.equal(up, dense["model.layers.1.mlp.experts.2.up_proj.weight"][:, 3:])


def test_plans_say_what_becomes_of_the_numbers_and_the_copy_is_dense(tmp_path: Path) -> None:
    dense = write(tmp_path / "in", "modelopt")
    config = json.loads((tmp_path / "in" / "config.json").read_text())  # with the settings in ModelOpt's own file
    described = {"quantization": {"quant_algo": config.pop("quantization_config")["quant_algo"]}}
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps(described))
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    text = f"name: n\ncluster: {{device: cpu}}\nmodel: {{hf: {tmp_path / 'in'}, seq_len: 16, dtype: fp32}}"
    recipe = loads(text, [f"serve.checkpoint={tmp_path / 'in'}"])
    said = "the folder's weights are fp8 numbers of ModelOpt"
    assert said in model_to_serve(recipe, "cpu").note and any(said in note for note in Setting.of(recipe).notes)
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "fp32"]) == Exit.DONE
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == dense.keys() and all(torch.equal(written[name], dense[name].float()) for name in dense)
    assert "quantization_config" not in read_raw(tmp_path / "out")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


NOT_READ = [
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "`expert_dtype: fp4`"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "`weight_block_size: "),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "`quant_algo: NVFP4`"),
    (compressed("group") | {"format": "nvfp4-pack-quantized"}, "`format: nvfp4-pack-quantized`"),
    (
        compressed("channel", type="int", num_bits=3) | {"format": "pack-quantized"},
        "`config_groups.group_0.weights.num_bits: 3`",
    ),
    (compressed("channel") | {"quantization_status": "frozen"}, "`quantization_status: frozen`"),
    (compressed("channel") | {"transform_config": {"config_groups": {"R1": {}}}}, "`transform_config: "),
    (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "`sparsity_config: "),
    (compressed("channel", symmetric=False), "`config_groups.group_0.weights.symmetric: False`"),
    (compressed("block"), "`config_groups.group_0.weights.block_structure: None`"),
    (compressed("tensor", num_bits=4), "`config_groups.group_0.weights.num_bits: 4`"),
]


@pytest.mark.parametrize(("settings", "words"), NOT_READ)
def test_settings_that_are_not_obeyed_are_named(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path, "qwen3", quantization_config=settings)
    with pytest.raises(FolderError, match=re.escape(f"of which {words}")) as caught:
        read_raw(folder)
    assert "dense model" in caught.value.fix


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tensors, name, scale: tensors.pop(scale), "in 8 bits without `"),
        (lambda tensors, name, scale: tensors.update({scale: torch.ones(3, 5)}), "are not for blocks of [24, 20]"),
        (lambda tensors, name, scale: tensors.update({name: tensors[name].bfloat16()}), "which is BF16"),
        (lambda tensors, name, scale: tensors.update({scale: tensors[scale].to(torch.uint8)}), "is of dtype U8"),
    ],
)
def test_tensors_that_contradict_the_settings_are_refused(
    damage: Callable[[dict[str, torch.Tensor], str, str], Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, "fp8")
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    damage(tensors, name, f"{name}_scale_inv")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(words)):
        open_model(str(tmp_path)).weights  # noqa: B018 (raises)
