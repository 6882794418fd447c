"""The sampling settings of a model's folder are obeyed, refused or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tpshard.serve.generation_defaults import read_generation_defaults


def read(folder: Path, **config: Any) -> Any:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_generation_defaults(folder)


def test_a_folder_without_the_file_has_none(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path).values == {}


def test_settings_are_obeyed_or_named(tmp_path: Path) -> None:
    found = read(
        tmp_path, temperature=0.6, top_p=0.9, top_k=20, min_p=None, repetition_penalty=1.05, max_new_tokens=64,
        do_sample=True, eos_token_id=[1, 2], transformers_version="5", _from_model_config=True, output_scores=False,
        num_beams=1, no_repeat_ngram_size=3, suppress_tokens=[4], typical_p=1.0, invented="x",
    )  # fmt: skip
    assert found.values == {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "default_tokens": 64,
    }  # fmt: skip
    assert found.not_obeyed == ("invented", "no_repeat_ngram_size", "suppress_tokens")


def test_greedy_is_temperature_zero(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=False, temperature=0.7).values == {"temperature": 0.0}


@pytest.mark.parametrize(("key", "value"), [("temperature", "hot"), ("top_p", 5), ("top_k", 1.5)])
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{key}` is not"):
        read(tmp_path, **{key: value})
