"""Layouts as a rewrite of the program: the same logits in all of them, and the gathers where the permutation says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from operator import add
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tpshard.kernels.gptq_solver import Heads, Settings, ordering, round_to_nearest
from tpshard.kernels.layouts import LAYOUTS, Layout
from tpshard.kernels.quantized import Quantized, group_index
from tpshard.kernels.reorder import fewer, positions, sorting
from tpshard.models import build
from tpshard.models.config import ModelConfig
from tpshard.models.dims import param_dims
from tpshard.parallelism.capture import capture
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.partitioner import partition_captured
from tpshard.parallelism.simulate import local_arguments, run_lockstep
from tpshard.programs.layouts import ActOrder, Turned, act_orders, arrange, planned_orders
from tpshard.programs.padding import padded, shared_rows
from tpshard.programs.serving import Step, make_pools, step
from tpshard.serve.job import Weights
from tpshard.serve.padding import pad

LLAMA = ModelConfig(
    family="llama", layers=1, width=64, heads=8, kv_heads=4, head_dim=16, mlp=128, vocab=64, max_seq=64, seq_len=32,
    dtype="fp32",
)  # fmt: skip
GRANITE = ModelConfig(
    family="granite", layers=1, width=64, heads=8, kv_heads=1, head_dim=16, mlp=128, vocab=64, max_seq=64, seq_len=32,
    dtype="fp32", attention_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
MODELS = {"llama": (LLAMA, True), "granite": (GRANITE, True)}
UNEVEN = {"llama, 11 groups": (replace(LLAMA, mlp=88), True), "granite, 11 groups": (replace(GRANITE, mlp=88), True)}
UNEVEN |= {f"{family}, 10.5 groups": (replace(config, mlp=84), False) for family, (config, _) in MODELS.items()}
"""Models whose groups no tp divides, and whether their zeros are symmetric."""
CASES = [
    *(("llama", "head_local", tp) for tp in (1, 2, 4, 8)), *(("granite", "global", tp) for tp in (1, 8)),
    ("llama", "global", 4), ("granite", "head_local", 2),
    *((name, "head_local", tp) for name in UNEVEN for tp in (1, 2, 4, 8)),
]  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Served:
    """A random model whose layers are quantized in groups of 8, and its logits for two short prompts."""

    def __init__(self, config: ModelConfig, symmetric: bool, order: Any) -> None:
        self.config = config
        self.model = build(config, device="cpu", seed=3)
        generator = torch.Generator().manual_seed(0)
        dims, settings = param_dims(self.model), Settings(group_size=8, sym=symmetric)
        self.quantized: dict[str, Quantized] = {}
        importance: dict[str, torch.Tensor] = {}  # products of one input share its order
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if p.dim() == 1:
                    p.add_(torch.randn(p.shape, generator=generator) * 0.1)
                elif name.startswith("layers."):
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.15)
                    key = f"{name.split('.')[2]} {dims[name][1]}"
                    seen = importance.setdefault(key, torch.rand(p.shape[1], generator=generator))
                    heads = Heads(config.heads, config.kv_heads, config.head_dim) if dims[name][1] == "heads" else None
                    plan = ordering(seen, settings, order, heads)
                    self.quantized[name] = round_to_nearest(p, settings, plan)
                    p.copy_(self.quantized[name].dequantize(torch.float32).T)

    def group(self, name: str) -> torch.Tensor | None:
        return self.quantized[name].group if name in self.quantized else None

    def weights(self, tp: int) -> Weights:
        """As a server over `tp` devices takes them."""
        own = dict(self.model.named_parameters())
        block = lambda name, starts, sizes: own[name].detach()[tuple(map(slice, starts, map(add, starts, sizes)))]  # noqa: E731
        whole = Weights(self.config, block, self.quantized.get, self.group)
        return pad(whole, padded(self.config, tp, shared_rows(self.config, self.group)))

    def step(self, layout: Layout, tp: int, dtype: torch.dtype = torch.float32) -> Step:
        weights = self.weights(tp)
        model = build(weights.config, dtype=dtype)
        orders = act_orders(model, weights.config, weights.group)
        return step(
            model, weights.config, Mesh({"tp": tp}), rows=8, wanted=8, blocks=2, block_size=16, orders=orders,
            layout=layout,
        )  # fmt: skip

    def inputs(self, step: Step, dtype: torch.dtype) -> list[torch.Tensor]:
        """Everything that a step takes, whole: a prompt of 5 tokens and one of 3, and the parameters as arranged."""
        weights, arrangement = self.weights(step.program.mesh.ranks), step.arrangement
        tokens = torch.arange(8)[None] * 7 % 64
        places, sequences = torch.tensor([[*range(5), *range(3)]]), torch.tensor([[0] * 5 + [1] * 3])
        tables = torch.zeros(9, 2, dtype=torch.int64)
        tables[0, 0], tables[1, 0] = 1, 2
        rows = [tokens, places, (sequences + 1) * 16 + places, sequences, tables, torch.arange(8)]
        pools = [pool for pair in make_pools(self.config, 2, 16, dtype, "cpu") for pool in pair]
        values = []
        for name, p in build(weights.config).named_parameters():
            found = weights.quantized(name)
            value = weights.block(name, (0,) * p.dim(), p.shape) if found is None else found.dequantize(torch.float32).T
            if (own := arrangement.rows_of(name, weights.group)) is not None:
                value = value[:, own]
            if (columns := arrangement.columns_of(name, weights.group)) is not None:
                value = value[columns]
            values.append(value.to(dtype))
        return [*rows, *pools, *values, *(arrangement.order(t, weights.group) for t in arrangement.inputs.values())]

    def logits(self, step: Step, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        given = self.inputs(step, dtype)
        tp = step.program.mesh.ranks
        results = run_lockstep(step.program, [local_arguments(step.program, rank, given) for rank in range(tp)])
        for (other,) in results[1:]:
            assert torch.equal(results[0][0], other)
        return results[0][0]

    @torch.no_grad()
    def expected(self) -> torch.Tensor:
        tokens = torch.arange(8)[None] * 7 % 64
        return torch.cat([self.model(tokens[:, :5])[0], self.model(tokens[:, 5:])[0]])


served = cache(lambda family, order: Served(*(MODELS | UNEVEN)[family], order))


def gathers(step: Step) -> list[str]:
    """Modules whose act-order is gathered for."""
    found = [c for c in step.program.collectives if c.reason.startswith("the act-order of ")]
    assert all(c.kind == "all_gather" and not c.asked for c in found)
    return [c.reason.split()[3] for c in found]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small wait longer for a second thread than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "order", "tp"), CASES)
def test_every_layout_gives_the_logits_of_the_dense_weights(family: str, order: str, tp: int, layout: Layout) -> None:
    model = served(family, order)
    made = model.step(layout, tp)
    torch.testing.assert_close(model.logits(made), model.expected(), rtol=1e-4, atol=1e-4)
    naive = ["layers.0.attention.wo", "layers.0.mlp.down"] if layout == "naive" and tp > 1 else []
    assert gathers(made) == naive
    counted = Counter(c.kind for c in made.program.collectives)
    # one all-reduce for attention, one for the MLP; one for the embedding and a gather of the logits
    assert counted == ({"all_reduce": 3, "all_gather": 1 + len(naive)} if tp > 1 else {})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_dtype(layout: Layout, dtype: torch.dtype) -> None:
    model = served("llama", "head_local")
    found, expected = model.logits(model.step(layout, 2, dtype), dtype).float(), model.expected()
    assert (found - expected).norm() <= TOLERANCE[dtype] * expected.norm()


DOWN = "layers.0.mlp.down.weight"


def groups_of_devices(step: Step, weights: Weights) -> list[set[int]]:
    """The groups whose rows of `down` each device holds."""
    group, rows = weights.group(DOWN), step.arrangement.rows_of(DOWN, weights.group)
    assert group is not None and rows is not None
    return [set(part.tolist()) for part in group[rows].chunk(step.program.mesh.ranks)]


@pytest.mark.parametrize("layout", ["naive", "tp_aware"])
@pytest.mark.parametrize("family", UNEVEN)
def test_shards_are_cut_between_groups(family: str, layout: Layout) -> None:
    model = served(family, "head_local")
    for tp, own in ((2, [6, 5]), (4, [3, 3, 3, 2]), (8, [2, 2, 2, 2, 2, 1, 0, 0])):
        weights = model.weights(tp)
        found = groups_of_devices(model.step(layout, tp), weights)
        assert sum(map(len, found)) == len(set().union(*found)), "a group lies on two devices"
        assert [len(groups & set(range(11))) for groups in found] == own
    whole = torch.sort(model.group(DOWN)).values  # type: ignore[arg-type]
    halves = [set(part.tolist()) for part in whole.chunk(2)]
    assert halves[0] & halves[1] == {5}  # what equal parts of the model's own columns would share


def test_what_is_added_must_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with other values there the logits are others."""
    model, zeros = served("llama, 11 groups", "head_local"), Quantized.padded

    def spoiled(self: Quantized, inputs: int, outputs: int) -> Quantized:
        found = zeros(self, inputs, outputs)
        added = found.scales == 0
        codes = found.codes.where(~added[found.group.long()], 9)
        return replace(found, codes=codes, scales=found.scales.where(~added, 1))

    made = model.step("tp_aware", 2)
    torch.testing.assert_close(model.logits(made), model.expected(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Quantized, "padded", spoiled)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(model.logits(made), model.expected(), rtol=1e-4, atol=1e-4)


def test_padded_weights_are_zero_beyond_the_model() -> None:
    model = served("granite, 10.5 groups", "head_local")
    weights = model.weights(8)
    assert weights.config.mlp == 128
    own = dict(model.model.named_parameters())
    for name, p in build(weights.config).named_parameters():
        whole, mine = weights.block(name, (0,) * p.dim(), p.shape), own[name].detach()
        inside = tuple(slice(n) for n in mine.shape)
        assert whole.shape == p.shape and torch.equal(whole[inside], mine)
        assert whole.count_nonzero() == mine.count_nonzero()
        for start in (76, 84, 96):  # across the end of the model, at it, and beyond
            starts = tuple(start if n == 128 else 3 for n in p.shape)
            part = whole[tuple(slice(s, s + 16) for s in starts)]
            assert torch.equal(weights.block(name, starts, part.shape), part)
        found = weights.quantized(name)
        assert found is None or torch.equal(found.check().dequantize(torch.float32).T, whole)
    assert weights.group(DOWN).tolist() == weights.quantized(DOWN).group.tolist()  # type: ignore[union-attr]


def test_only_what_is_not_divided_is_padded() -> None:
    wide = replace(LLAMA, mlp=231 * 128)
    assert [padded(wide, tp, 128).mlp // 128 for tp in (1, 2, 4, 8)] == [231, 232, 232, 232]
    assert padded(LLAMA, 8, 8) is LLAMA and padded(LLAMA, 8) is LLAMA and padded(wide, 2) is wide
    assert padded(replace(LLAMA, mlp=84), 1, 8).mlp == 84
    assert padded(replace(LLAMA, mlp=100), 8).mlp == 256  # dense
    assert padded(LLAMA, 4, 64) is LLAMA  # fewer groups than devices: cut within them
    shared = {8: served("llama, 10.5 groups", "head_local").group, 1: lambda name: None}
    assert all(shared_rows(LLAMA, group) == size for size, group in shared.items())
    layers = {"layers.0.mlp.down.weight": 8, "layers.1.mlp.down.weight": 12}  # which `dynamic` may say
    assert shared_rows(replace(LLAMA, layers=3), lambda name: group_index(128, layers.get(name, -1))) == 24


def test_what_is_left_to_do_at_run_time() -> None:
    def reordered(step: Step) -> list[tuple[str, int]]:
        nodes = [n for n in step.program.graph.nodes if str(n.target) == "tpshard.reorder.default"]
        return [(str(n.args[1]).removesuffix("_order"), n.args[2]) for n in nodes]

    inputs = [("layers_0_attention_wq", 1), ("layers_0_mlp_gate", 1)]  # q, k and v share one, gate and up too
    local, crossing = served("llama", "head_local"), served("llama", "global")
    assert reordered(local.step("tp_aware", 2)) == inputs
    assert reordered(crossing.step("tp_aware", 2)) == [inputs[0], ("layers_0_attention_wo", 1), inputs[1]]
    for layout in ("naive", "local_sort"):
        found = reordered(local.step(layout, 2))
        assert [name for name, _ in found] == [
            "layers_0_attention_wq", "layers_0_attention_wo", "layers_0_mlp_gate", "layers_0_mlp_down"
        ]  # fmt: skip
    turned = local.step("tp_aware", 2).arrangement.columns
    assert turned["layers.0.attention.wv.weight"] == Turned("layers.0.attention.wo.weight", 8, 4)
    biases = served("granite", "head_local").step("tp_aware", 2).arrangement.columns
    assert {"layers.0.attention.wv.bias", "layers.0.mlp.up.bias"} < biases.keys()


def test_orders_are_planned_as_the_quantizer_writes_them() -> None:
    for family, (config, _) in MODELS.items():
        for order in ("head_local", "global"):
            model = served(family, order)
            found = act_orders(model.model, config, model.group)
            planned = planned_orders(config, order, 8)
            assert found.keys() == planned.keys()
            for a in found:
                assert (found[a].blocks, found[a].alike) == (planned[a].blocks, planned[a].alike)
                for b in found:
                    assert (found[a].key == found[b].key) == (planned[a].key == planned[b].key)
    assert not planned_orders(LLAMA, "none", 8)
    in_sequence = {"layers.0.attention.wo.weight"}
    assert planned_orders(LLAMA, "head_local", 16).keys() == (planned_orders(LLAMA, "global", 16).keys() - in_sequence)


# ---- any pair of products ---------------------------------------------------------------------------------------
def pair(between: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], layout: Layout) -> tuple[Any, ...]:
    """between(x A^T + a, x B^T) C^T with act-ordered rows of C, over 4 devices: arrangement, program and results."""
    generator = torch.Generator().manual_seed(0)
    x, first, bias, second, third = (
        torch.randn(s, generator=generator) for s in [(3, 16), (32, 16), (32,), (32, 16), (8, 32)]
    )
    group = torch.randint(0, 4, (32,), generator=generator, dtype=torch.int32)

    def f(x: Any, first: Any, bias: Any, second: Any, third: Any) -> torch.Tensor:
        return F.linear(between(F.linear(x, first, bias), F.linear(x, second)), third)

    names = ["x", "first", "bias", "second", "third.weight"]
    graph = capture(f, (x, first, bias, second, third), names)
    found = arrange(graph, {"third.weight": ActOrder("")}, layout, {"third.weight": 4}, names[1:])
    orders = [("t",) if taken.blocks == 4 else (None,) for taken in found.inputs.values()]
    shardings = [(None, None), ("t", None), ("t",), ("t", None), (None, "t"), *orders]
    program = partition_captured(graph, Mesh({"t": 4}), shardings, [(None, None)])
    values = []
    for name, value in zip(names, (x, first, bias, second, third)):
        rows, columns = found.rows_of(name, lambda _: group), found.columns_of(name, lambda _: group)
        value = value if rows is None else value[:, rows]
        values.append(value if columns is None else value[columns])
    values += [found.order(taken, lambda _: group) for taken in found.inputs.values()]
    return found, program, program.simulate(*values)[0], f(x, first, bias, second, third)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "between",
    [
        lambda a, b: torch.relu(a) * b.sigmoid(),
        lambda a, b: a.index_select(0, torch.arange(2)) * b.index_select(0, torch.arange(2)),
        lambda a, b: (a + b).view(3, 4, 8).tanh().view(3, 32),
    ],
)
def test_any_two_products_are_laid_out(layout: Layout, between: Any) -> None:
    found, program, y, expected = pair(between, layout)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    split = "view" in between.__code__.co_names
    kinds = [c.kind for c in program.collectives]
    assert kinds == (["all_gather", "all_reduce"] if layout == "naive" else ["all_reduce"])
    # a permutation of 32 cannot be taken into [4, 8] unless it stays within the 4: then it is sorted on each device
    absorbed = layout == "tp_aware" and not split
    assert found.columns.keys() == ({"first", "bias", "second"} if absorbed else set())
    assert found.rows["third.weight"].blocks == (1 if absorbed or layout == "naive" else 4)


