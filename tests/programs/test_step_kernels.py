"""Each pass that chooses kernels keeps all values, and replaces only the operations it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import torch.nn.functional as F
import transformers
from servers import folder_runner, lockstep, prompts, recipe, setting, weights_of
from torch import Tensor, fx
from tpshard.kernels.linear import packed_dtype
from tpshard.kernels.norm import NORM
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.packed import Packed, pack, unpack
from tpshard.kernels.quantized.quantized import Quantized, concatenate, group_index
from tpshard.kernels.quantized.quantized_linear import quantized_gate, quantized_linear
from tpshard.models import build
from tpshard.models.families.config import ModelConfig
from tpshard.models.families.layers import RMSNorm
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.passes.run import Pass
from tpshard.parallelism.program import Program, info
from tpshard.programs.server import serving, step_kernels
from tpshard.programs.server.act_order import Arrangement
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import Coded, model_to_serve
from tpshard.programs.server.serving import build_serving
from tpshard.programs.server.step_kernels import fold_linears, fuse_norms, merge_views, store_norms_in_order

LLAMA = ModelConfig(
    family="llama", layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=64, max_seq=128, seq_len=64,
    dtype="fp32", tie_embeddings=True,
)  # fmt: skip
CASES = {"llama": LLAMA, "granite": replace(LLAMA, family="granite", attention_bias=True, mlp_bias=True)}


def names(program: Program) -> Counter[str]:
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return Counter(str(getattr(node.target, "__name__", node.target)) for node in calls)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", CASES)
def test_every_pass_of_a_server_keeps_the_values(family: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, every = CASES[family], serving.passes
    model = build(config, device="cpu", seed=2)
    of = setting(config, f"serve.mesh.tp={tp}")
    count = len(every(of, Arrangement(), Size(8)))
    results, calls = [], []
    for n in range(count + 1):
        monkeypatch.setattr(serving, "passes", lambda *args, n=n: every(*args)[:n])
        programs = build_serving(of, [Size(8)])
        results.append(lockstep(programs, weights_of(model)))
        calls.append(sum(n for name, n in names(programs.any).items() if name != "slice.Tensor"))  # views of products
        for node in programs.any.graph.nodes:  # every node says what it makes
            assert node.op in ("output",) or info(node).specs or "offset" in node.name
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
    assert calls == sorted(calls, reverse=True) and calls[-1] < 0.7 * calls[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_gpus_step_has_fewer_kernels_of_the_same_bits(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LLAMA
    model, of = build(config, device="cpu", seed=2), setting(config, f"serve.mesh.tp={tp}", kind="gpu")
    fewer = build_serving(of, [Size(8)])
    assert names(fewer.any)["rotate.default"] == config.layers
    # the sum before a layer's second norm, and that before the next layer's first or the last norm
    assert names(fewer.any)["add_rms_norm.default"] == 2 * config.layers
    monkeypatch.setattr(serving, "FEWER", ())
    plain = build_serving(of, [Size(8)])
    sums = [names(programs.any)["add.Tensor"] + names(programs.any)["mul.Tensor"] for programs in (plain, fewer)]
    assert sums[0] - sums[1] == 8 * config.layers, "four products and four sums of each layer"
    assert torch.equal(*(lockstep(programs, weights_of(model)) for programs in (fewer, plain)))


@pytest.mark.parametrize(("name", "norms", "rotated"), [("llama", 5, 2), ("qwen3", 9, 2), ("olmo2", 9, 2)])
def test_what_transformers_writes_becomes_the_same_kernels(
    name: str, norms: int, rotated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms with the weight first, and halves that are put together with a sign."""
    folder = architectures.folder(tmp_path, name, weights=True)
    written = recipe(f"model={{transformers: {folder}, seq_len: 64}}", "serve.dtype=fp32")
    of = ServeSetting.of(written, model_to_serve(written, "gpu"), "gpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights, results = weights_of(theirs), []
    for fewer in (serving.FEWER, ()):
        monkeypatch.setattr(serving, "FEWER", fewer)
        programs = build_serving(of, [Size(8)])
        found = names(programs.any)
        assert found["rms_norm_permuted.default"] + found["add_rms_norm.default"] == norms
        assert found["rotate.default"] == (rotated if fewer else 0)
        results.append(lockstep(programs, weights))
    assert torch.equal(*results)
    expected = folder_runner(folder, "serve.dtype=fp32").logits(prompts())
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-4)


