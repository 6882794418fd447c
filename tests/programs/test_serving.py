"""A server's programs compute the plain model's logits on any number of devices, with the same bits on each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from servers import lockstep, prompts, recipe, runner_of, setting, weights_of
from torch import Tensor, nn
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.kernels.attention.attention import attention
from tpshard.models import build
from tpshard.models.dims import name
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.layers import Embedding, Linear
from tpshard.models.module_model import ModuleModel
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import Served
from tpshard.programs.server.serving import build_serving
from tpshard.serve.api.need import kernels, need
from tpshard.serve.engine.engine import Engine

LLAMA = ModelConfig(
    family="llama", layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=64, max_seq=128, seq_len=64,
    dtype="fp32",
)  # fmt: skip
GRANITE = replace(LLAMA, family="granite", kv_heads=1, attention_bias=True, mlp_bias=True, tie_embeddings=True)
CASES = {
    "llama, one device": (LLAMA, 1),
    "llama, tp 2": (LLAMA, 2),
    "llama, KV heads replicated": (LLAMA, 4),
    "mistral, a window": (replace(LLAMA, family="mistral", window=2), 2),
    "qwen2, a window in one layer": (replace(LLAMA, family="qwen2", window=2, full_layers=(0,)), 4),
    "qwen3, one device": (replace(LLAMA, family="qwen3", attention_bias=True), 1),
    "qwen3, KV heads replicated": (replace(LLAMA, family="qwen3", attention_bias=True), 4),
    "a mixture of experts": (replace(LLAMA, family="moe", experts=4, top_k=2, shared_experts=1), 2),
    "tied, vocab not divided": (replace(LLAMA, vocab=63, tie_embeddings=True), 2),
    "granite, one device": (GRANITE, 1),
    "granite, one KV head": (GRANITE, 2),
    "llama, MLP not divided": (replace(LLAMA, mlp=50, mlp_bias=True), 4),
    "granite, MLP not divided": (replace(GRANITE, mlp=49), 2),
}


def expected(model: nn.Module) -> Tensor:
    tokens = torch.from_numpy(prompts().tokens)[None]
    with torch.no_grad():
        return torch.cat([model(tokens[:, :5])[0], model(tokens[:, 5:])[0]])


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_model(case: str) -> None:
    config, tp = CASES[case]
    model = build(config, device="cpu", seed=2)
    programs = build_serving(setting(config, f"serve.mesh.tp={tp}"), [Size(8)])
    assert (programs.setting.spec.outline == config) == ("MLP" not in case)
    torch.testing.assert_close(lockstep(programs, weights_of(model)), expected(model), rtol=1e-4, atol=1e-4)
    split = tp > 1 and config.vocab % tp == 0
    counted = Counter(c.kind for c in programs.any.collectives)
    sums = 2 * config.layers + split if tp > 1 else 0
    assert counted == Counter({"all_reduce": sums})


ON_GPU = {"llama, tp 2": 9, "qwen3, KV heads replicated": 9, "a mixture of experts": 9, "llama, MLP not divided": 9}
"""Products of dense weights of two layers (q|k|v, o, gate|up, down; with experts o, and those of the shared one beside
the router's) and a head."""


@pytest.mark.parametrize("case", ON_GPU)
def test_products_of_one_value_are_one_launch_on_a_gpu(case: str) -> None:
    config, tp = CASES[case]
    model = build(config, device="cpu", seed=2)
    on_gpu = build_serving(setting(config, f"serve.mesh.tp={tp}", kind="gpu"), [Size(8)])
    torch.testing.assert_close(lockstep(on_gpu, weights_of(model)), expected(model), rtol=1e-4, atol=1e-4)
    assert kernels(on_gpu.any)["linear"] == ON_GPU[case]
    held = {port.held.of: port for port in on_gpu.any.inputs if port.held is not None}
    port = held[tuple(f"layers.0.attention.{one}.weight" for one in ("wq", "wk", "wv"))]
    assert port.local_bytes == 4 * config.width * config.head_dim * (config.heads + 2 * max(tp, config.kv_heads)) // tp


def test_a_server_drops_no_token_whatever_the_capacity() -> None:
    config = replace(LLAMA, family="moe", experts=4, top_k=2, shared_experts=0, capacity=0.5)
    whole, dropping = (build(replace(config, capacity=c), device="cpu", seed=2) for c in (None, 0.5))
    programs = build_serving(setting(config, "serve.mesh.tp=2"), [Size(8)])
    logits = lockstep(programs, weights_of(dropping))
    torch.testing.assert_close(logits, expected(whole), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, expected(dropping), rtol=1e-2, atol=1e-2)
    assert programs.notes == ["experts compute all tokens that choose them: `capacity: 0.5` is for training"]


def test_only_rows_with_logits_go_on_after_the_last_attention() -> None:
    program = build_serving(setting(LLAMA, "serve.requests=8"), [Size(32)]).any
    rows = {n.args[1].name: n.meta["tpshard"].specs[0].shape[-2] for n in program.graph.nodes  # type: ignore[union-attr]
            if getattr(n.target, "__name__", "") == "fixed_rows_linear"}  # fmt: skip
    whole = {name for name, count in rows.items() if count == 32}
    assert rows["output_weight_onednn" if "output_weight_onednn" in rows else "output_weight"] == 8
    last = {"layers_1_attention_wo_weight", *(f"layers_1_mlp_{one}_weight" for one in ("gate", "down"))}  # gate and up
    assert last <= rows.keys() - whole
    assert {"layers_0_mlp_down_weight", "layers_1_attention_wq_weight"} <= whole  # q, k and v


def test_the_fingerprint_is_the_recipes_and_not_the_caches() -> None:
    overrides = ("serve.mesh.tp=2", "serve.requests=8", "serve.step_tokens=8")
    first = build_serving(setting(LLAMA, *overrides))
    assert [one["rows"] for one in first.listed] == [1, 2, 4, 8]
    assert build_serving(setting(LLAMA, *overrides, "serve.cache_mb=1")).listed == first.listed
    for other in ("serve.batch_invariant=false", "serve.mesh.tp=4", "sharding.rules.vocab=null"):
        programs = build_serving(setting(LLAMA, *overrides, other)).listed
        assert not {one["fingerprint"] for one in programs} & {one["fingerprint"] for one in first.listed}


def test_the_sizes_of_steps_follow_from_requests_and_device() -> None:
    assert setting(LLAMA).rows == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    assert setting(LLAMA, "serve.requests=100").rows == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    assert setting(LLAMA, kind="gpu").rows == (8, 64, 512, 2048)
    small = setting(LLAMA, "serve.step_tokens=20", "serve.requests=3")
    assert small.rows == (1, 2, 4, 8, 16, 24) and [small.logit_rows(rows) for rows in small.rows] == [1, 2, 4, 8, 8, 8]
    runner = runner_of(build(LLAMA, device="cpu"), "serve.step_tokens=20", "serve.requests=3")
    engine = Engine(runner)
    sizes = []
    logits = runner.logits
    runner.logits = lambda batch: (sizes.append(len(batch.tokens)), logits(batch))[1]  # type: ignore[method-assign,func-returns-value]
    engine.add(Sequence(tuple(range(60)), Sampling(temperature=0), 2))
    while engine.busy:
        engine.step()
    assert sizes == [24, 24, 12, 1]


def test_tp_that_fits_no_heads_is_refused_with_what_fits() -> None:
    with pytest.raises(Mistakes, match=r"tp 3 does not fit 4 heads and 2 KV heads[\s\S]*serve.mesh.tp: 1, 2 or 4\b"):
        setting(LLAMA, "serve.mesh.tp=3")
    with pytest.raises(Mistakes, match="nothing in a server's step is sharded over `dp`"):
        build_serving(setting(LLAMA, "serve.mesh.dp=2"), [Size(8)])


def test_what_it_needs_is_known_before_anything_is_loaded() -> None:
    programs = {tp: build_serving(setting(LLAMA, f"serve.mesh.tp={tp}"), [Size(8)]) for tp in (1, 2)}
    block = 2 * LLAMA.layers * 16 * 2 * 8 * 4
    one, two = (replace(need(programs[tp], 1 << 30), blocks=100) for tp in (1, 2))
    assert programs[1].bytes("parameter") == 4 * LLAMA.count
    assert one.cache_bytes == 101 * block == 2 * two.cache_bytes
    assert not one.collectives and one.as_json()["cache"]["tokens"] == 1600
    choosing = sum(len(one.collectives) for one in programs[2].choosing(8).values())
    assert sum(c["count"] for c in two.collectives) == 2 * LLAMA.layers + 1 + choosing
    assert LLAMA.width * 4 in {c["bytes"] for c in two.collectives if c["kind"] == "all_reduce"}, "of one row"
    assert np.isclose(programs[2].bytes("parameter"), 2 * LLAMA.count, rtol=0.1)
    assert "5 all_reduce over tp" in str(two) and "9 fixed_rows_linear" in str(two)


def test_the_cache_fills_what_is_left() -> None:
    on_cpu = build_serving(setting(LLAMA, "serve.requests=8", "serve.mesh.tp=2"), [Size(8)])
    each, weights = on_cpu.bytes("cache"), on_cpu.bytes("parameter")
    assert each == 2 * LLAMA.layers * 16 * 8 * 4  # one of two KV heads
    assert on_cpu.cache_blocks(4 * 40 * each) == 40  # a quarter
    assert on_cpu.cache_blocks(1) == 16  # 256 tokens at least
    assert on_cpu.cache_blocks(1 << 40) == 8 * 128 // 16  # what the requests need
    on_gpu = build_serving(setting(LLAMA, "serve.requests=8", kind="gpu"), [Size(8)])
    assert on_gpu.cache_blocks(on_gpu.bytes("parameter") + 4 * 20 * 2 * each) == 3 * 20
    programs = build_serving(setting(LLAMA, "serve.cache_mb=1"), [Size(8)])
    assert programs.cache_blocks(1) == 2**20 // programs.bytes("cache") and weights


def test_a_device_holds_its_part_of_an_mlp_that_tp_does_not_divide() -> None:
    def size_of(mlp: int, tp: int) -> Any:
        return build_serving(setting(replace(LLAMA, mlp=mlp), f"serve.mesh.tp={tp}"), [Size(8)])

    uneven, evenly = {tp: size_of(1001, tp) for tp in (1, 2, 4)}, {tp: size_of(1024, tp) for tp in (2, 4)}
    for tp in (2, 4):
        assert uneven[tp].bytes("parameter") == evenly[tp].bytes("parameter")
    assert uneven[4].bytes("parameter") < 0.27 * uneven[1].bytes("parameter")
    assert uneven[4].notes == ["MLP padded from 1,001 to 1,024 columns, equal parts for tp 4"]
    assert not uneven[1].notes and not evenly[4].notes
    assert uneven[4].notes[0] in str(need(uneven[4], 1 << 30))


# ---- what a recipe says of shardings --------------------------------------------------------------------------------
def kinds(*overrides: str, config: ModelConfig = LLAMA) -> dict[str, int]:
    model = build(config, device="cpu", seed=2)
    programs = build_serving(setting(config, *overrides), [Size(8)])
    torch.testing.assert_close(lockstep(programs, weights_of(model)), expected(model), rtol=1e-4, atol=1e-4)
    return dict(Counter(c.kind for c in programs.any.collectives))


def test_rules_and_annotations_decide_as_in_training() -> None:
    tp = "serve.mesh.tp=2"
    assert kinds(tp) == {"all_reduce": 5}
    assert kinds(tp, "sharding.rules.vocab=null") == {"all_reduce": 4}
    assert kinds(tp, "sharding.rules.vocab=null", "sharding.rules.mlp=null") == {"all_reduce": 2}
    # sequence parallelism: sums are scattered over the rows and gathered again
    spread = kinds(tp, "sharding.rules.rows=tp", "sharding.annotate={'layers.*.residual': [batch, rows, embed]}")
    assert spread["reduce_scatter"] >= 3 and spread["all_gather"] >= 4 and spread.get("all_reduce", 0) <= 2
    whole = "sharding.annotate={embedded: [batch, rows, embed], 'layers.*.residual': [batch, rows, embed]}"
    assert kinds(tp, "sharding.rules={seq: tp, rows: tp, vocab: null}", whole)["reduce_scatter"] >= 3
    pinned = build_serving(setting(LLAMA, tp, "sharding.pin={'tok_embed.weight': [null, tp]}"), [Size(8)]).any
    assert pinned.sharding_of("tok_embed.weight") == (None, "tp")


def test_an_axis_of_another_name_is_as_good_as_tp() -> None:
    overrides = (
        "mesh={model: 1, dp: 1, fsdp: 1}",
        "sharding.rules={heads: model, mlp: model}",
        "serve.mesh={model: 2}",
    )
    assert kinds(*overrides) == {"all_reduce": 4}
    experts = replace(LLAMA, family="moe", experts=4, top_k=2, shared_experts=0)
    assert kinds("serve.mesh={ep: 2}", "sharding.rules={expert: ep}", config=experts) == {"all_reduce": 2}


# ---- modules of the user's ------------------------------------------------------------------------------------------
class Mine(nn.Module):
    """A user's model: two gated attention layers without an MLP; `mixed` also mixes tokens outside of attention."""

    def __init__(self, mixed: str = "") -> None:
        super().__init__()
        self.mixed = mixed
        self.table = Embedding(64, 32, dims=("vocab", "embed"), std=0.5)
        self.q = nn.ModuleList(Linear(32, 32, dims=("heads", "embed")) for _ in range(2))
        self.kv = nn.ModuleList(Linear(32, 32, dims=("kv_heads", "embed")) for _ in range(2))
        self.out = nn.ModuleList(Linear(32, 32, dims=("embed", "heads")) for _ in range(2))

    def forward(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        x = self.table(tokens)
        if self.mixed == "mean":
            x = x + x.mean(1, keepdim=True)
        if self.mixed == "place":
            x = x * torch.arange(x.shape[1], device=x.device)[:, None]
        if self.mixed == "softmax":
            x = x + torch.softmax(x @ x.mT, -1) @ x
        for q, kv, out in zip(self.q, self.kv, self.out):
            k, v = (part.unflatten(-1, (2, 8)) for part in kv(x).chunk(2, -1))
            mixed = attention(q(x).unflatten(-1, (4, 8)), k, v, documents)
            x = x + out(name(mixed, "mixed", "batch", "seq", "heads", "head_dim").flatten(-2)) * F.sigmoid(x)
        return F.linear(x, self.table.weight)


def mine(*overrides: str, mixed: str = "") -> ServeSetting:
    spec = ModuleModel(f"{__name__}:Mine", {"mixed": mixed})
    return ServeSetting.of(recipe(*overrides), Served(spec, "fp32"), "cpu")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_module_of_the_users_is_served_like_any_other(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    torch.manual_seed(0)
    model = Mine()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    programs = build_serving(mine(f"serve.mesh.tp={tp}"), [Size(8)])
    torch.testing.assert_close(lockstep(programs, weights_of(model)), expected(model), rtol=1e-4, atol=1e-4)
    assert [p.shape for p in programs.any.inputs if p.kind == "cache"] == [(1, 16, 2, 8)] * 4


@pytest.mark.parametrize("mixed", ["mean", "place", "softmax"])
def test_a_module_whose_tokens_meet_outside_of_attention_is_refused(mixed: str) -> None:
    with pytest.raises(Mistakes, match=r"cannot be served[\s\S]*lets tokens of a step see each other"):
        build_serving(mine(mixed=mixed), [Size(8)])


def test_a_module_that_is_none_is_the_recipes_mistake() -> None:
    served = Served(ModuleModel("there.is:None"), "fp32")
    with pytest.raises(Mistakes, match="No module named 'there'") as raised:
        build_serving(ServeSetting.of(recipe(), served, "cpu"), [Size(8)])
    assert {mistake.exit for mistake in raised.value.diagnostics} == {Exit.RECIPE}
