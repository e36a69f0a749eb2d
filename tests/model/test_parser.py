from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.output import ContentDelta, ParsedOutput, ReasoningDelta, ToolCallArguments, ToolCallStart, tool_call_id
from model.parser import OutputParser, parse_output
from model.renderer import encode, render
from model.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "tests/data/chat")

# No clock: a busy machine must not fail a property.
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
USER = {"role": "user", "content": "go"}
END = "<|end_of_msg|>"


def call_id(index: int) -> str:
    return f"call-{index}"


def generation(assistant: dict[str, Any], *, thinking: bool = True) -> list[int]:
    """The ids that the model would have generated to say this message."""
    before = encode(render({"messages": [USER], "thinking": thinking}), TOKENIZER).ids
    after = encode(
        render({"messages": [USER, assistant], "thinking": thinking, "add_generation_prompt": False}), TOKENIZER
    ).ids
    assert after[: len(before)] == before
    return after[len(before) :]


def ids_of(text: str) -> list[int]:
    """Ids of hand-written output, markers as special ids."""
    return TOKENIZER.encode(text, allow_special=True)


def parse(text: str, *, thinking: bool = True, stopped: bool = False) -> ParsedOutput:
    return parse_output(ids_of(text), TOKENIZER, thinking=thinking, call_id=call_id, stopped=stopped)


def stream(ids: list[int], sizes: list[int], *, thinking: bool) -> tuple[ParsedOutput, ParsedOutput, list[Any]]:
    """(the result, the result put together from deltas alone, the deltas)."""
    parser = OutputParser(TOKENIZER, thinking=thinking, call_id=call_id)
    deltas: list[Any] = []
    start = 0
    for size in [*sizes, len(ids)]:
        deltas += parser.push(ids[start : start + size])
        start += size
    result = parser.finish()
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: dict[int, Any] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert delta.index == len(calls)
            calls[delta.index] = type(result.tool_calls[0])(id=delta.id, name=delta.name, arguments="")
        elif isinstance(delta, ToolCallArguments):
            call = calls[delta.index]
            calls[delta.index] = type(call)(id=call.id, name=call.name, arguments=call.arguments + delta.fragment)
    joined = ParsedOutput(
        reasoning_content=None if result.reasoning_content is None else reasoning,
        content="".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        tool_calls=tuple(calls.values()),
        ended=result.ended,
        problem=result.problem,
    )
    return result, joined, deltas


texts = st.lists(
    st.sampled_from(["<|close|>", "think", "<|sep|>", "<|open|>", END, "é", "👩‍👧", "\n", " ", '"', "\\", "&quot;"])
    | st.text(max_size=6),
    max_size=8,
).map("".join)
reasonings = texts.filter(lambda text: not text or text.strip())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    texts.filter(bool),
    st.dictionaries(texts, json_values, max_size=3),
)


