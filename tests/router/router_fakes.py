"""A router in front of fake workers, and a client for it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from fake_workers import TOKENIZER, FakeModel, FakeWorker

from model.spelling import Spelling
from model.splice import Reply
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import worker_pb2
from router.core import Worker, WorkerKey
from router.fleet import Match, cold
from router.frontend import Frontends, start
from router.service import ServedModel
from router.settings import RouterSettings

MODEL = ServedModel(name="toy", tokenizer=TOKENIZER, context_len=4_096, created=1)
TEST_TIMEOUT_S = 20.0


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a fresh loop, with a limit."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


async def spin(holds: Callable[[], bool]) -> None:
    """Let the loop run until something that nothing signals has come about."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


class FakeFleet:
    """A view that tests change."""

    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        self._workers = [worker.worker() for worker in workers]
        self._changed = asyncio.Event()
        self.fresh = True

    def workers(self) -> Sequence[Worker]:
        return self._workers

    def present(self) -> Set[WorkerKey] | None:
        return {worker.key for worker in self._workers} if self.fresh else None

    def set(self, workers: Sequence[FakeWorker]) -> None:
        self._workers = [worker.worker() for worker in workers]
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()
        except TimeoutError:
            return


class FakeIndex:
    """Answers `tokens` where a prompt is longer than that."""

    def __init__(self, tokens: int = 0, matchable_tokens: int = 0) -> None:
        self.tokens = tokens
        self.matchable_tokens = matchable_tokens
        self.seen_tokens = 0
        self.kept: dict[WorkerKey, int] = {}

    async def match(
        self, root: bytes, hashes: Sequence[bytes], fingerprint: Fingerprint, tenant: str, prompt_tokens: int
    ) -> Match:
        if not 0 < self.tokens < prompt_tokens:
            return cold(prompt_tokens, "cold")
        return Match(
            tokens=self.tokens,
            matchable_tokens=self.matchable_tokens,
            seen_tokens=self.seen_tokens,
            kept=self.kept,
            lost=(("no_snapshot", prompt_tokens - self.tokens),),
            hit=worker_pb2.CacheHit(tokens=self.tokens, matchable_tokens=self.matchable_tokens),
        )


class FakeIds:
    """The id store in memory: what is kept is there, `away` loses everything."""

    def __init__(self) -> None:
        self.kept_turns: dict[tuple[bytes, bytes], Reply] = {}
        self.kept_texts: dict[tuple[bytes, bytes], list[Spelling]] = {}
        self.away = False
        self.asked = 0

    async def turns(self, tag: bytes, keys: Sequence[bytes]) -> list[Reply | None]:
        self.asked += 1
        return [None if self.away else self.kept_turns.get((tag, key)) for key in keys]

    async def texts(self, tag: bytes, heads: Sequence[bytes]) -> list[Spelling]:
        self.asked += 1
        return [] if self.away else [one for head in heads for one in self.kept_texts.get((tag, head), [])]

    async def keep_turn(self, tag: bytes, key: bytes, reply: Reply) -> None:
        if not self.away:
            self.kept_turns[tag, key] = reply

    async def keep_text(self, tag: bytes, head: bytes, spelling: Spelling) -> None:
        if not self.away:
            self.kept_texts.setdefault((tag, head), []).insert(0, spelling)


@dataclass
class Cluster:
    """A router over HTTP and gRPC, its fakes, and a client session."""

    frontends: Frontends
    fleet: FakeFleet
    index: FakeIndex
    model: FakeModel
    workers: dict[str, FakeWorker]
    session: aiohttp.ClientSession
    fatal: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.frontends.http

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=named) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def chat(self, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", chat_request(text, **fields))

    async def stream(self, path: str, body: Any, **headers: str) -> list[Any]:
        """All events of a streamed answer; the end mark as the string it is."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        events = []
        async with self.session.post(self.url + path, json={**body, "stream": True}, headers=named) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    text = line[6:].strip().decode()
                    events.append(text if text == "[DONE]" else json.loads(text))
        return events

    async def idle(self) -> None:
        """Wait until nothing is in flight, then assert that nothing was kept."""
        service = self.frontends.service
        await service.wait_idle(5)
        service.check()
        assert not service.admission.in_flight and not service.admission.waiting


def chat_request(text: str = "hi", **fields: Any) -> dict[str, Any]:
    kwargs = {"chat_template_kwargs": {"thinking": False}}
    return {"model": "toy", "messages": [{"role": "user", "content": text}], **kwargs, **fields}


def completion_request(prompt: Any = "Q=", **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, **fields}


def settings(**changes: Any) -> RouterSettings:
    base = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "redis_url": "redis://nowhere", "model_dir": "toy"}
    return RouterSettings(**{**base, "drain_ms": 200, "suspect_ms": 200, "recovery_wait_ms": 3_000, **changes})


@asynccontextmanager
async def cluster(
    roles: Sequence[str] = ("prefill", "decode"), ids: FakeIds | None = None, **changes: Any
) -> AsyncIterator[Cluster]:
    """A running router before fresh fakes, one for each role; a role named twice is numbered."""
    model = FakeModel()
    workers = {}
    for role in roles:
        name = next(n for n in (f"{role}-{i}" for i in itertools.count()) if n not in workers)
        workers[name] = await FakeWorker(model, role, name).start()
    fleet, index, fatal = FakeFleet(list(workers.values())), FakeIndex(), []
    async with asyncio.TaskGroup() as group:
        frontends = await start(settings(**changes), MODEL, fleet, index, ids or FakeIds(), group, fatal.append)
        watch = group.create_task(frontends.watch())
        try:
            async with aiohttp.ClientSession() as session:
                yield Cluster(frontends, fleet, index, model, workers, session, fatal)
        finally:
            watch.cancel()
            for worker in workers.values():
                worker.go_on.set()
            await frontends.drain(0.2)
            for worker in workers.values():
                await worker.die()
    assert not fatal
