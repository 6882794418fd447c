"""GPTQ folders with act-order, served in every layout: the answers of the dense weights that they stand for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from tpshard.cli.serve_worker import open_weights
from tpshard.kernels.blocked import Blocked
from tpshard.kernels.gptq_solver import Settings
from tpshard.kernels.rows_linear import TILE
from tpshard.models import build, from_hf
from tpshard.models.config import ModelConfig
from tpshard.programs.layouts import act_orders
from tpshard.programs.serving import arrangement_on_one
from tpshard.serve.engine import Engine
from tpshard.serve.job import Job
from tpshard.serve.local import LocalRunner
from tpshard.serve.quantize import Quantizer, Sequences, write
from tpshard.serve.quantized import Inputs, prepare, rewrite
from tpshard.serve.ranks import Ranks
from tpshard.serve.request import Sampling, Sequence
from tpshard.serve.worker import local_runner

LLAMA = ModelConfig(
    family="llama", layers=2, width=64, heads=4, kv_heads=2, head_dim=32, mlp=128, vocab=128, max_seq=64, seq_len=32,
    dtype="fp32",
)  # fmt: skip
GRANITE = ModelConfig(
    family="granite", layers=1, width=64, heads=4, kv_heads=1, head_dim=16, mlp=128, vocab=128, max_seq=64, seq_len=32,
    dtype="fp32", attention_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
LAYOUTS = ("naive", "local_sort", "tp_aware")


def quantize(config: ModelConfig, out: Path) -> Path:
    torch.manual_seed(1)
    model = build(config, device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.ones_like(p) if name.endswith("norm.weight") else torch.randn_like(p) * 0.15)
    tokens = torch.randint(0, 128, (6, 32)) // torch.randint(1, 9, (6, 1))
    text = Sequences(tokens, tokens.roll(-1, 1))
    parameters = dict(model.named_parameters())
    settings = Settings(bits=4, group_size=32)
    write(Quantizer(config, lambda name: parameters[name].detach(), text, text, settings, "global"), out)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("gptq")
    return {config.family: quantize(config, base / config.family) for config in (LLAMA, GRANITE)}


def job(folder: Path, **more: Any) -> Job:
    return Job(**{"source": str(folder), "vocab": 128, "max_seq": 64, "blocks": 16, "rows": (8, 16)} | more)


def greedy(runner: Any) -> tuple[list[list[int]], list[float]]:
    engine = Engine(runner)
    sequences = [Sequence(tuple(range(3, 3 + n)), Sampling(temperature=0, logprobs=0), 8) for n in (2, 9, 21)]
    for s in sequences:
        engine.add(s)
    scores: dict[int, list[float]] = {s.id: [] for s in sequences}
    while engine.busy:
        for event in engine.step():
            assert event.logprob is not None
            scores[event.sequence.id].append(event.logprob.logprob)
    return [s.tokens for s in sequences], [x for s in sequences for x in scores[s.id]]


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_every_layout_gives_the_answers_of_the_dense_weights(family: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    tokens, scores = greedy(LocalRunner(from_hf(folder, dtype=torch.float32), blocks=16, max_seq=64))
    weights = open_weights(str(folder))
    assert not weights.quantized("layers.0.mlp.down.weight").sorted  # act-order it is
    for layout in LAYOUTS:
        found = greedy(local_runner(job(folder, layout=layout, batch_invariant=layout != "naive"), weights))
        assert found[0] == tokens
        assert found[1] == pytest.approx(scores, abs=1e-4)


def test_four_bits_are_multiplied_as_four_bits(folders: dict[str, Path]) -> None:
    weights = open_weights(str(folders["llama"]))
    model = build(LLAMA)
    arrangement = arrangement_on_one(model, LLAMA, act_orders(model, LLAMA, weights.group), "tp_aware")
    parts = {"layers.0.mlp.down.weight": ((0, 64), (0, 128)), "layers.0.mlp.up.weight": ((0, 128), (0, 64))}
    linears = prepare(parts, weights.quantized, weights.group, arrangement, "cpu")
    down = linears.of["layers.0.mlp.down.weight"]
    assert isinstance(down, Blocked) and down.width == 4
    assert "layers.0.mlp.down.weight" not in arrangement.of  # nothing is taken in order between the two
    dense = LocalRunner(from_hf(folders["llama"], dtype=torch.bfloat16), blocks=16, max_seq=64)
    _, expected = greedy(dense)
    quantized = local_runner(job(folders["llama"], dtype="bf16"), weights)
    code = quantized._program.code
    assert code.count("matmul_on_cpu(") == 14
    assert code.count("rows_linear.default(") == 1  # the head is dense
    assert [code.count(f"{one}(") for one in ("rows_rms_norm", "rows_rotate", "rows_gate")] == [5, 4, 2]
    norms = re.findall(r"rows_rms_norm\(\w+, \w+, (\w+),", code)
    assert [order == "None" for order in norms] == [False] * 4 + [True]  # all but the last store in a product's order
    assert code.count("reorder.default(") == 2  # of wo's inputs, whose order crosses heads, in each layer
    assert "rsqrt" not in code and "roll" not in code and "silu" not in code
    found = greedy(quantized)[1]
    assert found[0] == pytest.approx(expected[0], abs=0.15)


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_are_kept_apart_only_where_it_is_asked_for(invariant: bool) -> None:
    from tpshard.kernels import quantized_ops
    from tpshard.kernels.gptq_solver import round_to_nearest

    graph = fx.Graph()
    x, source = graph.placeholder("x"), graph.placeholder("source")
    node = graph.call_function(torch.ops.tpshard.rows_linear.default, (x, source, None))
    graph.output(node)
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    quantized = round_to_nearest(weight, Settings(group_size=32))
    inputs = Inputs(graph)
    used = torch.tensor([8])
    rewrite([node], {source: "w"}, {"w": quantized_ops.prepare(quantized, "cpu")}, inputs, invariant, used)
    (multiplied,) = (node for node in graph.nodes if node.op == "call_function")
    assert multiplied.target is torch.ops.tpshard.quantized_matmul.default and multiplied.args[-2] is invariant
    rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    module = fx.GraphModule(torch.nn.Module(), graph)
    found = module(rows, weight, *inputs.tensors)
    torch.testing.assert_close(found, rows @ quantized.dequantize(torch.float32))
    used.fill_(3)  # what follows is padding
    fewer = module(rows, weight, *inputs.tensors)
    assert torch.equal(fewer[:3], found[:3]) and not fewer[3:].any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_row_of_a_quantized_step_has_the_same_bits_in_every_batch(dtype: str, folders: dict[str, Path]) -> None:
    runner = local_runner(job(folders["llama"], dtype=dtype), open_weights(str(folders["llama"])))
    _, together = greedy(runner)
    alone = []
    for n in (2, 9, 21):
        engine, s = Engine(runner), Sequence(tuple(range(3, 3 + n)), Sampling(temperature=0, logprobs=0), 8)
        engine.add(s)
        while engine.busy:
            alone += [e.logprob.logprob for e in engine.step() if e.logprob is not None]
    assert together == alone
    assert TILE == 8


@pytest.mark.parametrize("layout", ["naive", "tp_aware"])
def test_two_ranks_give_the_same_answers(layout: str, folders: dict[str, Path]) -> None:
    expected = greedy(local_runner(job(folders["llama"]), open_weights(str(folders["llama"]))))
    told = job(folders["llama"], tp=2, layout=layout, rows=(8,))
    ranks = Ranks([sys.executable, "-m", "tpshard.cli.serve_worker"], told)
    try:
        found = greedy(ranks)
    finally:
        ranks.close()
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
