"""Writes a Hugging Face folder of a preset with random weights, dense in bf16 or in 4-bit GPTQ with act-order.

    python benchmarks/random_llama.py OUT [--preset llama3-8b] [--layers N] [--quantized] [--device cuda]

For measuring servers: the values are drawn, not trained, at the speed of the disk (8 B parameters in 4 bits: 6 GB).
Linears with one input (q, k and v; gate and up) have one order, as those of one Hessian do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.presets import PRESETS
from tpshard.models.folders.hf_config import write_config

BITS, GROUP = 4, 128
SHARED = {"q_proj": "in", "k_proj": "in", "v_proj": "in", "o_proj": "o", "gate_proj": "mlp", "up_proj": "mlp"}
"""Which linears of a layer share an order; another has its own."""


def linears(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's linears, by their names in the folder."""
    heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        "self_attn.q_proj": (c.width, heads), "self_attn.k_proj": (c.width, kv), "self_attn.v_proj": (c.width, kv),
        "self_attn.o_proj": (heads, c.width), "mlp.gate_proj": (c.width, c.mlp), "mlp.up_proj": (c.width, c.mlp),
        "mlp.down_proj": (c.mlp, c.width),
    }  # fmt: skip


class Drawn:
    """Tensors of a random model, drawn on `device` and given on the CPU."""

    def __init__(self, config: ModelConfig, quantized: bool, device: str) -> None:
        self.config, self.quantized, self.device = config, quantized, device
        self.draw = torch.Generator(device).manual_seed(3)

    def dense(self, *shape: int) -> Tensor:
        """[outputs, inputs] in bf16, so that outputs are of the size of inputs."""
        values = torch.randn(shape, generator=self.draw, device=self.device) * shape[-1] ** -0.5
        return values.to(torch.bfloat16).cpu()

    def coded(self, inputs: int, outputs: int, order: Tensor) -> dict[str, Tensor]:
        """The tensors of a linear in GPTQ's first format: any words are codes, and every zero is 8."""
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (inputs * BITS // 32, outputs), generator=self.draw,
                              dtype=torch.int32, device=self.device)  # fmt: skip
        groups = inputs // GROUP
        size = torch.rand(groups, outputs, generator=self.draw, device=self.device) * 0.5 + 0.5
        return {
            "qweight": words.cpu(), "scales": (size * (0.25 / inputs**0.5)).half().cpu(), "g_idx": order,
            "qzeros": torch.full((groups, outputs * BITS // 32), 0x77777777, dtype=torch.int32),
        }  # fmt: skip

    def layer(self, index: int) -> Iterator[tuple[str, Tensor]]:
        prefix, orders = f"model.layers.{index}", dict[str, Tensor]()
        for name, (inputs, outputs) in linears(self.config).items():
            if not self.quantized:
                yield f"{prefix}.{name}.weight", self.dense(outputs, inputs)
                continue
            shared = SHARED.get(name.rpartition(".")[2], name)
            if shared not in orders:
                orders[shared] = (torch.arange(inputs, dtype=torch.int32) // GROUP)[torch.randperm(inputs)]
            for suffix, tensor in self.coded(inputs, outputs, orders[shared]).items():
                yield f"{prefix}.{name}.{suffix}", tensor.clone()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", torch.ones(self.config.width, dtype=torch.bfloat16)

    def ends(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.dense(self.config.vocab, self.config.width)
        yield "model.norm.weight", torch.ones(self.config.width, dtype=torch.bfloat16)
        if not self.config.tie_embeddings:
            yield "lm_head.weight", self.dense(self.config.vocab, self.config.width)


def write(out: Path, config: ModelConfig, quantized: bool, device: str = "cpu") -> Path:
    """Writes the folder, one file for eight layers, and returns it."""
    out.mkdir(parents=True)
    described = write_config(config, "bf16")
    if quantized:
        described["quantization_config"] = {
            "quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": True, "sym": True,
            "checkpoint_format": "gptq",
        }  # fmt: skip
    (out / "config.json").write_text(json.dumps(described, indent=1))
    drawn = Drawn(config, quantized, device)
    (out / "tokenizer.json").write_text(tokenizer(config.vocab))
    parts = [list(range(i, min(i + 8, config.layers))) for i in range(0, config.layers, 8)]
    files, index = len(parts) + 1, dict[str, str]()
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        tensors = dict(drawn.ends()) if not number else dict(t for i in parts[number - 1] for t in drawn.layer(i))
        save_file(tensors, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out


def tokenizer(vocab: int) -> str:
    """A tokenizer of bytes that has a text for every id, so that a server streams each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{i}Ġ" for i in range(len(alphabet), vocab))]
    bytewise = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return str(bytewise.to_str())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="llama3-8b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = PRESETS[options.preset]
    write(options.out, replace(config, layers=options.layers or config.layers), options.quantized, options.device)


if __name__ == "__main__":
    main()
