"""What the assistant wrote is found in the rendered text, whatever the template does around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_folders import CHATML, MARKED, chat_folder
from tpshard.models.folders.assistant_spans import ConversationRenderer
from tpshard.models.folders.chat_template import ChatTemplate, TemplateError
from tpshard.models.folders.folder_tokenizer import FolderTokenizer

ASKED = [
    {"role": "user", "content": "two plus two?"}, {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "and now?"}, {"role": "assistant", "content": " It is sunny. "},
]  # fmt: skip
CALLS = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"function": {"name": "weather", "arguments": {"at": "home"}}}]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]  # fmt: skip
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
NEXT_HEADER = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}<|eom|>{% else %}<|eot|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MACRO = (
    "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ say(m) }}<|im_end|>{% else %}U:{{ m.content }}"
    "{% endif %}{% endfor %}"
)

LAST_SYSTEM = (
    "{% set talk = messages[1:] %}{% for m in talk %}{% if m.role == 'user' %}[INST] "
    "{{ messages[0].content if loop.revindex <= 2 }} {{ m.content }}[/INST]{% else %} {{ m.content }}<|eot|>{% endif %}"
    "{% endfor %}"
)
"""The system message stands in the last question, as in Mistral's v3."""
RETURNS = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|eot|>"
    "{% else %}<|eom|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
"""The last answer ends in another marker than those before, as in harmony."""


def renderer(folder: Path, template: str, **settings: Any) -> ConversationRenderer:
    tokenizer = FolderTokenizer(chat_folder(folder, template, **settings))
    return ConversationRenderer(tokenizer, ChatTemplate(template, tokenizer.special))


def learned(of: ConversationRenderer, messages: list[dict[str, Any]]) -> str:
    rendered = of.rendered(messages)
    return of.tokenizer.decode([id for id, one in zip(rendered.ids, rendered.learned) if one], special=True)


@pytest.mark.parametrize(
    ("template", "messages", "settings", "expected"),
    [
        (CHATML, ASKED, {}, "It is four.<|im_end|> It is sunny. <|im_end|>"),
        (MARKED, ASKED, {}, "It is four.<|im_end|> It is sunny. <|im_end|>"),
        (INST, ASKED, {}, " It is four. <|end|> It is sunny. <|end|>"),
        (NEXT_HEADER, ASKED, {"stops": ("<|user|>",)}, "It is four.<|user|> It is sunny. "),
        (NEXT_HEADER, ASKED, {}, "It is four. It is sunny. "),
        (THINKS, [*ASKED[:3], {**ASKED[3], "reasoning_content": "Hm."}], {},
         "It is four.<|im_end|><think>\nHm.\n</think>\n\n It is sunny. <|im_end|>"),
        (TOOLS, CALLS, {},
         '<call>{"name": "weather", "arguments": {"at": "home"}}</call><|eom|>It is sunny.<|eot|>'),
        (MACRO, ASKED, {}, "It is four.<|im_end|> It is sunny. <|im_end|>"),
    ],
)  # fmt: skip
def test_the_answers_and_what_ends_them_are_learned(
    tmp_path: Path, template: str, messages: Any, settings: Any, expected: str
) -> None:
    assert learned(renderer(tmp_path, template, **settings), messages) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED, INST, THINKS, TOOLS, MACRO])
def test_tokens_and_marked_answers_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    mine = renderer(tmp_path, template).rendered(ASKED)
    theirs: Any = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        ASKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=template == MARKED
    )
    assert mine.ids == theirs["input_ids"]
    if template == MARKED:
        assert mine.learned == list(map(bool, theirs["assistant_masks"]))


def test_text_that_looks_like_a_marker_ends_no_answer(tmp_path: Path) -> None:
    tricky = [{"role": "user", "content": "It is four.<|im_end|>"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    assert learned(renderer(tmp_path, CHATML), tricky) == "a<|im_end|>b<|im_end|>"


def test_an_answer_begins_at_its_prompt_where_the_system_message_moves(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, ASKED[0], {"role": "assistant", "content": "a"}, *ASKED[2:]]
    assert learned(renderer(tmp_path, LAST_SYSTEM), talk) == " a<|eot|>  It is sunny. <|eot|>"


@pytest.mark.parametrize("own", ["<|eot|>", "<|eom|>", "<|im_end|>"])
def test_an_answer_that_ends_in_a_marker_has_the_end_of_its_turn_too(own: str, tmp_path: Path) -> None:
    talk = [ASKED[0], {"role": "assistant", "content": f"a{own}"}, ASKED[2], {"role": "assistant", "content": "b"}]
    assert learned(renderer(tmp_path, RETURNS, end="<|eot|>"), talk) == f"a{own}<|eom|>b<|eot|>"


def test_a_template_that_writes_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="nothing"):
        renderer(tmp_path, "{% if false %}x{% endif %}").rendered(ASKED)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_of_weight_0_is_not_learned(template: str, tmp_path: Path) -> None:
    of = renderer(tmp_path, template)
    last = learned(of, [*ASKED[:3], {"role": "assistant", "content": "Nine."}])
    only = learned(of, [ASKED[0], {**ASKED[1], "weight": 0}, ASKED[2], {"role": "assistant", "content": "Nine."}])
    assert only and last.endswith(only) and "Nine." in only and "four" not in only
