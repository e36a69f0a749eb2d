"""One attempt at a turn: prefill, then adopt and stream; or one worker that does both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moonrelay.errors import DeadlineExceeded
from moonrelay.stubs.v1 import common_pb2, worker_pb2
from router import core
from router.core import Need, Plan, Worker
from router.edge import WorkerLost, Workers, WorkerStream
from router.ledger import Ledger
from router.lookup import Lookup
from router.metrics import TRANSPORTS, RouterMetrics
from router.turn import Turn
from router.wire import fingerprint_proto, miss_reason_name, restored_by_tier

log = logging.getLogger(__name__)
CONTEXT_IDS_MAX: Final = 16_384  # of a prompt that decode's drafter may look back on
Hear = Callable[[Any], Awaitable[bool]]  # an event of the stream; True: it was the last


@dataclass(slots=True)
class Leg:
    """What one attempt holds. `handoff`: id and fence; `adopting`: decode was told of it; `adopted`: it owns it."""

    lookup: Lookup
    sampling: common_pb2.Sampling
    work_id: str  # the request's id for workers: new for each attempt, since the last one may still be dying
    plan: Plan | None = None
    reservation_id: str | None = None
    handoff: tuple[str, int] | None = None
    adopting: bool = False
    adopted: bool = False

    @property
    def need(self) -> Need:
        return self.lookup.need


class Handover:
    """What the two halves of an attempt tell each other, prefill first."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[worker_pb2.HandoffOpened] = asyncio.get_running_loop().create_future()
        self.first_taken = asyncio.Event()  # the client has prefill's token: decode's may follow
        self.complete = False  # prefill has done its part; from now on decode's silence counts
        self.clock: asyncio.Timeout | None = None  # of decode's silence, while its stream is heard
        self.decoding: asyncio.Task[None] | None = None


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
            with self._ledger.held(plan.decode, leg.need.computed_tokens(plan.decode)):
                await self._generate(turn, leg, plan.decode)
            return
        try:
            with self._ledger.held(plan.decode, 0):
                await self._both(turn, leg, plan.prefill, plan.decode)
        finally:
            # Workers ignore what has gone further meanwhile. A handoff of which decode was told is decode's to
            # release: it may be reading.
            if not leg.adopted and leg.reservation_id is not None:
                self._workers.release_reservation(plan.decode, leg.reservation_id)
            if not leg.adopting and leg.handoff is not None:
                self._workers.release_handoff(plan.prefill, *leg.handoff)

    async def reserve(self, turn: Turn, leg: Leg, worker: Worker) -> None:
        """Set rows and a slot aside on the decode side. Raises: NoRoom, WorkerLost."""
        lookup = leg.lookup
        request = worker_pb2.ReserveRequest(
            request_id=leg.work_id,
            prompt_tokens=lookup.prompt_tokens,
            max_tokens=turn.remaining,
            fingerprint=fingerprint_proto(worker.fingerprint),
            root=lookup.root,
            prefix_hashes=lookup.hashes,
            write_back=lookup.writeback,
        )
        leg.reservation_id = await self._workers.reserve(worker, request)

    async def _both(self, turn: Turn, leg: Leg, prefill: Worker, decode: Worker) -> None:
        """Prefill and decode side by side: decode follows the handoff from the moment it is opened.

        Not a TaskGroup: before Python 3.12 one whose task fails while it is being left marks its own task as
        cancelled for ever, and one that has failed swallows a cancellation from outside.
        """
        handover = Handover()
        if turn.remaining == 1:  # prefill draws it, and decode's part would only take the cores from prefill's
            turn.served.decode = None
            await self._prefill(turn, leg, handover, prefill)
            if not turn.ended:
                raise WorkerLost(f"{prefill.instance_id} did not end the turn with its last token", prefill)
            return
        loop = asyncio.get_running_loop()
        prefilling = loop.create_task(self._prefill(turn, leg, handover, prefill))  # first: the client waits for it
        decoding = loop.create_task(self._decode(turn, leg, handover, prefill, decode))
        handover.decoding = decoding
        both = (prefilling, decoding)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in both:
                task.cancel()
            await _ended(both)  # each gives back what it holds
        faults = [fault for task in both if not task.cancelled() and (fault := task.exception()) is not None]
        if faults:
            raise _cause(faults)
        if not turn.ended:
            raise WorkerLost(f"{prefill.instance_id} withdrew its handoff", prefill, decode)

    async def _prefill(self, turn: Turn, leg: Leg, handover: Handover, worker: Worker) -> None:
        """Compute the prompt; the first token goes to the client at once."""
        began = time.perf_counter()

        async def hear(event: worker_pb2.PrefillEvent) -> bool:
            match event.WhichOneof("event"):
                case "opened":
                    leg.handoff = (event.opened.handoff_id, event.opened.fence)
                    if not handover.opened.done():
                        handover.opened.set_result(event.opened)
                case "first_token":
                    self._note_prefilled(turn, leg, event.first_token.cache, time.perf_counter() - began)
                    await turn.take([event.first_token.token])
                    handover.first_taken.set()
                case "handoff":
                    if event.handoff.HasField("finish_reason"):
                        turn.end(event.handoff.finish_reason)
                    return True
            return False

        with self._ledger.held(worker, leg.need.computed_tokens(worker)):
            stream = await self._workers.prefill(worker, prefill_request(turn, leg), _left_s(turn))
            await self._hear_all(turn, stream, hear)
        handover.complete = True
        if turn.ended and handover.decoding is not None:
            handover.decoding.cancel()  # nothing to adopt
        if handover.clock is not None:
            _put_off(handover.clock, self._stall_s)

    def _note_prefilled(self, turn: Turn, leg: Leg, cache: common_pb2.CacheUsage, seconds: float) -> None:
        turn.served.prefill_seconds = seconds
        self._metrics.stage["prefill"].observe(seconds)
        self._settle_cache(turn, leg.lookup, cache)

    async def _decode(self, turn: Turn, leg: Leg, handover: Handover, prefill: Worker, worker: Worker) -> None:
        """Let decode pull and adopt the handoff, and stream what it generates."""
        if leg.reservation_id is None:
            await self.reserve(turn, leg, worker)
        opened = await handover.opened
        request = worker_pb2.AdoptRequest(
            request_id=leg.work_id,
            reservation_id=leg.reservation_id,
            sampling=leg.sampling,
            opened=opened,
            writeback=turn_writeback(turn, leg.lookup) if leg.lookup.writeback else None,
            tenant=turn.call.tenant,
            context_ids=turn.ids[: opened.prompt_tokens][-CONTEXT_IDS_MAX:],
        )
        began = time.perf_counter()

        async def hear(event: worker_pb2.DecodeEvent) -> bool:
            match event.WhichOneof("event"):
                case "tokens":
                    if not handover.first_taken.is_set():
                        await handover.first_taken.wait()
                    await turn.take(event.tokens.tokens)
                case "finished":
                    turn.served.note_draft(event.finished.draft)
                    turn.end(event.finished.reason)
                    return True
                case "adopted":
                    leg.adopted = True
                    self._note_adopted(turn, leg, event.adopted, time.perf_counter() - began)
            return False

        stream = await self._workers.adopt(worker, request, _left_s(turn))
        leg.adopting = True
        try:
            await self._hear_all(turn, stream, hear, handover)
        except WorkerLost as lost:
            if leg.adopted or lost.died:
                raise
            if lost.withdrawn:
                return  # the turn ended with its first token, or prefill's own stream says what went wrong
            # Either side may have broken the handoff.
            raise WorkerLost(str(lost), worker, prefill, detail=lost.detail) from None

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
                    turn.served.note_draft(event.finished.draft)
                    turn.end(event.finished.reason)
                    return True
            return False

        request = prefill_request(turn, leg)
        request.write_back = leg.lookup.writeback
        stream = await self._workers.generate(worker, request, _left_s(turn))
        await self._hear_all(turn, stream, hear)

    async def _hear_all(self, turn: Turn, stream: WorkerStream, hear: Hear, handover: Handover | None = None) -> None:
        """Hear events until the last, or until the turn ends before it, which cancels the work.

        With `handover` silence counts only once prefill has done its part. Raises: WorkerLost where the worker falls
        silent, DeadlineExceeded where the client stops reading.
        """
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        whole = False
        try:
            async with asyncio.timeout(None if handover and not handover.complete else self._stall_s) as clock:
                if handover is not None:
                    handover.clock = clock
                while not whole and not turn.ended:
                    whole = await hear(await stream.read())
                    if loop.time() - heard_s > self._stall_s / 8:  # a timer per token would cost more than the token
                        heard_s = loop.time()
                        _put_off(clock, self._stall_s)
        except TimeoutError:
            if turn.emitting:
                raise DeadlineExceeded("the client does not read its answer") from None
            silent = f"{stream.worker.instance_id} has been silent for {self._stall_s:g} s"
            raise WorkerLost(silent, stream.worker) from None
        finally:
            if handover is not None:
                handover.clock = None
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
            seen_tokens=lookup.match.seen_tokens,
            index_lost=lookup.match.lost,
            restored=restored,
            worker_reason=miss_reason_name(cache.miss_reason),
            drafter_cold=cache.drafter_cold,
        )
        self._metrics.prompt_tokens.inc(lookup.prompt_tokens)
        self._metrics.count_cache(turn.account)

    def _note_adopted(self, turn: Turn, leg: Leg, adopted: worker_pb2.Adopted, seconds: float) -> None:
        served = turn.served
        served.held_tokens = adopted.held_tokens
        self._metrics.handoff_tokens.inc(leg.lookup.prompt_tokens)
        self._metrics.handoff_held_tokens.inc(adopted.held_tokens)
        served.transport = adopted.transport if adopted.transport in TRANSPORTS else "other"
        served.handoff_bytes += adopted.bytes
        served.pull_seconds += adopted.pull_seconds
        served.verify_seconds += adopted.verify_seconds
        self._metrics.handoff_bytes.labels(served.transport).inc(adopted.bytes)
        self._metrics.stage["adopt"].observe(seconds)


