"""One attempt at a turn: prefill, then adopt and stream; or one worker that does both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from moonrelay.errors import DeadlineExceeded
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from router import core
from router.core import Plan, Worker
from router.edge import WorkerLost, Workers, WorkerStream, miss_reason_name, restored_by_tier
from router.ledger import Ledger
from router.lookup import Lookup
from router.metrics import TRANSPORTS, RouterMetrics
from router.turn import Turn

log = logging.getLogger(__name__)
Hear = Callable[[Any], Awaitable[bool]]  # an event of the stream; True: it was the last


@dataclass(slots=True)
class Leg:
    """What one attempt holds. `adopted`: decode owns the bytes, so the handoff and reservation are over."""

    lookup: Lookup
    sampling: common_pb2.Sampling
    work_id: str  # the request's id for workers: new for each attempt, since the last one may still be dying
    plan: Plan | None = None
    reservation_id: str | None = None
    manifest: worker_pb2.Manifest | None = None
    adopted: bool = False

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that no cache hit saves."""
        return self.lookup.prompt_tokens - self.lookup.match.tokens


class Legs:
    def __init__(self, workers: Workers, ledger: Ledger, metrics: RouterMetrics, *, stall_s: float) -> None:
        self._workers = workers
        self._ledger = ledger
        self._metrics = metrics
        self._stall_s = stall_s

    async def run(self, turn: Turn, leg: Leg) -> None:
        """Serve the turn to its end, or raise what ended the attempt; whatever was held is given back.

        Raises: WorkerLost, NoRoom, and what workers refuse.
        """
        plan = leg.plan
        assert plan is not None, "the leg was placed"
        turn.served.decode = plan.decode.instance_id
        turn.served.prefill = None if plan.prefill is None else plan.prefill.instance_id
        if plan.prefill is None:
            with self._ledger.held(plan.decode, leg.computed_tokens):
                await self._generate(turn, leg, plan.decode)
            return
        try:
            with self._ledger.held(plan.decode, 0):
                await self._prefill(turn, leg, plan.prefill)
                if not turn.ended:
                    await self._decode(turn, leg, plan.prefill, plan.decode)
        finally:
            if not leg.adopted:
                if leg.reservation_id is not None:
                    self._workers.release_reservation(plan.decode, leg.reservation_id)
                if leg.manifest is not None and leg.manifest.handoff_id:
                    self._workers.release_handoff(plan.prefill, leg.manifest)

    async def _prefill(self, turn: Turn, leg: Leg, worker: Worker) -> None:
        """Compute the prompt; the first token goes to the client at once."""
        began = time.perf_counter()
        ready: list[worker_pb2.HandoffReady] = []

        async def hear(event: worker_pb2.PrefillEvent) -> bool:
            match event.WhichOneof("event"):
                case "first_token":
                    self._note_prefilled(turn, leg, event.first_token.cache, time.perf_counter() - began)
                    await turn.take([event.first_token.token])
                case "handoff":
                    ready.append(event.handoff)
            return bool(ready)

        with self._ledger.held(worker, leg.computed_tokens):
            request = prefill_request(turn, leg)
            stream = await self._workers.prefill(worker, request, _left_s(turn))
            await self._hear_all(turn, stream, hear, to_the_end=True)  # an ended turn has a handoff to release
        leg.manifest = ready[0].manifest
        if ready[0].HasField("finish_reason"):
            turn.end(ready[0].finish_reason)

    def _note_prefilled(self, turn: Turn, leg: Leg, cache: common_pb2.CacheUsage, seconds: float) -> None:
        turn.served.prefill_seconds = seconds
        self._metrics.stage["prefill"].observe(seconds)
        self._settle_cache(turn, leg.lookup, cache)

    async def _decode(self, turn: Turn, leg: Leg, prefill: Worker, worker: Worker) -> None:
        """Let decode pull and adopt the handoff, and stream what it generates."""
        request = worker_pb2.AdoptRequest(
            request_id=leg.work_id,
            reservation_id=leg.reservation_id,
            manifest=leg.manifest,
            sampling=leg.sampling,
        )
        began = time.perf_counter()

        async def hear(event: worker_pb2.DecodeEvent) -> bool:
            match event.WhichOneof("event"):
                case "tokens":
                    await turn.take(event.tokens.tokens)
                case "finished":
                    turn.end(event.finished.reason)
                    return True
                case "adopted":
                    leg.adopted = True
                    self._note_adopted(turn, event.adopted, time.perf_counter() - began)
            return False

        stream = await self._workers.adopt(worker, request, _left_s(turn))
        try:
            await self._hear_all(turn, stream, hear)
        except WorkerLost as lost:
            if leg.adopted:
                raise
            raise WorkerLost(str(lost), worker, prefill) from None  # either side may have broken the handoff

    async def _generate(self, turn: Turn, leg: Leg, worker: Worker) -> None:
        """The aggregated path: one worker does both."""
        began = time.perf_counter()

        async def hear(event: worker_pb2.DecodeEvent) -> bool:
            match event.WhichOneof("event"):
                case "cache":
                    turn.served.prefill_seconds = time.perf_counter() - began
                    self._settle_cache(turn, leg.lookup, event.cache)
                case "tokens":
                    await turn.take(event.tokens.tokens)
                case "finished":
                    self._settle_cache(turn, leg.lookup, event.cache)  # a worker that did not say: nothing was cached
                    turn.end(event.finished.reason)
                    return True
            return False

        stream = await self._workers.generate(worker, prefill_request(turn, leg), _left_s(turn))
        await self._hear_all(turn, stream, hear)

    async def _hear_all(self, turn: Turn, stream: WorkerStream, hear: Hear, *, to_the_end: bool = False) -> None:
        """Hear events until the last, or (unless `to_the_end`) until the turn ends before it, which cancels the work.

        Raises: WorkerLost where the worker falls silent, DeadlineExceeded where the client stops reading.
        """
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        whole = False
        try:
            async with asyncio.timeout(self._stall_s) as clock:
                while not whole and (to_the_end or not turn.ended):
                    whole = await hear(await stream.read())
                    if loop.time() - heard_s > self._stall_s / 8:  # a timer per token would cost more than the token
                        heard_s = loop.time()
                        clock.reschedule(heard_s + self._stall_s)
        except TimeoutError:
            if turn.emitting:
                raise DeadlineExceeded("the client does not read its answer") from None
            silent = f"{stream.worker.instance_id} has been silent for {self._stall_s:g} s"
            raise WorkerLost(silent, stream.worker) from None
        finally:
            self._workers.end(stream, whole=whole)

    def _settle_cache(self, turn: Turn, lookup: Lookup, cache: common_pb2.CacheUsage) -> None:
        """Account for the client's prompt, once; a replay's cache is not the client's business."""
        if turn.account is not None:
            return
        restored = restored_by_tier(cache)
        if sum(restored.values()) >= lookup.prompt_tokens:
            log.error("worker reports more cached tokens than there are", extra={"request_id": turn.call.request_id})
            restored = dict.fromkeys(restored, 0)
        turn.account = core.account(
            prompt_tokens=lookup.prompt_tokens,
            hit_tokens=lookup.match.tokens,
            matchable_tokens=lookup.match.matchable_tokens,
            index_lost=lookup.match.lost,
            restored=restored,
            worker_reason=miss_reason_name(cache.miss_reason),
        )
        self._metrics.prompt_tokens.inc(lookup.prompt_tokens)
        self._metrics.count_cache(turn.account.by_tier, turn.account.lost)

    def _note_adopted(self, turn: Turn, adopted: worker_pb2.Adopted, seconds: float) -> None:
        served = turn.served
        served.transport = adopted.transport if adopted.transport in TRANSPORTS else "other"
        served.handoff_bytes += adopted.bytes
        served.pull_seconds += adopted.pull_seconds
        served.verify_seconds += adopted.verify_seconds
        self._metrics.handoff_bytes.labels(served.transport).inc(adopted.bytes)
        self._metrics.stage["adopt"].observe(seconds)


def prefill_request(turn: Turn, leg: Leg) -> worker_pb2.PrefillRequest:
    """A replay is not stored: nobody will send its generated part, cut off where a worker died, as a prompt."""
    lookup = leg.lookup
    return worker_pb2.PrefillRequest(
        request_id=leg.work_id,
        prompt_ids=turn.ids,
        sampling=leg.sampling,
        root=lookup.root,
        prefix_hashes=lookup.hashes,
        hit=lookup.match.hit,
        snapshot_at=lookup.snapshot_at,
        store=not turn.generated,
    )


def _left_s(turn: Turn) -> float:
    """What remains of the request's deadline, for the worker to know; never zero, which gRPC takes for none."""
    return max(0.001, turn.call.deadline_s - asyncio.get_running_loop().time())
