"""The program of a deep model built from that of a shallow one equals the one built directly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import pytest
from torch import fx
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.depth import Depth
from tpshard.parallelism.partitioning.stretch import stretch_program
from tpshard.parallelism.program import INFO, Program, info
from tpshard.plan import planner
from tpshard.plan.search import search
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.memo import Memo, key
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import few_layers, training
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import loads, with_changes

SMALL = "seq_len: 16, width: 16, heads: 4, kv_heads: 2, mlp: 24, vocab: 32, layers: 6"
LAYERED = "sharding: {annotate: {'layers.*.residual': [batch, seq_sp, embed]}, rules: {seq_sp: tp}}"


def setting(mesh: str, preset: str = "tiny", *more: str, extra: str = "") -> Setting:
    recipe = f"""
name: small
mesh: {mesh}
model: {{preset: {preset}, {SMALL}{extra}}}
batch: {{global_sequences: 8}}
"""
    return Setting.of(loads(recipe + "\n".join(more)))


def shape_of(program: Program) -> list[Any]:
    """Everything in a program that is priced or passed on, with places instead of names."""
    at = {node: i for i, node in enumerate(program.graph.nodes)}
    rows = []
    for node in program.graph.nodes:
        row: list[Any] = [node.op, fx.map_arg((node.args, node.kwargs), lambda n: at[n])]
        if node.op == "call_function":
            facts, comm = info(node), info(node).comm
            row += [str(node.target), facts.specs, facts.place, facts.flops, facts.global_flops, facts.saved]
            if comm is not None:
                named = comm.value if comm.of in ("parameter", "gradient") else ()
                row += [comm.kind, comm.refs, comm.bytes, comm.dtype, comm.of, comm.requested, named]
        rows.append(row)
    return rows


EACH = 7
"""One value of so many is explained, which takes longer than all else: of every layer others."""


def assert_same(actual: Program, whole: Program) -> None:
    """A stretched program is the deep model's, in all that is run, priced, compared or explained."""
    assert shape_of(actual) == shape_of(whole)
    assert actual.donated == whole.donated and actual.inputs == whole.inputs
    assert actual.outputs == whole.outputs and actual.warnings == whole.warnings
    assert [node.meta.get(INFO) for node in actual.nodes] == [node.meta.get(INFO) for node in whole.nodes]
    assert [*actual.records.items()] == [*whole.records.items()]
    assert all(actual.explanation_of(value) == whole.explanation_of(value) for value in [*whole.records][::EACH])


SETTINGS = {
    "one device": setting("{fsdp: 1}"),
    "fsdp": setting("{fsdp: 4}"),
    "replicas": setting("{dp: 2, fsdp: 2}"),
    "tensor parallel": setting("{fsdp: 2, tp: 2}"),
    "sequence parallel": setting("{fsdp: 2, tp: 2}", "tiny", LAYERED),
    "another family": setting("{fsdp: 2, tp: 2}", "granite-20b", extra=", max_seq: 64"),
}


MORE = ("one device", "fsdp", "replicas", "tensor parallel")
"""Settings whose rules the others have too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in MORE else ()) for name in SETTINGS]
)
def test_a_stretched_program_is_the_deep_models_node_by_node(name: str) -> None:
    deep = SETTINGS[name]
    shallow = step_programs.micro_program(deep.keep("layers", range(4)))
    actual = stretch_program(shallow, Depth("layers", deep.layers))
    assert actual is not None
    assert_same(actual, step_programs.micro_program(deep))


@pytest.mark.parametrize(
    ("name", "more", "depth", "mesh"),
    [
        ("gpt2", {"n_layer": 6}, Depth("transformer.h", 6), "{fsdp: 2}"),
        ("gpt_oss", {"num_hidden_layers": 13}, Depth("model.layers", 13, period=2), "{tp: 2}"),
        ("deepseek_v32", {"num_hidden_layers": 7}, Depth("model.layers", 7, head=1), "{fsdp: 2}"),
        pytest.param("gemma3_text", {"num_hidden_layers": 38}, Depth("model.layers", 38, period=6), "{fsdp: 2, tp: 2}",
                     marks=pytest.mark.slow),
        pytest.param("llama4_text", {
            "num_hidden_layers": 14, "no_rope_layers": [1, 0] * 7, "moe_layers": [*range(1, 14, 2)],
        }, Depth("model.layers", 14, period=2), "{fsdp: 2, tp: 2}", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_blocks_of_a_transformers_class_are_repeated(
    name: str, more: dict[str, Any], depth: Depth, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {k: v for k, v in architectures.config_of(name).items() if k != "layer_types"}
    monkeypatch.setitem(architectures.CONFIGS, name, config | more)
    recipe = f"""
