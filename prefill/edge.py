"""The PrefillWorker service: prompts in, handoffs out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from engine.api import Finished, FinishReason, LastPass, Progress, SampledToken, TokenSampled
from engine.worker.expiry import Expiry, now_ms
from engine.worker.prompt import PromptRun, PromptRunner
from engine.worker.service import Gate
from engine.worker.wire import (
    FINISH,
    fingerprint_to_wire,
    layout_to_wire,
    prompt_from_wire,
    token_to_wire,
)
from model.batch import PoolLayout
from moonrelay.errors import HandoffRefused, InvariantError, Unavailable
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prefill.core import HandoffTable
from prefill.handoff import Handoff, LayerWatch, nbytes
from prefill.metrics import HandoffMetrics
from prefill.parts import PART_BYTES

Emit = Callable[[worker_pb2.PrefillEvent], Awaitable[None]]
Send = Callable[[worker_pb2.HandoffPart], Awaitable[None]]


async def beside(first: Awaitable[None], other: Awaitable[None]) -> None:
    """Both at once, begun in this order. Where one fails the other is ended before that is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(other)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # moot where it is over
        await asyncio.gather(*tasks, return_exceptions=True)


class PrefillEdge(worker_pb2_grpc.PrefillWorkerServicer):
    """Owns the handoff table; memory leaves it only as the table says."""

    def __init__(
        self,
        prompts: PromptRunner,
        table: HandoffTable,
        gate: Gate,
        metrics: HandoffMetrics,
        *,
        fingerprint: Fingerprint,
        layout: PoolLayout,
        max_context: int,
        peer: common_pb2.Peer,
        address: str,
        part_bytes: int = PART_BYTES,
        drafter: str = "",
    ) -> None:
        self.table = table
        self._drafter = drafter
        self._prompts, self._gate, self._metrics = prompts, gate, metrics
        self._max_context = max_context
        self._fingerprint, self._layout = fingerprint_to_wire(fingerprint), layout_to_wire(layout)
        self._peer, self._address = peer, address
        self._split = worker_pb2.Split(tp_size=1, tp_rank=0, first_head=0, end_head=layout.num_heads)
        self._part_bytes = part_bytes
        self._lent: dict[str, Handoff] = {}
        self._layers = LayerWatch(prompts.engine.progress)
        self._expiry = Expiry(table.next_deadline_ms, self._expire)
        self._num_handoffs = 0

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        await self._gate.serve(context, self._prefill(request, context.write, context.time_remaining()))

    async def FollowHandoff(
        self, request: worker_pb2.FollowHandoffRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await self._gate.serve(context, self._follow(request, context.write), drains=True)

    async def ReleaseHandoff(
        self, request: worker_pb2.ReleaseHandoffRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReleaseHandoffReply:
        return await self._gate.serve(context, self._release(request), drains=True)

    async def run(self) -> None:
        """End leases when their time comes; until cancelled."""
        await self._expiry.run()

    async def drained(self) -> None:
        """Until no handoff is left: pulled, or its lease and the longest transfer over."""
        await self._expiry.until(lambda: len(self.table) == 0)

    async def _prefill(self, request: worker_pb2.PrefillRequest, emit: Emit, remaining_s: float | None) -> None:
        """The whole life of a prompt here, in order; details live one call down."""
        arrived_s = time.monotonic()
        prompt = prompt_from_wire(request, block_tokens=self._prompts.block_tokens, max_context=self._max_context)
        tokens = len(prompt.ids)
        async with self._prompts.run(prompt, tokens=tokens, hold_after_first=True, remaining_s=remaining_s) as run:
            handoff = self._begin(run)
            try:
                await emit(worker_pb2.PrefillEvent(opened=self._opened(handoff, tokens)))
                token, reason = await self._compute(run, handoff, emit)
                self._prompts.metrics.ttft.observe(time.monotonic() - arrived_s)
                usage = run.usage()
                first = worker_pb2.FirstToken(token=token_to_wire(token), cache=usage)
                ready = worker_pb2.HandoffReady()
                said = emit(worker_pb2.PrefillEvent(first_token=first))
                if reason is None:
                    await beside(said, self._publish(run, handoff, token.id))
                else:
                    await said
                    ready.finish_reason = FINISH[reason]
            finally:
                self._layers.remove(handoff)
                handoff.withdraw("the request ended without a handoff")
                if self.table.abandon(handoff.id, now_ms=now_ms()):
                    self._free(handoff.id)
                self._expiry.change()
            self._prompts.store(run)
        self._prompts.metrics.prompt_done(tokens, usage)
        await emit(worker_pb2.PrefillEvent(handoff=ready))

    async def _compute(
        self, run: PromptRun, handoff: Handoff, emit: Emit
    ) -> tuple[SampledToken, FinishReason | None]:
        """The first token; and why the turn ended, where it ended the turn."""
        token: SampledToken | None = None
        while True:
            events = await run.events()
            last = any(isinstance(event, Finished) for event in events)
            for event in events:
                match event:
                    case Progress(tokens=done):
                        handoff.tokens_done(done)
                        if last:
                            continue  # the token says as much, and nothing may go before it
                        await emit(worker_pb2.PrefillEvent(progress=worker_pb2.PrefillProgress(tokens_done=done)))
                    case LastPass(number=number) if handoff.wants_layers:
                        self._layers.add(handoff, number)
                    case TokenSampled(token=drawn):
                        token = drawn
                    case Finished(reason="cancelled"):
                        raise Unavailable("the engine is stopping")
                    case Finished(reason=reason, tokens_in_state=consumed):
                        if token is None or consumed != len(run.prompt.ids):
                            raise InvariantError(f"state holds {consumed} of {len(run.prompt.ids)} prompt tokens")
                        return token, None if reason == "held" else reason

    async def _publish(self, run: PromptRun, handoff: Handoff, next_token: int) -> None:
        """Checksum what is left, then lend everything: the lease runs from when the manifest is complete."""
        tokens = len(run.prompt.ids)
        self._layers.remove(handoff)
        with self._metrics.publish_seconds.time():
            first, rows, state = await handoff.regions()
            whole = sum(span.length for span in rows) + sum(p.recurrent.length + p.conv.length for p in state)
            lease = self.table.publish(handoff.id, nbytes=whole, now_ms=now_ms())
            self._expiry.change()
        if lease is None:  # its follower had given up
            handoff.withdraw("declined")
            self._free(handoff.id)
            return
        self._metrics.published_bytes.inc(whole)
        manifest = worker_pb2.Manifest(
            handoff_id=handoff.id,
            fingerprint=self._fingerprint,
            layout=self._layout,
            split=self._split,
            tokens_in_state=tokens,
            next_token=next_token,
            sampler_position=tokens + 1,
            rows=rows,
            state=state,
            source=self._peer,
            source_address=self._address,
            fence=lease.fence,
            lease_ms=lease.lease_ms,
            drafter=self._drafter,
            draft_first=self._prompts.draft_first(run.holding),
        )
        handoff.publish(manifest, held_blocks=first)

    async def _follow(self, request: worker_pb2.FollowHandoffRequest, send: Send) -> None:
        """Every part of a handoff to its one follower, to the manifest or the withdrawal. Raises: HandoffRefused."""
        outcome = self.table.follow(request.handoff_id, fence=request.fence)
        if outcome != "granted":
            raise HandoffRefused(f"handoff {request.handoff_id}: {outcome}", reason="withdrawn")
        handoff = self._lent[request.handoff_id]
        if request.HasField("held") and not handoff.agree(request.held):
            raise HandoffRefused("the blocks held are not this prompt's", reason="held")
        async for part in handoff.parts():
            lent = nbytes(part)
            if lent and not self.table.lend(handoff.id, nbytes=lent):
                continue  # complete or declined meanwhile: the last part says which
            await send(part)

    async def _release(self, request: worker_pb2.ReleaseHandoffRequest) -> worker_pb2.ReleaseHandoffReply:
        match self.table.release(request.handoff_id, fence=request.fence):
            case "freed":
                self._free(request.handoff_id)
            case "declined":
                self._lent[request.handoff_id].withdraw("declined")
        return worker_pb2.ReleaseHandoffReply()

    def _begin(self, run: PromptRun) -> Handoff:
        self._num_handoffs += 1
        handoff_id = f"{run.prompt.request_id}.{self._num_handoffs}"
        fence = self.table.begin(handoff_id)
        self._lent[handoff_id] = handoff = Handoff(handoff_id, fence, self._prompts, run, self._part_bytes)
        return handoff

    def _opened(self, handoff: Handoff, prompt_tokens: int) -> worker_pb2.HandoffOpened:
        return worker_pb2.HandoffOpened(
            handoff_id=handoff.id,
            source=self._peer,
            source_address=self._address,
            fence=handoff.fence,
            fingerprint=self._fingerprint,
            layout=self._layout,
            split=self._split,
            prompt_tokens=prompt_tokens,
            drafter=self._drafter,
        )

    def _expire(self, now: int) -> None:
        for handoff_id in self.table.expire(now):
            self._free(handoff_id)

    def _free(self, handoff_id: str) -> None:
        handoff = self._lent.pop(handoff_id)
        handoff.withdraw("its time is over")
        handoff.holding.drop()
        self._expiry.change()
