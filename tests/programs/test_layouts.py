"""All layouts of act-ordered weights give the same logits, and gather only where the order mixes shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from servers import lockstep, recipe, weights_of
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_solver import Heads, Settings, ordering, round_to_nearest
from tpshard.kernels.quantized.quantized import Quantized, extend_groups, group_index
from tpshard.kernels.quantized.reorder import head_local_order, merge_blocks, positions, sorting
from tpshard.models import build
from tpshard.models.dims import param_dims
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.partitioning.partition import partition_captured
from tpshard.parallelism.simulate import join
from tpshard.parallelism.tracing.capture import capture
from tpshard.plan.report.order_rows import order_rows
from tpshard.programs.server.act_order import (
    LAYOUTS,
    ActOrder,
    Arrangement,
    ColumnOrder,
    Layout,
    act_orders,
    arrange,
    planned_orders,
)
from tpshard.programs.server.padding import padded_mlp, shared_rows
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import Quantization
from tpshard.programs.server.served import Served as served_model
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.serve.engine.weights import Filler, Weights

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
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}


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
                    inputs = importance.setdefault(key, torch.rand(p.shape[1], generator=generator))
                    heads = Heads(config.heads, config.kv_heads, config.head_dim) if dims[name][1] == "heads" else None
                    plan = ordering(inputs, settings, order, heads)
                    self.quantized[name] = round_to_nearest(p, settings, plan)
                    p.copy_(self.quantized[name].dequantize(torch.float32).T)

    def group(self, name: str) -> torch.Tensor | None:
        return self.quantized[name].group if name in self.quantized else None

    def orders(self) -> dict[str, ActOrder]:
        c = self.config
        return act_orders(c.parameters, (c.heads, c.kv_heads, c.head_dim), self.group)

    def weights(self) -> Weights:
        own = weights_of(self.model)
        return Weights(own.shapes, own.block, self.quantized.get, self.group)

    def step(self, layout: Layout, tp: int, dtype: str = "fp32") -> ServingPrograms:
        settings = GPTQConfig(group_size=8, desc_act=True)
        weights = dict.fromkeys(self.quantized, settings)
        orders = self.orders()
        quantized = Quantization(settings, weights, orders, shared_rows(self.config.parameters, self.group))
        served_recipe = recipe(f"serve.mesh.tp={tp}", f"serve.layout={layout}")
        served = served_model(FamilyModel(self.config), dtype, quantized)
        return build_serving(ServeSetting.of(served_recipe, served, "cpu"), [Size(8)])

    def logits(self, programs: ServingPrograms) -> torch.Tensor:
        return lockstep(programs, self.weights())

    @torch.no_grad()
    def expected(self) -> torch.Tensor:
        tokens = torch.arange(8)[None] * 7 % 64
        return torch.cat([self.model(tokens[:, :5])[0], self.model(tokens[:, 5:])[0]])


served = cache(lambda family, order: Served(*(MODELS | UNEVEN)[family], order))


def gathers(programs: ServingPrograms) -> list[str]:
    """The modules before which activations are gathered for an act-order."""
    result = [c for c in programs.any.collectives if c.why[0].mixes]
    assert all(c.kind == "all_gather" and not c.requested for c in result)
    return [c.why[0].mixes.removesuffix(".order") for c in result]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread, which is faster for products this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "order", "tp"), CASES)
def test_every_layout_gives_the_logits_of_the_dense_weights(family: str, order: str, tp: int, layout: Layout) -> None:
    model = served(family, order)
    logits = model.step(layout, tp)
    torch.testing.assert_close(model.logits(logits), model.expected(), rtol=1e-4, atol=1e-4)
    naive = ["layers.0.attention.wo", "layers.0.mlp.down"] if layout == "naive" and tp > 1 else []
    assert gathers(logits) == naive
    counted = Counter(c.kind for c in logits.any.collectives)
    # one all-reduce for attention, one for the MLP, one for the embedding
    assert counted == Counter({"all_reduce": 3, "all_gather": len(naive)} if tp > 1 else {})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_dtype(layout: Layout, dtype: str) -> None:
    """Weights are multiplied by torch's int4 product in bf16, and dequantized in other dtypes."""
    model = served("llama", "head_local")
    logits = model.step(layout, 2, dtype)
    kernels = {getattr(node.target, "__name__", "") for node in logits.any.graph.nodes}
    assert bool({"int4_linear", "parts_linear"} & kernels) == (dtype == "bf16")
    actual, expected = model.logits(logits).float(), model.expected()
    assert (actual - expected).norm() <= TOLERANCE[dtype] * expected.norm()


