from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.renderer import CheckpointHint, Prompt, Rendered, RenderError, encode, render
from model.tokenizer import Tokenizer
from moonrelay.errors import InvalidRequest

GOLDEN = Path(__file__).parents[2] / "tests/data/chat"
CASES = json.loads((GOLDEN / "cases.json").read_text())["cases"]
TOKENIZER = Tokenizer.load(GOLDEN)

# No clock: a busy machine must not fail a property.
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
TOOL = {"type": "function", "function": {"name": "grep", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def golden_render(request: dict[str, Any]) -> Rendered:
    return render(request, image_prompts=request.get("image_prompts"), image_placeholders=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_conversations(case: dict[str, Any]) -> None:
    expected = case["expected"]
    rendered = golden_render(case["request"])
    prompt = encode(rendered, TOKENIZER)
    assert rendered.text == expected["text"]
    segments = [
        {"text": segment.text, "allow_special": segment.allow_special, "is_assistant": segment.is_assistant}
        for segment in rendered.segments
    ]
    assert segments == expected["segments"]
    assert prompt.ids == expected["toy_token_ids"] == TOKENIZER.encode_segments(rendered.segments)
    mask = [0] * len(prompt.ids)
    for start, end in prompt.assistant_spans:
        mask[start:end] = [1] * (end - start)
    assert mask == expected["toy_assistant_mask"]


def test_golden_conversations_are_all_there() -> None:
    assert len(CASES) == 15


def parts_at_hints(request: dict[str, Any]) -> tuple[Rendered, dict[int, str]]:
    """The prompt's text before each hint; the hint's token offset must fall on the same place."""
    rendered = render(request)
    prompt = encode(rendered, TOKENIZER)
    texts = {}
    for in_segments, in_tokens in zip(rendered.hints, prompt.checkpoint_hints, strict=True):
        text = "".join(segment.text for segment in rendered.segments[: in_segments.offset])
        assert TOKENIZER.decode(prompt.ids[: in_tokens.offset]) == text
        texts[in_tokens.kind] = text
    return rendered, texts


def test_hints_end_at_declarations_and_at_the_last_message() -> None:
    request = {
        "messages": [
            {"role": "system", "content": "one"},
            {"role": "system", "tools": [TOOL]},
            USER,
            {"role": "system", "content": "late"},
        ],
        "tools": [TOOL],
        "tool_choice": "required",
    }
    rendered, texts = parts_at_hints(request)
    assert texts[0].count("<|end_of_msg|>") == 4
    assert "late<|close|>" not in texts[0] and "New Tools" in texts[0]
    assert texts[1].endswith("late<|close|>message<|sep|><|end_of_msg|>")
    assert rendered.one_shot
    assert rendered.thinking


def test_kind_1_is_a_prefix_of_the_next_turn_and_the_prompt_with_one_shots_is_not() -> None:
    first = {"messages": [USER], "response_format": {"type": "json_object"}}
    answer = {"role": "assistant", "content": "{}", "reasoning_content": "so"}
    _, texts = parts_at_hints(first)
    later = render({"messages": [USER, answer, USER]}).text
    assert later.startswith(texts[1])
    assert not later.startswith(render(first).text)


def test_no_declarations_no_kind_0() -> None:
    rendered, texts = parts_at_hints({"messages": [USER], "thinking": False})
    assert set(texts) == {1}
    assert not rendered.thinking
    assert not rendered.one_shot


def test_hints_and_spans_where_nothing_is_encoded_in_between() -> None:
    prompt = encode(Rendered(segments=(), hints=(CheckpointHint(0, 1),), thinking=True, one_shot=False), TOKENIZER)
    assert prompt == Prompt(ids=[], checkpoint_hints=(CheckpointHint(0, 1),), assistant_spans=())


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "max"),
        ({"thinking_effort": "low"}, "low"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": None}, "max"),
        ({"reasoning_effort": "medium", "thinking_effort": None}, "medium"),
        ({"reasoning_effort": "low", "thinking_effort": "low"}, "low"),
        ({"thinking_effort": None}, None),
        ({"thinking": False, "thinking_effort": "low"}, None),
    ],
)
def test_effort(fields: dict[str, Any], effort: str | None) -> None:
    text = render({"messages": [USER], **fields}).text
    assert ("thinking-effort" in text) == (effort is not None)
    assert effort is None or f"`thinking_effort={effort}`" in text


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({}, ""),
        ({"reasoning_content": " \n"}, ""),
        ({"reasoning_content": " a "}, " a "),
        ({"reasoning": "b"}, "b"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
    ],
)
def test_reasoning_under_both_names_and_blank_reasoning(fields: dict[str, Any], thought: str) -> None:
    text = render({"messages": [{"role": "assistant", "content": "x", **fields}]}).text
    assert f"<|open|>think<|sep|>{thought}<|close|>think<|sep|>" in text


