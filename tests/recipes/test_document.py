"""The schema for editors and shells agrees with the loader, and every shipped recipe is valid."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from tpshard.cli.preflight.model_checks import model_errors
from tpshard.cli.shared.completion import completions
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.document import json_schema, keys, texts
from tpshard.recipes.reading.extends import builtins
from tpshard.recipes.reading.hints import hints, section_of
from tpshard.recipes.reading.load import load, loads
from tpshard.recipes.text.section import Section

SHIPPED = (
    "quickstart", "tiny", "llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b", "granite-20b", "moe", "conformer",
    "unet", "encoder", "dense-2d",
)  # fmt: skip


def sections(cls: type[Section] = Recipe) -> list[type[Section]]:
    inner = [result for hint in hints(cls).values() if (result := section_of(hint)) is not None]
    return [cls, *(s for result in inner for s in sections(result))]


def test_every_key_is_documented() -> None:
    missing = [
        f"{cls.__name__}.{key}" for cls in sections() for key in hints(cls) if not texts()[cls.__name__].get(key)
    ]
    assert missing == []


@cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_shipped_recipes_are_all_there() -> None:
    assert set(SHIPPED) <= set(builtins())


@pytest.mark.parametrize("name", sorted(builtins()))
def test_a_shipped_recipe_holds(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert [d for d in model_errors(recipe) if d.severity == "error"] == []
    assert recipe.cluster is not None or name == "tiny"
    assert loads(recipe.to_yaml()) == recipe
    text = builtins()[name].read_text()
    assert text.startswith("# ")
    assert list(validator().iter_errors(yaml.safe_load(text))) == []


def test_every_key_of_a_resolved_recipe_is_in_the_json_schema() -> None:
    for name in builtins():
        assert list(validator().iter_errors(yaml.safe_load(load(name).to_yaml()))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"modle": 1},
        {"compile": "jit"},
        {"mesh": {"tp": 0}},
        {"mesh": {"a b": 1}},
        {"optimizer": {"lr": -1}},
        {"optimizer": {"betas": [0.9]}},
        {"fsdp": {"bucket": {"mbb": 1}}},
        {"sharding": {"rules": {"heads": 3}}},
        {"train": {"steps": "many"}},
        {"model": {}, "train": []},
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(change: dict[str, Any]) -> None:
    assert list(validator().iter_errors({"model": {"preset": "tiny"}, **change}))
    with pytest.raises(Exception, match=r"error|wrong"):
        loads(yaml.safe_dump({"model": {"preset": "tiny"}, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"remat": {"every": 2}},
        {"remat": ["mm"]},
        {"fsdp": {"bucket": [["layers.*"]], "memory_limit": "70GiB", "reshard_after_forward": "auto"}},
        {"sharding": {"rules": {"heads": "tp", "mlp": ["tp"], "vocab": None}}},
        {"sharding": {"pin": {"tok_embed.weight": ["tp", None]}}},
        {"train": {"steps": "${oc.env:STEPS,3}", "clip_grad_norm": None}},
        {"logging": {"wandb": None}, "name": None},
    ],
)
def test_the_json_schema_takes_what_the_loader_takes(change: dict[str, Any]) -> None:
    whole = {"model": {"preset": "tiny"}, **change}
    assert list(validator().iter_errors(whole)) == []
    loads(yaml.safe_dump(whole))


def test_overrides_complete_key_by_key_and_then_to_values() -> None:
    def words(incomplete: str) -> list[str]:
        return [value for value, _ in completions(incomplete)]

    assert words("tr") == ["train."]
    assert words("rem") == ["remat="]
    assert words("train.st") == ["train.steps="]
    assert words("compile=") == ["compile=auto", "compile=inductor", "compile=blocks", "compile=eager"]
    assert words("fsdp.accumulate.g") == ["fsdp.accumulate.gather="]
    assert words("fsdp.accumulate.gather=s") == ["fsdp.accumulate.gather=step"]
    assert words("mesh.") == ["mesh.dp=", "mesh.fsdp=", "mesh.tp="]
    assert "cluster.device=h200" in words("cluster.device=h2")
    assert words("nothing.") == words("train.steps.x=") == []
    assert dict(completions("seed"))["seed="]


def test_keys_say_what_they_may_be_and_their_default() -> None:
    actual = {key.path: key for key in keys()}
    assert actual["train.steps"].legal == "a whole number, at least 1 and at most 1e12"
    assert actual["train.steps"].default == "what train.tokens or data.epochs makes, else 200000"
    assert actual["fsdp.param_dtype"].default == "model.dtype; with fp8: bf16"
    assert actual["compile"].legal == "auto, inductor, blocks or eager"
    assert [key.path for key in keys("optimizer")][:3] == ["optimizer.name", "optimizer.lr", "optimizer.betas"]
    assert [key.path for key in keys("seed")] == ["seed"]
    assert keys("optimiser") == []
    assert actual["remat"].default == "selective" and "remat.every" not in actual
    assert all(key.text for key in keys())
