"""Chat templates stay within limits, and what they do with a role is known before a conversation is rendered."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tpshard.models.folders import chat_template
from tpshard.models.folders.chat_template import ChatTemplate, TemplateError, TemplateTimeout

HELLO = [{"role": "user", "content": "hello"}]
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONLY_THREE = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'assistant' %}({{ m.content }})"
    "{% elif m.role == 'system' %}S{{ m.content }}{% endif %}{% endfor %}"
)
REST_IS_ASSISTANT = (
    "{% for m in messages %}{% if m.role == 'system' %}S{% elif m.role == 'user' %}U{% else %}A{% endif %}"
    "{{ m.content }}{% endfor %}"
)
KNOWS = "{% for m in messages %}{% if m.role in ['system', 'developer'] %}S{% endif %}{{ m.content }}{% endfor %}"
REFUSES = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }}:{{ m.content }} {% endfor %}"
)
ONLY_USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def test_templates_of_models_find_what_transformers_gives_them() -> None:
    source = (
        "{%- if tools is not none or documents is not none %}no{% endif -%}"
        "{% for m in messages %}{% generation %}{{ m.content | tojson(ensure_ascii=False) }}{% endgeneration %}"
        "{% endfor %}{{ strftime_now('%Y') }}"
    )
    assert ChatTemplate(source, {}).render(HELLO) == f'"hello"{time.localtime().tm_year}'


def test_templates_are_bounded() -> None:
    assert ChatTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<b>"}).render(HELLO) == "hello<b>"
    for source, why in (
        ("{% for i in range(10**9) %}{% endfor %}", "longer than 1 s|OverflowError|Range too big"),
        ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "more than 1048576 bytes"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined|SecurityError"),
        ("{{ messages.append(1) }}", "unsafe|SecurityError"),
        ("{{ raise_exception('no tools here') }}", "^no tools here$"),
        ("{% include '/etc/passwd' %}", "failed"),
        ("{{ missing.attribute }}", "failed"),
        ("{% if %}", "failed"),
    ):
        with pytest.raises(TemplateError, match=why):
            ChatTemplate(source, {}).render(HELLO)


def test_a_template_that_computes_without_end_is_told_from_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateTimeout, match=r"longer than 0\.1 s"):
        ChatTemplate(loops, {}).render(HELLO)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (CHATML, "<developer>be brief<end><user>hello<end><assistant>"),
        (ONLY_THREE, "Sbe brief[hello]"),
        (REST_IS_ASSISTANT, "Sbe briefUhello"),
        (KNOWS, "Sbe briefhello"),
        (REFUSES, "system:be brief user:hello "),
    ],
    ids=["any role", "drops others", "others are the assistant", "knows it", "refuses it"],
)
def test_a_developer_is_the_system_where_the_template_knows_none(source: str, rendered: str) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    assert ChatTemplate(source, {}).render(messages) == rendered
    assert messages[0]["role"] == "developer"


@pytest.mark.parametrize(("role", "dropped"), [("system",) * 2, ("developer", "system"), ("assistant",) * 2])
def test_messages_that_a_template_drops_are_refused(role: str, dropped: str) -> None:
    template = ChatTemplate(ONLY_USERS, {})
    assert template.render(HELLO) == "hello"
    with pytest.raises(TemplateError, match=f"drops messages of the role `{dropped}`"):
        template.render([{"role": role, "content": "a"}, *HELLO])


def test_an_answer_continues_the_last_message_where_it_ends() -> None:
    def continued(source: str, content: str) -> str:
        messages: list[dict[str, Any]] = [*HELLO, {"role": "assistant", "content": content}]
        return ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)

    assert continued(CHATML, "e") == "<user>hello<end><assistant>e"  # not the `e` of `<end>`
    assert continued(CHATML, "It is ") == "<user>hello<end><assistant>It is"  # the template strips
    assert continued(ONLY_THREE, "It is ") == "[hello](It is "
    assert continued(CHATML, "") == "<user>hello<end><assistant>"
    with pytest.raises(TemplateError, match="does not write the last message"):
        continued("{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}{% endfor %}", "a")


def test_an_open_conversation_has_no_generation_prompt() -> None:
    assert ChatTemplate(CHATML, {}).render(HELLO, add_generation_prompt=False) == "<user>hello<end>"


def test_the_variables_that_a_template_reads_are_known() -> None:
    template = ChatTemplate("{% if enable_thinking %}think{% endif %}{{ messages[0].content }}", {})
    assert "enable_thinking" in template.variables_read and "other" not in template.variables_read
    assert template.render(HELLO, enable_thinking=True) == "thinkhello"


def test_results_of_tools_may_be_written_where_the_tool_was_called() -> None:
    """As Gemma 4's template does: the message alone writes nothing."""
    source = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role }}:{{ m.content }} {% if m.tool_calls %}"
        "({{ messages[loop.index].content }}) {% endif %}{% endif %}{% endfor %}"
    )
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {}}}
    asked = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    assert "(sunny)" in ChatTemplate(source, {}).render(asked)


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ("{{ m.content | trim }}", "<user>a b<assistant>c"),
        ("{% if m.content is iterable %}{{ m.content | tojson }}{% endif %}", '<user>" a b"<assistant>"c "'),
        ("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
         "{% endif %}", "<user>ab<assistant>c"),
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", "<user> a b<assistant>c "),
    ],
)  # fmt: skip
def test_contents_in_parts_are_text_where_the_template_reads_no_parts(writes: str, expected: str) -> None:
    """And a text is a part where it reads parts alone."""
    template = ChatTemplate(f"{{% for m in messages %}}<{{{{ m.role }}}}>{writes}{{% endfor %}}", {})
    asked = {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "c "}]}
    assert template.render([asked, answer]) == expected
    continued = template.render([asked, answer], continue_final_message=True)
    assert continued == expected.removesuffix('"')
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render(plain).replace('"', "") == "<user>a<assistant>b"
    with pytest.raises(TemplateError, match="has no text"):
        ChatTemplate(CHATML, {}).render([{"role": "user", "content": [{"type": "image"}]}])
