"""The DecodeWorker service: handoffs adopted and continued; and whole requests, where one worker does both halves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import grpc

from decode.manifest import refused
from decode.reader import Identity, Reader
from engine.api import Finished, SequenceSpec, TokenSampled
from engine.worker.drafting import draft_to_wire
from engine.worker.prompt import PromptRunner
from engine.worker.service import Gate
from engine.worker.turn import Turn, turn_prompt
from engine.worker.wire import (
    FINISH,
    after_first_token,
    check_length,
    fingerprint_from_wire,
    prompt_from_wire,
    sampling_from_wire,
    token_to_wire,
)
from moonrelay.errors import InvalidRequest, Unavailable
from moonrelay.prefix import HASH_BYTES
from moonrelay.stubs.v1 import worker_pb2, worker_pb2_grpc

Emit = Callable[[worker_pb2.DecodeEvent], Awaitable[None]]
GRID_SLACK = 1e-3  # of an interval
WRITE_BACK_PATIENCE_S = 0.05  # the end of a turn waits for its write-back; its tokens are out already


def next_due(now_s: float, interval_s: float) -> float:
    """The next multiple of `interval_s` after `now_s`.

    That is often one itself, since the loop's clock counts whole milliseconds: no rounding may make it its own next.
    """
    return (math.floor(now_s / interval_s + GRID_SLACK) + 1) * interval_s


class DecodeEdge(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(
        self,
        prompts: PromptRunner,
        reader: Reader,
        gate: Gate,
        *,
        identity: Identity,
        max_context: int,
        stream_interval_s: float = 0.0,
    ) -> None:
        self._prompts, self._reader, self._gate = prompts, reader, gate
        self._identity, self._max_context = identity, max_context
        self._stream_interval_s = stream_interval_s

    async def Reserve(
        self, request: worker_pb2.ReserveRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReserveReply:
        return await self._gate.serve(context, self._reserve(request))

    async def Adopt(self, request: worker_pb2.AdoptRequest, context: grpc.aio.ServicerContext) -> None:
        await self._gate.serve(context, self._adopt(request, context.write), drains=True)

    async def ReleaseReservation(
        self, request: worker_pb2.ReleaseReservationRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReleaseReservationReply:
        return await self._gate.serve(context, self._release(request), drains=True)

    async def Generate(self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext) -> None:
        await self._gate.serve(context, self._generate(request, context.write, context.time_remaining()))

    async def _reserve(self, request: worker_pb2.ReserveRequest) -> worker_pb2.ReserveReply:
        if request.HasField("fingerprint"):
            theirs = fingerprint_from_wire(request.fingerprint)
            if theirs != self._identity.fingerprint:
                raise refused("fingerprint", f"{theirs}, expected {self._identity.fingerprint}")
        check_length(request.prompt_tokens, request.max_tokens, self._max_context)
        hashes, full = request.prefix_hashes, request.prompt_tokens // self._prompts.block_tokens
        if hashes and (len(hashes) != full or any(len(h) != HASH_BYTES for h in (request.root, *hashes))):
            raise InvalidRequest(f"expected a root and {full} hashes of {HASH_BYTES} bytes", param="prefix_hashes")
        return self._reader.reserve(
            request.request_id,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            root=request.root,
            hashes=tuple(hashes),
            write_back=request.write_back,
        )

    async def _release(self, request: worker_pb2.ReleaseReservationRequest) -> worker_pb2.ReleaseReservationReply:
        self._reader.release(request.reservation_id)
        return worker_pb2.ReleaseReservationReply()

    async def _adopt(self, request: worker_pb2.AdoptRequest, emit: Emit) -> None:
        """A handed-over request from its opening to its last token, in order."""
        if not request.HasField("opened"):
            raise InvalidRequest("expected the handoff that prefill opened", param="opened")
        sampling = sampling_from_wire(request.sampling)
        kept = turn_prompt(
            request, prompt_tokens=request.opened.prompt_tokens, block_tokens=self._prompts.block_tokens
        )
        adoption = await self._reader.adopt(request)
        first = adoption.next_token
        turn = self._prompts.turn(request.request_id, adoption.holding, kept, (first,), tenant=request.tenant)
        try:
            spec = SequenceSpec(
                request_id=turn.engine_id,
                ids=(first,),  # seen by no state: the first step consumes it
                sampling=after_first_token(sampling, first),
                restored=adoption.tokens_in_state,
                draft_first=adoption.draft_first,
                history=list(request.context_ids) if self._prompts.drafter else (),
                write_back=kept is not None,
            )
            turn.submit(spec)
            adopted = worker_pb2.Adopted(
                bytes=adoption.bytes,
                transport=adoption.transport,
                pull_seconds=adoption.pull_seconds,
                verify_seconds=adoption.verify_seconds,
                held_tokens=adoption.held_tokens,
                after_manifest_seconds=adoption.after_manifest_seconds,
            )
            await emit(worker_pb2.DecodeEvent(adopted=adopted))
            await self._stream(turn, emit)
        finally:
            turn.close()
            self._reader.finish(request.reservation_id)

    async def _generate(self, request: worker_pb2.PrefillRequest, emit: Emit, remaining_s: float | None) -> None:
        """A whole request in this one worker, in order."""
        arrived_s = time.monotonic()
        prompt = prompt_from_wire(request, block_tokens=self._prompts.block_tokens, max_context=self._max_context)
        prompt_tokens = len(prompt.ids)
        async with self._prompts.run(
            prompt,
            tokens=prompt_tokens + prompt.sampling.max_tokens,
            hold_after_first=False,
            remaining_s=remaining_s,
        ) as run:
            usage = run.usage()

            async def first_token() -> None:
                self._prompts.metrics.ttft.observe(time.monotonic() - arrived_s)
                self._prompts.metrics.prompt_done(prompt_tokens, usage)
                self._prompts.store(run)
                await emit(worker_pb2.DecodeEvent(cache=usage))

            await self._stream(run.turn, emit, first_token)

    async def _stream(self, turn: Turn, emit: Emit, first_token: Callable[[], Awaitable[None]] | None = None) -> None:
        """Send every token, then why the turn ended. Raises: what failed it.

        Tokens of one step go together, and those of faster steps wait for the message that is due: a message costs
        two processes as much as a small model's token.
        """
        clock, interval_s = asyncio.get_running_loop().time, self._stream_interval_s
        count, last_s, due_s = 0, None, 0.0
        while True:
            tokens, finished = [], None
            for event in await turn.events(due_s):
                match event:
                    case TokenSampled(token=token):
                        tokens.append(token_to_wire(token))
                    case Finished():
                        finished = event
            if tokens:
                now_s = time.monotonic()  # the loop's clock counts whole milliseconds
                if last_s is not None:
                    self._prompts.metrics.inter_token.observe((now_s - last_s) / len(tokens))
                elif first_token is not None:
                    await first_token()
                count, last_s = count + len(tokens), now_s
                if interval_s:  # on one grid, so that all requests' messages are sent, and read, together
                    due_s = next_due(clock(), interval_s)
                await emit(worker_pb2.DecodeEvent(tokens=worker_pb2.Tokens(tokens=tokens)))
            if finished is not None:
                if finished.reason not in FINISH:
                    raise Unavailable("the engine is stopping")
                await turn.landed(WRITE_BACK_PATIENCE_S)
                draft = draft_to_wire(finished.draft)
                end = worker_pb2.Finished(reason=FINISH[finished.reason], completion_tokens=count, draft=draft)
                await emit(worker_pb2.DecodeEvent(finished=end))
                return
