"""Products are computed while activations travel to experts and back or between tensor ranks; nothing else changes."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from tpshard.kernels.experts.experts import experts
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.passes.moves import wait
from tpshard.parallelism.passes.overlap_exchanges import overlap_exchanges
from tpshard.parallelism.passes.recompute import keep_selected, recompute
from tpshard.parallelism.passes.run import run
from tpshard.parallelism.program import Program, info
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

aten = torch.ops.aten
RECIPE = """
name: overlapped
cluster: {device: cpu}
mesh: {fsdp: 2, ep: 2}
model:
  {preset: tiny-moe, capacity: CAPACITY, layers: 1, seq_len: 8, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 8,
   vocab: 32, experts: 4}
batch: {global_sequences: 4}
"""
TENSOR = """
name: tensor
cluster: {device: cpu}
mesh: {fsdp: 2, tp: 2}
model: {preset: tiny, layers: 3, seq_len: 8, width: 16, heads: 4, kv_heads: 2, head_dim: 4, mlp: 32, vocab: 32}
sharding: {rules: {batch: fsdp, heads: tp, mlp: tp, SEQUENCE}ANNOTATE}
batch: {global_sequences: 4}
"""
CAPACITIES = ("2.0", "null")


@cache
def programs(capacity: str) -> tuple[Program, Program]:
    """A micro-batch's program before and after the pass."""
    return before_and_after(RECIPE.replace("CAPACITY", capacity))


@cache
def tensor_programs(sequence: bool) -> tuple[Program, Program]:
    """The same of dense layers over tensor ranks. sequence: the residual stream is sharded over the sequence."""
    annotate = ", annotate: {layers.*.residual: [batch, seq_sp, embed]}" if sequence else ""
    text = TENSOR.replace(", SEQUENCE", ", seq_sp: tp" if sequence else "").replace("ANNOTATE", annotate)
    return before_and_after(text)


def before_and_after(recipe: str) -> tuple[Program, Program]:
    whole = step_programs.micro_program(Setting.of(loads(recipe)))
    plain = run([partial(recompute, keep=keep_selected())], whole)
    return plain, run([overlap_exchanges], plain)


def products(program: Program, phase: str, axis: str = "ep") -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """The products between the issue and the wait of each exchange over `axis`, and those of the shared expert."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    matmuls = {node for node in nodes if node.target in (aten.mm.default, aten.bmm.default)}
    hidden = []
    for i, node in enumerate(nodes):
        comm = info(node).comm
        if comm is not None and comm.axes == (axis,) and comm.of == "activation" and info(node).phase == phase:
            end = next(j for j in range(i, len(nodes)) if nodes[j].target is wait and nodes[j].args[0] is node)
            hidden.append([one for one in nodes[i:end] if one in matmuls])
    return hidden, [n for n in nodes if n in matmuls and ".shared." in info(n).module and info(n).phase == phase]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("phase", "count"), [("forward", 3), ("backward", 6)])
def test_the_shared_expert_is_computed_while_tokens_travel(capacity: str, phase: str, count: int) -> None:
    plain, overlapped = programs(capacity)
    assert not any(products(plain, phase)[0])
    hidden, shared = products(overlapped, phase)
    assert sum(map(bool, hidden)) >= 2 and len(shared) == count
    assert {node for some in hidden for node in some}.issuperset(shared)


@pytest.mark.parametrize(("capacity", "kinds"), [("2.0", {"all_to_all"}), ("null", {"all_gather", "reduce_scatter"})])
def test_tokens_travel_as_the_page_says(capacity: str, kinds: set[str]) -> None:
    """With a capacity dispatch and combine are one exchange each way. Sharded experts ask for all of them."""
    moved = [c for c in programs(capacity)[0].collectives if c.axes == ("ep",) and c.of == "activation"]
    assert {c.kind for c in moved} == kinds
    assert all(c.requested for c in moved)
    assert capacity == "null" or len(moved) == 4


def test_a_recipe_may_wait_for_each_exchange() -> None:
    text = TENSOR.replace(", SEQUENCE", "").replace("ANNOTATE", "")
    sizes = []
    for overrides in ([], ["sharding.overlap=false"]):
        program = training.build(Setting.of(loads(text, overrides))).micro
        sizes.append([len(between) for between in products(program, "backward", "tp")[0]])
    assert sum(sizes[0]) > 0 == sum(sizes[1])


@pytest.mark.parametrize("sequence", [True, False])
def test_gradients_of_weights_are_computed_while_those_of_activations_travel(sequence: bool) -> None:
    """Between tensor ranks. Only the last layer's first exchange has no product before it."""
    plain, overlapped = tensor_programs(sequence)
    assert not any(products(plain, "backward", "tp")[0])
    beside = products(overlapped, "backward", "tp")[0]
    assert [bool(some) for some in beside] == ([False, *[True] * 11] if sequence else [True] * 6)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_collectives_stay_and_no_bit_changes(capacity: str) -> None:
    check_equal(*programs(capacity))


@pytest.mark.parametrize("sequence", [True, False])
def test_collectives_between_tensor_ranks_stay_and_no_bit_changes(sequence: bool) -> None:
    check_equal(*tensor_programs(sequence))


def check_equal(plain: Program, overlapped: Program) -> None:
    counts = [Counter((c.kind, c.axes, c.of, c.bytes) for c in program.collectives) for program in (plain, overlapped)]
    assert counts[0] == counts[1]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randint(0, 32, port.shape, generator=generator)
        if port.dtype == torch.int64
        else torch.randn(port.shape, generator=generator) * 0.3
        for port in plain.inputs
    ]
    for one, other in zip(plain.simulate(*inputs), overlapped.simulate(*inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("matrices", "requested"), [(("ep", None, None), True), ((None, None, None), False)])
def test_experts_ask_only_for_exchanges_along_the_axes_that_shard_them(matrices: Any, requested: bool) -> None:
    """Tokens whose columns are sharded are gathered; experts ask for it only if that axis shards the experts."""
    mesh = Mesh({"ep": 2})

    def layer(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts(x, ids, weights, gate, up, down)

    into, out = torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    tokens = (torch.randn(5, 8), torch.randint(0, 4, (5, 2)), torch.rand(5, 2))
    shardings = [(None, "ep"), (None, None), (None, None), matrices, matrices, matrices]
    program = partition(layer, (*tokens, into, into, out), mesh, in_shardings=shardings)
    (gather,) = [c for c in program.collectives if c.kind == "all_gather" and c.value == ("arg0",)]
    assert gather.requested is requested