def test_a_weight_that_others_read_too_is_held_twice() -> None:
    """A tied table is looked up unpacked and multiplied packed."""
    program = build_serving(setting(LLAMA), [Size(8)]).any
    table, packed = (next(p for p in program.inputs if p.name == name) for name in
                     ("tok_embed.weight", "tok_embed.weight (onednn)"))  # fmt: skip
    assert table.held is None and packed.held is not None and packed.held.of == ("tok_embed.weight",)


def test_what_a_cpu_multiplies_side_by_side_is_packed_as_its_library_packs() -> None:
    program = build_serving(setting(LLAMA), [Size(8)]).any
    held = {port.held.of: port.held.form for port in program.inputs if port.held is not None and len(port.held.of) > 1}
    form = "dense" if packed_dtype(torch.float32) is None else "onednn"
    sides = (("attention.wq", "attention.wk", "attention.wv"), ("mlp.gate", "mlp.up"))
    layers = [f"layers.{i}" for i in range(LLAMA.layers)]
    assert held == {tuple(f"{layer}.{one}.weight" for one in side): form for layer in layers for side in sides}


# ---- norms ----------------------------------------------------------------------------------------------------------
def root(x: Tensor, eps: float | Tensor = 0.25, dim: int = -1) -> Tensor:
    return torch.rsqrt((x * x).mean(dim, keepdim=True) + eps)


def models_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 0.25)
    return unit.to(x.dtype) * w


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": models_norm,
    "norm, its root used again": lambda x, w: x * root(x) * w + root(x),
    "norm, its weight first": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.25)),
}
LIKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by weights of its own for each row": lambda x, w: x * root(x) * (x + w),
    "over rows": lambda x, w: x * root(x, dim=1) * w,
    "a tensor as eps": lambda x, w: x * root(x, w[:1].abs()) * w,
    "eps twice": lambda x, w: x * torch.rsqrt(torch.add((x * x).mean(-1, keepdim=True), 0.25, alpha=2)) * w,
    "a number as weight": lambda x, _: x * root(x) * 2.0,
    "widened and shifted": lambda x, w: (lambda v: (v * root(v)).bfloat16() * w.bfloat16())(x.double() + 3),
    "widened later": lambda x, w: (x * root(x)).double() * w.double(),
}


def on_one(run: Callable[..., Tensor], *args: Tensor) -> Program:
    return partition(run, args, Mesh({}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*NORMS, *LIKES])
def test_norms_are_told_from_their_likes(name: str, dtype: torch.dtype) -> None:
    run = (NORMS | LIKES)[name]
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 8, 64, generator=generator).to(dtype), torch.randn(64, generator=generator).to(dtype)
    fused = fuse_norms(on_one(run, x, w))
    counted = names(fused)["rms_norm_permuted.default"]
    if dtype == torch.float32 or name in ("norm", *LIKES):
        assert counted == (name in NORMS)
    (y,), expected = fused.simulate(x, w), run(x, w)
    assert y.dtype == expected.dtype
    close = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(y, expected, rtol=close, atol=close)


def test_the_models_norm_is_one_of_them() -> None:
    norm = RMSNorm(64, 0.25)
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(1, 8, 64)
    program = partition(lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), (x, norm.weight), Mesh({}))
    fused = fuse_norms(program)
    assert names(fused) == {"rms_norm_permuted.default": 1}
    torch.testing.assert_close(fused.simulate(x, norm.weight.detach())[0], norm(x).detach())


