"""A folder's tokenizer gives the ids, special tokens and ends that transformers reads from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.train.data.tokens import load_tokenizer

TEXTS = ["hello world", "the <s> quick </s> fox", " é日🦊 ", "a <pad> b"]


def write(
    folder: Path, template: str | None, config: dict[str, Any], special: tuple[str, ...] = ("<s>", "</s>")
) -> int:
    """A byte-level BPE whose post-processor is `template`; returns the number of its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox says hello world"] * 9, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in special]
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(template, None, ids)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size(with_added_tokens=True)


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("template", [None, "<s> $A", "$A </s>", "<s> $A </s>", "<s> <s> $A </s>"])
@pytest.mark.parametrize("cls", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_ids_are_those_of_transformers(cls: str, template: str | None, flag: bool | None, tmp_path: Path) -> None:
    config = {"tokenizer_class": cls, "bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    write(tmp_path, template, config | ({} if flag is None else {"add_bos_token": flag, "add_eos_token": flag}))
    ours, reference = FolderTokenizer(tmp_path), theirs(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == reference(text, truncation=False, padding=False).input_ids
        assert ours.encode(text, special=False) == reference(text, add_special_tokens=False).input_ids
        assert [*ours.prefix, *ours.encode(text, special=False), *ours.suffix] == ours.encode(text)
    assert (ours.begin, ours.end) == (reference.bos_token_id, reference.eos_token_id)
    said = [key for key, ids in (("bos", ours.prefix), ("eos", ours.suffix)) if flag is not None and flag != bool(ids)]
    assert [note for note in ours.notes if "post-processor" in note] == ours.notes and len(ours.notes) == len(said)


MAPS = [
    ({}, {"eos_token": "<e>", "bos_token": {"content": "<s>", "lstrip": False}}),
    ({"eos_token": "</s>"}, {"eos_token": "<e>"}),
    ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<e>"}),
    ({"eos_token": "</s>", "bos_token": None, "added_tokens_decoder": {}}, {"bos_token": "<e>"}),
    ({"eos_token": "</s>", "bos_token": "<s>"}, {"pad_token": "<e>"}),
]


@pytest.mark.parametrize(("config", "older"), MAPS)
def test_special_tokens_are_named_in_either_file(config: dict[str, Any], older: Any, tmp_path: Path) -> None:
    write(tmp_path, None, {"tokenizer_class": "PreTrainedTokenizerFast"} | config, ("<s>", "</s>", "<e>"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    reference = theirs(tmp_path).special_tokens_map
    named = {key: str(token) for key, token in reference.items() if token != "[PAD]"}  # of tokenizer.json's padding
    assert FolderTokenizer(tmp_path).special == named


def test_tokens_of_the_config_alone_are_added(tmp_path: Path) -> None:
    size = write(tmp_path, None, {})
    entry = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {"eos_token": "<new>", "added_tokens_decoder": {str(size): entry | {"special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = FolderTokenizer(tmp_path)
    assert ours.end == size and ours.encode("a<new>") == theirs(tmp_path)("a<new>", truncation=False).input_ids
    config["added_tokens_decoder"] = {str(size + 5): entry}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="another id than"):
        FolderTokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_an_older_vocabulary_is_read_through_transformers(model_type: str, tmp_path: Path) -> None:
    write(tmp_path / "new", None, {})
    model = json.loads((tmp_path / "new" / "tokenizer.json").read_text())["model"]
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(m) for m in model["merges"])]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, reference = FolderTokenizer(tmp_path), theirs(tmp_path)
    assert all(ours.encode(text) == reference(text).input_ids for text in TEXTS)
    assert ours.end == reference.eos_token_id == vocab["<|endoftext|>"] and ours.size == len(vocab)


def test_the_ids_that_stop_are_united(tmp_path: Path) -> None:
    write(tmp_path / "tok", None, {"eos_token": "</s>"})
    model = tmp_path / "model"
    model.mkdir()
    assert FolderTokenizer(tmp_path / "tok").stop_tokens == {1}
    (model / "config.json").write_text('{"eos_token_id": [2, 7], "text_config": {"eos_token_id": 9}}')
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "tok" / "generation_config.json").write_text('{"eos_token_id": [-1, 6]}')
    assert FolderTokenizer(tmp_path / "tok", models=[model]).stop_tokens == {1, 2, 5, 6, 7, 9}
    for wrong in ('"2"', "2.0", "[true]", '{"a": 1}', "[[2]]"):
        (model / "config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(ValueError, match="neither a token's id nor a list"):
            FolderTokenizer(tmp_path / "tok", models=[model])


def with_token(folder: Path, token: AddedToken, config: dict[str, Any]) -> int:
    """A tokenizer with one more token; returns the number of those before it."""
    rows = write(folder, "<s> $A", config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    return rows


def test_a_special_token_without_an_embedding_row_is_ordinary_text(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "pad_token": "<pad>"}
    rows = with_token(tmp_path, AddedToken("<pad>", special=True), config)
    whole, ours = FolderTokenizer(tmp_path), FolderTokenizer(tmp_path, rows)
    assert whole.encode("a <pad> b")[3] == rows, "a text could ask for the missing row"
    assert max(max(ours.encode(text)) for text in TEXTS) < rows and ours.decode(ours.encode(TEXTS[3])) == TEXTS[3]
    assert ours.encode("hello </s>") == whole.encode("hello </s>")
    assert "<pad>" in ours.notes[0] and not whole.notes


@pytest.mark.parametrize("case", ["not special", "end", "template", "merged"])
def test_a_token_that_texts_contain_needs_its_row(case: str, tmp_path: Path) -> None:
    config = {"eos_token": "<new>" if case == "end" else "</s>"}
    if case == "template":
        config["chat_template"] = "{{ '<new>' }}"
    rows = with_token(tmp_path, AddedToken("<new>", special=case != "not special"), config)
    with pytest.raises(ValueError, match="which texts can contain"):
        FolderTokenizer(tmp_path, rows - 1 if case == "merged" else rows)
    assert FolderTokenizer(tmp_path, rows + 1).size == rows + 1


def test_code_is_refused_where_it_would_be_needed(tmp_path: Path) -> None:
    write(tmp_path, None, {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}})
    assert FolderTokenizer(tmp_path).size > 256
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tpshard never does"):
        FolderTokenizer(tmp_path)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "sentencepiece.bpe.model", "vocab.bpe", "model.gguf"])
def test_a_format_that_is_not_read_is_named_with_a_way_on(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"a")
    with pytest.raises(ValueError, match=rf"the format of {re.escape(name)} is not read, but .*save_pretrained"):
        FolderTokenizer(tmp_path)
    with pytest.raises(Mistakes, match=rf"the format of {re.escape(name)} is not read, but .*save_pretrained"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer\.json in it$"):
        (tmp_path / name).unlink()
        FolderTokenizer(tmp_path)