name: blocks
mesh: {mesh}
model: {{transformers: "{architectures.folder(tmp_path, name)}", seq_len: 16}}
batch: {{global_sequences: 8}}
"""
    deep = Setting.of(loads(recipe))
    assert deep.depth == depth
    few = few_layers.shallow_program(deep)
    assert few is not None
    actual = stretch_program(few, depth)
    assert actual is not None
    assert_same(actual, step_programs.micro_program(deep))


def test_a_familys_windows_repeat_in_blocks() -> None:
    config = ModelConfig(
        "qwen3", layers=13, width=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=32, max_seq=16, seq_len=16,
        window=4, full_layers=tuple(range(1, 13, 2)),
    )  # fmt: skip
    deep = replace(setting("{fsdp: 2}"), spec=FamilyModel(config))
    assert deep.depth == Depth("layers", 13, period=2)
    few = few_layers.shallow_program(deep)
    assert few is not None and deep.depth is not None
    actual = stretch_program(few, deep.depth)
    assert actual is not None
    assert_same(actual, step_programs.micro_program(deep))


@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_layers_that_are_not_alike_are_not_repeated(layer: int) -> None:
    pinned = f"sharding: {{pin: {{layers.{layer}.mlp.up.weight: [tp, null]}}, rules: {{mlp: []}}}}"
    deep = setting("{fsdp: 2, tp: 2}", "tiny", pinned)
    shallow = step_programs.micro_program(deep.keep("layers", range(4)))
    assert stretch_program(shallow, Depth("layers", deep.layers)) is None
    assert shape_of(few_layers.micro_program(deep)) == shape_of(step_programs.micro_program(deep))


def test_a_program_that_gathers_and_reduces_once_a_step_is_stretched_too() -> None:
    deep = setting("{fsdp: 2, tp: 2}", "tiny", "fsdp: {accumulate: {gather: step, reduce: last}}")
    plain = few_layers.micro_program(deep)
    actual, whole = few_layers.micro_program(deep, plain), step_programs.micro_program(deep, plain)
    assert shape_of(actual) == shape_of(whole) and actual.records == whole.records
    assert all(actual.explanation_of(value) == whole.explanation_of(value) for value in [*whole.records][::EACH])


def test_a_deep_model_warns_of_every_layer() -> None:
    deep = setting("{fsdp: 1, tp: 3}", "tiny", "sharding: {on_uneven: pad}")
    notes = few_layers.micro_program(deep).warnings
    assert notes == step_programs.micro_program(deep).warnings
    assert any("`layers.5." in note for note in notes)


NAMED = {
    "fsdp 64 on A100": ["cluster={device: a100-80g, nodes: 8, devices_per_node: 8}", "mesh={fsdp: 64}"],
    "fsdp 256 on H100": ["cluster={device: h100-sxm-80g, nodes: 32, devices_per_node: 8}", "mesh={fsdp: 256}"],
    "tp 8": ["cluster={device: h100-sxm-80g, nodes: 8, devices_per_node: 8}", "mesh={fsdp: 8, tp: 8}", "remat=full"],
}


@pytest.mark.parametrize(
    ("name", "layers"),
    [("tp 8", 6), *(pytest.param(name, 80, marks=pytest.mark.slow) for name in NAMED)],
)
def test_a_variant_costs_what_its_plan_says(name: str, layers: int) -> None:
    recipe = loads(
        "name: named\nmodel: {preset: llama3-70b, seq_len: 8192}\nbatch: {global_sequences: 256, per_device: 1}\n"
        "remat: full\n",
        [*NAMED[name], f"model.layers={layers}"],
    )
    variants = Variants()
    for changes in ([], ["remat=selective", "fsdp.prefetch=2"]):
        changed = with_changes(recipe, changes)
        actual = search.price_variant(changed, variants=variants)
        plan = planner.price_training(planner.build_programs(Setting.of(changed, devices_of(changed))))
        assert (actual.needed_bytes, actual.step_s, actual.exposed_s) == (
            plan.needed_bytes,
            plan.step_s,
            plan.exposed_s,
        )


@pytest.mark.parametrize(
    "pipeline",
    [pytest.param("{schedule: 1f1b}", marks=pytest.mark.slow), "{schedule: zero_bubble, split: [2, 3, 3, 1]}"],
)  # fmt: skip
def test_a_pipeline_of_alike_stages_has_the_price_of_its_whole_programs(pipeline: str) -> None:
    once = "fsdp: {accumulate: {gather: step, reduce: last}}" if "split" in pipeline else ""
    deep = setting("{pp: 4, fsdp: 2}", "tiny", f"pipeline: {pipeline}", "compile: eager", once)
    changes = [f"model.layers={9 if once else 8}", "batch.global_sequences=16", "batch.per_device=1"]
    deep = Setting.of(loads(deep.recipe.to_yaml(), [*changes, "model.tie_embeddings=true"]))
    assert_priced_as_whole(deep)


def test_a_pipeline_of_layers_with_biases_has_the_price_of_its_whole_programs() -> None:
    once = "fsdp: {accumulate: {gather: step, reduce: last}}"
    extra = ", max_seq: 64, attention_bias: true, mlp_bias: true"
    deep = setting("{pp: 2, dp: 2, fsdp: 1, tp: 2}", "granite-20b", "pipeline: {schedule: 1f1b}", once, extra=extra)
    assert_priced_as_whole(Setting.of(loads(deep.recipe.to_yaml(), ["model.layers=12", "batch.per_device=1"])))


def assert_priced_as_whole(deep: Setting) -> None:
    alike_ = few_layers.priced_stages(deep)
    assert alike_ is not None
    quick = planner.price_training(alike_)
    whole = planner.price_training(training.build(deep))
    assert quick.step_s == pytest.approx(whole.step_s, rel=1e-9) and quick.needed_bytes == whole.needed_bytes
    assert (quick.local_flops, quick.useful_flops) == (whole.local_flops, whole.useful_flops)
    assert quick.pipeline is not None and whole.pipeline is not None
    assert [s.layers for s in quick.pipeline.stages] == [s.layers for s in whole.pipeline.stages]


def test_stages_of_a_transformers_class_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures.CONFIGS, "gpt2", architectures.config_of("gpt2") | {"n_layer": 8})
    recipe = f"""
