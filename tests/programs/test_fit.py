"""A recipe that does not fit its model or mesh is refused with the sizes that would fit, before anything is built."""

from __future__ import annotations

import dataclasses

import pytest
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.models.families.config import DTYPES, ModelConfig
from tpshard.models.families.presets import PRESETS
from tpshard.models.family_model import FamilyModel
from tpshard.programs.fit.fit import misfits
from tpshard.recipes.keys.mesh_sizes import nearest_meshes
from tpshard.recipes.reading.load import loads


def errors(text: str, name: str = "tiny", **overrides: object) -> list[Diagnostic]:
    recipe = loads(f"model: {{preset: {name}}}\n{text}", file="r.yaml")
    return [d for d in misfits(recipe, FamilyModel.of_preset(name, overrides)) if d.severity == "error"]


def law(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(Mistakes) as caught:
        loads(f"model: {{preset: tiny}}\n{text}", file="r.yaml")
    return caught.value.diagnostics


def lines(d: Diagnostic) -> list[int]:
    assert d.where is not None
    return [d.where.line, *(source.line for source, _ in d.also)]


def test_tp_that_does_not_divide_names_the_sizes_that_do() -> None:
    (heads, mlp) = errors("mesh: {fsdp: 4, tp: 3}", "llama3-8b")  # 128,256 rows of the vocabulary are a multiple of 3
    assert "`mesh.tp: 3`" in heads.message
    assert (heads.exit, heads.why) == (Exit.FIT, "32 heads, 8 KV heads")
    assert str(heads.where) == "r.yaml:2:21"
    assert "14,336 columns of the MLP" in mlp.message
    assert heads.fix == mlp.fix == "tp 1, 2, 4, 8 or 16; or sharding.on_uneven: pad"


def test_padding_allows_any_size() -> None:
    assert errors("mesh: {tp: 3}\nsharding: {on_uneven: pad}") == []
    assert errors("mesh: {fsdp: 3}\nsharding: {on_uneven: pad}") == []


def test_sizes_offered_fit() -> None:
    text = "cluster: {device: h100-sxm-80g, nodes: 3, devices_per_node: 8}\nmesh: {fsdp: -1, tp: 6}"
    mistakes = errors(text, "llama3-8b")[0]
    assert mistakes.fix == "tp 1, 2, 4 or 8; or sharding.on_uneven: pad"
    for tp in (1, 2, 4, 8):
        text = f"cluster: {{device: h100-sxm-80g, nodes: 3, devices_per_node: 8}}\nmesh: {{fsdp: -1, tp: {tp}}}\n"
        assert errors(text + "batch: {global_sequences: 96}", "llama3-8b") == []


def test_kv_heads_may_be_fewer_than_tp_and_it_is_said() -> None:
    recipe = loads("model: {preset: llama3-8b}\nmesh: {tp: 16}")
    (note,) = misfits(recipe, FamilyModel.of_preset("llama3-8b"))
    assert (note.severity, note.message) == ("warning", "each of the 8 KV heads is replicated on 2 devices")
    assert "12 heads" in errors("mesh: {tp: 6}", heads=12, kv_heads=4, vocab=2052)[0].message


def test_two_axes_on_one_dim_must_divide_it_together() -> None:
    text = "mesh: {dp: 2, tp: 3}\nsharding: {rules: {mlp: [dp, tp]}}"
    assert errors(text) == []
    (actual,) = errors(text, mlp=386)
    assert actual.exit == Exit.FIT
    assert "dp 2 x tp 3 do not divide the 386 columns of the MLP" in actual.message
    assert lines(actual) == [2, 3]


def test_pins_and_annotations_are_divided_too() -> None:
    assert "heads" in errors('mesh: {tp: 16}\nsharding: {rules: {}, pin: {"layers.*.attention.wq.weight": [tp, null]}}',
                             kv_heads=1)[0].message  # fmt: skip
    recipe = loads(
        "model: {preset: tiny, seq_len: 255}\nmesh: {tp: 2}\n"
        'sharding: {rules: {seq_sp: tp}, annotate: {"layers.*.residual": [batch, seq_sp, embed]}}'
    )
    (actual,) = misfits(recipe, FamilyModel.of_preset("tiny"))
    assert "255 tokens of a sequence" in actual.message


def test_patterns_that_match_nothing_are_told_with_a_suggestion() -> None:
    text = (
        "mesh: {tp: 2}\nsharding:\n  annotate:\n    layers.*.residul: [batch, seq, embed]\n"
        "  pin:\n    tok_embd.weight: [tp, null]\nfsdp: {wrap: [layer.*, [norm]]}"
    )
    mistakes = errors(text)
    assert [(d.where.line, d.fix) for d in mistakes if d.where] == [  # type: ignore[union-attr]
        (5, "did you mean `layers.*.residual`?"),
        (7, "did you mean `tok_embed.weight`?"),
        (8, "did you mean `layers.*`?"),
    ]
    assert {d.exit for d in mistakes} == {Exit.RECIPE}


def test_the_default_units_may_speak_of_what_a_tied_model_lacks() -> None:
    assert errors("", "llama3-1b") == []
    assert errors("fsdp: {wrap: [layers.*, [norm, output]]}", "llama3-1b") == []


def test_a_pin_of_another_rank_shows_the_dims() -> None:
    (actual,) = errors("mesh: {tp: 2}\nsharding: {pin: {tok_embed.weight: [tp]}}")
    assert (actual.exit, actual.why) == (Exit.RECIPE, "its dims are [vocab, embed]")


def test_rules_that_cut_a_tensor_twice_over_an_axis_show_both_lines() -> None:
    mistakes = errors("mesh: {tp: 2}\nsharding:\n  rules:\n    heads: tp\n    embed: tp")
    twice = [d for d in mistakes if "twice" in d.message]
    assert twice and all(lines(d) in ([6, 5], [5, 6]) for d in twice)
    assert {d.exit for d in twice} == {Exit.RECIPE}


def test_an_annotation_that_cuts_twice_shows_the_rules() -> None:
    (actual,) = law(
        "mesh: {tp: 2}\nsharding:\n  rules:\n    heads: tp\n    seq_sp: tp\n"
        "  annotate:\n    layers.*.attention.q: [batch, seq_sp, heads, head_dim]"
    )
    assert lines(actual) == [8, 6, 5]
    (pinned,) = law("mesh: {tp: 2}\nsharding: {pin: {tok_embed.weight: [tp, tp]}}")
    assert "twice" in pinned.message
    (ruled,) = law("mesh: {tp: 2}\nsharding: {rules: {heads: [tp, tp]}}")
    assert "twice" in ruled.message


def test_unknown_axes_show_the_mesh() -> None:
    rule, pin, axis = sorted(
        law(
            "mesh: {fsdp: 2, tp: 2}\nsharding:\n  rules: {heads: tpp}\n"
            "  pin: {tok_embed.weight: [x, null]}\nfsdp: {axis: fsd}"
        ),
        key=lines,
    )
    assert (rule.fix, lines(rule)) == ("did you mean `tp`?", [4, 2])
    assert lines(pin) == [5, 2]
    assert axis.fix == "did you mean `fsdp`?"


def test_an_axis_that_nothing_uses_is_told() -> None:
    (actual,) = law("mesh: {fsdp: 2, pp: 2}")
    assert (actual.message, lines(actual)) == ("nothing uses the mesh axis `pp`", [2])
    assert law("mesh: {tp: 2}\nsharding: {rules: {batch: [dp, fsdp]}}")[0].message.endswith("`tp`")
    idle = loads("model: {preset: tiny}\nmesh: {fsdp: 2, pp: 1, ep: 1, spatial: 1, x: 1}")  # wastes no device
    assert idle.mesh["ep"] == 1
    assert loads("model: {preset: tiny}\nmesh: {x: 2, tp: 2}\nsharding: {pin: {tok_embed.weight: [x, null]}, "
                 "rules: {heads: tp}}").mesh["x"] == 2  # fmt: skip


def test_a_rule_or_annotation_for_a_dim_that_does_not_exist_is_told() -> None:
    (actual,) = law("mesh: {tp: 2}\nsharding: {rules: {haeds: tp}}")
    assert actual.fix == "did you mean `heads`?"
    (actual,) = law("mesh: {tp: 2}\nsharding: {rules: {heads: tp}, annotate: {layers.*.residual: [batch, sq, embed]}}")
    assert actual.fix == "did you mean `seq`?"
    (actual,) = law("mesh: {tp: 2}\nsharding: {rules: {heads: tp}, priority: {haeds: 1}}")
    assert actual.fix == "did you mean `heads`?" and "a priority but no rule" in actual.message
    assert loads("model: {module: 'a:B'}\nsharding: {rules: {channels: tp}}").sharding.rules == {"channels": ("tp",)}


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [
        ("{fsdp: 4, tp: 3}", "mesh: {fsdp: 4, tp: 4}"),
        ("{fsdp: -1, tp: 3}", "mesh: {fsdp: -1, tp: 4}"),
        ("{dp: 3, fsdp: 4, tp: 2}", "mesh: {dp: 2, fsdp: 4, tp: 2}"),
    ],
)
def test_a_mesh_that_is_not_the_cluster_names_the_nearest(mesh: str, fix: str) -> None:
    (actual,) = law(f"cluster: {{device: h100-sxm-80g, nodes: 2, devices_per_node: 8}}\nmesh: {mesh}")
    assert actual.exit == Exit.MACHINE
    assert actual.fix.startswith(fix)
    assert lines(actual) == [3, 2]


