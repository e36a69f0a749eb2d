"""Every field of a request: what is refused, by which name, in which form."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_workers import TOKENIZER
from router_fakes import chat_request, cluster, completion_request, in_loop

from moonrelay.errors import InvalidRequest, UnknownModel
from router import fields
from router.schema import parse_chat, parse_completion

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
USER = {"role": "user", "content": "hi"}

BAD_SHARED = [
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_p", 1e-300, "top_p"),  # zero, as the wire carries it
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("top_k", 1 << 40, "top_k"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", "many", "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("seed", -1, "seed"),
    ("seed", 1 << 64, "seed"),
    ("seed", "7", "seed"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a", 3], "stop[1]"),
    ("stop", ["a", "b", "c", "d", "e"], "stop"),
    ("stop", 5, "stop"),
    ("stop", "x" * 2_000, "stop"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("n", 2, "n"),
    ("n", 0, "n"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", "1", "frequency_penalty"),
    ("repetition_penalty", 1.1, "repetition_penalty"),
    ("logit_bias", [5], "logit_bias"),
    ("logit_bias", {"99999999": 1}, "logit_bias"),
    ("logit_bias", {"-5": 1}, "logit_bias"),
    ("logit_bias", {"\u0665": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", {"5": None}, "logit_bias.5"),
    ("logit_bias", {str(i): 1 for i in range(1_025)}, "logit_bias"),
    ("min_p", 0.1, "min_p"),
    ("min_tokens", 3, "min_tokens"),
    ("stop_token_ids", [5], "stop_token_ids"),
    ("ignore_eos", 1, "ignore_eos"),
    ("return_token_ids", "yes", "return_token_ids"),
    ("user", 5, "user"),
    ("no_such_field", 1, "no_such_field"),
    ("model", 5, "model"),
    ("model", None, "model"),
]
BAD_CHAT = [
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [5], "messages[0]"),
    ("messages", None, "messages"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [USER, {"role": "user", "content": 5}], "messages[1].content"),
    ("messages", [{**USER, "colour": 1}], "messages[0].colour"),
    ("messages", [{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal"),
    ("messages", [{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}],
        "messages[0].content[0].cache_control",
    ),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        "messages[0].content[0]",
    ),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("logprobs", 3, "logprobs"),
    ("top_logprobs", 3, "top_logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("tools", "f", "tools"),
    ("tools", [{"type": "web"}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}], "tools[0].function.strict"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": "{}"}}], "tools[0].function.parameters"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ("tools", [{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0].function.description"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("tool_choice", "any", "tool_choice"),
    ("parallel_tool_calls", False, "parallel_tool_calls"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format"),
    ("response_format", "text", "response_format"),
    ("reasoning_effort", "minimal", "reasoning_effort"),
    ("chat_template_kwargs", {"thinking": 1}, "chat_template_kwargs.thinking"),
    ("chat_template_kwargs", {"colour": 1}, "chat_template_kwargs.colour"),
    ("store", True, "store"),
    ("service_tier", "priority", "service_tier"),
    ("metadata", 5, "metadata"),
    ("modalities", ["audio"], "modalities"),
    ("functions", [{}], "functions"),
    ("function_call", "auto", "function_call"),
    ("audio", {}, "audio"),
    ("prediction", {}, "prediction"),
    ("web_search_options", {}, "web_search_options"),
    ("verbosity", "low", "verbosity"),
    ("prompt_cache_key", "k", "prompt_cache_key"),
    ("prompt", "hi", "prompt"),
]
BAD_COMPLETION = [
    ("prompt", None, "prompt"),
    ("prompt", 5, "prompt"),
    ("prompt", {"a": 1}, "prompt"),
    ("prompt", ["a", "b"], "prompt"),
    ("prompt", [[1], [2]], "prompt"),
    ("prompt", [1, "a"], "prompt"),
    ("prompt", [1, -1], "prompt[1]"),
    ("prompt", [1, 2.5], "prompt[1]"),
    ("prompt", [1, 2, True], "prompt[2]"),
    ("prompt", [1, 10**6], "prompt[1]"),
    ("prompt", [[1, 10**6]], "prompt[0][1]"),
    ("prompt", [1, 1 << 70], "prompt[1]"),
    ("logprobs", True, "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("echo", True, "echo"),
    ("suffix", "x", "suffix"),
    ("best_of", 2, "best_of"),
    ("messages", [USER], "messages"),
    ("tools", [TOOL], "tools"),
]
GOOD_CHAT = {
    "temperature": 2,
    "top_p": 1,
    "top_k": -1,
    "max_tokens": 5.0,
    "max_completion_tokens": 5,
    "seed": fields.UINT64_MAX,
    "stop": ["a", "b", "c", "d"],
    "n": 1,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": -100, "511": 1.5},
    "logprobs": True,
    "top_logprobs": 20,
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "reasoning_effort": "low",
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "modalities": ["text"],
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}


@pytest.mark.parametrize(("name", "value", "param"), BAD_SHARED + BAD_CHAT, ids=str)
@in_loop
async def test_chat_refuses_by_name(name, value, param):
    async with cluster() as c:
        status, answer = await c.post("/v1/chat/completions", {**chat_request(), name: value})
        assert status == 400, answer
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"] and error["code"]
        assert not c.workers["decode-0"].calls


@pytest.mark.parametrize(("name", "value", "param"), BAD_SHARED + BAD_COMPLETION, ids=str)
def test_a_completion_refuses_by_name(name, value, param):
    with pytest.raises(InvalidRequest) as refused:
        parse_completion({**completion_request(), name: value}, "toy", TOKENIZER.vocab_size)
    assert refused.value.param == param


def test_what_is_supported_is_read():
    read = parse_chat({**chat_request(), **GOOD_CHAT, "stream": True}, "toy", 512)
    assert (read.temperature, read.top_p, read.top_k, read.max_tokens) == (2.0, 1.0, 0, 5)
    assert (read.stop, read.top_logprobs, read.seed) == (("a", "b", "c", "d"), 20, fields.UINT64_MAX)
    assert (read.presence_penalty, read.frequency_penalty, read.logit_bias) == (-2.0, 0.5, ((5, -100.0), (511, 1.5)))
    assert read.stream and read.include_usage and read.ignore_eos and read.return_token_ids
    assert read.chat == {
        "messages": [USER],
        "tools": [TOOL],
        "thinking": False,
        "reasoning_effort": "low",
    }


def test_null_means_not_given():
    given = dict.fromkeys([*GOOD_CHAT, "functions", "audio"])
    assert parse_chat({**chat_request(), **given}, "toy", 512) == parse_chat(chat_request(), "toy", 512)


def test_none_as_tool_choice_only_where_there_is_nothing_to_call():
    assert parse_chat({**chat_request(), "tool_choice": "none"}, "toy", 512)
    with pytest.raises(InvalidRequest, match="tool_choice"):
        parse_chat({**chat_request(), "tool_choice": "none", "tools": [TOOL]}, "toy", 512)


def test_two_names_of_one_limit_must_agree():
    with pytest.raises(InvalidRequest) as refused:
        parse_chat({**chat_request(), "max_tokens": 5, "max_completion_tokens": 6}, "toy", 512)
    assert refused.value.param == "max_completion_tokens"


def test_an_echoed_openai_message_is_taken_back():
    echo = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert parse_chat({**chat_request(), "messages": [USER, echo, USER]}, "toy", 512)


def test_prompts_come_in_four_forms():
    for prompt, want in [("ab", "ab"), (["ab"], "ab"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])]:
        assert parse_completion(completion_request(prompt), "toy", 500).prompt == want


def test_a_million_ids_are_read_quickly_and_a_bad_last_one_is_named():
    ids = [7] * 1_000_000
    assert fields.token_ids(ids, "prompt", 500) == ids
    with pytest.raises(InvalidRequest) as refused:
        fields.token_ids([*ids, 500], "prompt", 500)
    assert refused.value.param == "prompt[1000000]"


def test_another_model_is_unknown():
    with pytest.raises(UnknownModel) as refused:
        parse_chat({**chat_request(), "model": "gpt-4"}, "toy", 512)
    assert refused.value.param == "model"


RAW = [
    (b"{", 400, "invalid_request"),
    (b"", 400, "invalid_request"),
    (b"[]", 400, "invalid_request"),
    (b'"text"', 400, "invalid_request"),
    (b"\xff\xfe", 400, "invalid_request"),
    (b'{"temperature": NaN}', 400, "invalid_request"),
    (b'{"temperature": 1e999}', 400, "invalid_request"),
    (b"[" * 100_000, 400, "invalid_request"),
    (b'{"a":' * 50_000, 400, "invalid_request"),
    (b" " * 600_000, 413, "request_too_large"),
]


@in_loop
async def test_broken_bodies_paths_methods_and_types_are_refused_in_one_form():
    async with cluster(body_bytes_max=500_000) as c:
        url = c.url + "/v1/chat/completions"
        headers = {"Content-Type": "application/json"}
        for raw, status, code in RAW:
            async with c.session.post(url, data=raw, headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (status, code), raw[:20]
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            async with c.session.post(url, data=b"{}", headers={"Content-Type": content_type}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (415, "unsupported_media_type")
        async with c.session.post(url, data=b"{}", headers={**headers, "Content-Encoding": "gzip"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (415, "unsupported_media_type")
        for method, path, status in [
            ("GET", "/nope", 404),
            ("POST", "/v1/nope", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("POST", "/v1/models/toy", 405),
            ("GET", "/v1/models/other", 404),
        ]:
            async with c.session.request(method, c.url + path) as answer:
                body = await answer.json()
                assert answer.status == status and set(body["error"]) == {"message", "type", "param", "code"}
                assert "x-request-id" in answer.headers
        status, body = await c.chat(model="other")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


@in_loop
async def test_prompts_and_limits_beyond_the_context():
    async with cluster() as c:
        for body, param in [
            (completion_request([5] * 4_096), "prompt"),
            (completion_request("a b " * 4_000), "prompt"),
            (completion_request([5] * 4_000, max_tokens=97), "max_tokens"),
            (completion_request([5], max_tokens=10**15), "max_tokens"),
        ]:
            status, answer = await c.post("/v1/completions", body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert answer["error"]["param"] == param
        status, answer = await c.chat("word " * 5_000)
        assert (status, answer["error"]["param"]) == (400, "messages")
        status, answer = await c.post("/v1/completions", completion_request([]))
        assert (status, answer["error"]["param"]) == (400, "prompt")
        status, answer = await c.post("/v1/completions", completion_request([5] * 4_000, max_tokens=96))
        assert status == 200
        await c.idle()


@in_loop
async def test_bad_headers_are_named():
    async with cluster() as c:
        for name, value in [("x-moonrelay-deadline-ms", "soon"), ("x-moonrelay-deadline-ms", "-1")]:
            status, answer = await c.post("/v1/completions", completion_request(), **{name: value})
            assert (status, answer["error"]["param"]) == (400, name)
        status, answer = await c.post("/v1/completions", completion_request(), x_moonrelay_tenant="a b")
        assert (status, answer["error"]["param"]) == (400, "x-moonrelay-tenant")


async def raw_answer(reader: asyncio.StreamReader) -> tuple[bytes, dict]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, json.loads(await reader.readexactly(length))


@pytest.mark.parametrize(
    "raw", [b"GET /health\x00 HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n"]
)
@in_loop
async def test_what_is_no_http_gets_the_same_form(raw):
    async with cluster() as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        head, body = await raw_answer(reader)
        assert b" 400 " in head and body["error"]["code"] == "invalid_request"
        assert await reader.read() == b""
        writer.close()
        assert (await c.get("/health"))[0] == 200


@in_loop
async def test_a_body_declared_too_long_is_refused_before_it_comes():
    async with cluster() as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n{"
        )
        head, body = await raw_answer(reader)
        assert b" 413 " in head and body["error"]["code"] == "request_too_large"
        writer.close()


@in_loop
async def test_a_body_that_is_no_object_names_no_field():
    async with cluster() as c:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            status, answer = await c.post(path, [1])
            assert (status, answer["error"]["param"]) == (400, None)
            assert "expected a JSON object" in answer["error"]["message"]


@in_loop
async def test_a_slow_body_is_given_up():
    async with cluster(body_timeout_ms=50) as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99\r\n\r\n{"
        )
        head, body = await raw_answer(reader)
        assert b" 408 " in head and body["error"]["code"] == "request_timeout"
        writer.close()