@pytest.mark.parametrize(
    "between",
    [
        lambda a, b: torch.softmax(a, -1) + b,  # sums over the permuted dim
        lambda a, b: a + b * torch.arange(32),  # depends on the position
        lambda a, b: a.flip(-1) + b,
        lambda a, b: a.index_select(1, torch.arange(32)) + b,
    ],
)
def test_what_mixes_positions_is_not_passed(between: Any) -> None:
    found, _, y, expected = pair(between, "tp_aware")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert not found.columns and found.rows["third.weight"].blocks == 4


def test_what_others_read_is_not_turned() -> None:
    def f(x: Any, first: Any, third: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.linear(x, first)
        return F.linear(torch.relu(hidden), third), hidden.sum(0)

    graph = capture(f, (torch.ones(3, 16), torch.ones(32, 16), torch.ones(8, 32)), ["x", "first", "third.weight"])
    found = arrange(graph, {"third.weight": ActOrder("")}, "tp_aware", {"third.weight": 2}, ["first", "third.weight"])
    assert not found.columns and found.rows["third.weight"].blocks == 2


def test_orders_within_blocks() -> None:
    group = torch.tensor([1, 0, 1, 0, 3, 2, 3, 2], dtype=torch.int32)
    assert sorting(group, 2).tolist() == [1, 3, 0, 2] * 2
    assert positions(sorting(group, 2), 2).tolist() == sorting(group).tolist() == [1, 3, 0, 2, 5, 7, 4, 6]
    assert fewer(sorting(group, 2), 2, 1).tolist() == [1, 3, 0, 2]
    x = torch.randn(2, 3, 8)
    assert torch.equal(torch.ops.tpshard.reorder(x, sorting(group, 2), 2), x[..., sorting(group)])
