"""The sampling settings of a model's folder are obeyed, refused or named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tpshard.serve.api import answers, fields
from tpshard.serve.api.generation_defaults import read_generation_defaults
from tpshard.serve.api.preprocess import Prepared
from tpshard.serve.engine.picks import CHOOSE, picks_of
from tpshard.serve.engine.sampling import Recalled, pick
from transformers.generation import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def read(folder: Path, **config: Any) -> Any:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_generation_defaults(folder)


def test_a_folder_without_the_file_has_none(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path).values == {}


def test_settings_are_obeyed_or_named(tmp_path: Path) -> None:
    found = read(
        tmp_path, temperature=0.6, top_p=0.9, top_k=20, min_p=None, repetition_penalty=1.05, max_new_tokens=64,
        do_sample=True, eos_token_id=[1, 2], transformers_version="5", _from_model_config=True, output_scores=False,
        num_beams=1, no_repeat_ngram_size=3, forced_eos_token_id=4, typical_p=1.0, invented="x",
    )  # fmt: skip
    assert found.values == {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "usual_max_tokens": 64,
    }  # fmt: skip
    assert found.not_obeyed == ("forced_eos_token_id", "invented", "no_repeat_ngram_size")


def test_greedy_is_temperature_zero(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=False, temperature=0.7).values == {"temperature": 0.0}


def test_excluded_tokens_and_lengths_are_those_of_transformers(tmp_path: Path) -> None:
    """Of the logits of every step of a greedy answer, and of its end."""
    ends, prompt, limit = [2, 5], (7, 3, 8), 12
    config = {
        "bad_words_ids": [[4], [2], [9, 6], [8, 1, 3]], "suppress_tokens": [10, 11], "begin_suppress_tokens": [12],
        "min_new_tokens": 4, "min_length": 6, "max_length": limit, "eos_token_id": ends, "stop_strings": "zz",
    }  # fmt: skip
    found = read(tmp_path, **config)
    assert found.not_obeyed == () and found.values["model_stop"] == ("zz",)
    order = fields.chat({"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0}, found.values)
    order = Prepared.decode(*Prepared(order, (prompt,), ()).encode()).order
    (sequence,) = answers.sequences(order, [prompt], SimpleNamespace(stop_tokens=frozenset(ends)), 64)
    width = len(prompt)
    theirs = LogitsProcessorList(
        [
            MinLengthLogitsProcessor(6, ends, device="cpu"),
            MinNewTokensLengthLogitsProcessor(width, 4, ends, device="cpu"),
            NoBadWordsLogitsProcessor(config["bad_words_ids"], ends),
            SuppressTokensLogitsProcessor([10, 11]),
            SuppressTokensAtBeginLogitsProcessor([12], width),
        ]
    )
    generator = torch.Generator().manual_seed(1)
    while len(sequence.answer) < sequence.max_tokens:
        logits = torch.randn(16, generator=generator)
        expected = theirs(torch.tensor([sequence.tokens]), logits[None])[0]
        picks = picks_of([(sequence, CHOOSE)])
        recalled = Recalled(0, 16, 1, logits.device)
        recalled.recall(picks.told)
        assert torch.equal(recalled.change(logits[None], picks)[0], expected), sequence.tokens
        token = pick(logits[None], picks).token(0)
        assert token == int(expected.argmax())
        sequence.tokens.append(token if len(sequence.answer) != 1 else 9)  # 6 is excluded next
    assert len(sequence.tokens) == limit


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("top_p", 5),
        ("top_k", 1.5),
        ("max_length", 0),
        ("bad_words_ids", [[]]),
        ("suppress_tokens", ["a"]),
        ("stop_strings", [""]),
        ("min_new_tokens", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{key}` (is not|has)"):
        read(tmp_path, **{key: value})
