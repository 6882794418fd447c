"""`plan --stage` prints what a step is at any stage, and compares two of them."""

from __future__ import annotations

import json

import pytest
from small_recipe import RECIPE
from tpshard.cli.main import run as tpshard
from tpshard.plan.questions import stage_texts
from tpshard.programs.parts import step_programs
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import few_layers
from tpshard.recipes.reading.load import loads

ONE_DEVICE = ["--against", "cluster.devices_per_node=2", "--against", "mesh={fsdp: 2, tp: 1}"]


def printed(capsys, *arguments):
    assert tpshard(["plan", "small.yaml", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def few_and_every():
    setting = Setting.of(loads(RECIPE, ["model.layers=8"]))
    return few_layers.micro_program(setting), step_programs.micro_program(setting)


@pytest.mark.parametrize("name", ["graph", "shardings"])
@pytest.mark.parametrize("of", ["layers.0.mlp", "layers.4.attention", "layers.7", "norm"])
def test_equal_layers_read_as_if_each_had_been_captured(name, of, few_and_every):
    few, every = few_and_every
    assert few.shardings is not None and len(few.shardings.graph.ops) < len(every.shardings.graph.ops)
    note, _, text = stage_texts.part_text(name, few, of).partition("\n")
    assert note == "layers.2 stands for 2 to 6, which are alike"
    assert text == stage_texts.part_text(name, every, of)


@pytest.mark.parametrize("what", ["train", "decode"])
@pytest.mark.parametrize(
    ("stage", "of", "choices"), [("prefech", "", "shardings, partition"), ("graph", "layers.0.mpl", "layers.*.mlp")]
)
def test_an_unknown_name_is_answered_with_the_choices(small, capsys, what, stage, of, choices):
    assert tpshard(["plan", "small.yaml", "--for", what, "--stage", stage, *(["--of", of] if of else [])]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and choices in printed.err


def test_a_stage_is_compared_with_a_text_or_a_recipe_and_writes_nothing(small, capsys):
    asked = ["--stage", "partition", "--of", "layers.0.mlp.down"]
    text = printed(capsys, *asked)
    assert text.startswith("micro-batch\n") and "all_reduce" in text and "layers.0.mlp.up.mm" not in text
    assert [path.name for path in small.parent.iterdir() if path.name != ".cache"] == ["small.yaml"]
    (small.parent / "kept.txt").write_text(text)
    assert printed(capsys, *asked, "--against", "kept.txt").endswith("the same\n")
    changed = json.loads(printed(capsys, *asked, "--json", *ONE_DEVICE))
    assert not changed["same"] and any(line.startswith("- ") and "all_reduce" in line for line in changed["lines"])
    assert not any(line.startswith("+ ") and "all_reduce" in line for line in changed["lines"])
    assert tpshard(["plan", "small.yaml", *asked, "--against", "."]) == 2


def test_a_pipeline_shows_the_stage_that_has_the_layer(small, capsys):
    recipe = [
        "cluster.devices_per_node=4",
        "mesh={pp: 2, fsdp: 1, tp: 2}",
        "model.layers=2",
        "pipeline={schedule: 1f1b}",
    ]
    shown = json.loads(printed(capsys, *recipe, "--stage", "bucket", "--of", "layers.1", "--json"))
    computing = [
        part["part"] for part in shown["parts"] if any("layers.1.mlp.up.mm[" in line for line in part["lines"])
    ]
    assert computing == ["stage 1, forward"]
    whole = json.loads(printed(capsys, *recipe, "--stage", "bucket", "--of", "stage 1", "--json"))["parts"]
    assert [part["part"] for part in whole] == ["stage 1, forward", "stage 1, backward"]
    assert "update\n" in printed(capsys, "--stage", "shardings", "--of", "update")


def test_a_servers_step_and_its_passes_are_shown(small, capsys):
    shown = [printed(capsys, "--for", "decode", "--stage", stage, "--of", "layers.0.mlp.up", "model.seq_len=16")
             for stage in ("partition", "fold_linears")]  # fmt: skip
    assert " = mm(" in shown[0] and " = linear(" in shown[1] and " = mm(" not in shown[1]