DOWN = "layers.0.mlp.down.weight"


def groups_of_devices(programs: ServingPrograms, model: Served) -> list[set[int]]:
    """The groups whose rows of `down` each device holds."""
    group = extend_groups(model.quantized[DOWN].group, programs.shapes[DOWN][1])
    rows = programs.arrangement.rows_of(DOWN, lambda _: group)
    assert rows is not None
    return [set(part.tolist()) for part in group[rows].chunk(programs.setting.mesh.ranks)]


@pytest.mark.parametrize("layout", ["naive", "tp_aware"])
@pytest.mark.parametrize("family", UNEVEN)
def test_shards_are_cut_between_groups(family: str, layout: Layout) -> None:
    model = served(family, "head_local")
    for tp, own in ((2, [6, 5]), (4, [3, 3, 3, 2]), (8, [2, 2, 2, 2, 2, 1, 0, 0])):
        actual = groups_of_devices(model.step(layout, tp), model)
        assert sum(map(len, actual)) == len(set().union(*actual)), "a group lies on two devices"
        assert [len(groups & set(range(11))) for groups in actual] == own
    whole = torch.sort(model.group(DOWN)).values  # type: ignore[arg-type]
    halves = [set(part.tolist()) for part in whole.chunk(2)]
    assert halves[0] & halves[1] == {5}  # what equal parts of the model's own columns would share


