"""The `openai` client against the router, what a router imports, and the socket options that streaming needs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from fake_workers import TOKENIZER, chat_ids
from router_fakes import cluster, in_loop, spin

ROOT = Path(__file__).resolve().parent.parent.parent
THINK = {"chat_template_kwargs": {"thinking": True}}


def client(c, **changes):
    return openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="none", max_retries=0, **changes)


@in_loop
async def test_the_openai_client_chats_and_completes():
    async with cluster() as c, client(c) as api:
        assert [model.id async for model in api.models.list()] == ["toy"]
        assert (await api.models.retrieve("toy")).id == "toy"
        c.model.reply = chat_ids("Hello there.", thinking="hm")
        messages = [{"role": "user", "content": "hi"}]
        answer = await api.chat.completions.create(model="toy", messages=messages, extra_body=THINK)
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("Hello there.", "hm")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        # What the client gives back of its own making must be taken.
        messages += [message.model_dump(), {"role": "user", "content": "more"}]
        again = await api.chat.completions.create(model="toy", messages=messages, extra_body=THINK)
        assert again.choices[0].finish_reason == "stop"

        stream = await api.chat.completions.create(
            model="toy", messages=messages[:1], stream=True, stream_options={"include_usage": True}, extra_body=THINK
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(k.choices[0].delta.content or "" for k in chunks if k.choices) == "Hello there."
        assert chunks[-1].usage == answer.usage

        c.model.reply = [*TOKENIZER.encode("plain"), TOKENIZER.eos]
        completion = await api.completions.create(model="toy", prompt="Q=", max_tokens=10, logprobs=1)
        assert completion.choices[0].text == "plain"


@in_loop
async def test_the_openai_client_raises_its_own_errors():
    messages = [{"role": "user", "content": "hi"}]
    async with cluster(recovery_wait_ms=50) as c, client(c) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(model="toy", messages=messages, temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(model="gpt", messages=messages)
        c.workers["decode-0"].die_after = 2
        stream = await api.chat.completions.create(
            model="toy", messages=messages, stream=True, extra_body={"chat_template_kwargs": {"thinking": False}}
        )
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "unavailable"
        c.fleet.set([])
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="toy", messages=messages)


def test_a_router_never_imports_torch():
    code = "import sys, router.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@in_loop
async def test_small_writes_are_not_held_back():
    """With Nagle's algorithm on, the second event of a stream would wait 40 ms for the client's delayed ACK."""
    async with cluster() as c:
        host, port = c.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        server = c.frontends._runner.server
        await spin(lambda: bool(server.connections))
        for protocol in server.connections:
            sock = protocol.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
