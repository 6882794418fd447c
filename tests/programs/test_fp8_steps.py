"""Training with fp8 products: meshes and policies differ by rounding alone, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.kernels.fp8 import fp8
from tpshard.models.families.presets import preset
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.program import info
from tpshard.parallelism.rules import fp8_rule
from tpshard.plan.planner import planned_training, report
from tpshard.programs.compare.equality import compare, first_difference
from tpshard.programs.fit.fit import misfits
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.setting.cluster import device_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

RECIPE = """
cluster: {device: cpu}
model: {preset: tiny, dtype: fp8, layers: 1, width: 128, heads: 4, kv_heads: 4, head_dim: 64, mlp: 256, vocab: 64,
        seq_len: 128}
batch: {global_sequences: 2}
compile: eager
"""
EXACT = "fsdp.param_dtype=fp32"
"""With this, all but the rounding to fp8 is computed in float64."""


def setting_of(*overrides: str, **mesh: int) -> Setting:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    return Setting.of(loads(RECIPE + f"mesh: {{{sizes}}}\n", overrides))


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ({"fsdp": 2, "tp": 2}, ("remat=full",)),
        pytest.param({"tp": 2}, (), marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, ("remat=none",), marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tp": 2}, ("remat=[fp8_multiply]",), marks=pytest.mark.slow),
    ],
)
def test_meshes_round_the_same_blocks(mesh: dict[str, int], overrides: tuple[str, ...]) -> None:
    compared = compare(setting_of(EXACT, *overrides, **mesh), setting_of(EXACT), steps=1)
    assert compared.equal and compared.largest.apart > 0


def test_each_linear_layer_has_three_products_of_two_rounded_operands_and_all_else_is_bf16() -> None:
    setting = setting_of("cluster.device=h200-x4", fsdp=2, tp=2)
    programs = training.build(setting)
    nodes = [node for node in programs.micro.graph.nodes if node.op == "call_function"]
    kinds = [str(node.target) for node in nodes]
    assert kinds.count("tpshard.fp8_multiply.default") == 3 * 7
    read_again = 2 * (2 + 1)  # in both passes `wk` and `wv` read what `wq` does, and `up` what `gate` does
    assert kinds.count("tpshard.fp8_quantize.default") == 2 * 3 * 7 - read_again
    assert {info(node).module for node in nodes if str(node.target) == "aten.mm.default"} == {"output"}
    assert setting.param_dtype == torch.bfloat16
    report = planned_training(programs).report
    assert report.provenance["time"] == "roofline" and "fp8" in report.unfitted_constants["time"]


def test_scales_of_another_block_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault gives the rows of one of two devices the scale of their first block alone."""
    plain = fp8.multiply

    def faulty(a: torch.Tensor, a_scales: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain(a, a_scales[:1].expand_as(a_scales), *rest)

    original = fp8_rule._local

    def local(at: Any, of: Any) -> Any:
        node = original(at, of)
        source = node if "fp8_multiply" in str(node.target) else node.args[0]
        if at.op.module.endswith("mlp.down") and at.op.phase == "forward" and at.emitter.mesh.ranks > 1:
            source.target = torch.ops.tpshard.fp8_faulty.default
        return node

    library = torch.library.Library("tpshard", "FRAGMENT")
    library.define("fp8_faulty(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, ScalarType dtype) -> Tensor")
    library.impl("fp8_faulty", faulty, "CPU")
    monkeypatch.setattr(fp8_rule, "_local", local)
    one, other = setting_of(EXACT, fsdp=2), setting_of(EXACT)
    first = first_difference(one, other)
    assert first is not None and (first.module, first.phase) == ("layers.0.mlp.down", "forward")


def refusal(*overrides: str, **mesh: int) -> str:
    recipe = loads(RECIPE + f"mesh: {{{', '.join(f'{a}: {n}' for a, n in mesh.items())}}}\n", overrides)
    config = preset(recipe.model.preset, recipe.model.overrides()) if recipe.model.preset else None
    errors = [d for d in misfits(recipe, FamilyModel(config)) if d.severity == "error"]
    assert errors and all(d.exit is Exit.FIT and d.where is not None and d.where.line and d.fix for d in errors)
    return errors[0].message


def test_what_does_not_fit_is_refused_with_its_place() -> None:
    assert refusal("model.mlp=300") == "fp8 products need 300 mlp of `mlp.gate` to be a multiple of 128"
    assert refusal("model.seq_len=96") == "fp8 products need sequences of 96 tokens to be a multiple of 128"
    assert refusal(tp=4) == "`mesh.tp: 4` cuts the fp8 blocks of 256 heads of `attention.wq`"
    assert "does not suit" in refusal("pipeline={form: vectorized, schedule: gpipe}", "model.layers=2", pp=2)
    assert "dense families" in refusal("model={preset: tiny-moe, dtype: fp8}")
    assert "dense families" in refusal("model={module: tpshard.models.unet:UNet, dtype: fp8}")


def test_devices_and_servers_without_fp8_say_so() -> None:
    with pytest.raises(Mistakes, match="a100-80g cannot multiply fp8") as refused:
        training.build(Setting.of(loads(RECIPE, ["cluster.device=a100-80g"])))
    assert "h100-sxm-80g" in str(refused.value.diagnostics[0].fix)
    assert device_of(loads(RECIPE, ["cluster.device=h200"]))[0].rate("float8_e4m3fn") > 1.9e15
    with pytest.raises(Mistakes, match="a server does not multiply in fp8"):
        model_to_serve(loads(RECIPE), "gpu")
    served_in_bf16 = loads(RECIPE, ["cluster.device=a100-80g", "serve.dtype=bf16"])
    assert model_to_serve(served_in_bf16, "gpu").dtype == "bf16"
    assert report(served_in_bf16, "", "decode").fits
