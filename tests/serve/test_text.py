"""Streamed text equals the whole text, stop strings may span tokens, and chat templates stay within limits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers
from tpshard.models.folder_tokenizer import FolderTokenizer
from tpshard.serve.chat import ChatTemplate, TemplateError
from tpshard.serve.text import Writer


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
    assert out == writer.text
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


HELLO = [{"role": "user", "content": "hello"}]


def test_templates_of_models_find_what_transformers_gives_them() -> None:
    source = (
        "{%- if tools is not none or documents is not none %}no{% endif -%}"
        "{% for m in messages %}{% generation %}{{ m.content | tojson(ensure_ascii=False) }}{% endgeneration %}"
        "{% endfor %}{{ strftime_now('%Y') }}"
    )
    template = ChatTemplate(source, {})
    assert template.render(HELLO) == f'"hello"{time.localtime().tm_year}'
    template.close()


def test_templates_are_bounded_and_the_next_one_works() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<b>"})
    assert template.render(HELLO) == "hello<b>"
    for source, why in (
        ("{% for i in range(10**9) %}{% endfor %}", "longer than 1 s|OverflowError|Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 1 s"),
        ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "more than 1048576 bytes"),
        ("{{ 'x' * 10**10 }}", "memory|answer|bytes"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined|SecurityError"),
        ("{{ messages.append(1) }}", "unsafe|SecurityError"),
        ("{{ raise_exception('no tools here') }}", "^no tools here$"),
        ("{% include '/etc/passwd' %}", "failed"),
        ("{{ missing.attribute }}", "failed"),
        ("{% if %}", "failed"),
    ):
        template.source = source
        with pytest.raises(TemplateError, match=why):
            template.render(HELLO)
    template.source = "{{ messages[0].role }}"
    assert template.render(HELLO) == "user"
    template.close()
