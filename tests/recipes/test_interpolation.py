"""Interpolations follow OmegaConf's grammar, are checked in place, are kept when saved, and never run code."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, as_text, dumps
from tpshard.models.family_model import FamilyModel
from tpshard.programs.fit.fit import misfits
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import load, loads

TINY = "model: {preset: tiny}\n"


def wrong(text: str, *overrides: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(Mistakes) as caught:
        loads(TINY + text, overrides, file="r.yaml")
    assert caught.value.exit == Exit.RECIPE
    return caught.value.diagnostics


def places(d: Diagnostic) -> list[str]:
    """Every place that the mistake shows, as file:line:col."""
    assert d.where is not None
    return [str(d.where), *(str(source) for source, _ in (*d.also, *d.where.origins))]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("mesh: {fsdp: 2, tp: 2}\nserve: {mesh: {tp: '${mesh.tp}'}}", "serve.mesh", {"tp": 2}),
        ("mesh: {fsdp: 2, tp: 2}\nserve: {mesh: '${mesh}'}", "serve.mesh", {"dp": 1, "fsdp": 2, "tp": 2}),
        ("mesh: {fsdp: '${.tp}', tp: 2}", "mesh", {"dp": 1, "fsdp": 2, "tp": 2}),
        ("fsdp: {prefetch: '${.accumulate.n}', accumulate: {dtype: '${..master_dtype}'}}", "", "`fsdp.accumulate.n`"),
        ("fsdp: {accumulate: {dtype: '${..master_dtype}'}}", "fsdp.accumulate.dtype", "fp32"),
        ("optimizer: {betas: ['${oc.env:NO_SUCH,0.5}', '${.0}']}", "optimizer.betas", (0.5, 0.5)),
        ("sharding: {rules: {batch: [dp, fsdp], heads: ['${..mlp}'], mlp: tp}}", "sharding.rules.heads", ("tp",)),
        ("train: {steps: '${oc.decode:${oc.env:NO_SUCH,1e3}}'}", "train.steps", 1000),
        ("train: {steps: '${schedule.warmup_steps}'}\nschedule: {warmup_steps: 7}", "train.steps", 7),
        ("schedule: {warmup_steps: '${train.steps}'}", "schedule.warmup_steps", 200_000),
        ("serve: {port: '${model.seq_len}'}", "serve.port", 256),
        ("train: {steps: '${oc.select:train.nothing,9}'}", "train.steps", 9),
        ("name: 'a-${seed}-${model.dtype}'", "run.dir", "runs/a-42-fp32"),
        ("name: '${seed}'", "name", "42"),
        (r"name: 'a\${b}'", "name", "a${b}"),
        ("fsdp: {memory_limit: '${oc.decode:70GiB}'}", "fsdp.memory_limit", 70 * 1024**3),
        ("compile: '${oc.env:NO_SUCH,eager}'", "compile", "eager"),
    ],
)
def test_a_value_is_what_it_stands_for(text: str, path: str, value: Any) -> None:
    if not path:
        assert value in wrong(text)[0].message
        return
    recipe: Any = loads(TINY + text)
    actual = recipe
    for key in path.split("."):
        actual = actual[key] if isinstance(actual, dict) else getattr(actual, key)
    assert actual == value
    assert loads(recipe.to_yaml()) == recipe
    assert loads(recipe.to_yaml(resolved=True)).to_yaml(resolved=True) == recipe.to_yaml(resolved=True)


def test_layers_and_overrides_change_what_an_interpolation_stands_for(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TINY + "mesh: {tp: 2}\nserve: {mesh: {tp: '${mesh.tp}'}}\n")
    (tmp_path / "mine.yaml").write_text("extends: ./base.yaml\nmesh: {tp: 4}\n")
    assert load(tmp_path / "mine.yaml").serve.mesh == {"tp": 4}
    assert load(tmp_path / "mine.yaml", ["mesh.tp=8"]).serve.mesh == {"tp": 8}
    assert load(tmp_path / "mine.yaml", ["seed=${mesh.tp}", "mesh.tp=8"]).seed == 8
    saved = loads(load(tmp_path / "mine.yaml").to_yaml(), ["mesh.tp=8"])
    assert saved.serve.mesh == {"tp": 8}


def test_a_map_that_is_interpolated_is_written_out_where_a_layer_changes_it() -> None:
    recipe = loads(TINY + "mesh: {tp: 2}\nserve: {mesh: '${mesh}'}", ["serve.mesh.dp=2"], file="r.yaml")
    assert recipe.serve.mesh == {"tp": 2, "dp": 2}
    assert str(recipe.where("serve.mesh.tp")) == "r.yaml:3:15"
    assert recipe.where("serve.mesh.dp").file == "<override 1>"


def test_a_mistake_shows_where_the_value_is_used_and_where_it_is_written(tmp_path: Path) -> None:
    (actual,) = wrong("train: {steps: '${name}'}\nname: many")
    assert "`train.steps: many` is text" in actual.message
    assert places(actual) == ["r.yaml:2:16", "r.yaml:3:7"]
    assert "${name}" in as_text([actual]) and "name: many" in as_text([actual])
    assert [place["line"] for place in json.loads(dumps([actual]))["diagnostics"][0]["also"]] == [3]
    (tmp_path / "base.yaml").write_text(TINY + "seed: -1\n")
    (tmp_path / "mine.yaml").write_text("extends: ./base.yaml\nserve: {port: '${batch.global_sequences}'}\n")
    with pytest.raises(Mistakes) as caught:
        load(tmp_path / "mine.yaml", ["batch.global_sequences=${seed}"])
    seed, port = (d for d in caught.value.diagnostics if "seed" in d.message or "port" in d.message)
    assert [Path(place).name for place in places(seed)] == ["base.yaml:2:7"]
    assert [Path(p).name for p in places(port)] == ["mine.yaml:2:15", "<override 1>:1:24", "base.yaml:2:7"]


def test_what_does_not_fit_shows_both_places_too() -> None:
    recipe = loads("model: {preset: llama3-8b}\nmesh: {fsdp: 4, tp: '${seed}'}\nseed: 3", file="r.yaml")

    actual = next(d for d in misfits(recipe, FamilyModel.of_preset("llama3-8b")) if "heads" in d.message)
    assert places(actual)[0] == "r.yaml:2:21" and "r.yaml:3:7" in places(actual)


def test_a_key_without_a_value_is_one_mistake_however_many_need_it() -> None:
    (actual,) = wrong(
        "train: {steps: '${batch.sequences}'}\nbatch: {per_device: '${train.steps}'}\nseed: '${train.steps}'"
    )
    assert "`train.steps: ${batch.sequences}` refers to `batch.sequences`" in actual.message
    assert places(actual)[0] == "r.yaml:2:16"
    (derived,) = wrong("train: {steps: '${schedule.warmup_steps}'}")
    assert "`schedule.warmup_steps`" in derived.message and places(derived)[0] == "r.yaml:2:16"
    assert wrong("train: {steps: '${optimizer.lrr}'}")[0].fix == "did you mean `optimizer.lr`?"
    (to_be_given,) = wrong("train: {steps: '???'}\nbatch: {global_sequences: '${train.steps}'}")
    assert "must be given" in to_be_given.message and places(to_be_given)[0] == "r.yaml:2:16"
    assert loads(TINY + "train: {steps: '???'}", ["train.steps=3"]).train.steps == 3
    with pytest.raises(Mistakes) as refused:
        loads(TINY + "train: {steps: 3}", ["train.steps=???"])
    assert "`train.steps` must be given" in refused.value.diagnostics[0].message


def test_a_key_whose_name_is_interpolated_is_named_where_it_is_missing() -> None:
    (actual,) = wrong("seed: '${model.${name}}'\nname: sead")
    assert "`seed: ${model.${name}}`" in actual.message and "`model.sead`" in actual.message
    assert places(actual) == ["r.yaml:2:7"]


def test_the_first_mistake_on_the_way_is_reported() -> None:
    args = "{a: '${.b}', b: '${mesh.x}${.b}'}"
    with pytest.raises(Mistakes) as caught:
        loads(f"model: {{module: 'a:B', args: {args}}}", file="r.yaml")
    (actual,) = caught.value.diagnostics
    assert "`model.args.b: ${mesh.x}${.b}`" in actual.message and actual.message.endswith("`mesh.x`")
    assert places(actual) == ["r.yaml:1:46", "r.yaml:1:34"]


def test_an_override_replaces_what_an_interpolation_made_a_list() -> None:
    recipe = loads(
        TINY + "mesh: {tp: 2}\noptimizer: {betas: '${oc.decode:\"[0.5, 0.6]\"}'}", ["optimizer.betas=[0.1, 0.2]"]
    )
    assert recipe.optimizer.betas == (0.1, 0.2)
    assert loads(TINY, ["serve.mesh.tp=${oc.dict.values:mesh}", "serve.mesh.tp=2"]).serve.mesh == {"tp": 2}


def test_an_interpolated_section_has_no_derived_defaults() -> None:
    (mistake,) = wrong("schedule: '${oc.decode:\"{name: constant}\"}'")
    assert "`schedule.warmup_steps`" in mistake.message and places(mistake)[0] == "r.yaml:2:11"
    (mistake,) = wrong("schedule: '${oc.decode:\"{warmup_steps: null}\"}'")
    assert "`schedule.warmup_steps`" in mistake.message
    (mistake,) = wrong("schedule: '${oc.decode:\"{nam: constant}\"}'")
    assert "`schedule.nam`" in mistake.message and places(mistake)[0] == "r.yaml:2:11"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("seed: '${seed}'", ["r.yaml:2:7"]),
        ("seed: '${train.steps}'\ntrain: {steps: '${seed}'}", ["r.yaml:2:7", "r.yaml:3:16"]),
        ("seed: '${train.steps}'\ntrain: {steps: '${batch.global_sequences}'}\nbatch: {global_sequences: '${seed}'}\n"
         "serve: {port: '${seed}'}", ["r.yaml:4:27", "r.yaml:2:7", "r.yaml:3:16"]),
        ("name: 'a-${run.dir}'\nrun: {dir: 'b-${name}'}", ["r.yaml:2:7", "r.yaml:3:12"]),
    ],
)  # fmt: skip
def test_a_circle_is_one_mistake_that_shows_all_of_it(text: str, at: list[str]) -> None:
    (actual,) = wrong(text)
    assert "circular interpolation" in actual.message
    assert places(actual) == at


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:A", "BRACE_CLOSE"),
        ("${}", "${}"),
        ("${HOME}", "no value"),
        ("${model.width}", "must be text"),
        ("${oc.env:A,b!}", "'!'"),
        ("${env:HOME}", "`env` is not allowed"),
        ("${oc.create:{a: 1}}", "`oc.create` is not allowed"),
        ("${oc.coerce:planted.x,1}", "`oc.coerce` is not allowed"),
        ("${oc.decode:'${oc.coerce:planted.x,1}'}", "`oc.coerce` is not allowed"),
        (r"${oc.decode:'\${oc.coerce:planted.x,1}'}", "`oc.coerce` is not allowed"),
        ("${oc.decode:${oc.env:PLANTED}}", "Unsupported interpolation type oc.coerce"),
        ("${${oc.env:PLANTED_NAME}:planted.x,1}", "Unsupported interpolation type oc.coerce"),
        ("${own:planted}", "`own` is not allowed"),
        ("${oc.decode:${oc.env:PLANTED_OWN}}", "Unsupported interpolation type own"),
    ],
)
def test_what_is_no_value_or_could_run_code_is_refused(
    value: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a module that would be imported nor another library's resolver is reached."""
    ran: list[str] = []
    (tmp_path / "planted.py").write_text("x = int\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PLANTED", "${oc.coerce:planted.x,1}")
    monkeypatch.setenv("PLANTED_NAME", "oc.coerce")
    monkeypatch.setenv("PLANTED_OWN", "${own:planted}")
    OmegaConf.register_resolver("own", lambda text: ran.append(text) or text)
    try:
        quoted = value.replace("'", "''")
        (actual,) = wrong(f"data: {{source: '{quoted}'}}")
    finally:
        OmegaConf.clear_resolver("own")
    assert places(actual) == ["r.yaml:2:16"]
    assert why in actual.message + actual.why
    assert "planted" not in sys.modules and not ran


