"""The PrefillWorker service: prompts in, handoffs out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import grpc

from engine.api import Finished, FinishReason, Progress, SampledToken, TokenSampled
from engine.worker.expiry import Expiry, now_ms
from engine.worker.memory import Holding
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
from moonrelay.errors import InvariantError, Unavailable
from moonrelay.prefix import Fingerprint
from moonrelay.stubs.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from prefill.core import HandoffTable
from prefill.metrics import HandoffMetrics

TP_SIZE = 1
Emit = Callable[[worker_pb2.PrefillEvent], Awaitable[None]]


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
        transport_note: str,
    ) -> None:
        self.table = table
        self._prompts, self._gate, self._metrics = prompts, gate, metrics
        self._max_context, self._transport_note = max_context, transport_note
        self._fingerprint, self._layout = fingerprint_to_wire(fingerprint), layout_to_wire(layout)
        self._peer, self._address = peer, address
        self._lent: dict[str, Holding] = {}
        self._expiry = Expiry(table.next_deadline_ms, self._expire)
        self._num_handoffs = 0

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        await self._gate.serve(context, self._prefill(request, context.write, context.time_remaining()))

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
            handoff_id = self._begin(run)
            try:
                token, reason = await self._compute(run, emit)
                self._prompts.metrics.ttft.observe(time.monotonic() - arrived_s)
                usage = run.usage()
                first = worker_pb2.FirstToken(token=token_to_wire(token), cache=usage)
                await emit(worker_pb2.PrefillEvent(first_token=first))
                ready = worker_pb2.HandoffReady(transport_note=self._transport_note)
                if reason is None:
                    ready.manifest.CopyFrom(await self._publish(run, handoff_id, token.id))
                else:
                    ready.finish_reason = FINISH[reason]
            finally:
                if self.table.abandon(handoff_id):
                    self._free(handoff_id)
            self._prompts.store(run)
        self._prompts.metrics.prompt_done(tokens, usage)
        await emit(worker_pb2.PrefillEvent(handoff=ready))

    async def _compute(self, run: PromptRun, emit: Emit) -> tuple[SampledToken, FinishReason | None]:
        """The first token; and why the turn ended, where it ended the turn."""
        token: SampledToken | None = None
        while True:
            for event in await run.events():
                match event:
                    case Progress(tokens=done):
                        run.hash_ahead(done)
                        await emit(worker_pb2.PrefillEvent(progress=worker_pb2.PrefillProgress(tokens_done=done)))
                    case TokenSampled(token=drawn):
                        token = drawn
                    case Finished(reason="cancelled"):
                        raise Unavailable("the engine is stopping")
                    case Finished(reason=reason, tokens_in_state=consumed):
                        if token is None or consumed != len(run.prompt.ids):
                            raise InvariantError(f"state holds {consumed} of {len(run.prompt.ids)} prompt tokens")
                        return token, None if reason == "held" else reason

    async def _publish(self, run: PromptRun, handoff_id: str, next_token: int) -> worker_pb2.Manifest:
        """Checksum everything, then lend it out: the lease runs from when the manifest is complete."""
        holding, tokens = run.holding, len(run.prompt.ids)
        with self._metrics.publish_seconds.time():
            rows = await run.spans(0, len(holding.reservation.blocks))
            state = await self._prompts.checked(holding.state_parts())
            nbytes = sum(span.length for span in (*rows, *state))
            lease = self.table.publish(handoff_id, nbytes=nbytes, now_ms=now_ms())
            self._expiry.change()
        self._metrics.published_bytes.inc(nbytes)
        return worker_pb2.Manifest(
            handoff_id=handoff_id,
            fingerprint=self._fingerprint,
            layout=self._layout,
            tp_size=TP_SIZE,
            tokens_in_state=tokens,
            next_token=next_token,
            sampler_position=tokens + 1,
            rows=rows,
            state=state,
            source=self._peer,
            source_address=self._address,
            fence=lease.fence,
            lease_ms=lease.lease_ms,
        )

    async def _release(self, request: worker_pb2.ReleaseHandoffRequest) -> worker_pb2.ReleaseHandoffReply:
        if self.table.release(request.handoff_id, fence=request.fence) == "freed":
            self._free(request.handoff_id)
        return worker_pb2.ReleaseHandoffReply()

    def _begin(self, run: PromptRun) -> str:
        self._num_handoffs += 1
        handoff_id = f"{run.prompt.request_id}.{self._num_handoffs}"
        self.table.begin(handoff_id)
        self._lent[handoff_id] = run.holding.share()
        return handoff_id

    def _expire(self, now: int) -> None:
        for handoff_id in self.table.expire(now):
            self._free(handoff_id)

    def _free(self, handoff_id: str) -> None:
        self._lent.pop(handoff_id).drop()
        self._expiry.change()