def prefill_request(turn: Turn, leg: Leg) -> worker_pb2.PrefillRequest:
    lookup = leg.lookup
    return worker_pb2.PrefillRequest(
        request_id=leg.work_id,
        prompt_ids=turn.ids,
        sampling=leg.sampling,
        root=lookup.root,
        prefix_hashes=lookup.hashes,
        hit=lookup.match.hit,
        snapshot_at=lookup.snapshot_at,
        store=lookup.store,
        tenant=turn.call.tenant,
    )


def turn_writeback(turn: Turn, lookup: Lookup) -> worker_pb2.TurnWriteback:
    """What decode must know of the prompt to keep the turn after it."""
    full = len(lookup.hashes) * lookup.fingerprint.block_tokens
    return worker_pb2.TurnWriteback(
        root=lookup.root, prefix_hashes=lookup.hashes, tail_ids=turn.prompt.ids[full:], hit=lookup.match.hit
    )


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for tasks that were told to end. A cancellation meanwhile, even a second one, waits for them as well."""
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _cause(faults: Sequence[BaseException]) -> BaseException:
    """The one fault that an attempt ends with. Losses are one loss of all workers that were lost."""
    lost = [fault for fault in faults if isinstance(fault, WorkerLost)]
    if len(lost) < len(faults):
        return next(fault for fault in faults if not isinstance(fault, WorkerLost))
    workers = dict.fromkeys(worker for fault in lost for worker in fault.workers)
    return WorkerLost(
        str(lost[0]),
        *workers,
        unreachable=all(fault.unreachable for fault in lost),
        died=all(fault.died or fault.unreachable for fault in lost),
        detail="; ".join(fault.detail for fault in lost if fault.detail),
    )


def _put_off(clock: asyncio.Timeout, seconds: float) -> None:
    if not clock.expired():  # else its time has come already
        clock.reschedule(asyncio.get_running_loop().time() + seconds)


def _left_s(turn: Turn) -> float:
    """What remains of the request's deadline, for the worker to know; never zero, which gRPC takes for none."""
    return max(0.001, turn.call.deadline_s - asyncio.get_running_loop().time())
