"""Streamed text equals the whole text, and stop strings may span tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.serve.api.text import Writer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> FolderTokenizer:
    return FolderTokenizer(tokenizer_folder)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abc é日🦊\n", min_size=1, max_size=40), st.lists(st.text("abc é", min_size=1, max_size=4)))
def test_what_is_given_out_is_the_text_up_to_the_first_stop(
    tokenizer: FolderTokenizer, text: str, stops: list[str]
) -> None:
    tokens = tokenizer.encode(text, special=False)
    writer, out = Writer(tokenizer, stops), ""
    for i, token in enumerate(tokens):
        out += writer.add(token, last=i + 1 == len(tokens))
        assert not any(stop in out for stop in stops)
        assert text.startswith(out)
        if writer.stopped:
            break
    # The first stop string to be complete ends the text: of those that end with one token the one that starts first.
    ends = [text.find(stop) for stop in stops if stop in text]
    assert writer.stopped == bool(ends)
    if not ends:
        assert out == text
    else:
        assert len(out) in ends


def sentencepiece(folder: Path) -> FolderTokenizer:
    """A tokenizer as Llama 2's: spaces are `▁`, unknown characters bytes, and its decoder strips the first space."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "a", "▁a", *(f"<0x{b:02X}>" for b in range(256))]
    merges = [("▁", "a")]
    result = Rust(models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True))
    result.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    result.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    result.add_special_tokens(["</s>"])
    folder.mkdir()
    result.save(str(folder / "tokenizer.json"))
    return FolderTokenizer(folder)


def test_an_answer_goes_on_from_its_prompt_where_decoders_strip_spaces(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path / "sp")
    assert tokenizer.decode([3, 4]) == "the cat"
    fox = [8 + b for b in "🦊".encode()]
    for context, space in (([3], " "), ([], ""), ([3, fox[0]], ""), ([1], "")):
        writer = Writer(tokenizer, context=context)
        assert "".join(writer.add(token) for token in [4, 5, 3, 2, *fox]) == f"{space}cats the 🦊"
    assert [tokenizer.token_text(t) for t in (4, 5, 1)] == [" cat", "s", "</s>"]
    assert b"".join(map(tokenizer.token_bytes, fox)).decode() == "🦊"


def test_a_token_is_shown_with_its_bytes(tokenizer: FolderTokenizer) -> None:
    text = "the fox: é日🦊 \n"
    tokens = tokenizer.encode(text, special=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
    (first, *_, last) = tokenizer.encode("🦊", special=False)
    assert (tokenizer.token_text(first), tokenizer.token_text(last)) == (r"bytes:\xf0", r"bytes:\x8a")
    assert tokenizer.token_text(1) == "<|end|>"


def test_half_a_character_waits(tokenizer: FolderTokenizer) -> None:
    tokens = tokenizer.encode("a🦊b", special=False)
    writer = Writer(tokenizer)
    parts = [writer.add(token) for token in tokens]
    assert "".join(parts) == "a🦊b"
    assert "" in parts and not any("�" in part for part in parts)
    cut = Writer(tokenizer)
    assert "".join(cut.add(token, last=i == 2) for i, token in enumerate(tokens[:3])) == "a�"


def test_a_tokenizer_folder_is_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        FolderTokenizer(tmp_path)


def test_no_stop_string_ends_the_least_tokens(tokenizer: FolderTokenizer) -> None:
    tokens = tokenizer.encode("abcabcab", special=False)
    for least in range(len(tokens) + 1):
        writer = Writer(tokenizer, ["ab"], least=least)
        text = "".join(writer.add(token, last=i + 1 == len(tokens)) for i, token in enumerate(tokens))
        ends = [n for n in range(1, len(tokens) + 1) if n > least and tokenizer.decode(tokens[:n]).endswith("ab")]
        assert writer.stopped == bool(ends)
        assert text == tokenizer.decode(tokens[: ends[0]])[:-2] if ends else text == "abcabcab"
