"""The planned quantization of weights equals that of the weights themselves."""

import pytest
import torch
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index
from tpshard.programs.server.served import Coded


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("inputs", "size"), [(256, 64), (256, 40), (200, 96), (448, 200), (96, -1)])
def test_bytes_of_a_weight_on_a_cpu(bits, inputs, size):
    groups, outputs = group_count(inputs, size), 32
    weight = Quantized(
        torch.zeros(inputs, outputs, dtype=torch.uint8),
        torch.ones(groups, outputs).half(),
        torch.zeros(groups, outputs, dtype=torch.uint8),
        group_index(inputs, size),
        bits,
    )
    held = int4.pack(weight)
    bytes_held = held.codes.nbytes + held.scales.nbytes
    settings = GPTQConfig(bits=bits, group_size=size, desc_act=False)
    assert Coded(settings, "cpu", False, "").row_bytes(inputs, inputs) * outputs == bytes_held