@st.composite
def assistants(draw: st.DrawFn, thinking: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if thinking:
        message["reasoning_content"] = draw(reasonings)
    if tool_calls := draw(st.lists(calls, max_size=3)):
        message["tool_calls"] = [{**call, "id": call_id(index)} for index, call in enumerate(tool_calls)]
    return message


def spelled(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments as JSON text and an empty content beside calls as null, as replies have it."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    return message


@quick
@given(st.data(), st.booleans(), st.lists(st.integers(1, 6), max_size=80))
def test_what_was_said_is_what_is_parsed_and_renders_back(
    data: st.DataObject, thinking: bool, sizes: list[int]
) -> None:
    said = data.draw(assistants(thinking))
    ids = generation(said, thinking=thinking)
    result, joined, _ = stream(ids, sizes, thinking=thinking)
    assert result.ok, result.problem
    assert joined == result
    assert result.message() == spelled(said)
    assert generation(result.message(), thinking=thinking) == ids
    assert parse_output(ids, TOKENIZER, thinking=thinking, call_id=call_id) == result
    assert parse_output(ids[:-1], TOKENIZER, thinking=thinking, call_id=call_id, stopped=True) == result


@quick
@given(st.data(), st.booleans())
def test_a_cut_output_yields_a_prefix_and_no_part_of_a_marker(data: st.DataObject, thinking: bool) -> None:
    said = data.draw(assistants(thinking))
    ids = generation(said, thinking=thinking)
    cut = data.draw(st.integers(0, len(ids) - 1))
    result, joined, _ = stream(ids[:cut], [1] * cut, thinking=thinking)
    assert joined == result
    assert not result.ok
    assert result.problem is not None
    assert not result.ended
    whole = spelled(said)
    assert (whole.get("reasoning_content") or "").startswith(result.reasoning_content or "")
    assert (whole["content"] or "").startswith(result.content)
    for call, full in zip(result.tool_calls, whole.get("tool_calls", []), strict=False):
        assert call.name == full["function"]["name"]
        assert full["function"]["arguments"].startswith(call.arguments)


soup = st.lists(
    st.sampled_from(
        [
            *[f"<|close|>{tag}<|sep|>" for tag in ("think", "response", "tools", "call", "argument", "message", "x")],
            *[f"<|open|>{tag}<|sep|>" for tag in ("think", "response", "tools", "call", "message", "x", "")],
            '<|open|>call tool="f" index="1"<|sep|>',
            '<|open|>call tool="" index="2"<|sep|>',
            '<|open|>argument key="k" type="string"<|sep|>',
            '<|open|>argument key="k" type="number"<|sep|>',
            '<|open|>argument key="q" type="array"<|sep|>',
            '<|open|>json type="object"<|sep|>',
            *["<|open|>", "<|close|>", "<|sep|>", END, "[EOS]", "<|media_pad|>", "7", "[1]", "text", "é", "\udcff"],
        ]
    ),
    max_size=24,
)


@quick
@given(soup, st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=6), st.booleans())
def test_any_output_is_read_without_failing(pieces: list[str], noise: list[int], thinking: bool) -> None:
    ids = [token_id for piece in pieces for token_id in ids_of(piece)] + noise
    result, joined, _ = stream(ids, [1] * len(ids), thinking=thinking)
    assert joined == result
    assert result.ok == (result.ended and result.problem is None)
    if result.ended:
        for call in result.tool_calls:
            assert call.name
            if "json block" not in (result.problem or ""):
                json.loads(call.arguments)


@quick
@given(st.data(), soup)
def test_ok_means_that_it_renders_back(data: st.DataObject, pieces: list[str]) -> None:
    """A well-formed output with something spliced in at random: whatever is still called ok must render back."""
    ids = generation(data.draw(assistants(True)))
    at = data.draw(st.integers(0, len(ids)))
    drop = data.draw(st.integers(0, 3))
    ids = ids[:at] + [i for piece in pieces[:2] for i in ids_of(piece)] + ids[at + drop :]
    result = parse_output(ids, TOKENIZER, thinking=True, call_id=call_id)
    canonical = not any("\ufffd" in text for text in [TOKENIZER.decode(ids)]) and bool(
        not result.reasoning_content or result.reasoning_content.strip()
    )
    if result.ok and canonical and all(same_spelling(call.arguments) for call in result.tool_calls):
        assert TOKENIZER.decode(generation(result.message())) == TOKENIZER.decode(ids)


def same_spelling(arguments: str) -> bool:
    return json.dumps(json.loads(arguments), ensure_ascii=False) == arguments


THINK = "so<|close|>think<|sep|>"
RESPONSE = "<|open|>response<|sep|>yes<|close|>response<|sep|>"
CLOSE = "<|close|>message<|sep|>" + END


def tools(*inner: str) -> str:
    return f"{THINK}{RESPONSE}<|open|>tools<|sep|>{''.join(inner)}<|close|>tools<|sep|>{CLOSE}"


def call(*arguments: str, name: str = "f", index: str = "1") -> str:
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def test_the_canonical_form_is_ok() -> None:
    result = parse(tools(call(argument("a&amp;b", "string", 'x"\n'), argument("n", "array", "[1, 2]"))))
    assert result.ok, result.problem
    assert (result.reasoning_content, result.content) == ("so", "yes")
    assert result.tool_calls[0].arguments == '{"a&b": "x\\"\\n", "n": [1, 2]}'
    assert parse("yes<|close|>response<|sep|>" + CLOSE, thinking=False).message() == {
        "role": "assistant",
        "content": "yes",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (THINK + RESPONSE, "the output ends inside message, without <|end_of_msg|>"),
        ("so", "the output ends inside think"),
        (THINK + RESPONSE + "<|close|>message<|sep|>", "the output ends after its message"),
        (THINK + CLOSE, "the message has no response"),
        ("so" + END, "the message ends before think closes"),
        (THINK + RESPONSE + END, "the message ends before message closes"),
        ("so<|close|>thi" + END, "the message ends inside a marker"),
        ("so<|open|><|close|>think<|sep|>", "a marker begins inside a marker"),
        ("so" + RESPONSE + CLOSE, "'response' opens inside think"),
        (THINK + "loose" + RESPONSE + CLOSE, "text outside a channel, in message"),
        (THINK + "\n" + RESPONSE + CLOSE, "text outside a channel, in message"),
        (THINK + RESPONSE + RESPONSE + CLOSE, "response opens after response"),
        (THINK + "<|open|>tools<|sep|>" + CLOSE, "tools opens after think"),
        (THINK + RESPONSE + CLOSE + "x", "more follows <|end_of_msg|>"),
        (THINK + RESPONSE + "<|close|>message<|sep|>x" + END, "text outside a channel, in no message"),
        (THINK + RESPONSE + "<|open|>notes<|sep|>x<|close|>notes<|sep|>" + CLOSE, "'notes' opens inside message"),
        (THINK + RESPONSE + "<|close|>tools<|sep|>" + CLOSE, "'tools' closes but is not open"),
        ("so<|close|>message<|sep|>" + END, "message closes before think"),
        ("so<|sep|>", "<|sep|> stands in text"),
        ("so[EOS]", "[EOS] stands in text"),
        ("so<|media_pad|>", "<|media_pad|> stands in text"),
        (THINK + "<|open|>response x<|sep|>", "malformed marker 'response x'"),
        (tools(), "tools holds no call"),
        (tools(call(index="2")), "call '2' follows call 0"),
        (tools(call(), call(index="1")), "call '1' follows call 1"),
        (tools(call(name="")), "a call names no tool"),
        (tools("<|open|>call<|sep|><|close|>call<|sep|>"), "malformed marker 'call'"),
        (tools(call(name="a&b")), """malformed marker 'call tool="a&b" index="1"'"""),
        (tools(call("x")), "text outside a channel, in call"),
        (tools(call(argument("k", "number", "x"))), "argument 'k' is not JSON"),
        (tools(call(argument("k", "number", "NaN"))), "argument 'k' is not JSON"),
        (tools(call(argument("k", "number", ""))), "argument 'k' is not JSON"),
        (tools(call(argument("k", "integer", "1"))), "argument 'k' of type 'integer' holds a number"),
        (tools(call(argument("k", "string", ""), argument("k", "null", "null"))), "argument 'k' is given twice"),
        (tools(call('<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>')), "arguments come as one json"),
    ],
)
def test_departures_from_the_format_are_described(text: str, problem: str) -> None:
    result = parse(text)
    assert not result.ok
    assert result.problem is not None
    assert result.problem.split(": ", 1)[1].startswith(problem)


