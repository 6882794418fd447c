"""Every field of a request with a value out of range or of another type, and every unknown one, is refused by name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParameters
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParameters
from tpshard.serve.api import fields, neutral_fields
from tpshard.serve.api.field_checks import Refused

MODEL = {"model": "m"}
NUMBERS = {
    "temperature": (-0.1, 2.1), "top_p": (0, 1.01), "min_p": (-0.1, 1.1), "repetition_penalty": (0, 101),
    "presence_penalty": (-2.1, 2.1), "frequency_penalty": (-2.1, 2.1), "top_k": (-2, 2**31), "n": (0, 10**9),
    "max_tokens": (-1, 2**31), "seed": (-(2**64), 2**64), "best_of": (0, 17), "logprobs": (-1, 21),
}  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    *((key, value) for key, pair in NUMBERS.items() for value in (*pair, "1", [1], {}, True, 10**400, 1e308)),
    *((key, value) for key in ("top_k", "n", "max_tokens", "seed", "best_of", "logprobs") for value in (1.5, 1.0)),
    *((key, value) for key in ("stream", "echo", "ignore_eos") for value in (1, "true", [])),
    *(("stop", value) for value in ("", [""], [1], {}, ["x"] * 17, "x" * 257, [["x"]], "\0")),
    *(("logit_bias", v) for v in ([], "x", {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "2"}, {"1": True}, {"1.5": 1})),
    *(("logit_bias", v) for v in ({str(i): 1 for i in range(1025)}, {"٣": 1}, {"9" * 11: 1}, {"5": 1, "05": 2})),
    *(("prompt", v) for v in ("", [], [""], [[]], 1, {}, [1, "a"], [-1], [True], [1.5], [2**31], ["a"] * 65, "a\0b")),
    *(("prompt", value) for value in ("\ud800", [["a"]], [[[1]]])),
    *(("stream_options", value) for value in ({}, {"include_usage": True})),  # without stream
    *(("stop_token_ids", value) for value in ("x", [-1], [1.5], [True], list(range(65)))),
    ("suffix", "x"), ("user", 1), ("best_of", 2), ("model", 1), ("max_tokens", 0),
]  # fmt: skip


@pytest.mark.parametrize("key,value", WRONG, ids=lambda v: str(v)[:20])
def test_a_wrong_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(Refused) as error:
        fields.completion(MODEL | {"prompt": "a"} | {key: value})
    assert error.value.status == 400
    assert error.value.param == key
    assert key in error.value.message
    assert len(error.value.message) < 400
    json.dumps(error.value.body())


MESSAGE = {"role": "user", "content": "a"}
WRONG_CHAT: list[tuple[str, Any]] = [
    *(("messages", v) for v in ([], "a", [1], [{}], [{"role": "user"}], [{"role": "tool", "content": "a"}])),
    *(("messages", [MESSAGE | v]) for v in ({"content": 1}, {"content": "\0"}, {"tool_calls": [1]}, {"extra": 1})),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
    ("messages", [MESSAGE] * 4097),
    *(("response_format", value) for value in ({"type": "json_object"}, 1)),
    ("logprobs", 2), ("top_logprobs", 2), ("max_completion_tokens", 0), ("max_tokens", 0), ("store", True),
    ("tools", [{}]), ("tool_choice", "required"), ("functions", [{}]), ("metadata", {"a": "b"}), ("audio", {}),
    ("echo", True), ("modalities", ["text", "audio"]), ("web_search_options", {}), ("service_tier", "flex"),
    ("chat_template_kwargs", {"messages": []}), ("reasoning_effort", 1), ("add_generation_prompt", 1),
]  # fmt: skip


@pytest.mark.parametrize("key,value", WRONG_CHAT, ids=lambda v: str(v)[:20])
def test_a_wrong_chat_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(Refused) as error:
        fields.chat(MODEL | {"messages": [MESSAGE]} | {key: value})
    assert (error.value.status, error.value.param) == (400, key)


def test_tools_that_are_not_to_be_called_are_ignored() -> None:
    plain = MODEL | {"messages": [MESSAGE], "seed": 1}
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        assert fields.chat(plain | {tools: [{"name": "f"}], choice: "none"}) == fields.chat(plain)
        with pytest.raises(Refused, match=f"`{tools}`"):
            fields.chat(plain | {tools: [{"name": "f"}], choice: "auto"})


def test_what_is_missing_or_unknown_is_refused() -> None:
    for body, param in (({"prompt": "a"}, "model"), (MODEL, "prompt"), (MODEL | {"prompt": "a", "Temp": 1}, "Temp")):
        with pytest.raises(Refused) as error:
            fields.completion(body)
        assert error.value.param == param


def test_what_is_asked_for_is_what_is_meant() -> None:
    order = fields.completion(
        MODEL
        | {"prompt": [[1, 2], "b"], "temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "n": 2, "stop": "x"}
        | {"logit_bias": {"5": -100}, "logprobs": 0, "max_tokens": None, "stream": True}
        | {"stream_options": {"include_usage": True}}
    )
    assert order.prompts == ((1, 2), "b")
    assert order.sampling.temperature == 0 and order.sampling.top_k == 0 and order.sampling.seed == 7
    assert order.sampling.logit_bias == ((5, -100.0),) and order.sampling.logprobs == 0
    assert order.max_tokens is None and order.stop == ("x",) and order.include_usage
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = fields.chat(MODEL | {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 3})
    assert chat.messages == ({"role": "user", "content": "ab"},) and chat.max_tokens == 3


BODIES = [
    b"", b"{", b"[]", b"1", b'"x"', b"null", b"{}x", b'{"a": 1, "a": 2}',
    b"\xff\xfe{\x00}\x00", b'{"a": "\xff"}', b'{"a": ' + b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\x00"}', b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: str(b[:12]))
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as error:
        fields.parse(body)
    assert error.value.status == 400


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    for key in sorted(fields.COMPLETION):
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "[NaN]", '{"5": NaN}'):
            raw = json.dumps(MODEL | {"prompt": "a", key: 0}).replace(f'"{key}": 0', f'"{key}": {value}')
            with pytest.raises(Refused) as error:
                fields.completion(fields.parse(raw.encode()))
            assert error.value.param == key


def test_a_wrong_message_is_told_with_its_place() -> None:
    for message, place in (
        (5, "an item 1 that is not an object"),
        (MESSAGE | {"content": 5}, "an item 1 whose `content` is not a string: 5"),
        ({"role": "user"}, "an item 1 whose `content` is not a string: None"),
        (MESSAGE | {"name": 1}, "an item 1 whose `name` is not a string: 1"),
        (MESSAGE | {"content": [{"type": "text", "text": 5}]}, "an item 1 whose `text` is not a string: 5"),
    ):
        with pytest.raises(Refused) as error:
            fields.chat(MODEL | {"messages": [MESSAGE, message]})
        assert place in error.value.message


def test_brackets_in_strings_are_no_depth() -> None:
    assert fields.parse(json.dumps({"a": "[{" * 500 + '\\"[[['}).encode())["a"].startswith("[{")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_body_breaks_the_parser(body: bytes) -> None:
    try:
        device = fields.parse(body)
    except Refused:
        return
    assert device == json.loads(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(fields.COMPLETION.keys() | fields.CHAT.keys())), VALUES)
def test_no_value_breaks_a_field(key: str, value: Any) -> None:
    for parse, rest in ((fields.completion, {"prompt": "a"}), (fields.chat, {"messages": [MESSAGE]})):
        try:
            parse(MODEL | rest | {key: value})
        except Refused as error:
            json.dumps(error.body())


def parameters(body: Any) -> list[str]:
    """The fields of a request in the `openai` package."""
    return [name for name in get_type_hints(body) if name not in ("model", "prompt", "messages")]


@pytest.mark.parametrize(
    "key", sorted({*parameters(CompletionParameters), *fields.COMPLETION, "of_others"} - {"model", "prompt"})
)
def test_null_is_absence_in_a_completion(key: str) -> None:
    body = MODEL | {"prompt": "a"}
    assert fields.completion({key: None, **body, "seed": 1}) == fields.completion(body | {"seed": 1})


@pytest.mark.parametrize(
    "key", sorted({*parameters(ChatParameters), *fields.CHAT, "of_others"} - {"model", "messages"})
)
def test_null_is_absence_in_a_chat(key: str) -> None:
    body = MODEL | {"messages": [MESSAGE]}
    assert fields.chat({key: None, **body, "seed": 1}) == fields.chat(body | {"seed": 1})


NEUTRAL = [
    (path, key, value)
    for path, table in (("completion", neutral_fields.COMPLETION_VALUES), ("chat", neutral_fields.CHAT_VALUES))
    for key, values in table.items()
    for value in values
]


@pytest.mark.parametrize(("path", "key", "value"), NEUTRAL, ids=lambda v: str(v)[:20])
def test_a_value_that_asks_for_nothing_changes_nothing(path: str, key: str, value: Any) -> None:
    parse, body = {
        "completion": (fields.completion, MODEL | {"prompt": "a", "seed": 1}),
        "chat": (fields.chat, MODEL | {"messages": [MESSAGE], "seed": 1}),
    }[path]
    assert parse(body | {key: value}) == parse(body)
    other_number = 77 if isinstance(value, int) and not isinstance(value, bool) else [value]
    for other in (other_number, "another", {"a": 1}):
        with pytest.raises(Refused, match=f"`{key}` is not supported") as error:
            parse(body | {key: other})
        assert (error.value.param, error.value.code) == (key, "invalid_value")


def test_an_answer_sent_back_as_a_message_is_its_text() -> None:
    answer = ChatCompletionMessage(role="assistant", content="b", annotations=[], tool_calls=[], refusal=None)
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": None, "x": None}
    question = {"role": "user", "content": [part], "name": None, "tool_calls": None}
    order = fields.chat(MODEL | {"messages": [question, answer.model_dump()]})
    assert order.messages == (MESSAGE, {"role": "assistant", "content": "b"})
    for key, value in (("tool_calls", [1]), ("refusal", "no"), ("audio", {}), ("unknown", [])):
        with pytest.raises(Refused, match=f"an item 0 with `{key}`, which is not supported"):
            fields.chat(MODEL | {"messages": [MESSAGE | {key: value}]})
    with pytest.raises(Refused, match="a part of `content` of type 'image_url'; only text is supported"):
        fields.chat(MODEL | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})


def test_defaults_hold_for_what_a_request_does_not_say() -> None:
    defaults = {"temperature": 0.5, "top_k": 7, "usual_max_tokens": 9, "model_stop": ["z"]}
    order = fields.completion(MODEL | {"prompt": "a", "top_k": 0, "top_p": 0.5, "temperature": None}, defaults)
    assert (order.sampling.temperature, order.sampling.top_k, order.sampling.top_p) == (0.5, 0, 0.5)
    assert (order.max_tokens, order.usual.max_tokens, order.stop) == (None, 9, ("z",))
    asked = fields.completion(MODEL | {"prompt": "a", "stop": "y", "min_tokens": 0}, defaults | {"usual_min_tokens": 3})
    assert (asked.stop, asked.usual.min_tokens) == (("y", "z"), 0)
    assert fields.completion(MODEL | {"prompt": "a", "ignore_eos": True}, defaults).stop == ()


def test_prompts_are_open_or_continued() -> None:
    body = MODEL | {"messages": [MESSAGE]}
    assert fields.chat(body).add_generation_prompt
    assert not fields.chat(body | {"continue_final_message": True}).add_generation_prompt
    assert fields.chat(body | {"continue_final_message": False, "add_generation_prompt": False}).messages
    for parse, rest in ((fields.chat, MODEL), (fields.tokenize, {})):
        with pytest.raises(Refused, match="exclude one another"):
            parse(rest | {"messages": [MESSAGE], "continue_final_message": True, "add_generation_prompt": True})
    equal = fields.chat(body | {"max_tokens": 3, "max_completion_tokens": 3, "top_logprobs": 0, "logprobs": False})
    assert equal.max_tokens == 3
    with pytest.raises(Refused, match="differ"):
        fields.chat(body | {"max_tokens": 3, "max_completion_tokens": 4})


def test_what_is_tokenized_is_a_prompt_or_messages() -> None:
    for body in ({}, {"prompt": "a", "messages": [MESSAGE]}, {"prompt": None}):
        with pytest.raises(Refused, match="either `prompt` or `messages`"):
            fields.tokenize(body)
    with pytest.raises(Refused, match="`tokens` has a token that is not between"):
        fields.detokenize({"tokens": [-1]})
