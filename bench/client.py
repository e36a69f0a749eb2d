"""A load client that speaks /v1/completions with token-id prompts: the same bytes to us and to a peer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_S = 600.0


@dataclass
class Server:
    """Where to send requests, and what this server wants in a body to generate exactly `max_tokens`."""

    name: str
    url: str
    model: str
    vocab: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Timing:
    ttft_s: float
    last_s: float
    end_s: float  # the stream's end: after the last token a server may still put the turn away
    tokens: int
    usage: dict[str, Any]


def prompt_ids(length: int, vocab: int, seed: int) -> list[int]:
    """Random ordinary tokens; a new seed is a prompt that no cache has seen."""
    draw = random.Random(seed)
    return [draw.randrange(300, vocab - 300) for _ in range(length)]


async def stream(session: aiohttp.ClientSession, server: Server, prompt: Sequence[int], max_tokens: int) -> Timing:
    """One streamed completion, timed from the request's first byte."""
    body = {
        "model": server.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **server.extra,
    }  # fmt: skip
    began = time.perf_counter()
    first = last = None
    usage: dict[str, Any] = {}
    headers = {"x-moonrelay-explain": "1"}
    async with session.post(f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{server.name}: HTTP {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{server.name}: {event['error']}")
            usage = event.get("usage") or usage
            # The last event may only say why the stream ended, which comes once the turn is put away.
            if any(choice.get("text") or not choice.get("finish_reason") for choice in event.get("choices", ())):
                last = time.perf_counter()
                first = first or last
    if first is None or last is None:
        raise RuntimeError(f"{server.name}: the stream held no token event")
    ended = time.perf_counter()
    return Timing(first - began, last - began, ended - began, usage.get("completion_tokens", 0), usage)


class Measure:
    """The figures of one server; every method is one sample, medians are the caller's."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, seed: int) -> None:
        self.server, self.session, self.seed = server, session, seed

    def _prompt(self, length: int) -> list[int]:
        self.seed += 1
        return prompt_ids(length, self.server.vocab, self.seed)

    async def prefill(self, length: int) -> float:
        """Tokens per second to the first token of a prompt that is nowhere cached."""
        timing = await stream(self.session, self.server, self._prompt(length), 2)
        return length / timing.ttft_s

    async def decode(self, streams: int, tokens: int) -> tuple[float, float]:
        """Generated tokens per second over all streams, 32-token prompts, from the first to the last token; and the
        seconds from a stream's last token to its end."""
        prompts = [self._prompt(32) for _ in range(streams)]
        timings = await asyncio.gather(*(stream(self.session, self.server, p, tokens) for p in prompts))
        wall = max(t.last_s for t in timings) - min(t.ttft_s for t in timings)
        return sum(t.tokens - 1 for t in timings) / wall, max(t.end_s - t.last_s for t in timings)

    async def cached(self, length: int, shared: int) -> tuple[Timing, Timing]:
        """Cold, then a prompt that shares its first `shared` tokens."""
        prompt = self._prompt(length)
        cold = await stream(self.session, self.server, prompt, 2)
        await asyncio.sleep(1.0)  # storing runs beside the request; both servers get the same pause
        warm = await stream(self.session, self.server, prompt[:shared] + self._prompt(length - shared), 2)
        return cold, warm


def session() -> aiohttp.ClientSession:
    """A connection per request: the peer closes idle ones, and a reused one would then fail, or hide its set-up."""
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