def test_developer_is_another_name_of_system() -> None:
    texts = {render({"messages": [{"role": role, "content": "x"}]}).text for role in ("developer", "system")}
    assert len(texts) == 1


def test_json_object_response_format_and_schema_places() -> None:
    def notice(response_format: Any) -> str:
        return render({"messages": [USER], "response_format": response_format}).text

    schema = {"type": "object", "a": {"z": 1, "b": 2}}
    places = ({"schema": schema, "name": "n"}, {"json_schema": schema}, schema)
    texts = {notice({"type": "json_schema", "json_schema": place}) for place in places}
    assert len(texts) == 1
    assert '```json\n{"a":{"b":2,"z":1},"type":"object"}\n```<|close|>' in texts.pop()
    plain = notice({"type": "json_object"})
    assert "`response_format=json_object`.\nYour response must be raw JSON data" in plain
    assert "schema" not in plain
    assert notice({"type": "text"}) == notice(None) == render({"messages": [USER]}).text


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, "boolean", "true"),
        (None, "null", "null"),
        (0, "number", "0"),
        (-1.5e300, "number", "-1.5e+300"),
        ("", "string", ""),
        ("é\n", "string", "é\n"),
        ([], "array", "[]"),
        ({"é": [1, "ü"]}, "object", '{"é": [1, "ü"]}'),
    ],
)
def test_argument_types(value: Any, kind: str, text: str) -> None:
    for arguments in ({"k": value}, json.dumps({"k": value})):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        rendered = render({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}).text
        argument = f'<|open|>argument key="k" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
        assert f'<|open|>call tool="f" index="1"<|sep|>{argument}<|close|>call<|sep|>' in rendered


def results(*given: tuple[str | None, str]) -> str:
    """The rendered results of two calls, a and b of the tools f and g, each given as (id, name)."""
    calls = [{"id": i, "type": "function", "function": {"name": n}} for i, n in (("a", "f"), ("b", "g"))]
    messages: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": calls}]
    for number, (call_id, name) in enumerate(given):
        message = {"role": "tool", "tool_call_id": call_id, "name": name, "content": f"r{number}"}
        messages.append({key: value for key, value in message.items() if value is not None})
    text = render({"messages": messages, "add_generation_prompt": False}).text
    heads = text.split('<|open|>message role="tool" ')[1:]
    return " ".join(head.split("<|close|>")[0].replace("<|sep|>", ":") for head in heads)


def test_tool_results_take_call_order_and_name() -> None:
    assert results(("b", None), ("a", None)) == 'tool="f" index="1":r1 tool="g" index="2":r0'
    assert results(("b", "stale")) == 'tool="g" index="1":r0'
    assert results(("b", None), ("b", None)) == 'tool="g" index="1":r0 tool="g" index="2":r1'


def test_tool_results_with_an_unknown_id_stay_as_they_came() -> None:
    assert results(("b", "x"), ("?", "y")) == 'tool="x" index="1":r0 tool="y" index="2":r1'
    assert results((None, None), (None, None)) == 'tool="f" index="1":r0 tool="g" index="2":r1'


