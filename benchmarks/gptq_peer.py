"""Compares tpshard's GPTQ folders with those of transformers and GPTQModel, bit for bit, on a CPU.

    python -m venv peer && peer/bin/pip install torch==2.13.0 transformers==5.23.0 gptqmodel optimum
    PYTHONPATH=types peer/bin/python benchmarks/gptq_peer.py

For every setting both tools pack the same quantized weights of a small random Llama. The tensors must be equal, and
transformers must compute the same bits of logits from either folder. No test needs these packages.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_format import GPTQFolder, write_into
from tpshard.kernels.quantized.quantized import Quantized, group_count, group_index
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import GPTQConfig as PeerConfig

from record import Record, parser_of

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantized_linear(inputs: int, outputs: int, bits: int, group_size: int, sym: bool, order: bool) -> Quantized:
    group = group_index(inputs, group_size)
    groups = group_count(inputs, group_size)
    zeros = torch.randint(1, 1 << bits, (groups, outputs))
    if sym:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    return Quantized(
        torch.randint(0, 1 << bits, (inputs, outputs)).to(torch.uint8),
        ((torch.rand(groups, outputs) + 0.5) * 0.4 / (1 << bits)).half(),
        zeros.to(torch.uint8),
        group[torch.randperm(inputs)] if order else group,
        bits,
    )


def peer_tensors(weight: Quantized, group_size: int, sym: bool, order: bool, form: str) -> dict[str, torch.Tensor]:
    """The linear packed by GPTQModel."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    module = TorchLinear(bits=weight.bits, group_size=group_size, sym=sym, desc_act=order, in_features=weight.inputs,
                         out_features=weight.outputs, bias=False, register_buffers=True)  # fmt: skip
    dense = torch.nn.Linear(weight.inputs, weight.outputs, bias=False)
    index = weight.group.long()
    dense.weight.data = (weight.scales.float()[index] * (weight.codes.float() - weight.zeros.float()[index])).T
    module.pack(dense, weight.scales.float().T.contiguous(), weight.zeros.float().T.contiguous(), weight.group)
    if form == "gptq":
        settings = QuantizeConfig(bits=weight.bits, group_size=group_size, desc_act=order, sym=sym)
        convert_gptq_v2_to_v1_format_module(module, settings)
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {name: getattr(module, name).data.contiguous().clone() for name in names}


def logits(folder: Path, config: GPTQConfig, tokens: torch.Tensor) -> torch.Tensor:
    peer = PeerConfig(bits=config.bits, group_size=config.group_size, desc_act=config.desc_act, sym=config.sym,
                      checkpoint_format=config.checkpoint_format, backend="gptq_torch")  # fmt: skip
    load = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, quantization_config=peer, device_map="cpu")
    with torch.no_grad():
        return model(tokens).logits


def compare(bits: int, group_size: int, sym: bool, order: bool, form: str, work: Path) -> dict[str, object]:
    llama = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
                        num_key_value_heads=4, vocab_size=256, max_position_embeddings=128)  # fmt: skip
    model = LlamaForCausalLM(llama).half()
    linears = {
        name: quantized_linear(module.in_features, module.out_features, bits, group_size, sym, order)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in LINEARS
    }
    dense = {k: v for k, v in model.state_dict().items() if k.removesuffix(".weight") not in linears}
    config = GPTQConfig(bits=bits, group_size=group_size, desc_act=order, sym=sym, checkpoint_format=form)
    settings = json.loads(llama.to_json_string()) | {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    (work / "ours").mkdir(parents=True)
    (work / "theirs").mkdir()
    write_into(work / "ours", settings, linears.items(), dense.items(), config, shard_bytes=200_000)
    theirs = [
        (f"{name}.{suffix}", tensor)
        for name, weight in linears.items()
        for suffix, tensor in peer_tensors(weight, group_size, sym, order, form).items()
    ]
    write_into(work / "theirs", settings, (), [*theirs, *dense.items()], config)
    ours = {k: v for file in (work / "ours").glob("*.safetensors") for k, v in load_file(file).items()}
    peer = load_file(work / "theirs/model.safetensors")
    same_files = ours.keys() == peer.keys() and all(torch.equal(ours[k], peer[k]) for k in peer)
    read = GPTQFolder(work / "theirs")
    same_dense = all(torch.equal(read.linear(n).dequantize(), w.dequantize()) for n, w in linears.items())
    tokens = torch.randint(0, 256, (2, 16))
    same_logits = torch.equal(logits(work / "ours", config, tokens), logits(work / "theirs", config, tokens))
    return {"bits": bits, "group_size": group_size, "sym": sym, "act_order": order, "format": form,
            "same_files": same_files, "same_dense": same_dense, "same_logits": same_logits}  # fmt: skip


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record("gptq_peer", "gptqmodel", quiet=options.json)
    torch.manual_seed(0)
    rows = record.rows
    cases = itertools.product((2, 3, 4, 8), (-1, 32, 128), (True, False), (True, False), ("gptq", "gptq_v2"))
    for case in cases:
        with tempfile.TemporaryDirectory() as work:
            rows.append(compare(*case, work=Path(work)))
        record.say(str(rows[-1]))
    wrong = [r for r in rows if not (r["same_files"] and r["same_dense"] and r["same_logits"])]
    record.figure("settings", len(rows), "settings")
    record.figure("settings.equal", len(rows) - len(wrong), "settings equal bit for bit")
    record.close(write=options.record, as_json=options.json)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