def test_other_users_of_omegaconf_keep_their_resolvers() -> None:
    OmegaConf.register_resolver("own", lambda: 3)
    try:
        loads(TINY + "seed: '${train.steps}'")
        assert OmegaConf.create({"a": "${own:}"}).a == 3
    finally:
        OmegaConf.clear_resolver("own")


def test_a_bomb_of_interpolations_is_refused_before_it_is_written_out() -> None:
    args = ", ".join(["a0: x", *(f"a{n}: '${{.a{n - 1}}}${{.a{n - 1}}}'" for n in range(1, 60))])
    with pytest.raises(Mistakes) as caught:
        loads(f"model: {{module: 'a:B', args: {{{args}}}}}", file="r.yaml")
    (actual,) = caught.value.diagnostics
    assert "more than 2,000 interpolations" in actual.why and places(actual)[0].startswith("r.yaml:1:")
    assert loads(TINY, [f"model.args={{a: [{', '.join(['1'] * 3000)}]}}", "model.module=a:B"]).model.args


def test_keys_are_not_interpolated() -> None:
    (actual,) = wrong("mesh: {'${name}': 2}")
    assert places(actual) == ["r.yaml:2:8"]


def test_the_environment_is_asked_when_the_value_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHO", raising=False)
    text = (
        "model: {module: 'a:B', args: {who: '${oc.env:WHO}', all: ['${seed}', '${oc.env:WHO}']}}\nname: '${oc.env:WHO}'"
    )
    recipe: Recipe = pickle.loads(pickle.dumps(loads(text, file="r.yaml")))
    for read in (lambda: recipe.model.args, lambda: recipe.name, lambda: recipe.run.dir):
        with pytest.raises(Mistakes, match=r"WHO is not set(.|\n)*r\.yaml|WHO is not set(.|\n)*<default run\.dir>"):
            read()
    for who in ("ada", "bob"):
        monkeypatch.setenv("WHO", who)
        assert recipe.model.args == {"who": who, "all": (42, who)}
        assert (recipe.name, recipe.run.dir) == (who, f"runs/{who}")
    assert "bob" not in repr(recipe) + recipe.to_yaml()
    assert recipe == loads(recipe.to_yaml())


