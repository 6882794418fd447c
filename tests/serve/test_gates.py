"""On a GPU a server's gate and up are one launch: graphs with a GPU's packed weights, rewritten and interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from tpshard.kernels import quantized_ops
from tpshard.kernels.packed import Packed, beside, pack, unpacked
from tpshard.kernels.quantized import Quantized, group_index
from tpshard.models import build
from tpshard.models.config import ModelConfig
from tpshard.programs.layouts import Arrangement
from tpshard.programs.serving import make_pools
from tpshard.serve.gates import join_gates
from tpshard.serve.quantized import Inputs, Linears, rewrite
from tpshard.serve.stepgraph import fix_rows, trace

LLAMA = ModelConfig(
    family="llama", layers=2, width=64, heads=4, kv_heads=2, head_dim=32, mlp=96, vocab=128, max_seq=64, seq_len=32,
    dtype="fp32",
)  # fmt: skip
MATMUL = torch.ops.tpshard.quantized_matmul.default


def linear(inputs: int, outputs: int, seed: int, group: Tensor | None = None, size: int = 32) -> Quantized:
    g = torch.Generator().manual_seed(seed)
    group = group_index(inputs, size) if group is None else group
    groups = int(group.max()) + 1
    codes = torch.randint(0, 16, (inputs, outputs), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (groups, outputs), generator=g, dtype=torch.uint8)
    return Quantized(codes, (torch.rand(groups, outputs, generator=g) * 0.02).half(), zeros, group, 4)


class Reference(fx.Interpreter):
    """Products with packed weights by plain torch."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in (MATMUL, quantized_ops.GATE_UP):
            return super().call_function(target, args, kwargs)
        x, *weight = args
        y = x @ unpacked(quantized_ops._packed(*weight[:6])).dequantize(x.dtype)
        if target is MATMUL:
            return y
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up


def traced(config: ModelConfig) -> tuple[fx.Graph, list[Tensor], dict[fx.Node, str], dict[str, Quantized]]:
    model = build(config, device="cpu", seed=1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    pools = make_pools(config, 4, 16, torch.float32, torch.device("cpu"))
    graph = trace(model, pools, parameters)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip(inputs[-len(parameters) :], parameters))
    weights = {name: linear(*reversed(p.shape), seed) for seed, (name, p) in enumerate(parameters.items())
               if ".mlp." in name and p.dim() == 2}  # fmt: skip
    fixed = [t for pair in pools for t in pair] + list(parameters.values())
    return graph, fixed, names, weights


@pytest.mark.parametrize("invariant", [True, False])
def test_a_steps_gate_and_up_are_one_launch_with_the_same_logits(invariant: bool) -> None:
    found, joined = {}, {}
    for join in (False, True):
        graph, fixed, names, weights = traced(LLAMA)
        linears = Linears({name: pack(w) for name, w in weights.items()}, Arrangement(), lambda _: None)  # type: ignore[arg-type]
        more = Inputs(graph)
        nodes = fix_rows(graph, [node for node, name in names.items() if name in weights])
        joined[join] = join_gates(nodes, names, linears, more, invariant) if join else 0
        rewrite([node for node in nodes if not node._erased], names, linears.of, more, invariant)
        graph.lint()
        rows = torch.arange(5)
        step = [rows[None] + 3, rows[None], rows[None] + 16, rows[None] * 0, torch.tensor([[1]]), rows]
        found[join] = Reference(fx.GraphModule({}, graph)).run(*step, *fixed, *more.tensors)
        targets = [node.target for node in graph.nodes]
        assert targets.count(quantized_ops.GATE_UP) == joined[join]
        assert targets.count(MATMUL) == 3 * LLAMA.layers - 2 * joined[join]
        calls = [node for node in graph.nodes if node.target is quantized_ops.GATE_UP]
        assert all(node.args[-1] is invariant for node in calls)
    assert joined == {False: 0, True: LLAMA.layers}
    # the separate weights are not held any more
    assert {linears.of[f"layers.0.mlp.{n}.weight"].columns for n in ("gate", "up")} == {2 * LLAMA.mlp}
    (before,), (after,) = (list(f) if isinstance(f, (tuple, list)) else [f] for f in (found[False], found[True]))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_what_is_no_gate_of_two_products_is_left_alone() -> None:
    def graph_of(result: Any) -> tuple[fx.Graph, list[fx.Node], dict[fx.Node, str]]:
        graph = fx.Graph()
        x, other, gate, up = (graph.placeholder(name) for name in ("x", "other", "gate", "up"))
        product = torch.ops.tpshard.rows_linear.default
        nodes = result(graph, lambda a, w, bias=None: graph.call_function(product, (a, w, bias)), x, other, gate, up)
        return graph, nodes, {gate: "gate", up: "up"}

    aten = torch.ops.aten

    def gated(graph: fx.Graph, first: fx.Node, second: fx.Node, also: Any = None) -> list[fx.Node]:
        silu = graph.call_function(aten.silu.default, (first,))
        made = graph.call_function(aten.mul.Tensor, (second, silu))
        graph.output((made, also(first) if also else None))
        return [first, second]

    shapes: dict[str, Any] = {
        "whole": lambda g, p, x, o, a, b: gated(g, p(x, a), p(x, b)),
        "other rows": lambda g, p, x, o, a, b: gated(g, p(x, a), p(o, b)),
        "bias": lambda g, p, x, o, a, b: gated(g, p(x, a), p(x, b, o)),
        "read elsewhere": lambda g, p, x, o, a, b: gated(g, p(x, a), p(x, b), lambda first: first),
    }
    counts = {}
    for name, shape in shapes.items():
        graph, nodes, names = graph_of(shape)
        weights = {n: pack(linear(64, 32, i)) for i, n in enumerate(("gate", "up"))}
        linears = Linears(dict(weights), None, None)  # type: ignore[arg-type]
        counts[name] = join_gates(nodes, names, linears, Inputs(graph), True)
    assert counts == {"whole": 1, "other rows": 0, "bias": 0, "read elsewhere": 0}


def test_weights_lie_side_by_side_only_where_their_groups_agree() -> None:
    ragged = torch.tensor([0] * 20 + [1] * 44)
    for group in (None, ragged):
        one, two = linear(64, 32, 1, group), linear(64, 48, 2, group)
        both = beside(pack(one), pack(two))
        assert isinstance(both, Packed) and both.columns == 80
        expected = torch.cat([one.dequantize(), two.dequantize()], 1)
        assert torch.equal(unpacked(both).dequantize(), expected)
    plain = pack(linear(64, 32, 1))
    assert beside(plain, pack(linear(64, 32, 2, ragged))) is None
    assert beside(plain, replace(plain, bias=torch.zeros(32))) is None
    assert beside(plain, pack(linear(64, 32, 2), quads=True)) is None
    assert beside(pack(linear(64, 32, 1, ragged)), pack(linear(64, 32, 2, ragged.flip(0) * -1 + 1))) is None