name: stages
mesh: {{pp: 4, fsdp: 2}}
model: {{transformers: "{architectures.folder(tmp_path, "gpt2")}", seq_len: 16}}
batch: {{global_sequences: 16, per_device: 1}}
pipeline: {{schedule: 1f1b}}
compile: eager
"""
    assert_priced_as_whole(Setting.of(loads(recipe)))


@pytest.mark.parametrize("more", ["remat: {every: 3}", 'fsdp: {wrap: ["layers.1", "layers.*"]}'])
def test_stages_whose_layers_a_recipe_treats_apart_are_not_alike(more: str) -> None:
    deep = setting("{pp: 4, fsdp: 2}", "tiny", "pipeline: {schedule: 1f1b}", "compile: eager", more)
    assert few_layers.priced_stages(deep) is None


@pytest.mark.parametrize(
    ("layers", "pipeline", "more", "shared"),
    [
        (7, "{schedule: 1f1b, split: [1, 1, 1, 1, 1, 2]}", "", 3),
        (6, "{schedule: zero_bubble}", "optimizer: {name: muon}", 3),
        (6, "{schedule: 1f1b}", "fsdp: {accumulate: {gather: step, reduce: last}}", 3),
        (6, "{schedule: 1f1b}", "fsdp: {wrap: [layers.3, 'layers.*']}", 0),
        (6, "{schedule: 1f1b}", "sharding: {annotate: {'layers.5.residual': [batch, null, embed]}}", 0),
    ],
)  # fmt: skip
def test_devices_with_alike_layers_have_one_s_programs_with_other_numbers(
    layers: int, pipeline: str, more: str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = few_layers.device_programs

    def counted(*args: Any) -> Any:
        made.append(args[4])
        return plain(*args)

    of = setting("{pp: 6, fsdp: 2}", "tiny", more, f"pipeline: {pipeline}")
    deep = Setting.of(with_changes(of.recipe, [f"model.layers={layers}", "batch.global_sequences=24"]))
    monkeypatch.setattr(few_layers, "device_programs", counted)
    actual = training.build(deep).fingerprints
    assert len(made) == 6 - shared
    if not shared:
        return
    monkeypatch.setattr(few_layers, "_distance", lambda *_: None)
    assert training.build(deep).fingerprints == actual


def test_settings_that_share_a_captured_graph_get_their_own_programs() -> None:
    """A graph serves every mesh with as many rows, and building from it changes nothing in it."""
    memo, keys, actual = Memo(), set(), []
    for mesh in ("{fsdp: 4}", "{fsdp: 2, tp: 2}", "{fsdp: 4}"):
        rows = f"batch.per_device={2 if 'tp' in mesh else 1}"
        one = Setting.of(loads(setting(mesh).recipe.to_yaml(), ["model.layers=2", rows]))
        keys.add(key(one, "graph of a micro-batch"))
        programs = training.build(one, memo=memo)
        actual.append((one, programs.micro.fingerprint, programs.update.fingerprint))
    assert len(keys) == 1
    for one, micro, update in actual[:2]:
        alone = training.build(one)
        assert (micro, update) == (alone.micro.fingerprint, alone.update.fingerprint)
    assert actual[0][1:] == actual[-1][1:] and actual[0][1:] != actual[1][1:]
