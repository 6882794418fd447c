"""Tokens and masks of chat templates that write the markers of families of models are those of transformers.

The templates are code and texts of this project. Their blocks of `{% generation %}` enclose what each model learns;
without them it has to be found.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from tpshard.models.folders.assistant_spans import ConversationRenderer
from tpshard.models.folders.chat_template import ChatTemplate, TemplateError
from tpshard.models.folders.folder_files import copy_tokenizer
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.train.data.byte_bpe import byte_bpe

EVERY = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"at": "home"}}}
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather at a place.",
    "parameters": {"type": "object", "required": ["at"], "properties": {
        "at": {"type": "string"}, "days": {"type": "array", "items": {"type": "string"}}}},
}}  # fmt: skip
ASK = {"role": "user", "content": "What is two plus two?"}
ANSWER = {"role": "assistant", "content": "It is four."}
TURNS = [ASK, ANSWER, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": " It is sunny. "}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TURNS]
SAME = [ASK, ANSWER, ASK, ANSWER]
ENDED = [ASK, {"role": "assistant", "content": "Four.</s>"}, ASK, ANSWER]
CALLS = [
    {"role": "user", "content": "The weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "sunny"}, ANSWER,
]  # fmt: skip
THOUGHTS = [
    ASK, {**ANSWER, "reasoning_content": "Two and two."}, TURNS[2],
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "Look outside."},
]  # fmt: skip
THOUGHT_CALLS = [ASK, {**CALLS[1], "reasoning_content": "I ask."}, *CALLS[2:]]
INSIDE = [ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."}, *TURNS[2:]]


def unmarked(template: str) -> str:
    """A template without its blocks of `{% generation %}`, which writes the same."""
    begins = re.sub(r"{%(-?)\s*generation\s*(-?)%}", r"{%\1 if true \2%}", template)
    return re.sub(r"{%(-?)\s*endgeneration\s*(-?)%}", r"{%\1 endif \2%}", begins)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the markers of all families, which itself puts a bos before texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in byte_bpe(["It is sunny. What is two plus two? It is four."] * 3, 300)[0].items():
        (folder / name).write_text(content, encoding="utf-8")
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = {
        m for one in EVERY.values() for m in re.findall(r"<\|\w+\|>|<｜[^｜ ]+｜>|\[e~\[|\]~b\]|<\w+_of_turn>", one)
    }
    rust.add_special_tokens([AddedToken(one, special=True) for one in ["<s>", "</s>", *sorted(found)]])
    bos = rust.token_to_id("<s>")
    rust.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
    rust.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[FolderTokenizer, Any]:
    from transformers import AutoTokenizer

    return FolderTokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("name", EVERY)
def test_tokens_and_what_is_learned_are_those_of_transformers(both: tuple[FolderTokenizer, Any], name: str) -> None:
    """With and without blocks of `{% generation %}`, in which case what they enclose is found."""
    ours, theirs = both
    marked, rendered = EVERY[name], 0
    templates = [ChatTemplate(source, ours.special) for source in (marked, unmarked(marked))]
    renderers = [ConversationRenderer(ours, template) for template in templates]
    conversations: list[tuple[list[Any], Any]] = [(TURNS, None), (SYSTEM, None), (SAME, None)]
    conversations += [(ENDED, None)] if "<|return|>" not in marked else []  # which ends other answers otherwise
    called = [CALLS, [*CALLS, *TURNS], THOUGHT_CALLS]
    conversations += [(messages, [TOOL]) for messages in called] if "tool_calls" in marked else []
    conversations += [(THOUGHTS, None), (INSIDE, None)] if "think" in marked else []
    for messages, tools in conversations:
        about: dict[str, Any] = {"chat_template": marked, "tools": tools}
        try:
            expected = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **about
            )
        except Exception as refusal:  # whatever a template's own code raises
            with pytest.raises(TemplateError, match=re.escape(str(refusal)[:60])):
                renderers[0].rendered(messages, tools)
            continue
        rendered += 1
        for renderer in renderers:
            mine = renderer.rendered(messages, tools)
            assert mine.ids == expected["input_ids"]
            learned = [ours.decode([id for id, one in zip(mine.ids, mask) if one], special=True)
                       for mask in (mine.learned, expected["assistant_masks"])]  # fmt: skip
            assert learned[0] == learned[1], (messages, renderer is renderers[0])
            assert mine.learned == list(map(bool, expected["assistant_masks"]))
        asked, begun = messages[:-1], [*messages[:-1], {**messages[-1], "content": "It is "}]
        prompt = theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **about)
        assert templates[0].render(asked, tools=tools) == prompt
        prefilled = theirs.apply_chat_template(begun, tokenize=False, continue_final_message=True, **about)
        continued = templates[0].render(begun, add_generation_prompt=False, continue_final_message=True, tools=tools)
        assert continued == prefilled
    assert rendered >= 2


@pytest.mark.parametrize("form", ["config", "files"])
def test_a_template_for_tools_is_used_where_a_conversation_has_some(folder: Path, tmp_path: Path, form: str) -> None:
    """In the places where transformers finds it, with the white space of both templates as it is."""
    from transformers import AutoTokenizer

    default, with_tools = "\n{% for m in messages %}{{ m.content }}\n{% endfor %}\n  \n", f"\n {EVERY['qwen2.5']}\n"
    shutil.copytree(folder, tmp_path / "both")
    if form == "files":
        (tmp_path / "both" / "chat_template.jinja").write_text(default)
        (tmp_path / "both" / "additional_chat_templates").mkdir()
        (tmp_path / "both" / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
        (tmp_path / "both" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    copy_tokenizer(tmp_path / "both", tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(str(tmp_path / "both"))
    for read in map(FolderTokenizer, (tmp_path / "both", tmp_path)):
        template = ChatTemplate(read.chat_template or "", read.special)
        for messages, tools in ((TURNS, None), (CALLS, [TOOL])):
            expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
            assert template.render(messages, add_generation_prompt=False, tools=tools) == expected


def test_calls_that_a_template_writes_only_without_a_content_are_no_answer(folder: Path) -> None:
    """As DeepSeek R1's first template does."""
    tokenizer = FolderTokenizer(folder)
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is not none and m.content is defined %}{{ m.content }}"
        "{% else %}{{ m.tool_calls | tojson }}{% endif %}</s>{% endfor %}"
    )
    renderer = ConversationRenderer(tokenizer, ChatTemplate(source, tokenizer.special))
    with pytest.raises(TemplateError, match=r"message 2 calls tools, which .* at least not beside a content"):
        renderer.rendered(CALLS)
    assert '"name": "weather"' in renderer.rendered([ASK, {**CALLS[1], "content": None}, *CALLS[2:]]).text
