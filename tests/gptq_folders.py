"""Act-ordered GPTQ folders of small random transformers models, with the tensor names of other tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path

import architectures
import torch
from torch import Tensor, nn
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_format import write_into
from tpshard.kernels.quantized.quantized import Quantized

WIDER = {
    "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
"""GPTQ holds matrices whose sides are multiples of 32."""
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MIXTRALS = {".mlp.": ".block_sparse_moe.", ".gate_proj": ".w1", ".up_proj": ".w3", ".down_proj": ".w2"}
"""Other names of modules and matrices in Mixtral's folders."""


def quantized(name: str, place: Path, bits: int = 4, ordered: bool = True) -> tuple[Path, dict[str, Tensor]]:
    """Writes a GPTQ folder of a small random model, act-ordered or not; returns it with its dequantized parameters.

    Linears of one input share their order, as those of one Hessian do; each expert has its own.
    """
    from transformers.pytorch_utils import Conv1D

    model, values, orders = architectures.own(name), architectures.values(name), dict[str, Tensor]()
    coded: dict[str, Quantized] = {}
    generator = torch.Generator().manual_seed(5)

    def code(path: str, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Quantizes a weight [inputs, outputs] and returns what it stands for."""
        inputs = len(weight)
        shared = f"{path.rpartition('.')[0]} {any(end in path for end in ('o_proj', 'down', 'c_proj'))} {inputs}"
        group = torch.arange(inputs, dtype=torch.int32) // 16
        if ordered:
            group = group[orders.setdefault(shared, torch.randperm(inputs, generator=generator))]
        largest = torch.stack([weight[group == g].abs().amax(0) for g in range(inputs // 16)])
        middle = 1 << (bits - 1)
        scales = (largest / (middle - 1)).half()
        codes = (weight / scales.float()[group.long()] + middle).round().clamp(0, 2 * middle - 1).to(torch.uint8)
        coded[path] = Quantized(codes, scales, torch.full_like(scales, middle, dtype=torch.uint8), group, bits, bias)
        return coded[path].dequantize(torch.float32)

    for path, module in model.named_modules():
        if not re.search(r"\b(layers|h|blocks)\.\d", path):
            continue
        if isinstance(module, (nn.Linear, Conv1D)) and module.weight.numel() > 32 * 8:
            turned = isinstance(module, Conv1D)
            weight = values[f"{path}.weight"]
            dense = code(path, weight if turned else weight.T, _half(values, f"{path}.bias"))
            values[f"{path}.weight"] = dense if turned else dense.T.contiguous()
        for stacked in set(MATRICES) & set(dict(module.named_parameters(recurse=False))):
            matrices = values[f"{path}.{stacked}"].unflatten(1, (len(MATRICES[stacked]), -1))
            dense = torch.stack([
                code(f"{path}.{i}.{matrix}", own.T).T for i, expert in enumerate(matrices)
                for matrix, own in zip(MATRICES[stacked], expert)
            ])  # fmt: skip
            values[f"{path}.{stacked}"] = dense.view(matrices.shape).flatten(1, 2)
    held = {f"{path}.{leaf}" for path in coded for leaf in ("weight", "bias")}
    held |= {path for path in values if path.rpartition(".")[2] in MATRICES}
    spelled = _spelling(MIXTRALS if name == "mixtral" else {})
    settings = GPTQConfig(bits=bits, group_size=16, desc_act=ordered)
    linears = {spelled(path): linear for path, linear in coded.items()}
    dense_values = [(spelled(path), value) for path, value in values.items() if path not in held]
    place.mkdir(parents=True)
    write_into(place, architectures.config_of(name), linears.items(), dense_values, settings)
    return place, values


def _spelling(others: Mapping[str, str]) -> Callable[[str], str]:
    return lambda path: reduce(lambda spelled, change: spelled.replace(*change), others.items(), path)


def _half(values: dict[str, Tensor], path: str) -> Tensor | None:
    """A bias, rounded to the dtype of the files."""
    if path in values:
        values[path] = values[path].half().float()
    return values.get(path)
