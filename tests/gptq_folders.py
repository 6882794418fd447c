"""Act-ordered GPTQ folders of small random transformers models, with the tensor names of other tools."""

from __future__ import annotations

import re
from pathlib import Path

import architectures
import torch
from torch import Tensor, nn
from tpshard.kernels.gptq_config import GPTQConfig
from tpshard.kernels.gptq_format import write_folder
from tpshard.kernels.quantized import Quantized

WIDER = {"num_key_value_heads": 4, "intermediate_size": 64}
"""GPTQ holds matrices whose sides are multiples of 32."""


def quantized(name: str, place: Path) -> tuple[Path, dict[str, Tensor]]:
    """Writes an act-ordered GPTQ folder of a small random model; returns it with its dequantized parameters.

    Linears of one input share their order, as those of one Hessian do.
    """
    from transformers.pytorch_utils import Conv1D

    model, values, orders = architectures.own(name), architectures.values(name), dict[str, Tensor]()
    coded: dict[str, Quantized] = {}
    generator = torch.Generator().manual_seed(5)
    for path, module in model.named_modules():
        if not re.search(r"\b(layers|h)\.\d", path) or not isinstance(module, (nn.Linear, Conv1D)):
            continue
        turned = isinstance(module, Conv1D)
        weight = values[f"{path}.weight"] if turned else values[f"{path}.weight"].T  # [inputs, outputs]
        inputs = len(weight)
        shared = f"{path.rpartition('.')[0]} {any(end in path for end in ('o_proj', 'down', 'c_proj'))} {inputs}"
        group = torch.arange(inputs, dtype=torch.int32) // 16
        order = orders.setdefault(shared, torch.randperm(inputs, generator=generator))
        group = group[order]
        largest = torch.stack([weight[group == g].abs().amax(0) for g in range(inputs // 16)])
        scales = (largest / 7).half()
        codes = (weight / scales.float()[group.long()] + 8).round().clamp(0, 15).to(torch.uint8)
        bias = values.get(f"{path}.bias")
        coded[path] = Quantized(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), group, 4, bias)
        dense = coded[path].dequantize(torch.float32)
        values[f"{path}.weight"] = dense if turned else dense.T.contiguous()
    quantized_names = {f"{path}.{leaf}" for path in coded for leaf in ("weight", "bias")}
    settings = GPTQConfig(bits=4, group_size=16, desc_act=True)
    dense_values = [(path, value) for path, value in values.items() if path not in quantized_names]
    write_folder(place, architectures.config_of(name), coded.items(), dense_values, settings)
    return place, values
