"""Orders are found on the graphs of encoders too: where they are absorbed nothing is gathered, on one device or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import run_on_fake_gpu
from torch import Tensor, nn
from tpshard.models.encoder import Encoder
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.partitioning.partition import partition_captured
from tpshard.parallelism.tracing.capture import capture
from tpshard.plan.report.order_rows import order_rows
from tpshard.plan.report.pattern import pattern
from tpshard.programs.server.act_order import ActOrder, arrange
from transformers import BertConfig, BertModel, T5Config, T5Model, ViTConfig, ViTModel

HEADS = 4
_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 64,
          "attn_implementation": "eager"}  # fmt: skip
IDS = torch.arange(12).view(2, 6)


def own() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    model = Encoder(32, 8, layers=1, width=32, heads=HEADS, mlp=64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    zeros, places = torch.zeros_like(IDS), torch.arange(6).expand(2, 6)
    return model, lambda run: run(IDS, zeros, places)


def bert() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    return BertModel(BertConfig(vocab_size=32, **_SMALL), add_pooling_layer=False), lambda run: run(IDS)[0]


def vit() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    pixels = torch.randn(2, 3, 8, 8)
    return ViTModel(ViTConfig(image_size=8, patch_size=4, **_SMALL), add_pooling_layer=False), lambda run: run(pixels)[
        0
    ]


def t5() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    config = T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=HEADS, use_cache=False)
    return T5Model(config), lambda run: run(input_ids=IDS, decoder_input_ids=IDS.flip(1))[0]


_T5 = ("encoder.block.*.layer.*", "decoder.block.*.layer.*")
CASES = [
    (own, {"layers.*.attention.out", "layers.*.down"}, (".q", "up")),
    (bert, {"encoder.layer.*.output.dense", "encoder.layer.*.attention.output.dense"}, ("query", "intermediate.dense")),
    (vit, {"layers.*.mlp.fc2", "layers.*.attention.o_proj"}, ("q_proj", "fc1")),
    (t5, {f"{_T5[1]}.EncDecAttention.o", *(f"{place}.{leaf}" for place in _T5 for leaf in (
        "SelfAttention.o", "DenseReluDense.wo"))}, (".q", "DenseReluDense.wi")),
]  # fmt: skip
"""Linears whose order is absorbed, and those that rules shard by columns."""


@pytest.mark.parametrize(("make", "absorbed", "columns"), CASES, ids=["own", "bert", "vit", "t5"])
def test_an_encoders_orders_are_absorbed(
    make: Callable[[], tuple[nn.Module, Callable[..., Any]]], absorbed: set[str], columns: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model, call = make()
    model.eval()
    stored = {name: p.detach() for name, p in model.named_parameters()}
    linears = [f"{n}.weight" for n, m in model.named_modules() if hasattr(m, "weight") and m.weight.dim() == 2
               and "Embedding" not in type(m).__name__ and "lm_head" not in n and n != "output"]  # fmt: skip
    inner = [name for name in linears if pattern(name.removesuffix(".weight")) in absorbed]
    groups = {name: torch.randint(0, 4, (stored[name].shape[1],), dtype=torch.int32) for name in linears}
    orders = {name: ActOrder(name, HEADS if stored[name].shape[1] == 32 and name in inner else 1) for name in linears}

    def f(*values: Tensor) -> Any:
        return call(lambda *args, **named: torch.func.functional_call(model, dict(zip(stored, values)), args, named))

    for tp in (1, 2):
        graph = capture(f, tuple(stored.values()), list(stored))
        arrangement = arrange(graph, orders, "tp_aware", dict.fromkeys(inner, tp), list(stored))
        said = {row["linear"]: row["between"] for row in order_rows(arrangement.between)}
        assert {name for name, why in said.items() if not why} == absorbed
        assert said.keys() == {pattern(name.removesuffix(".weight")) for name in linears}
        shardings = [("tp", None) if name.removesuffix(".weight").endswith(columns) and p.dim() == 2 else None
                     for name, p in stored.items()]  # fmt: skip
        program = partition_captured(
            graph, Mesh({"tp": tp}), [*shardings, *[(None,)] * len(arrangement.inputs)], [(None, None, None)]
        )
        values = []
        for name, value in stored.items():
            rows, moved = arrangement.rows_of(name, groups.get), arrangement.columns_of(name, groups.get)
            value = value if rows is None else value[:, rows]
            values.append(value if moved is None else value[moved])
        values += [arrangement.order(order, groups.get) for order in arrangement.inputs.values()]
        torch.testing.assert_close(program.simulate(*values)[0], f(*stored.values()), rtol=1e-4, atol=1e-5)
        assert {c.kind for c in program.collectives} <= {"all_reduce"}
        run_on_fake_gpu(program, tp - 1)
