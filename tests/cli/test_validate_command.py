"""`tpshard validate` and `recipes`, and the checks of `plan` and `train` before they start."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow
import pytest
from patience import PATIENCE
from pyarrow import parquet
from tpshard import devices
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def diagnostics(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["diagnostics"]
    return parsed


def test_sound_recipes_are_fine(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "quickstart", "moe"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "quickstart: fine\nmoe: fine\n")


def test_every_file_is_reported_and_nothing_is_written(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "a.yaml").write_text("modle: 1\nmesh: {tp: 0}\n")
    (workdir / "b.yaml").write_text("model: {preset: tiny}\nmesh: {tp: 3}\n")
    assert run(["validate", "--json", "a.yaml", "b.yaml", "tiny"]) == Exit.RECIPE
    mistakes = diagnostics(capsys)
    assert [(d["file"], d["line"], d["exit"]) for d in mistakes] == [
        ("a.yaml", 1, 3), ("a.yaml", 1, 3), ("a.yaml", 2, 3), ("b.yaml", 2, 4), ("b.yaml", 2, 4)]  # fmt: skip
    assert sorted(p.name for p in workdir.iterdir()) == ["a.yaml", "b.yaml"]


def test_what_a_model_cannot_be_spread_over_is_4_before_anything_starts(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("validate", "plan", "train"):
        assert run([command, "quickstart", "mesh.tp=3"]) == Exit.FIT
        printed = capsys.readouterr()
        assert "`mesh.tp: 3` does not divide the 8 heads of tiny" in printed.err
        assert "<override 1>:1:9" in printed.err and printed.out == ""
    assert list(workdir.iterdir()) == []


def test_mistakes_of_the_recipe_and_of_the_fit_come_together(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--json", "tiny", "mesh.tp=3", "trian.steps=1", "seed=-1"]) == Exit.RECIPE
    assert {d["exit"] for d in diagnostics(capsys)} == {3, 4}


def test_a_mesh_for_another_cluster_is_5(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--json", "llama3-8b", "mesh.fsdp=3"]) == Exit.MACHINE
    (actual,) = [one for one in diagnostics(capsys) if one["severity"] == "error"]
    assert actual["fix"].startswith("mesh: {")


def test_numbers_that_contradict_each_other_are_3(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--json", "tiny", "model.kv_heads=3"]) == Exit.RECIPE
    (actual,) = diagnostics(capsys)
    assert "KV heads" in actual["message"] and actual["file"] == "<override 1>"


def test_a_vocabulary_smaller_than_the_tokenizer_is_3(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["validate", "--json", "tiny", "model.vocab=1024"]) == Exit.RECIPE
    (actual,) = diagnostics(capsys)
    assert (actual["file"], actual["fix"]) == ("<override 1>", "model.vocab: 2048")
    (workdir / "tokenizer").mkdir()
    words = {"model": {"vocab": {"a": 0, "b": 2999}}, "added_tokens": [{"id": 3000, "content": "<x>"}]}
    (workdir / "tokenizer" / "tokenizer.json").write_text(json.dumps(words))
    monkeypatch.setenv("TOKENIZER_DIR", "tokenizer")
    assert run(["validate", "--json", "tiny", "data.source=c4"]) == Exit.RECIPE
    assert "3,001 tokens" in diagnostics(capsys)[0]["message"]
    assert run(["validate", "tiny", "data.source=c4", "model.vocab=3072"]) == 0
    monkeypatch.delenv("TOKENIZER_DIR")
    assert run(["validate", "tiny", "data.source=c4"]) == 0


@pytest.mark.parametrize("key", ["hf", "transformers"])
def test_a_folder_of_transformers_with_fewer_rows_than_tokens_is_3(
    key: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "model").mkdir()
    (workdir / "a.yaml").write_text(f"model: {{{key}: model, seq_len: 64}}\n")
    (workdir / "model" / "config.json").write_text(json.dumps({**PHI, "vocab_size": 2048}))
    assert run(["validate", "a.yaml"]) == Exit.DONE
    capsys.readouterr()
    (workdir / "model" / "config.json").write_text(json.dumps({**PHI, "vocab_size": 2000}))
    assert run(["validate", "--json", "a.yaml"]) == Exit.RECIPE
    (actual,) = diagnostics(capsys)
    assert actual["message"] == "the tokenizer has 2,048 tokens, but the model's vocabulary has 2,000"
    assert actual["fix"] == "name the model's own tokenizer in `data.tokenizer`, or model.vocab: 2048"


def test_a_folders_configuration_is_checked_like_a_preset(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "model").mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
              "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 4096,
              "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
    (workdir / "a.yaml").write_text("model: {hf: model}\nmesh: {tp: 4}\n")
    (workdir / "model" / "config.json").write_text(json.dumps(config))
    assert run(["validate", "--json", "a.yaml"]) == Exit.FIT
    assert "6 heads, 2 KV heads" in [d["why"] for d in diagnostics(capsys)]
    (workdir / "a.yaml").write_text("model: {hf: model, dims: {model.norm.weight: [embed]}}\n")
    assert run(["validate", "--json", "a.yaml"]) == Exit.RECIPE
    (mistake,) = [d for d in diagnostics(capsys) if d["severity"] == "error"]
    assert "has no effect on a model of tpshard's family llama" in mistake["message"]
    (workdir / "model" / "config.json").write_text("{")
    assert run(["validate", "--json", "a.yaml"]) == Exit.RECIPE


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 4096, "max_position_embeddings": 128,
}  # fmt: skip
PHI = {**LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


@pytest.mark.parametrize("key", ["hf", "transformers"])
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "model holds no config.json"),
        ({"config.json": b"{"}, "is not valid JSON"),
        ({"config.json": {**PHI, "auto_map": {"AutoModel": "evil.Model"}}}, "`auto_map` asks to run code"),
        ({"config.json": {**PHI, "architectures": ["PhiForCausalLN"]}}, "has no model named `PhiForCausalLN`"),
        ({"config.json": {**PHI, "architectures": []}}, "does not name one class"),
        ({"config.json": {**PHI, "architectures": ["phi3"]}}, "has no model named `phi3`"),
        ({"config.json": {**PHI, "architectures": ["Gemma2DecoderLayer"]}}, "has no model named `Gemma2DecoderLayer`"),
        ({"config.json": LLAMA, "pytorch_model.bin": b""}, "pytorch_model.bin is a pickle"),
        ({"config.json": PHI, "pytorch_model.bin": b""}, "pytorch_model.bin is a pickle"),
        ({"config.json": PHI, "model.safetensors": TENSORS[:-1]}, "its header says"),
        ({"config.json": PHI, "model.safetensors": b"version https://git-lfs"}, "is not a valid safetensors file"),
        ({"config.json": PHI, "model.safetensors.index.json": {"weight_map": {"a": "b.safetensors"}}}, "is missing"),
    ],
)
def test_a_folder_that_cannot_be_a_model_is_told_without_torch(
    key: str, files: dict[str, Any], words: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "model").mkdir()
    for name, content in files.items():
        (workdir / "model" / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (workdir / "a.yaml").write_text(f"name: a\nmodel: {{{key}: model}}\n")
    assert run(["validate", "--json", "a.yaml"]) == Exit.RECIPE
    (actual,) = diagnostics(capsys)
    assert words in actual["message"]
    assert (actual["file"], actual["line"], actual["col"]) == ("a.yaml", 2, 11 + len(key))


def test_a_name_on_the_hub_is_no_folder(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "a.yaml").write_text("model: {hf: organization/name}\n")
    for command in ("validate", "plan"):
        assert run([command, "a.yaml"]) == Exit.RECIPE
        assert "organization/name is not a folder on this machine\n  --> a.yaml:1:13" in capsys.readouterr().err


@pytest.mark.parametrize("config", [LLAMA, PHI, {**PHI, "architectures": ["RobertaPreLayerNormForCausalLM"]}])
def test_a_sound_folder_is_fine_and_opens_neither_torch_nor_transformers(config: dict[str, Any], workdir: Path) -> None:
    (workdir / "model").mkdir()
    (workdir / "model" / "config.json").write_text(json.dumps(config))
    (workdir / "model" / "model.safetensors").write_bytes(TENSORS)
    (workdir / "a.yaml").write_text("model: {hf: model, seq_len: 64}\n")
    script = (
        "import sys; from tpshard.cli.main import run; code = run(['validate', 'a.yaml']); "
        "print(code, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "0 []\n", done.stderr


@pytest.mark.parametrize("name", ["nowhere:f", "rates:missing", "rates:none"])
def test_a_schedules_function_is_called(name: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "rates.py").write_text("def none(at):\n    return None\n")
    (workdir / "a.yaml").write_text(f"model: {{preset: tiny}}\nschedule: {{name: {name}}}\n")
    assert run(["validate", "--json", "a.yaml"]) == Exit.RECIPE
    (told,) = diagnostics(capsys)
    assert f"`schedule.name: {name}`" in told["message"] and (told["line"], told["col"]) == (2, 18)


def test_text_and_tokenizer_that_are_not_there_are_6(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "a.yaml").write_text("model: {preset: tiny}\ndata:\n  source: text\n  tokenizer: some/where\n")
    assert run(["validate", "--json", "a.yaml"]) == Exit.DATA
    text, tokenizer = diagnostics(capsys)
    assert (text["message"], text["line"]) == ("data.source: there is no text", 3)
    assert (tokenizer["line"], tokenizer["col"]) == (4, 14) and tokenizer["why"].startswith("there is no /")
    (workdir / "some" / "where").mkdir(parents=True)
    assert run(["validate", "--json", "a.yaml", "data.source=c4"]) == Exit.DATA
    assert diagnostics(capsys)[0]["why"] == "no tokenizer.json in it"
    assert run(["validate", "--json", "a.yaml", "task=frames"]) != Exit.DATA  # reads neither
    monkeypatch.setenv("TOKENIZER_DIR", "nowhere")
    assert run(["validate", "tiny", "data.source=c4"]) == Exit.DATA
    capsys.readouterr()
    assert (
        run(["validate", "--json", "tiny", "data.source=c4", "data.tokenizer=/other/machines/tokenizer"]) == Exit.DONE
    )
    assert [d["message"] for d in diagnostics(capsys)] == ["/other/machines/tokenizer is not on this machine"]
    (workdir / "rows.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert (
        run(["validate", "--json", "tiny", f"data.source={workdir}/*.json.gz", "data.tokenizer=/no/one"]) == Exit.DONE
    )
    assert [d["message"] for d in diagnostics(capsys)] == ["/no/one is not on this machine"]
    talk = '{"messages": [{"role": "usr", "content": "a"}, {"role": "assistant", "content": "b"}], "lang": "de"}\n'
    (workdir / "talks.jsonl").write_text(talk)
    chat = ["data.source=talks.jsonl", "data.messages=messages", "data.tokenizer=bytes", "data.chat_template=chatml"]
    (workdir / "none.jinja").write_text("")
    for more, why in (
        ((), "unknown role 'usr'"),
        (("data.chat_template=none.jinja", "data.bad_rows=1"), "template of the recipe writes nothing"),
        (("data.chat_template=no.jinja",), "No such file"),
        (("data.chat_template='{{ messages }}'",), "write it into a file, such as template.jinja"),
        (("data.sources=[{source: talks.jsonl, filter: {lang: en}}]",), "no row has lang en"),
    ):
        assert run(["validate", "--json", "tiny", *chat, *more]) == Exit.DATA
        assert why in str(diagnostics(capsys))
    assert run(["validate", "tiny", "train.init_from=nowhere"]) == Exit.CHECKPOINT
    assert run(["train", "tiny", "train.init_from=nowhere", "run.dir=new"]) == Exit.CHECKPOINT
    assert "starting" not in capsys.readouterr().err and not Path("new").exists()
    for odd in ("~no-such-user/x", "a" * 300):  # paths that cannot be looked up
        assert run(["validate", "tiny", f"data.source={odd}"]) == Exit.DATA
        assert run(["validate", "tiny", "data.source=c4", f"data.tokenizer={odd}"]) == Exit.DATA
    assert run(["plan", "tiny", "data.source=c4", "--dry-run", "--json"]) == Exit.DONE  # plans are made elsewhere too


def test_each_wrong_entry_of_a_list_is_told(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = "adapters.lora={rank: 4000, targets: [x, y, wq], modules_to_save: [vv, ww], rank_pattern: {t: 4, u: 8}}"
    for change, told in (
        (lora, ["`x` is no linear layer", "`y` is no linear layer", "`vv` is no module", "`ww` is no module",
                "`t` matches no layer", "`u` matches no layer", "rank 4000 is above"]),
        ("train.freeze=[x, tok_embed, y]", ["`x` matches no parameter", "`y` matches no parameter"]),
        ("serve.adapters={a: x, b: y}", ["the adapter `a` cannot", "the adapter `b` cannot"]),
    ):  # fmt: skip
        assert run(["validate", "--json", "tiny", change]) != Exit.DONE
        found = [one["message"] for one in diagnostics(capsys)]
        assert len(found) == len(told) and all(any(part in one for one in found) for part in told), found


def test_errors_in_a_source_name_its_own_keys(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "a.jsonl").write_text('{"body": "x"}\n' * 30)
    table = pyarrow.table({"body": ["x"] * 30})
    parquet.write_table(table, workdir / "a.parquet")
    for more, source, fix in (
        ((), "a.jsonl", "data.sources.0.column names another"),
        (("data.column=bod",), "a.jsonl", "data.column names another"),
        ((), "a.jsonl, messages: m", "data.sources.0.messages names another"),
        ((), "a.jsonl, prompt: body, completion: c", "data.sources.0.prompt and completion name others"),
        ((), "a.jsonl, column: body, filter: {lang: en}", 'for data.sources.0.filter "lang"'),
        ((), "a.parquet", "correct data.sources.0.column"),
        (("data.messages=m",), "a.parquet", "correct data.messages"),
        ((), "a.parquet, prompt: body, completion: c", "correct data.sources.0.completion"),
        ((), "a.parquet, column: body, filter: {lang: en}", "correct data.sources.0.filter"),
    ):  # fmt: skip
        chat = "data.chat_template=chatml"
        run(["validate", "--json", "tiny", f"data.sources=[{{source: {source}}}]", chat, *more])
        assert any(fix in one["fix"] for one in diagnostics(capsys)), (source, more)


def test_what_patterns_pick_is_told(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "a.yaml").write_text(
        "model: {preset: tiny}\ntrain: {freeze: [tok_embed, layers.0], steps: 100}\n"
        'optimizer: {groups: [{match: "*norm*", lr: 0.1}, {match: .norm, lr: 0.2}]}\n'
        "schedule: {warmup_steps: 10, stages: [{steps: 50}, {tokens: 32768, to: 0.5}]}\n"
    )
    assert run(["validate", "a.yaml", "--json"]) == Exit.DONE
    trained = json.loads(capsys.readouterr().out)["trained"]["a.yaml"]
    assert [(one["key"], one["tensors"], one["names"]) for one in trained["picks"]] == [
        ("train.freeze.0", 1, ["tok_embed.weight"]),
        ("train.freeze.1", 9, ["layers.0.attention_norm.weight", "layers.0.mlp.down.weight"]),
        ("optimizer.groups.0", 6, ["layers.1.attention_norm.weight", "layers.3.mlp_norm.weight"]),
        ("optimizer.groups.1", 1, ["norm.weight"]),
    ]
    assert [(one["first"], one["last"]) for one in trained["stages"]] == [(11, 60), (61, 61)]
    frozen, norms = trained["picks"][:2], trained["picks"][2:]
    assert trained["of"] - trained["elements"] == sum(one["elements"] for one in frozen)
    assert [one["elements"] for one in norms] == [768, 128]
    assert run(["plan", "a.yaml", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["trained"] == trained
    lora = "adapters.lora={rank: 4, targets: ['w[qv]', mlp.down]}"
    assert run(["validate", "tiny", lora]) == Exit.DONE
    told = capsys.readouterr().err
    assert (
        "adapters.lora.targets.0 `w[qv]`: 8 layers (" in told and "layers.0.attention.wq ... layers.3.attention" in told
    )
    for target, fix in (("mlp", "did you mean `mlp.*`?"), ("norm", "which trains it as a whole")):
        assert run(["validate", "tiny", f"adapters.lora={{targets: [{target}]}}", "--json"]) == Exit.RECIPE
        (one,) = diagnostics(capsys)
        assert one["message"] == f"`{target}` of tiny can have no adapter" and fix in one["fix"]
    hidden = "optimizer.groups=[{match: mlp.up, lr: 0.1}, {match: layers.*.mlp, lr: 0.2}]"
    assert run(["validate", "tiny", hidden, "--json"]) == Exit.RECIPE
    assert "every parameter of the group `mlp.up` is in a later group" in str(diagnostics(capsys))
    for more, why in (
        ("train.freeze=norm", "it is frozen"),
        ("adapters.lora={rank: 4}", "it is frozen beside adapters"),
    ):
        assert run(["validate", "tiny", "optimizer.groups=[{match: norm, lr: 0.1}]", more, "--json"]) == Exit.RECIPE
        assert [one["why"] for one in diagnostics(capsys)] == [why]
    assert run(["validate", "tiny", "optimizer.groups=[{match: [], lr: 0.1}]", "--json"]) == Exit.RECIPE
    assert [one["message"] for one in diagnostics(capsys)] == ["a group of parameters has an empty `match`"]


def test_recipes_are_listed_shown_and_copied(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"quickstart", "llama3-405b"} <= {row["name"] for row in rows}
    assert all(row["about"] and row["model"] for row in rows)
    assert run(["recipes", "cp", "quickstart"]) == 0
    assert (workdir / "quickstart.yaml").read_text().startswith("# ")
    assert [p.name for p in workdir.iterdir()] == ["quickstart.yaml"]
    capsys.readouterr()
    assert run(["recipes", "show", "quickstart.yaml"]) == 0
    assert capsys.readouterr().out == (workdir / "quickstart.yaml").read_text()
    assert run(["recipes", "show", "tiny", "train.steps=7"]) == 0
    assert "\n  steps: 7\n" in capsys.readouterr().out


def test_a_copy_never_replaces_unless_asked(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "tiny.yaml").write_text("mine")
    (workdir / "folder").mkdir()
    assert run(["recipes", "cp", "tiny"]) == Exit.USAGE
    assert (workdir / "tiny.yaml").read_text() == "mine"
    assert run(["recipes", "cp", "tiny", "--overwrite"]) == 0
    assert (workdir / "tiny.yaml").read_text() != "mine"
    assert run(["recipes", "cp", "tiny", "folder"]) == 0
    assert (workdir / "folder" / "tiny.yaml").exists()
    assert run(["recipes", "cp", "tiny", "new/deep/x.yaml"]) == 0
    assert run(["recipes", "cp", "tinny"]) == Exit.USAGE
    assert "did you mean `tiny`?" in capsys.readouterr().err
    (workdir / "dangling.yaml").symlink_to(workdir / "nowhere")
    assert run(["recipes", "cp", "tiny", "dangling.yaml"]) == Exit.USAGE
    assert not [p for p in workdir.rglob("*") if p.name.startswith(".")]


def test_the_schema_is_one_that_editors_take(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "schema", "--out", "recipe.schema.json"]) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads((workdir / "recipe.schema.json").read_text()))
    assert run(["recipes", "schema", "--out", "recipe.schema.json"]) == Exit.USAGE


def test_without_a_recipe_it_is_the_one_here_or_the_quickstart(workdir: Path) -> None:
    from tpshard.cli.shared.arguments import load, on_device

    assert load(None).name == "quickstart"
    assert load("train.steps=3", ["seed=1"]).train.steps == 3
    assert on_device(["seed=1"], "cpu") == ["seed=1", "cluster.device=cpu"]
    assert load("llama3-1b", on_device(None, "cpu")).cluster.device == "cpu"  # type: ignore[union-attr]
    (workdir / "recipe.yaml").write_text("name: mine\nmodel: {preset: tiny}\n")
    assert load(None).name == "mine"


def test_a_plans_files_never_replace_others_unless_asked(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "a.html").write_text("mine")
    assert run(["plan", "tiny", "--dry-run", "--html", "a.html"]) == Exit.USAGE
    assert "a.html exists" in capsys.readouterr().err
    assert (workdir / "a.html").read_text() == "mine"


def test_a_copy_makes_folders_below_the_working_directory_only(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "work").mkdir()
    os.chdir(workdir / "work")
    for path in ("../other/tiny.yaml", str(workdir / "else" / "tiny.yaml")):
        assert run(["recipes", "cp", "tiny", path]) == Exit.USAGE
        assert f"fix: mkdir -p {Path(path).parent}" in capsys.readouterr().err
    assert [p.name for p in workdir.iterdir()] == ["work"]
    assert run(["recipes", "cp", "tiny", "own/deep/tiny.yaml"]) == run(["recipes", "cp", "tiny", ".."]) == 0
    assert (workdir / "work" / "own" / "deep" / "tiny.yaml").is_file() and (workdir / "tiny.yaml").is_file()


def test_a_device_file_is_read_too(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["validate", "--json", "quickstart", "cluster.device=mine.yaml"]
    assert run(recipe) == Exit.RECIPE
    (actual,) = diagnostics(capsys)
    assert actual["file"] == "<override 1>" and "mine.yaml" in actual["message"]
    (workdir / "mine.yaml").write_text("name: mine\nkind: toaster\n")
    assert run(recipe) == Exit.RECIPE
    assert {actual["file"] for actual in diagnostics(capsys)} == {"mine.yaml"}
    shutil.copy(Path(devices.__file__).with_name("cpu.yaml"), workdir / "mine.yaml")
    assert run(recipe) == Exit.DONE


def test_what_train_refuses_of_a_folder_or_a_module_plan_and_validate_refuse_too(
    workdir: Path, capsys: pytest.CaptureFixture[str], copies: None
) -> None:
    from tpshard.models import to_hf
    from tpshard.models.family_model import FamilyModel

    small = {"layers": 2, "width": 32, "heads": 4, "head_dim": 8, "mlp": 32, "kv_heads": 2}
    to_hf(FamilyModel.of_preset("tiny", small).build(device="cpu"), "model")
    (workdir / "a.yaml").write_text("model: {hf: model, seq_len: 16}\ncluster: {device: cpu}\nmesh: {fsdp: 1}\n")
    assert run(["validate", "a.yaml"]) == Exit.DONE
    for changes in (["model.layers=1"], ["model.tie_embeddings=true"], ["model.layers=1", "model.tie_embeddings=true"]):
        for command in (["validate"], ["plan", "--dry-run"], ["train"]):
            capsys.readouterr()
            assert run([*command, "a.yaml", *changes]) == Exit.RECIPE, command
            assert "do not fit the weights in model" in capsys.readouterr().err
    next(Path("model").glob("*.safetensors")).unlink()
    for command, code in ((["validate"], Exit.DONE), (["plan", "--dry-run"], Exit.DONE), (["train"], Exit.RECIPE)):
        capsys.readouterr()
        assert run([*command, "a.yaml"]) == code
        assert "model has no weights" in capsys.readouterr().err, command
    Path("model", "config.json").write_text(json.dumps(PHI))
    for command in (["validate"], ["plan", "--dry-run"], ["train"]):
        capsys.readouterr()
        assert run([*command, "a.yaml", "model.layers=1"]) == Exit.RECIPE, command
        assert "change `layers` in its config.json" in capsys.readouterr().err
    (workdir / "buffered_module.py").write_text(
        "import torch\n"
        "class Buffered(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 4)\n"
        "        self.seen = torch.nn.BatchNorm1d(4)\n"
        "class Counting(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(9, 9)\n"
        "        self.register_buffer('count', torch.zeros(1))\n"
        "    def forward(self, tokens, documents=None, positions=None):\n"
        "        self.count.add_(1)\n"
        "        return self.table(tokens)\n"
        "class Broken(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        raise KeyError('nothing')\n"
    )
    (workdir / "b.yaml").write_text("model: {module: 'buffered_module:Buffered', layers: 3, pad_token: 1}\n")
    for command in (["validate"], ["plan", "--dry-run"], ["train"]):
        capsys.readouterr()
        assert run([*command, "b.yaml"]) == Exit.RECIPE, command
        assert "it has no layers, pad_token to override" in capsys.readouterr().err
    for name, words in (
        ("Buffered", "writes to the buffer"),
        ("Counting", "writes to the buffer `count`"),
        ("Broken", "nothing"),
        ("Missing", "has no Missing"),
    ):
        (workdir / "b.yaml").write_text(f"model: {{module: 'buffered_module:{name}', seq_len: 16}}\n")
        capsys.readouterr()
        assert run(["validate", "b.yaml"]) == Exit.RECIPE
        assert words in capsys.readouterr().err