def test_stages_that_are_added_to_a_mesh_lie_outside_of_its_other_axes() -> None:
    text = "model: {preset: tiny}\nmesh: {fsdp: 2, tp: 2}\npipeline: {schedule: 1f1b}\n"
    for added in ("mesh.pp=2", "mesh={pp: 2}"):
        assert list(loads(text, [added]).mesh.items()) == [("pp", 2), ("dp", 1), ("fsdp", 2), ("tp", 2)]
    assert list(loads("model: {preset: tiny}\nmesh: {fsdp: 2, pp: 2}\npipeline: {}\n").mesh)[-2:] == ["pp", "tp"]


def test_nearest_meshes_have_the_product() -> None:
    import math

    for world in (1, 6, 8, 30, 512):
        for mesh in ({"dp": 3, "tp": 2}, {"fsdp": 7, "tp": 4}, {"dp": 1, "fsdp": 5, "tp": 1}):
            assert all(math.prod(near.values()) == world for near in nearest_meshes(mesh, world))


def test_the_rest_is_what_is_left() -> None:
    recipe = loads("model: {preset: tiny}\nmesh: {dp: 2, fsdp: -1, tp: 2}")
    assert recipe.mesh_on(12) == {"dp": 2, "fsdp": 3, "tp": 2}
    with pytest.raises(Mistakes) as caught:
        recipe.mesh_on(6)
    assert caught.value.exit == Exit.MACHINE
    assert "one axis can take the remaining devices" in law("mesh: {dp: -1, fsdp: -1}")[0].why


