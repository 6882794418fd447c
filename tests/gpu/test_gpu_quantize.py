"""Quantizing on a device gives the CPU's codes, except for a few that rounding decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tpshard.kernels.quantized.gptq_format import GPTQFolder
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.models import build
from tpshard.models.families.presets import PRESETS
from tpshard.models.family_model import FamilyModel
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.quantize_report import Quantizing
from tpshard.serve.quantizing.task_rows import TaskRows, text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

CONFIG = replace(PRESETS["tiny"], layers=2, width=64, heads=4, kv_heads=2, head_dim=32, mlp=96, vocab=128, max_seq=64,
                 seq_len=32)  # fmt: skip


def text(sequences: int, seed: int) -> TaskRows:
    tokens = torch.randint(0, 128, (sequences, 32), generator=torch.Generator().manual_seed(seed))
    return text_rows(tokens, tokens.roll(-1, 1))


def quantize(device: str, out: Path) -> Quantizing:
    model = build(CONFIG, device="cpu", seed=3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    settings = Settings(bits=4, group_size=16)
    job = Quantizer(
        FamilyModel(CONFIG),
        parameters.__getitem__,
        text(16, 0),
        text(4, 1),
        settings,
        "global",
        device=device,
        dtype=torch.float32,
    )
    return write_quantized(job, out)


def test_a_device_quantizes_as_the_cpu_does(device: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = quantize(device, tmp_path / "there"), quantize("cpu", tmp_path / "here")
    assert [x.name for x in on_gpu.linears] == [x.name for x in on_cpu.linears]
    for x, y in zip(on_gpu.linears, on_cpu.linears):
        assert abs(x.error / y.error - 1) < 0.02, x.name
    assert abs(on_gpu.loss_before - on_cpu.loss_before) < 1e-3 and abs(on_gpu.loss_after - on_cpu.loss_after) < 1e-2
    a, b = GPTQFolder(tmp_path / "there"), GPTQFolder(tmp_path / "here")
    name = "model.layers.0.self_attn.q_proj"  # the first: nothing before it differs
    same = (a.linear(name).codes == b.linear(name).codes).double().mean()
    assert same > 0.98, same