def test_what_is_clear_is_kept_after_a_departure() -> None:
    result = parse("so" + RESPONSE + CLOSE)
    assert (result.reasoning_content, result.content, result.ended) == ("so", "yes", True)
    result = parse(tools(call(argument("k", "number", "x")), call(argument("q", "string", "y"), index="2")))
    assert [call.arguments for call in result.tool_calls] == ['{"k": "x"}', '{"q": "y"}']
    result = parse(tools(call('<|open|>json type="object"<|sep|>{"a": tru<|close|>json<|sep|>')))
    assert result.tool_calls[0].arguments == '{"a": tru'


def test_the_problem_names_the_first_bad_token() -> None:
    assert parse("so<|sep|>x[EOS]").problem == f"token {len(ids_of('so'))}: <|sep|> stands in text"


def test_a_stream_gives_nothing_between_a_marker_and_its_end() -> None:
    parser = OutputParser(TOKENIZER, thinking=True, call_id=call_id)
    marker = ids_of("<|close|>think<|sep|><|open|>response<|sep|>")
    assert len(marker) > 4
    assert parser.push(ids_of("so")) == [ReasoningDelta("so")]
    assert [parser.push([token_id]) for token_id in marker] == [[]] * len(marker)
    written_out = TOKENIZER.encode("<|close|>response<|sep|>")
    assert parser.push(written_out) == [ContentDelta("<|close|>response<|sep|>")]


def test_a_stream_holds_back_part_of_a_character() -> None:
    parser = OutputParser(TOKENIZER, thinking=False, call_id=call_id)
    assert [parser.push([token_id]) for token_id in ids_of("é")] == [[], [ContentDelta("é")]]


def test_part_of_a_character_stays_in_its_channel() -> None:
    ids = ids_of("é")[:1] + ids_of("<|close|>think<|sep|>" + RESPONSE)
    result, joined, _ = stream(ids, [1] * len(ids), thinking=True)
    assert (result.reasoning_content, result.content) == ("\ufffd", "yes")
    assert joined == result


def test_string_arguments_stream_and_others_come_whole() -> None:
    _, _, deltas = stream(
        ids_of(tools(call(argument("s", "string", "zz\n"), argument("n", "array", "[1, 2]")))),
        [1] * 500,
        thinking=True,
    )
    assert [delta for delta in deltas if isinstance(delta, ToolCallStart)] == [ToolCallStart(0, "call-0", "f")]
    fragments = [delta.fragment for delta in deltas if isinstance(delta, ToolCallArguments)]
    assert fragments == ['{"s": "', "z", "z", "\\n", '"', ', "n": [1, 2]', "}"]


def test_call_ids_follow_from_request_and_index() -> None:
    assert tool_call_id("r", 0) == tool_call_id("r", 0)
    assert len({tool_call_id(request, index) for request in ("r", "r1") for index in (0, 1, 11)}) == 6