def test_a_batch_that_cannot_be_dealt_comes_with_numbers() -> None:
    (actual,) = errors("mesh: {dp: 3, fsdp: 2}\nbatch: {global_sequences: 16}")
    assert (actual.exit, actual.why) == (Exit.FIT, "16 = 2 x 6 + 4")
    assert actual.fix == "batch.global_sequences: 12 or 18"
    (actual,) = errors("mesh: {fsdp: 2}\nbatch: {global_sequences: 16, per_device: 3}")
    assert (actual.exit, actual.why) == (Exit.FIT, "16 / 2 data ranks = 8")
    assert actual.fix == "batch.per_device: 1, 2, 4 or 8"


def test_positions_that_are_learned_have_an_end() -> None:
    recipe = loads("model: {preset: granite-tiny, seq_len: 512}")
    (actual,) = misfits(recipe, FamilyModel.of_preset("granite-tiny"))
    assert (actual.exit, actual.fix) == (Exit.FIT, "model.seq_len: 256, or model.max_seq: 512")
    assert misfits(loads("model: {preset: tiny, seq_len: 512}"), FamilyModel.of_preset("tiny")) == []


def test_keys_of_the_model_are_those_of_its_configuration() -> None:
    from dataclasses import fields

    from tpshard.recipes.keys import constraints, model_keys
    from tpshard.recipes.reading.hints import hints

    keys = set(hints(model_keys.Model)) - {*model_keys.Model.exclusive, "dims", "args"}
    assert keys == {f.name for f in fields(ModelConfig)} - {"family"}
    assert set(model_keys.Preset.__args__) == set(PRESETS)
    assert set(constraints.Dtype.__args__) == set(DTYPES)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("{schedule: 1f1b, split: [1, 2]}", "`pipeline.split` has 3 layers in 2 stages"),
        ("{schedule: 1f1b, split: [2, 1, 1]}", "`pipeline.split` has 4 layers in 3 stages"),
        ("{schedule: interleaved_1f1b, rounds: 3}", "6 stages are more than the 4 layers of the model"),
    ],
)
def test_the_stages_of_a_pipeline_have_the_layers_of_the_model(pipeline: str, message: str) -> None:
    (error,) = errors(f"mesh: {{pp: 2}}\npipeline: {pipeline}")
    assert (error.message, error.exit) == (message, Exit.FIT)
    assert errors("mesh: {pp: 2}\npipeline: {schedule: 1f1b, split: [1, 3]}") == []


