"""Workers that speak worker.proto over real gRPC and say what a script tells them.

A fake model continues any prompt with its reply: what of the reply stands at the prompt's end was generated already,
so that a replayed prompt goes on where it broke.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from model.tokenizer import Tokenizer
from moonrelay.errors import ServeError
from moonrelay.ids import InstanceId
from moonrelay.prefix import Fingerprint
from moonrelay.status import grpc_status
from moonrelay.stubs.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from router.core import Worker

TOY = Path(__file__).resolve().parent.parent / "data" / "chat"
TOKENIZER = Tokenizer.load(TOY)
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


def fingerprint(revision: str = "w1", block_tokens: int = 64) -> Fingerprint:
    return Fingerprint(
        model="toy",
        weights_revision=revision,
        tokenizer_revision="t1",
        row_dtype="fp32",
        snapshot_dtype="fp32",
        layout_version="1",
        numerics_version="fake-1",
        block_tokens=block_tokens,
    )


def chat_ids(text: str, *, thinking: str | None = None) -> list[int]:
    """What a model generates for an answer: channels as special ids, the end of the message last."""
    markup = "" if thinking is None else f"{thinking}<|close|>think<|sep|><|open|>response<|sep|>"
    markup += f"{text}<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    return TOKENIZER.encode(markup, allow_special=True)


@dataclass
class FakeModel:
    """What every fake worker generates, and with what law."""

    handoffs: dict[str, asyncio.Future[list[int]]] = field(default_factory=dict)  # what decode workers pull
    reply: list[int] = field(default_factory=lambda: chat_ids("Hello there."))
    tokens_per_event: int = 1
    logprobs: bool = False

    def next_ids(self, prompt_ids: Sequence[int], sampling: common_pb2.Sampling) -> tuple[list[int], int]:
        """All that would be generated after a prompt, and the reason it ends."""
        done = self.done(prompt_ids)
        ids: list[int] = []
        for token_id in itertools.chain(self.reply[done:], itertools.repeat(33)):
            ids.append(token_id)
            if token_id in sampling.stop_token_ids:
                return ids, STOP
            if len(ids) == sampling.max_tokens:
                return ids, LENGTH
        raise AssertionError("unreachable")

    def done(self, prompt_ids: Sequence[int]) -> int:
        prompt = list(prompt_ids)
        return next(n for n in range(len(self.reply), -1, -1) if n == 0 or prompt[-n:] == self.reply[:n])

    def token(self, token_id: int, sampling: common_pb2.Sampling) -> common_pb2.Token:
        if not sampling.HasField("top_logprobs"):
            return common_pb2.Token(id=token_id)
        top = [common_pb2.TopLogprob(id=token_id + n, logprob=-0.5 - n) for n in range(sampling.top_logprobs)]
        return common_pb2.Token(id=token_id, logprob=-0.5, top=top)


@dataclass
class FakeWorker:
    """One worker process. `faults` are raised by the next calls of a method, one each; counters show what it held."""

    model: FakeModel
    role: str
    name: str
    epoch: int = 1
    host_id: str = "h1"
    revision: str = "w1"
    room: int = 100
    die_after: int | None = None  # tokens of a decode stream after which the process is gone
    hold_after: int | None = None  # tokens after which a stream waits for `go_on`
    calls: list[tuple[str, Any]] = field(default_factory=list)
    faults: dict[str, list[ServeError]] = field(default_factory=dict)
    reservations: set[str] = field(default_factory=set)
    handoffs: dict[str, Sequence[int]] = field(default_factory=dict)
    cancelled: int = 0
    late_first_token: asyncio.Event | None = None
    frozen: bool = False  # answers nothing
    withdrawn: bool = False  # decode: is told by prefill that there is nothing to adopt
    late_handoff: asyncio.Event | None = None  # prefill: its last event waits for it
    cache: common_pb2.CacheUsage = field(default_factory=common_pb2.CacheUsage)
    draft: worker_pb2.DraftUsage = field(default_factory=worker_pb2.DraftUsage)

    def __post_init__(self) -> None:
        self.go_on = asyncio.Event()
        self.holding = asyncio.Event()
        self.changed = asyncio.Event()
        self.address = ""

    async def start(self) -> FakeWorker:
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(FakeHealth(self), self.server)
        if self.role == "prefill":
            worker_pb2_grpc.add_PrefillWorkerServicer_to_server(FakePrefill(self), self.server)
        else:
            worker_pb2_grpc.add_DecodeWorkerServicer_to_server(FakeDecode(self), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        return self

    async def die(self) -> None:
        await self.server.stop(None)

    def worker(self) -> Worker:
        return Worker(
            instance_id=InstanceId(self.name),
            epoch=self.epoch,
            role=self.role,  # type: ignore[arg-type]
            address=self.address,
            host_id=self.host_id,
            fingerprint=fingerprint(self.revision),
            context_len=4_096,
            state_bytes=1_000_000,
            row_bytes=1_000,
        )

    async def enter(self, method: str, request: Any, context: Any) -> None:
        self.calls.append((method, request))
        if self.frozen:
            self.holding.set()
            await self.go_on.wait()
        pending = self.faults.get(method)
        if pending:
            error = pending.pop(0)
            await context.abort(grpc_status(error), str(error), (("moonrelay-code", error.code),))

    def noted(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.changed.wait()

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    async def stream(
        self, ids: Sequence[int], sampling: common_pb2.Sampling
    ) -> AsyncIterator[worker_pb2.DecodeEvent]:
        step = self.model.tokens_per_event
        for start_at in range(0, len(ids), step):
            if self.hold_after is not None and start_at >= self.hold_after:
                self.holding.set()
                await self.go_on.wait()
            if self.die_after is not None and start_at >= self.die_after:
                self.die_after = None
                asyncio.get_running_loop().create_task(self.die())
                await asyncio.Event().wait()
            tokens = [self.model.token(i, sampling) for i in ids[start_at : start_at + step]]
            yield worker_pb2.DecodeEvent(tokens=worker_pb2.Tokens(tokens=tokens))


class FakeHealth(health_pb2_grpc.HealthServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Check(self, request, context):
        if self.worker.frozen:
            await self.worker.go_on.wait()
        return health_pb2.HealthCheckResponse()


class FakePrefill(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Prefill(self, request, context):
        worker = self.worker
        await worker.enter("Prefill", request, context)
        try:
            handoff_id = f"{worker.name}-{worker.epoch}-h{len(worker.calls)}"
            worker.model.handoffs[handoff_id] = pulled = asyncio.get_running_loop().create_future()
            opened = worker_pb2.HandoffOpened(
                handoff_id=handoff_id, source_address=worker.address, prompt_tokens=len(request.prompt_ids)
            )
            yield worker_pb2.PrefillEvent(opened=opened)
            yield worker_pb2.PrefillEvent(progress=worker_pb2.PrefillProgress(tokens_done=1))
            if worker.hold_after == -1:
                worker.holding.set()
                await worker.go_on.wait()
            if worker.die_after == -1:
                worker.die_after = None
                asyncio.get_running_loop().create_task(worker.die())
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):  # the latter where the call ends while an event is written
            worker.cancelled += 1
            worker.noted()
            raise
        ids, reason = worker.model.next_ids(request.prompt_ids, request.sampling)
        if len(ids) > 1:
            pulled.set_result(list(request.prompt_ids) + ids[:1])
        if worker.late_first_token is not None:
            await worker.late_first_token.wait()
        first = worker_pb2.FirstToken(token=worker.model.token(ids[0], request.sampling), cache=worker.cache)
        yield worker_pb2.PrefillEvent(first_token=first)
        if worker.late_handoff is not None:
            await worker.late_handoff.wait()
        ready = worker_pb2.HandoffReady()
        if len(ids) == 1:
            ready.finish_reason = reason
        else:
            worker.handoffs[handoff_id] = list(request.prompt_ids) + ids[:1]
        yield worker_pb2.PrefillEvent(handoff=ready)

    async def ReleaseHandoff(self, request, context):
        await self.worker.enter("ReleaseHandoff", request, context)
        self.worker.handoffs.pop(request.handoff_id, None)
        self.worker.noted()
        return worker_pb2.ReleaseHandoffReply()


class FakeDecode(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Reserve(self, request, context):
        worker = self.worker
        await worker.enter("Reserve", request, context)
        if len(worker.reservations) >= worker.room:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        reservation_id = f"r{len(worker.calls)}"
        worker.reservations.add(reservation_id)
        return worker_pb2.ReserveReply(reservation_id=reservation_id, ttl_ms=60_000)

    async def ReleaseReservation(self, request, context):
        await self.worker.enter("ReleaseReservation", request, context)
        self.worker.reservations.discard(request.reservation_id)
        self.worker.noted()
        return worker_pb2.ReleaseReservationReply()

    async def Adopt(self, request, context):
        worker = self.worker
        await worker.enter("Adopt", request, context)
        sampling = common_pb2.Sampling()
        sampling.CopyFrom(request.sampling)
        sampling.max_tokens -= 1
        if worker.withdrawn:
            worker.reservations.discard(request.reservation_id)
            worker.noted()
            words = (("moonrelay-code", "handoff_refused"), ("moonrelay-reason", "withdrawn"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "withdrawn", words)
        try:
            prompt = await worker.model.handoffs[request.opened.handoff_id]
            ids, reason = worker.model.next_ids(prompt, sampling)
            adopted = worker_pb2.Adopted(bytes=1_000, transport="tcp", pull_seconds=0.5, held_tokens=64)
            yield worker_pb2.DecodeEvent(adopted=adopted)
            async for event in worker.stream(ids, request.sampling):
                yield event
        except asyncio.CancelledError:
            worker.cancelled += 1
            raise
        finally:
            worker.reservations.discard(request.reservation_id)
            worker.noted()
        finished = worker_pb2.Finished(reason=reason, completion_tokens=len(ids), draft=worker.draft)
        yield worker_pb2.DecodeEvent(finished=finished)

    async def Generate(self, request, context):
        worker = self.worker
        await worker.enter("Generate", request, context)
        ids, reason = worker.model.next_ids(request.prompt_ids, request.sampling)
        try:
            yield worker_pb2.DecodeEvent(cache=worker.cache)
            async for event in worker.stream(ids, request.sampling):
                yield event
        except asyncio.CancelledError:
            worker.cancelled += 1
            raise
        finally:
            worker.noted()
        finished = worker_pb2.Finished(reason=reason, completion_tokens=len(ids), draft=worker.draft)
        yield worker_pb2.DecodeEvent(finished=finished)