def test_a_saved_recipe_keeps_interpolations_and_resolved_shows_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.delenv("TEXT", raising=False)
    recipe = loads(
        TINY + "name: mine\ntrain: {steps: '${oc.env:STEPS}'}\nmesh: {fsdp: '${.tp}', tp: 2}\nserve: {mesh: '${mesh}', "
        "api_key: '${oc.env:KEY,hunter2}'}\ndata: {source: '${oc.env:TEXT}'}"
    )
    saved = yaml.safe_load(recipe.to_yaml())
    assert saved["train"]["steps"] == "${oc.env:STEPS}" and saved["mesh"]["fsdp"] == "${.tp}"
    assert (saved["serve"]["mesh"], saved["run"]["dir"]) == ("${mesh}", "runs/${name}")
    shown = yaml.safe_load(recipe.to_yaml(resolved=True))
    assert (shown["train"]["steps"], shown["run"]["dir"]) == (12, "runs/mine")
    assert shown["mesh"] == shown["serve"]["mesh"] == {"dp": 1, "fsdp": 2, "tp": 2}
    assert shown["data"]["source"] == "${oc.env:TEXT}"
    assert "hunter2" not in recipe.to_yaml() + recipe.to_yaml(resolved=True)


def test_overrides_are_written_as_omegaconf_reads_them() -> None:
    names = {"layers.*.residual": ("batch", "seq", "embed")}
    for key in ("annotate.layers.*.residual", "annotate[layers.*.residual]", r"annotate.layers\.*\.residual"):
        assert loads(TINY, [f"sharding.{key}=[batch, seq, embed]"]).sharding.annotate == names
    with pytest.raises(Mistakes, match="an unmatched bracket") as caught:
        loads(TINY, ["train[steps=3"])
    assert caught.value.exit == Exit.USAGE