WINDOWED = dataclasses.replace(PRESETS["tiny"], family="qwen3", window=64)
EXPERTS = PRESETS["tiny-moe"]
MODEL = "model: {hf: some_folder, seq_len: 256"


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        (MODEL + ", balance: none, balance_rate: 0.5}", dataclasses.replace(EXPERTS, balance="none"), "balance_rate"),
        (MODEL + ", balance: loss}", dataclasses.replace(EXPERTS, balance="loss", top_k=8), "balance"),
        (MODEL + ", balance_rate: 0.1}", dataclasses.replace(EXPERTS, top_k=8), "balance_rate"),
        (MODEL + ", norm_top_k: false}", dataclasses.replace(EXPERTS, top_k=8, routing="softmax"), "norm_top_k"),
        (MODEL + ", window: 256}", dataclasses.replace(WINDOWED, window=256), "window"),
        (MODEL + ", window: 64}", dataclasses.replace(WINDOWED, full_layers=(0, 1, 2, 3)), "window"),
        (MODEL + ", full_layers: [4]}", dataclasses.replace(WINDOWED, full_layers=(4,)), "`model.full_layers` names"),
        (MODEL + "}\nremat: {every: 5}", WINDOWED, "`remat.every: 5` recomputes only the first of 4 layers"),
        (MODEL + "}\nsharding: {rules: {batch: fsdp, expert: tp}}", WINDOWED, "sharding.rules.expert"),
        (MODEL + "}\nfsdp: {accumulate: {gather: step}}\nbatch: {global_sequences: 8}", WINDOWED, "accumulate.gather"),
        (MODEL + "}\nfsdp: {accumulate: {reduce: last}}\nbatch: {global_sequences: 8}", None, "accumulate.reduce"),
        (
            MODEL + "}\nfsdp: {accumulate: {gather: step}}\nmesh: {pp: 2, fsdp: 1}\n"
            "pipeline: {schedule: gpipe, form: vectorized}", WINDOWED, "accumulate.gather",
        ),
        (MODEL + ", balance: bias, balance_rate: 0.5, norm_top_k: false}", EXPERTS, None),
        (MODEL + ", window: 255, full_layers: [3]}", dataclasses.replace(WINDOWED, full_layers=(3,)), None),
        (MODEL + "}\nremat: {every: 4}", WINDOWED, None),
        (MODEL + "}\nsharding: {rules: {batch: fsdp, expert: tp}}", EXPERTS, None),
        (MODEL + "}\nsharding: {rules: {batch: fsdp, expert: tp}}\nserve: {checkpoint: another}", WINDOWED, None),
        (MODEL + "}\nmesh: {fsdp: 1, ep: 2}", WINDOWED, None),
        (MODEL + "}\nfsdp: {accumulate: {gather: step, reduce: last, dtype: bf16}}", WINDOWED, None),
        (MODEL + "}\nfsdp: {accumulate: {dtype: bf16}}\nbatch: {global_sequences: 8}", WINDOWED, None),
    ],
)  # fmt: skip
def test_a_setting_that_the_model_makes_meaningless_is_named(
    text: str, config: ModelConfig | None, message: str | None
) -> None:
    mesh = "" if "mesh:" in text else "\nmesh: {fsdp: 1}"
    recipe = loads(text + mesh, file="a.yaml")
    actual = [d.message for d in misfits(recipe, FamilyModel(config))]
    assert len(actual) == (message is not None) and (message is None or message in actual[0]), actual