def test_tool_results_are_numbered_anew_after_each_assistant_message() -> None:
    turn = [
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    assert render({"messages": turn * 2}).text.count('tool="f" index="1"<|sep|>r') == 2


def call_with(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}
DEEP = "[" * 100_000 + "]" * 100_000


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("request_fields", "param", "message"),
    [
        ({}, "messages", "an array, found null"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "expected an array, found the string 'hi'"),
        ({"messages": ["hi"]}, "messages[0]", "an object"),
        ({"messages": [USER, {}]}, "messages[1].role", "one of system, developer"),
        ({"messages": [{"role": "function"}]}, "messages[0].role", "found the string 'function'"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role", "found an array"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "found null"),
        ({"messages": [USER, {"role": "user", "content": 7}]}, "messages[1].content", "found a number"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "null"),
        ({"messages": [{"role": "user", "content": [{"type": "a"}]}]}, "messages[0].content[0].type", "`text`"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "not supported"),
        ({"messages": [{**USER, "name": 1}]}, "messages[0].name", "a string"),
        ({"messages": [{"role": "assistant", "content": 1}]}, "messages[0].content", "found a number"),
        ({"messages": [{"role": "assistant", "reasoning": []}]}, "messages[0].reasoning", "an array"),
        (
            {"messages": [{"role": "assistant", "reasoning_content": 1}]},
            "messages[0].reasoning_content",
            "a string, found a number",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls", "an array"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "null"),
        ({"messages": [call_with("[1]")]}, "messages[0].tool_calls[0].function.arguments", "found an array"),
        ({"messages": [call_with(7)]}, "messages[0].tool_calls[0].function.arguments", "a JSON object"),
        ({"messages": [call_with(DEEP)]}, "messages[0].tool_calls[0].function.arguments", "too deeply"),
        ({"messages": [call_with("9" * 5000)]}, "messages[0].tool_calls[0].function.arguments", "digits"),
        ({"messages": [call_with(nested(5000))]}, "messages[0].tool_calls[0].function.arguments", "too deeply"),
        ({"messages": [{"role": "tool", "content": "r"}]}, "messages[0].tool_call_id", "the id of a call"),
        ({"messages": [{"role": "tool", "tool_call_id": 4}]}, "messages[0].tool_call_id", "a string"),
        ({"messages": [{"role": "system", "tools": [{}]}]}, "messages[0].tools[0].function", "an object"),
        ({"messages": [USER], "tools": {}}, "tools", "an array"),
        ({"messages": [USER], "tools": [{"type": "web"}]}, "tools[0].type", "`function`"),
        ({"messages": [USER], "tools": [{"function": {}}]}, "tools[0].function.name", "non-empty"),
        ({"messages": [USER], "tools": [{"function": {"name": "f", "x": nested(5000)}}]}, "tools", "too deeply"),
        ({"messages": [USER], "thinking": "yes"}, "thinking", "a boolean"),
        ({"messages": [USER], "thinking_effort": "huge"}, "thinking_effort", "one of low, medium"),
        ({"messages": [USER], "reasoning_effort": 3}, "reasoning_effort", "found a number"),
        (
            {"messages": [USER], "reasoning_effort": "low", "thinking_effort": "max"},
            "reasoning_effort",
            "another name",
        ),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice", "`auto`"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"messages": [USER], "response_format": {}}, "response_format.type", "found null"),
        (
            {"messages": [USER], "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "an object, found null",
        ),
        (
            {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
            "an object",
        ),
    ],
)
def test_malformed_requests_name_the_field(request_fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RenderError) as caught:
        render(request_fields)
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.param == param
    assert str(caught.value).startswith(param.split("[")[0].split(".")[0])
    assert message in str(caught.value)


@pytest.mark.parametrize("prompts", [[], ["<|media_begin|><|media_end|>"] * 2])
def test_images_must_match_their_expansions(prompts: list[str]) -> None:
    with pytest.raises(RenderError, match="images"):
        render({"messages": [{"role": "user", "content": [IMAGE]}]}, image_prompts=prompts)


def test_a_request_cannot_bring_its_own_image_expansions() -> None:
    request = {"messages": [{**USER, "content": "<|kimi_image_placeholder|>"}], "image_prompts": ["<|open|>"]}
    segments = render(request).segments
    assert [s.allow_special for s in segments if s.text == "<|kimi_image_placeholder|>"] == [False]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from(
    ["role", "content", "tool_calls", "tools", "function", "name", "arguments", "type", "text", "id", "reasoning"]
)
words = st.sampled_from(["user", "assistant", "tool", "system", "text", "function", "image_url", "{}", "{", "a"])
chat_like = st.recursive(
    words | json_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(field_names, inner, max_size=5),
    max_leaves=25,
)
messages_like = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={
        "content": chat_like,
        "tool_calls": chat_like,
        "tools": chat_like,
        "name": words,
        "reasoning_content": words,
        "tool_call_id": words,
    },
)
request_names = ["tools", "thinking", "thinking_effort", "reasoning_effort", "tool_choice", "response_format"]


@quick
@given(
    st.lists(messages_like, min_size=1, max_size=4) | chat_like,
    st.dictionaries(st.sampled_from(request_names), chat_like, max_size=2),
)
def test_whatever_comes_is_rendered_or_refused_by_name(messages: Any, fields: dict[str, Any]) -> None:
    request = {"messages": messages, **fields}
    try:
        rendered = render(request)
    except RenderError as error:
        assert error.param is not None
        assert error.param.split("[")[0].split(".")[0] in {"messages", *request}
        return
    structure = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
    assert {segment.text for segment in rendered.segments if segment.allow_special} <= structure
