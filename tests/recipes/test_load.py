"""A valid recipe gets its defaults, layers and overrides, and loads to the same after it was saved."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.recipes.reading.load import load, loads
from tpshard.recipes.text.write import secrets_of

TINY = "model: {preset: tiny}\n"


def test_the_model_alone_is_a_recipe_with_the_documented_defaults() -> None:
    recipe = loads(TINY)
    assert recipe.mesh == {"dp": 1, "fsdp": -1, "tp": 1}
    assert recipe.sharding.rules == {"batch": ("dp", "fsdp"), "vocab": ("tp",), "heads": ("tp",), "mlp": ("tp",)}
    assert (recipe.model.seq_len, recipe.model.dtype, recipe.fsdp.param_dtype) == (256, "fp32", "fp32")
    assert (recipe.fsdp.bucket, recipe.fsdp.prefetch, recipe.remat, recipe.compile) == (
        "auto",
        1,
        "selective",
        "auto",
    )
    assert recipe.fsdp.wrap == ("layers.*", ("tok_embed",), ("norm", "output"))
    assert (recipe.data.source, recipe.data.tokenizer) == ("sample", None)
    assert (recipe.batch.global_sequences, recipe.batch.per_device) == (128, None)
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.weight_decay) == (3e-4, (0.9, 0.95), 0.1)
    assert (recipe.train.steps, recipe.schedule.warmup_steps, recipe.train.clip_grad_norm) == (200_000, 2000, 1.0)
    assert (recipe.checkpoint.every_steps, recipe.checkpoint.keep_last, recipe.checkpoint.on_error) == (500, 3, "warn")
    assert recipe.logging.wandb is not None and recipe.logging.wandb.project == "tpshard"
    assert (recipe.quantize.bits, recipe.quantize.group_size, recipe.quantize.order) == (4, 128, "head_local")
    assert (recipe.serve.mesh, recipe.serve.host, recipe.serve.port) == ({"tp": 4}, "127.0.0.1", 8000)
    assert (recipe.name, recipe.run.dir, recipe.seed) == ("recipe", "runs/recipe", 42)


def test_a_server_has_no_more_devices_than_its_run_unless_told() -> None:
    for mesh, tp in (("{fsdp: 1}", 1), ("{fsdp: 3}", 2), ("{fsdp: 2, tp: 2}", 4), ("{fsdp: -1}", 4)):
        recipe = loads(TINY + f"mesh: {mesh}")
        assert recipe.serve.mesh == loads(recipe.to_yaml()).serve.mesh == {"tp": tp}
    assert loads(TINY + "cluster: {device: cpu, devices_per_node: 2}\nmesh: {fsdp: -1}").serve.mesh == {"tp": 2}
    assert loads(TINY + "mesh: {fsdp: 1}", ["serve.mesh.tp=4"]).serve.mesh == {"tp": 4}


def test_derived_defaults_follow_other_keys() -> None:
    recipe = loads("model: {preset: llama3-8b, dtype: fp16}\ntrain: {steps: 300}\ndata: {source: c4}")
    assert (recipe.fsdp.param_dtype, recipe.schedule.warmup_steps, recipe.model.seq_len) == ("fp16", 30, 8192)
    assert recipe.data.stored()["tokenizer"] == "${oc.env:TOKENIZER_DIR}"
    assert loads(TINY + "cluster: {device: cpu}\nmesh: {fsdp: 3, tp: 2}").cluster.devices_per_node == 6  # type: ignore[union-attr]


def test_a_default_that_needs_the_environment_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZER_DIR", raising=False)
    with pytest.raises(Mistakes, match=r"give `data\.tokenizer` a value, or export TOKENIZER_DIR"):
        print(loads(TINY + "data: {source: c4}").data.tokenizer)
    with pytest.raises(Mistakes, match=r"export TOKENIZER_DIR=\.\.\., or give a default"):
        print(loads(TINY + "data: {source: c4, tokenizer: '${oc.env:TOKENIZER_DIR}'}").data.tokenizer)


def test_null_leaves_a_derived_default_as_it_is() -> None:
    recipe = loads("model: {preset: tiny, seq_len: null}\nschedule: {warmup_steps: ~}\nfsdp: {param_dtype: null}")
    assert (recipe.model.seq_len, recipe.schedule.warmup_steps, recipe.fsdp.param_dtype) == (256, 2000, "fp32")


def test_a_saved_recipe_can_be_spread_otherwise() -> None:
    saved = loads(TINY + "cluster: {device: cpu}\nmesh: {fsdp: 2, tp: 2}").to_yaml()
    cluster = loads(saved, ["mesh.fsdp=4"]).cluster
    assert cluster is not None and cluster.devices_per_node == 8
    fixed = loads(TINY + "cluster: {device: cpu, devices_per_node: 4}\nmesh: {fsdp: 2, tp: 2}").to_yaml()
    with pytest.raises(Mistakes, match="does not fit 4 devices"):
        loads(fixed, ["mesh.fsdp=4"])


def test_axes_left_out_have_size_one_and_stand_where_they_usually_do() -> None:
    assert list(loads(TINY + "mesh: {fsdp: 2, tp: 2}").mesh.items()) == [("dp", 1), ("fsdp", 2), ("tp", 2)]
    assert list(loads(TINY + "mesh: {dp: 2, tp: 2}").mesh.items()) == [("dp", 2), ("fsdp", 1), ("tp", 2)]
    assert list(loads(TINY + "mesh: {tp: 2, dp: 2}").mesh) == ["fsdp", "tp", "dp"]


def test_one_axis_stands_for_a_list_and_null_for_none() -> None:
    recipe = loads(
        TINY + "mesh: {tp: 2, x: 2}\nsharding: {rules: {heads: tp, mlp: [tp, x], vocab: null},"
        ' pin: {"tok_embed.weight": [[tp, x], null], "output.weight": [tp, null]}}'
    )
    assert recipe.sharding.rules == {"heads": ("tp",), "mlp": ("tp", "x")}
    assert recipe.sharding.pin == {"tok_embed.weight": (("tp", "x"), ()), "output.weight": (("tp",), ())}


def test_rules_given_replace_the_default_and_an_override_adds_to_it() -> None:
    assert set(loads(TINY + "sharding: {rules: {heads: tp}}").sharding.rules) == {"heads"}
    assert set(loads(TINY, ["sharding.rules.embed=dp"]).sharding.rules) == {"batch", "vocab", "heads", "mlp", "embed"}
    assert loads(TINY, ["mesh.tp=2"]).mesh == {"dp": 1, "fsdp": -1, "tp": 2}


def test_overrides_reach_maps_lists_and_names_with_dots() -> None:
    recipe = loads(
        TINY,
        [
            "sharding.annotate.layers.*.residual=[batch, seq, embed]",
            "fsdp.bucket={mb: 25}",
            "fsdp.memory_limit=70GiB",
            "logging.wandb=null",
            "remat={every: 2}",
            "train.steps=10",
            "train.steps=20",
        ],
    )
    assert recipe.sharding.annotate == {"layers.*.residual": ("batch", "seq", "embed")}
    assert recipe.fsdp.bucket.mb == 25  # type: ignore[union-attr]
    assert recipe.remat.every == 2  # type: ignore[union-attr]
    assert (recipe.fsdp.memory_limit, recipe.logging.wandb, recipe.train.steps) == (70 * 1024**3, None, 20)


def test_where_points_at_the_line_that_decided() -> None:
    text = TINY + "mesh:\n  fsdp: 2\n  tp: 2\nsharding:\n  rules:\n    heads: tp\n"
    recipe = loads(text, ["train.steps=3"], file="r.yaml")
    assert str(recipe.where("mesh.tp")) == "r.yaml:4:7"
    assert str(recipe.where("sharding.rules.heads")) == "r.yaml:7:12"
    assert str(recipe.where("train.steps")) == "<override 1>:1:13"
    assert str(recipe.where("seed")) == "<default seed>"
    moved = loads("\n\n" + text, file="r.yaml")
    assert str(moved.where("sharding.rules.heads")) == "r.yaml:9:12"


def test_extends_merges_maps_key_by_key_and_replaces_the_rest(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "name: base\nmodel: {preset: llama3-8b, layers: 4}\nmesh: {fsdp: 4, tp: 2}\n"
        "fsdp: {bucket: {mb: 5}, prefetch: 3}\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(
        "extends: ./middle.yaml\nmodel: {preset: tiny}\nfsdp: {bucket: {file: b.json}}\n"
    )
    (tmp_path / "sub" / "middle.yaml").write_text("extends: ../base.yaml\nmesh: {tp: 4}\n")
    (tmp_path / "pyproject.toml").write_text("")
    recipe = load(tmp_path / "sub" / "mine.yaml")
    assert (recipe.name, recipe.model.preset, recipe.model.layers) == ("mine", "tiny", 4)
    assert (recipe.mesh, recipe.fsdp.prefetch) == ({"dp": 1, "fsdp": 4, "tp": 4}, 3)
    assert recipe.fsdp.bucket.file == "b.json"  # type: ignore[union-attr]
    assert recipe.where("mesh.fsdp").file.endswith("base.yaml")
    assert recipe.where("mesh.tp").file.endswith("middle.yaml")


def test_a_model_named_anew_replaces_the_one_below(tmp_path: Path) -> None:
    assert loads("extends: quickstart\nmodel: {module: 'a:B'}").model.preset is None
    assert loads("model: {module: 'a:B'}", ["model.preset=tiny"]).model.module is None


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a": "./b.yaml", "b": "./a.yaml"}, ["circular", "a.yaml -> ", "b.yaml -> "]),
        ({"a": "./a.yaml"}, ["circular"]),
        ({"a": "./gone.yaml"}, ["gone.yaml", " -> "]),
        ({"a": "./b.yaml", "b": "./gone.yaml"}, ["a.yaml -> ", "b.yaml -> ", "gone.yaml"]),
        ({"a": "../outside.yaml"}, ["out of the recipe's tree", " -> "]),
        ({"a": "/etc/hostname.yaml"}, ["out of the recipe's tree"]),
        ({"a": "quickstrat"}, ["no shipped recipe", " -> "]),
        ({"a": "[b.yaml]"}, ["the path of one file"]),
        ({"a": "./link.yaml"}, ["out of the recipe's tree"]),
    ],
)
def test_extends_that_leads_nowhere_shows_the_chain(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tmp_path / "outside.yaml").write_text(TINY)
    (tree / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    for name, base in files.items():
        (tree / f"{name}.yaml").write_text(f"extends: {base}\n{TINY}")
    with pytest.raises(Mistakes) as caught:
        load(tree / "a.yaml")
    (actual,) = caught.value.diagnostics
    assert caught.value.exit == Exit.RECIPE
    assert actual.where is not None and actual.where.line == 1 and actual.where.col == 10
    assert all(word in actual.message for word in words)


def test_a_mistake_in_a_base_names_its_file_and_who_extends_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {preset: tiny\n")
    (tmp_path / "mine.yaml").write_text("\nextends: ./base.yaml\n")
    with pytest.raises(Mistakes) as caught:
        load(tmp_path / "mine.yaml")
    (actual,) = caught.value.diagnostics
    assert actual.where is not None and actual.where.file.endswith("base.yaml")
    assert [(Path(s.file).name, s.line) for s, _ in actual.also if s.file != actual.where.file] == [("mine.yaml", 2)]


def test_the_environment_is_read_when_the_value_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHERE", raising=False)
    recipe = loads(TINY + 'data: {source: c4, tokenizer: "${oc.env:WHERE}/x"}\nrun: {dir: "${oc.env:OUT,out}/${name}"}')
    assert recipe.run.dir == "out/recipe"
    with pytest.raises(Mistakes) as caught:
        _ = recipe.data.tokenizer
    assert "WHERE" in str(caught.value) and "<text>:2:" in str(caught.value)
    assert "${oc.env:WHERE}/x" in repr(recipe)
    monkeypatch.setenv("WHERE", "/there")
    monkeypatch.setenv("OUT", "else")
    assert (recipe.data.tokenizer, recipe.run.dir) == ("/there/x", "else/recipe")
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again.data.tokenizer == "/there/x"


def test_paths_are_read_as_a_shell_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("NOWHERE", raising=False)
    text = TINY + "run: {dir: '~/runs/${name}'}\ndata: {source: $HOME/text, tokenizer: '$NOWHERE/x'}"
    recipe = loads(text, ["name=a", "serve.checkpoint=~/hf"])
    assert recipe.run.dir == "/home/ada/runs/a" and recipe.data.source == "/home/ada/text"
    assert recipe.serve.checkpoint == "/home/ada/hf" and loads(TINY, ["run.dir=a~b"]).run.dir == "a~b"
    with pytest.raises(Mistakes, match="NOWHERE is not set"):
        _ = recipe.data.tokenizer
    assert "/home/ada" not in recipe.to_yaml() and loads(recipe.to_yaml()) == recipe
    assert loads(TINY, ["name=$HOME"]).name == "$HOME"  # no path


def test_numbers_from_the_environment_are_checked_like_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "12")
    text = TINY + 'train: {steps: "${oc.env:STEPS}"}\nserve: {port: "${oc.env:NO_PORT,81}"}'
    recipe = loads(text)
    assert (recipe.train.steps, recipe.serve.port) == (12, 81)
    monkeypatch.setenv("STEPS", "many")
    with pytest.raises(Mistakes, match=r"train\.steps"):
        loads(text)


def test_saved_recipes_keep_interpolations_and_mask_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZER_DIR", "/secret/place")
    recipe = loads(
        'model: {module: "a:B", args: {hf_token: abc, apiKey: def, password: [g], tokens: 5, keyword: k, depth: 2}}\n'
        'data: {source: c4}\nserve: {api_key: "${oc.env:KEY,hunter2}"}'
    )
    text = recipe.to_yaml()
    assert "${oc.env:TOKENIZER_DIR}" in text and "/secret/place" not in text
    saved = yaml.safe_load(text)
    assert saved["model"]["args"] == {"hf_token": "***", "apiKey": "***", "password": "***", "tokens": 5,
                                      "keyword": "k", "depth": 2}  # fmt: skip
    assert saved["serve"]["api_key"] == "${oc.env:KEY,***}"
    assert recipe.serve.api_key == os.environ.get("KEY", "hunter2")
    assert {key for key, _ in secrets_of(recipe)} == {
        "model.args.hf_token", "model.args.apiKey", "model.args.password", "serve.api_key"
    }  # fmt: skip
    with pytest.raises(Mistakes, match=r"model\.args\.hf_token: \*\*\*` stands for a value"):
        loads(text.replace("${oc.env:TOKENIZER_DIR}", "place"))


def test_names_that_are_no_secrets_keys_are_saved_as_they_are() -> None:
    """Names of dims, parameters and columns, and numbers, though their words are `key` or `token`."""
    recipe = loads(
        "model: {preset: tiny, pad_token: 3}\n"
        "sharding: {rules: {key: tp}, annotate: {layers.*.key: [batch, seq, key]}}\n"
        "data: {sources: [{source: a.jsonl, filter: {token: b}}], tokenizer: bytes}"
    )
    assert loads(recipe.to_yaml()) == recipe


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
odd = st.sampled_from(
    ["on", "010", "1e5", "4096:1", "null", "~", "#a", "a: b", "- x", "*a", "&b", "!c", "'", '"', "yes"]
)


@settings(max_examples=60, deadline=None)
@given(
    args=st.dictionaries(names | odd, st.none() | st.booleans() | st.integers() | names | odd, max_size=4),
    lr=st.floats(0, 1),
    steps=st.integers(1, 10**9),
    mesh=st.dictionaries(st.sampled_from(["dp", "fsdp", "tp"]), st.integers(1, 64), max_size=3),
)
def test_a_saved_recipe_loads_to_the_same(args: dict[str, object], lr: float, steps: int, mesh: dict[str, int]) -> None:
    args = {k: v for k, v in args.items() if "${" not in k and "${" not in str(v) and not secret(k)}
    whole = {"model": {"module": "a:B", "args": args}, "optimizer": {"lr": lr}, "train": {"steps": steps}, "mesh": mesh}
    recipe = loads(yaml.dump(whole, Dumper=yaml.SafeDumper).replace("\x85", " "))
    assert loads(recipe.to_yaml()) == recipe


def secret(key: str) -> bool:
    from tpshard.recipes.text.write import looks_secret

    return looks_secret(key)


def test_the_name_of_a_file_that_is_not_there_is_a_usage_mistake(tmp_path: Path) -> None:
    with pytest.raises(Mistakes) as caught:
        load("quickstrat")
    assert caught.value.exit == Exit.USAGE
    assert caught.value.diagnostics[0].fix == "did you mean `quickstart`?"
    with pytest.raises(Mistakes) as caught:
        load(tmp_path / "no.yaml")
    assert caught.value.exit == Exit.USAGE


def test_a_runs_folder_is_its_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(TINY)
    assert load(folder).name == "first"


@pytest.mark.parametrize(
    ("override", "axes"),
    [
        ("mesh={tp: 2, fsdp: 2}", ["dp", "tp", "fsdp"]),
        ("mesh={tp: 2, dp: 2}", ["tp", "fsdp", "dp"]),
        ("mesh={tp: 2}", ["dp", "fsdp", "tp"]),
        ("mesh={ep: 2, tp: 2}", ["dp", "fsdp", "ep", "tp"]),
        ("mesh={tp: 2, ep: 2}", ["dp", "fsdp", "tp", "ep"]),
        ("mesh={tp: 2, pp: 2}", ["pp", "dp", "fsdp", "tp"]),
        ("mesh.fsdp=2", ["dp", "fsdp", "tp"]),
    ],
)
def test_axes_of_a_mesh_take_the_order_in_which_the_last_layer_writes_them(override: str, axes: list[str]) -> None:
    pipeline = ["pipeline.schedule=gpipe"] if "pp" in axes else []
    experts = ["model.preset=tiny-moe"] if "ep" in axes else []
    recipe = loads(TINY + "mesh: {dp: 1, fsdp: 1, tp: 1}\n", [override, *pipeline, *experts])
    assert list(recipe.mesh) == axes
    assert (recipe == loads(recipe.to_yaml())) and list(loads(recipe.to_yaml()).mesh) == axes


def test_recipes_whose_axes_have_another_order_differ() -> None:
    text = TINY + "mesh: {dp: 2, fsdp: 1, tp: 2}\n"
    assert loads(text) == loads(text, ["mesh={fsdp: 1}"]) != loads(text, ["mesh={tp: 2, dp: 2}"])


def test_a_layer_that_names_another_kind_of_model_replaces_the_earlier_one() -> None:
    """Its dimensions go with it, but those that the command line gives, whatever their order, are never lost."""
    text = "name: x\nmodel: {preset: tiny, layers: 2, width: 64, seq_len: 32, dims: {a: [b]}}\n"
    for changes in (["model={module: 'a:B', args: {k: 1}}"], ["model.args.k=1", "model.module=a:B"]):
        written = {key: value for key, value in loads(text, changes).model.stored().items() if value not in (None, {})}
        assert written == {"module": "a:B", "args": {"k": 1}, "seq_len": 32, "dtype": "bf16"}
    assert loads(text, ["model.layers=3", "model.module=a:B"]).model.overrides() == {"layers": 3}, (
        "refused by the model"
    )
    assert loads(text, ["model.preset=tiny-moe"]).model.overrides() == {"layers": 2, "width": 64}


def test_tokens_say_how_many_steps_a_run_has() -> None:
    text = "model: {preset: tiny, seq_len: 64}\nbatch: {global_sequences: 8}\n"
    recipe = loads(text + "train: {tokens: 5121}")
    assert recipe.train.steps == 11 and recipe.schedule.decay_steps == 11
    saved = recipe.to_yaml()
    assert loads(saved).train.steps == 11
    assert loads(saved, ["train.tokens=10240"]).train.steps == 20
    assert loads(saved, ["train.steps=30"]).train.steps == 30
    assert loads(saved, ["data.epochs=2"]).train.tokens is None and loads(saved, ["data.epochs=2"]).data.epochs == 2
    for both, place in (
        ("train: {steps: 5}\ndata: {epochs: 2}", (4, 16)), ("train: {tokens: 5}\ndata: {epochs: 2}", (4, 16)),
        ("train: {steps: 11, tokens: 5121}", (3, 28)), ("train: {steps: 12, tokens: 5121}", (3, 28)),
    ):  # fmt: skip
        with pytest.raises(Mistakes, match="both say how long a run is") as refused:
            loads(text + both)
        (one,) = refused.value.diagnostics
        assert one.where is not None and (one.where.line, one.where.col) == place


@pytest.mark.parametrize(("said", "key"), [
    ("data: {source: ''}", "data.source"), ("train: {init_from: ' '}", "train.init_from"),
    ("run: {dir: ''}", "run.dir"),
    ("data: {sources: [{source: ''}]}", "data.sources.0.source"), ("serve: {adapters: {a: ''}}", "serve.adapters.a"),
])  # fmt: skip
def test_an_empty_name_of_a_file_is_not_the_folder_of_the_command(said: str, key: str) -> None:
    with pytest.raises(Mistakes) as refused:
        loads(f"model: {{preset: tiny}}\n{said}")
    one = next(one for one in refused.value.diagnostics if one.message == f"`{key}` is empty")
    assert one.where is not None and one.where.line == 2 and one.where.col > 6