@pytest.mark.parametrize(
    ("blocks", "also", "folded"), [(1, lambda y: 0, True), (2, lambda y: 0, False), (1, lambda y: y.sum(), False)]
)
def test_a_norm_stores_in_the_one_order_in_which_it_is_read(
    blocks: int, also: Callable[[Tensor], Tensor | int], folded: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 8, 64, generator=generator), torch.randn(64, generator=generator)
    order = torch.randperm(64 // blocks, generator=generator).repeat(blocks)

    def run(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
        y = x * root(x) * w
        return torch.ops.tpshard.reorder(y, order, blocks) + also(y)

    stored = store_norms_in_order(fuse_norms(on_one(run, x, w, order)))
    assert ("reorder.default" in names(stored)) == (not folded) and names(stored)["rms_norm_permuted.default"] == 1
    torch.testing.assert_close(stored.simulate(x, w, order)[0], run(x, w, order), rtol=1e-5, atol=1e-5)
    (norm,) = (node for node in stored.graph.nodes if node.target is NORM)
    assert (norm.args[2] is not None) == folded


# ---- linears --------------------------------------------------------------------------------------------------------
def test_linears_of_any_dims_are_one_node_with_the_products_flops() -> None:
    def run(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w, b)
        return F.linear(y.unflatten(-1, (2, 3)).flatten(-2), v), y.view(4, 6).sum(0)

    inputs = torch.randn(2, 2, 5), torch.randn(6, 5), torch.randn(6), torch.randn(7, 6)
    program = on_one(run, *inputs)  # type: ignore[arg-type]
    folded = merge_views(fold_linears(program))
    assert names(folded)["linear"] == 2 and names(folded)["mm.default"] == names(folded)["permute.default"] == 0
    assert names(folded)["reshape.default"] < names(program)["reshape.default"]
    flops = [sum(info(node).flops for node in p.graph.nodes) for p in (program, folded)]
    assert flops[0] == flops[1] > 0
    for actual, expected in zip(folded.simulate(*inputs), run(*inputs)):
        torch.testing.assert_close(actual, expected)


def test_only_useful_work_is_counted_where_a_model_was_made_wider() -> None:
    program = on_one(lambda x, w: F.linear(x, w), torch.randn(4, 8), torch.randn(6, 8))
    (node,) = (node for node in program.graph.nodes if info(node).flops)
    counted = step_kernels.count_useful(program, {info(node).origin: 7})
    (after,) = (n for n in counted.graph.nodes if info(n).flops)
    assert (info(after).flops, info(after).global_flops) == (info(node).flops, 7)
    assert info(node).global_flops == info(node).flops  # a pass leaves what it was given as it was


# ---- gates on a GPU -------------------------------------------------------------------------------------------------
class Reference(fx.Interpreter):
    """A stand-in for the GPU kernels: products with packed weights in plain torch."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in (quantized_linear, quantized_gate):
            return super().call_function(target, args, kwargs)
        x, weight, _ = args
        y = x @ unpack(weight).dequantize(x.dtype)
        if target is quantized_linear:
            return y
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up


def quantize(inputs: int, outputs: int, seed: int) -> Quantized:
    g = torch.Generator().manual_seed(seed)
    group = group_index(inputs, 32)
    codes = torch.randint(0, 16, (inputs, outputs), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (inputs // 32, outputs), generator=g, dtype=torch.uint8)
    return Quantized(codes, (torch.rand(inputs // 32, outputs, generator=g) * 0.02).half(), zeros, group, 4)


def passes(weights: Mapping[str, Coded], invariant: bool) -> list[Pass]:
    quantizing = partial(step_kernels.quantize, weights=weights, kind="gpu", invariant=invariant)
    joins = [partial(join, weights=weights) for join in step_kernels.JOINS]
    return [fold_linears, merge_views, quantizing, *joins]


SHAPES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "whole": (lambda x, o, a, b, c: F.silu(x @ a.T) * (x @ b.T), 1, 0),
    "the other way round": (lambda x, o, a, b, c: (x @ b.T) * F.silu(x @ a.T), 1, 0),
    "other rows": (lambda x, o, a, b, c: F.silu(x @ a.T) * (o @ b.T), 0, 2),
    "a bias": (lambda x, o, a, b, c: F.silu(F.linear(x, a, c)) * (x @ b.T), 0, 1),
    "read elsewhere": (lambda x, o, a, b, c: (F.silu(x @ a.T) * (x @ b.T), (x @ a.T).sum(0)), 0, 3),
    "one product": (lambda x, o, a, b, c: (lambda y: F.silu(y) * y)(x @ a.T), 0, 1),
    "no gate": (lambda x, o, a, b, c: (x @ b.T, (x @ a.T) + c), 0, 1),
    "a matrix of two values": (lambda x, o, a, b, c: (x @ b.T, x @ a.T, o @ b.T), 0, 3),
}


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gate_and_what_it_lets_through_are_one_launch(shape: str, invariant: bool) -> None:
    run, joined, products = SHAPES[shape]
    x, other, bias = torch.randn(3, 64), torch.randn(3, 64), torch.randn(32)
    held = {"gate": quantize(64, 32, 1), "up": quantize(64, 32, 2)}
    inputs = [x, other, *(w.dequantize(torch.float32).T.contiguous() for w in held.values()), bias]
    program = partition(run, inputs, Mesh({}), names=["x", "other", "gate", "up", "bias"])
    coded = Coded(GPTQConfig(group_size=32, sym=False), "gpu", False, "")
    for one in passes(dict.fromkeys(held, coded), invariant):
        program = one(program)
    calls = [node for node in program.graph.nodes if node.target is quantized_gate]
    assert len(calls) == joined and all(node.args[-1] is invariant for node in calls)
    assert names(program)["quantized_linear"] == products
    arguments: list[Any] = []
    for port in program.inputs:
        if port.held is None:
            arguments.append(dict(zip(("x", "other", "gate", "up", "bias"), inputs))[port.name])
            continue
        weight = pack(concatenate([held[name] for name in port.held.of]))
        assert isinstance(weight, Packed) and port.local_bytes == weight.nbytes
        arguments.append(weight)
    done = Reference(fx.GraphModule({}, program.graph)).run(*arguments)
    expected = run(*inputs)
    for y, reference in zip(done, expected if isinstance(expected, tuple) else (expected,)):
        torch.testing.assert_close(y, reference, rtol=1e-4, atol=1e-4)


def test_products_with_biases_are_one_product_and_one_addition() -> None:
    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, a, b).unflatten(-1, (-1, 8)) for a, b in zip(weights[:3], weights[3:]))

    sizes = (32, 16, 16)
    inputs = [torch.randn(1, 3, 64), *(torch.randn(n, 64) for n in sizes), *(torch.randn(n) for n in sizes)]
    values = {f"v{i}": x for i, x in enumerate(inputs)}
    program = partition(run, inputs, Mesh({}), names=list(values))
    joined = step_kernels.join_products(merge_views(fold_linears(program)), {})
    assert names(joined)["linear"] == names(joined)["add.Tensor"] == 1
    held = [values[p.name] if p.held is None else torch.cat([values[n] for n in p.held.of]) for p in joined.inputs]
    for actual, expected in zip(fx.Interpreter(fx.GraphModule({}, joined.graph)).run(*held), run(*inputs)):
        torch.testing.assert_close(actual, expected)


def test_weights_in_other_groups_are_not_put_side_by_side() -> None:
    inputs = [torch.randn(3, 64), torch.randn(32, 64), torch.randn(32, 64)]
    program = partition(lambda x, a, b: F.silu(x @ a.T) * (x @ b.T), inputs, Mesh({}), names=["x", "gate", "up"])
    orders = {"gate": "a", "up": ""}
    weights = {name: Coded(GPTQConfig(group_size=32), "gpu", False, order) for name, order in orders.items()}
    for one in passes(weights, True):
        program = one(program)
    assert names(program)["quantized_linear"] == 2 and not names(program)["quantized_gate"]
