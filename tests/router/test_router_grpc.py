"""The gRPC frontend: the same semantics as over HTTP, statuses, health, reflection, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from fake_workers import TOKENIZER, chat_ids
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_fakes import chat_request, cluster, in_loop

from moonrelay.stubs.v1 import api_pb2, api_pb2_grpc, common_pb2

CALLS = TOKENIZER.encode(
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="x" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
    allow_special=True,
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])


@asynccontextmanager
async def generation(c):
    options = (("grpc.max_send_message_length", 64 << 20),)
    async with grpc.aio.insecure_channel(c.frontends.grpc, options=options) as channel:
        yield api_pb2_grpc.GenerationStub(channel)


def chat(text="hi", *, thinking=False, **fields):
    message = api_pb2.ChatMessage(role="user", content=text)
    chat_input = api_pb2.ChatInput(messages=[message], thinking=thinking, tools_json=fields.pop("tools", ""))
    return api_pb2.GenerateRequest(model="toy", chat=chat_input, **fields)


async def replies(call):
    found = [reply async for reply in call]
    assert [reply.WhichOneof("reply") for reply in found] == ["delta"] * (len(found) - 1) + ["done"]
    return [reply.delta for reply in found[:-1]], found[-1].done


@in_loop
async def test_a_chat_means_the_same_as_over_http():
    async with cluster() as c, generation(c) as stub:
        c.model.reply = chat_ids("Grüße 你好.", thinking="hmm")
        deltas, done = await replies(stub.Generate(chat(thinking=True, seed=4, temperature=0.5, max_tokens=50)))
        thinking = {"chat_template_kwargs": {"thinking": True}}
        _, answer = await c.post(
            "/v1/chat/completions", chat_request(**thinking, seed=4, temperature=0.5, max_tokens=50)
        )
        message = answer["choices"][0]["message"]
        assert "".join(delta.content for delta in deltas) == message["content"] == "Grüße 你好."
        assert "".join(delta.reasoning_content for delta in deltas) == message["reasoning_content"] == "hmm"
        assert (done.finish_reason, done.completion_tokens) == ("stop", answer["usage"]["completion_tokens"])
        assert done.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert done.cache.miss_reason == common_pb2.MISS_REASON_COLD
        assert [(lost.reason, lost.tokens) for lost in done.cache.lost] == [
            (common_pb2.MISS_REASON_COLD, done.prompt_tokens)
        ]
        first, second = c.workers["prefill-0"].requests("Prefill")
        assert first.prompt_ids == second.prompt_ids and first.sampling == second.sampling


@in_loop
async def test_penalties_and_bias_reach_every_worker():
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "seed": 1}
    async with cluster() as c, generation(c) as stub:
        await c.post("/v1/chat/completions", chat_request(**penalties, logit_bias={"5": -100, "7": 2}))
        await replies(stub.Generate(chat(**penalties, logit_bias={5: -100.0, 7: 2.0})))
        for name, method in (("prefill-0", "Prefill"), ("decode-0", "Adopt")):
            first, second = (request.sampling for request in c.workers[name].requests(method))
            for sampling in (first, second):
                assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
                assert dict(sampling.logit_bias) == {5: -100.0, 7: 2.0} and not sampling.generated
        with pytest.raises(grpc.aio.AioRpcError, match="logit_bias") as refused:
            await replies(stub.Generate(chat(logit_bias={99_999_999: 1.0})))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@in_loop
async def test_tool_calls_logprobs_and_completions():
    async with cluster() as c, generation(c) as stub:
        c.model.reply = CALLS
        deltas, done = await replies(stub.Generate(chat(tools=TOOLS, top_logprobs=1)))
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert done.finish_reason == "tool_calls" and calls[0].name == "f" and calls[0].id
        assert json.loads("".join(call.arguments for call in calls)) == {"x": 1}
        tokens = [token for delta in deltas for token in delta.tokens]
        assert [token.id for token in tokens] == CALLS and all(len(token.top) == 1 for token in tokens)
        c.model.reply = [*TOKENIZER.encode("one two three"), TOKENIZER.eos]
        for prompt in ({"prompt": "Q="}, {"prompt_ids": api_pb2.TokenIds(ids=[5, 6])}):
            deltas, done = await replies(stub.Generate(api_pb2.GenerateRequest(model="toy", stop=["thr"], **prompt)))
            assert "".join(delta.content for delta in deltas) == "one two "
            assert not any(delta.tokens for delta in deltas) and done.finish_reason == "stop"
        assert (await stub.ListModels(api_pb2.ListModelsRequest())).models == ["toy"]


@in_loop
async def test_a_turn_is_taken_back():
    async with cluster() as c, generation(c) as stub:
        call = api_pb2.ToolCall(id="c1", name="f", arguments='{"x": 1}')
        messages = [
            api_pb2.ChatMessage(role="user", content="hi"),
            api_pb2.ChatMessage(role="assistant", reasoning_content="hm", content="ok", tool_calls=[call]),
            api_pb2.ChatMessage(role="tool", tool_call_id="c1", content="one"),
        ]
        await replies(stub.Generate(api_pb2.GenerateRequest(model="toy", chat=api_pb2.ChatInput(messages=messages))))
        text = TOKENIZER.decode(c.workers["prefill-0"].requests("Prefill")[0].prompt_ids)
        assert 'tool="f" index="1"<|sep|>one' in text and "<|open|>think<|sep|>hm<|close|>think" in text


BAD = [
    (api_pb2.GenerateRequest(model="toy"), "INVALID_ARGUMENT", "input"),
    (api_pb2.GenerateRequest(model="other", prompt="x"), "NOT_FOUND", "model"),
    (api_pb2.GenerateRequest(prompt="x"), "INVALID_ARGUMENT", "model"),
    (api_pb2.GenerateRequest(model="toy", prompt="x", temperature=3), "INVALID_ARGUMENT", "temperature"),
    (api_pb2.GenerateRequest(model="toy", prompt="x", temperature=float("nan")), "INVALID_ARGUMENT", "temperature"),
    (api_pb2.GenerateRequest(model="toy", prompt="x", top_logprobs=21), "INVALID_ARGUMENT", "top_logprobs"),
    (
        api_pb2.GenerateRequest(model="toy", prompt_ids=api_pb2.TokenIds(ids=[5, 2**32 - 1])),
        "INVALID_ARGUMENT",
        "prompt_ids.ids[1]",
    ),
    (api_pb2.GenerateRequest(model="toy", prompt="x", max_tokens=0), "INVALID_ARGUMENT", "max_tokens"),
    (api_pb2.GenerateRequest(model="toy", prompt="x", stop=[""]), "INVALID_ARGUMENT", "stop[0]"),
    (api_pb2.GenerateRequest(model="toy", prompt="x" * 9_000), "INVALID_ARGUMENT", "prompt"),
    (api_pb2.GenerateRequest(model="toy", prompt="x", tenant="a b"), "INVALID_ARGUMENT", "tenant"),
    (chat(tools="["), "INVALID_ARGUMENT", "tools_json"),
    (chat(tools="{}"), "INVALID_ARGUMENT", "tools_json"),
    (api_pb2.GenerateRequest(model="toy", chat=api_pb2.ChatInput()), "INVALID_ARGUMENT", "messages"),
]


@pytest.mark.parametrize(
    ("request_", "code", "param"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
@in_loop
async def test_bad_requests_are_refused_by_name(request_, code, param):
    async with cluster() as c, generation(c) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies(stub.Generate(request_))
        trailing = dict(refused.value.trailing_metadata())
        assert (refused.value.code().name, trailing["moonrelay-param"]) == (code, param)
        assert refused.value.details() and trailing["moonrelay-code"]


@in_loop
async def test_statuses_of_overload_absence_and_deadlines():
    async with cluster(in_flight_max=1, queue_len_max=1, queue_timeout_ms=300) as c, generation(c) as stub:
        decode = c.workers["decode-0"]
        decode.hold_after = 0
        held = asyncio.ensure_future(replies(stub.Generate(chat())))
        await decode.holding.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies(stub.Generate(chat()))
        trailing = dict(refused.value.trailing_metadata())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailing["moonrelay-reason"] == "queue_timeout" and int(trailing["retry-after"]) >= 1
        decode.go_on.set()
        await held
        decode.go_on.clear()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies(stub.Generate(chat(), timeout=0.4))
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await decode.until(lambda: decode.cancelled == 1 and not decode.reservations)
        c.fleet.set([])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies(stub.Generate(chat()))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await c.idle()


@in_loop
async def test_a_cancelled_call_frees_everything():
    async with cluster() as c, generation(c) as stub:
        decode = c.workers["decode-0"]
        decode.hold_after = 2
        call = stub.Generate(chat())
        assert (await call.read()).delta.content
        await decode.holding.wait()
        call.cancel()
        await decode.until(lambda: decode.cancelled == 1 and not decode.reservations)
        await c.idle()


@in_loop
async def test_health_follows_the_fleet_and_reflection_names_the_services():
    async with cluster() as c, grpc.aio.insecure_channel(c.frontends.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="moonrelay.v1.Generation"))
        states = health_pb2.HealthCheckResponse
        seen = await watch.read()
        while seen.status != states.SERVING:
            seen = await watch.read()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
        c.fleet.set([c.workers["prefill-0"]])
        assert (await watch.read()).status == states.NOT_SERVING
        watch.cancel()

        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"moonrelay.v1.Generation", "grpc.health.v1.Health"} <= names
        call.cancel()


@in_loop
async def test_a_million_ids_fit_the_limits():
    """They exceed the toy's context, and it is the router that says so, not a transport."""
    async with cluster() as c, generation(c) as stub:
        ids = api_pb2.TokenIds(ids=[300] * 1_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replies(stub.Generate(api_pb2.GenerateRequest(model="toy", prompt_ids=ids)))
        assert dict(refused.value.trailing_metadata())["moonrelay-code"] == "context_length_exceeded"
        body = io.BytesIO(json.dumps({"model": "toy", "prompt": [300] * 1_000_000}).encode())
        headers = {"Content-Type": "application/json"}
        async with c.session.post(c.url + "/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "context_length_exceeded"