def test_what_is_added_must_be_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: other values in the padding change the logits."""
    model, zeros = served("llama, 11 groups", "head_local"), Quantized.pad

    def spoil(self: Quantized, inputs: int, outputs: int) -> Quantized:
        values = zeros(self, inputs, outputs)
        added = values.scales == 0
        codes = values.codes.where(~added[values.group.long()], 9)
        return replace(values, codes=codes, scales=values.scales.where(~added, 1))

    logits = model.step("tp_aware", 2)
    torch.testing.assert_close(model.logits(logits), model.expected(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(Quantized, "pad", spoil)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(model.logits(logits), model.expected(), rtol=1e-4, atol=1e-4)


def test_padded_weights_are_zero_beyond_the_model() -> None:
    model = served("granite, 10.5 groups", "head_local")
    logits = model.step("tp_aware", 8)
    assert logits.shapes[DOWN] == (64, 128)
    own, plain = dict(model.model.named_parameters()), replace(model.weights(), quantized=lambda name: None)
    for port in logits.any.inputs:
        if port.kind != "parameter" or port.name not in own:
            continue
        mine = own[port.name].detach()
        for weights in (model.weights(), plain):  # quantized as they are stored, and dense
            mesh, cpu = logits.setting.mesh, torch.device("cpu")
            fill = [Filler(weights, Arrangement(), logits.shapes, mesh, rank, cpu, 1) for rank in range(8)]
            whole = join(port, mesh, [one(replace(port, held=None)) for one in fill])
            inside = tuple(slice(n) for n in mine.shape)
            assert whole.shape == port.shape and torch.equal(whole[inside], mine)
            assert whole.count_nonzero() == mine.count_nonzero()


def test_only_what_is_not_divided_is_padded() -> None:
    wide = replace(LLAMA, mlp=231 * 128)
    assert [padded_mlp(wide, tp, 128) // 128 for tp in (1, 2, 4, 8)] == [231, 232, 232, 232]
    assert padded_mlp(LLAMA, 8, 8) == padded_mlp(LLAMA, 8) == LLAMA.mlp and padded_mlp(wide, 2) == wide.mlp
    assert padded_mlp(replace(LLAMA, mlp=84), 1, 8) == 84
    assert padded_mlp(replace(LLAMA, mlp=100), 8) == 256  # dense
    assert padded_mlp(LLAMA, 4, 64) == LLAMA.mlp  # merge_blocks groups than devices: cut within them
    shared = {8: served("llama, 10.5 groups", "head_local").group, 1: lambda name: None}
    assert all(shared_rows(LLAMA.parameters, group) == size for size, group in shared.items())
    layers = {"layers.0.mlp.down.weight": 8, "layers.1.mlp.down.weight": 12}  # which `dynamic` may say
    assert shared_rows(replace(LLAMA, layers=3).parameters, lambda name: group_index(128, layers.get(name, -1))) == 24


def test_what_is_left_to_do_at_run_time() -> None:
    def reorder(programs: ServingPrograms) -> list[tuple[str, int]]:
        """The operations that permute at run time, each with its number of blocks."""
        nodes = [(n, str(n.target)) for n in programs.any.graph.nodes]
        orders = [(n.args[1], n.args[2]) for n, name in nodes if name == "tpshard.reorder.default"]
        norms = [(n.args[2], 1) for n, name in nodes if name == "tpshard.rms_norm_permuted.default" and n.args[2]]
        return sorted((str(order).removesuffix("_order"), blocks) for order, blocks in [*orders, *norms])

    inputs = [("layers_0_attention_wq", 1), ("layers_0_mlp_gate", 1)]  # q, k and v share one, gate and up too
    local, crossing = served("llama", "head_local"), served("llama", "global")
    assert reorder(local.step("tp_aware", 2)) == inputs
    assert reorder(crossing.step("tp_aware", 2)) == [("layers_0_attention_wo", 1), *inputs]
    for layout in ("naive", "local_sort"):
        actual = reorder(local.step(layout, 2))
        assert [name for name, _ in actual] == [
            "layers_0_attention_wo", "layers_0_attention_wq", "layers_0_mlp_down", "layers_0_mlp_gate"
        ]  # fmt: skip
    said = order_rows(crossing.step("tp_aware", 2).arrangement.between)
    assert {row["linear"].rpartition(".")[2]: row["between"] for row in said} == {
        **dict.fromkeys(("wq", "wk", "wv"), "`mul` in layers.*.attention_norm reads the same values"),
        "wo": "`view` in layers.*.attention.wo joins dims that the order crosses",
        **dict.fromkeys(("gate", "up"), "`mul` in layers.*.mlp_norm reads the same values"), "down": "",
    }  # fmt: skip
    turned = local.step("tp_aware", 2).arrangement.columns
    assert turned["layers.0.attention.wv.weight"] == ColumnOrder("layers.0.attention.wo.weight", 8, 4)
    biases = served("granite", "head_local").step("tp_aware", 2).arrangement.columns
    assert {"layers.0.attention.wv.bias", "layers.0.mlp.up.bias"} < biases.keys()


def test_orders_are_planned_as_the_quantizer_writes_them() -> None:
    for family, (config, _) in MODELS.items():
        for order in ("head_local", "global"):
            model = served(family, order)
            actual = model.orders()
            planned = planned_orders(config, order, 8)
            assert actual.keys() == planned.keys()
            for a in actual:
                assert (actual[a].blocks, actual[a].alike) == (planned[a].blocks, planned[a].alike)
                for b in actual:
                    assert (actual[a].key == actual[b].key) == (planned[a].key == planned[b].key)
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
    arrangement = arrange(graph, {"third.weight": ActOrder("")}, layout, {"third.weight": 4}, names[1:])
    orders = [("t",) if order.blocks == 4 else (None,) for order in arrangement.inputs.values()]
    shardings = [(None, None), ("t", None), ("t",), ("t", None), (None, "t"), *orders]
    program = partition_captured(graph, Mesh({"t": 4}), shardings, [(None, None)])
    values = []
    for name, value in zip(names, (x, first, bias, second, third)):
        rows, columns = arrangement.rows_of(name, lambda _: group), arrangement.columns_of(name, lambda _: group)
        value = value if rows is None else value[:, rows]
        values.append(value if columns is None else value[columns])
    values += [arrangement.order(order, lambda _: group) for order in arrangement.inputs.values()]
    return arrangement, program, program.simulate(*values)[0], f(x, first, bias, second, third)


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
    actual, program, y, expected = pair(between, layout)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    split = "view" in between.__code__.co_names
    kinds = [c.kind for c in program.collectives]
    assert kinds == (["all_gather", "all_reduce"] if layout == "naive" else ["all_reduce"])
    # a permutation of 32 cannot be taken into [4, 8] unless it stays within the 4: then it is sorted on each device
    absorbed = layout == "tp_aware" and not split
    assert actual.columns.keys() == ({"first", "bias", "second"} if absorbed else set())
    assert actual.rows["third.weight"].blocks == (1 if absorbed or layout == "naive" else 4)
    assert actual.between == (
        {} if layout != "tp_aware" else {"third.weight": "`view` joins dims that the order crosses" if split else ""}
    )


@pytest.mark.parametrize(
    ("between", "stands"),
    [
        (lambda a, b: torch.softmax(a, -1) + b, "`sum` reads the same values"),  # sums over the permuted dim
        (lambda a, b: a + b * torch.arange(32), "`arange` mixes positions"),  # depends on the position
        (lambda a, b: a.flip(-1) + b, "`flip` mixes positions"),
        (lambda a, b: a.index_select(1, torch.arange(32)) + b, "`arange` mixes positions"),
    ],
)
def test_what_mixes_positions_is_not_passed_and_is_named(between: Any, stands: str) -> None:
    actual, _, y, expected = pair(between, "tp_aware")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert not actual.columns and actual.rows["third.weight"].blocks == 4
    assert actual.between == {"third.weight": stands}


def test_what_others_read_is_not_turned() -> None:
    def f(x: Any, first: Any, third: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.linear(x, first)
        return F.linear(torch.relu(hidden), third), hidden.sum(0)

    graph = capture(f, (torch.ones(3, 16), torch.ones(32, 16), torch.ones(8, 32)), ["x", "first", "third.weight"])
    arrangement = arrange(
        graph, {"third.weight": ActOrder("")}, "tp_aware", {"third.weight": 2}, ["first", "third.weight"]
    )
    assert not arrangement.columns and arrangement.rows["third.weight"].blocks == 2
    assert arrangement.between == {"third.weight": "`sum` reads the same values"}


def test_orders_within_blocks() -> None:
    group = torch.tensor([1, 0, 1, 0, 3, 2, 3, 2], dtype=torch.int32)
    assert sorting(group, 2).tolist() == [1, 3, 0, 2] * 2
    assert positions(sorting(group, 2), 2).tolist() == sorting(group).tolist() == [1, 3, 0, 2, 5, 7, 4, 6]
    assert merge_blocks(sorting(group, 2), 2, 1).tolist() == [1, 3, 0, 2]
    x = torch.randn(2, 3, 8)
    assert torch.equal(torch.ops.tpshard.reorder(x, sorting(group, 2), 2), x[..., sorting(group)])


def head_local_group(heads: int, kv_heads: int, head_dim: int, size: int) -> torch.Tensor:
    """g_idx of an output projection whose order stays within heads, one for all query heads of a KV head."""
    g = torch.Generator().manual_seed(0)
    group = torch.empty(heads, head_dim, dtype=torch.int32)
    inner = torch.stack([torch.randperm(head_dim, generator=g) for _ in range(kv_heads)])
    for head in range(heads):
        own = group_index(head_dim, size) + head * (head_dim // size)
        group[head, inner[head * kv_heads // heads]] = own
    return group.flatten()


def test_head_local_orders_are_told_from_others() -> None:
    group = head_local_group(8, 4, 32, 16)
    inner = head_local_order(group, 8, 4, 32)
    assert inner is not None and inner.shape == (4, 32)
    assert head_local_order(head_local_group(8, 8, 32, 16), 8, 4, 32) is None  # heads of one KV head disagree
    assert head_local_order(group[torch.randperm(256, generator=torch.Generator().manual_seed(0))], 8, 4, 32) is None
    spanning = head_local_order(group_index(256, 64), 8, 4, 32)  # groups of whole heads
    assert spanning is not None and torch.equal(spanning, torch.arange(32).expand(4, 32))
