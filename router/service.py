"""The life of a request, from its checked form to its one terminal reply."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from model.tokenizer import Tokenizer
from moonrelay.errors import DeadlineExceeded, InvariantError, ServeError, Unavailable
from moonrelay.prefix import Fingerprint
from moonrelay.status import http_status
from router import core
from router.admission import Admission, Refused
from router.core import Need, Plan, Worker, WorkerKey
from router.edge import Background, NoRoom, WorkerLost, Workers
from router.encodings import EncodingCache
from router.fleet import ROLES, Fleet, Gap, Index
from router.idstore import IdStore
from router.ledger import Ledger
from router.legs import Leg, Legs
from router.lookup import Lookups
from router.metrics import CLIENT_GONE, RouterMetrics
from router.output import ChatOutput, TextOutput
from router.prompt import Draft, Prompt, draft, token_limit, tokenise
from router.recall import Recall
from router.schema import GenerationRequest
from router.settings import RouterSettings
from router.turn import Call, ClientGone, Result, Sink, Turn, log_fields

log = logging.getLogger(__name__)
T = TypeVar("T")

OFF_LOOP_BYTES: Final = 10_000  # rendering and tokenising this much takes some milliseconds
PREPARE_THREADS: Final = 2
SIGN_OF_LIFE_S: Final = 0.5  # membership has missed it for 2 s already


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router knows of the model: its tokenizer and its context, in tokens."""

    name: str
    tokenizer: Tokenizer
    context_len: int
    created: int
    tokenizer_revision: str = ""


class Service:
    """Both frontends call `serve`; everything else here is one step of it."""

    def __init__(
        self,
        *,
        settings: RouterSettings,
        model: ServedModel,
        fleet: Fleet,
        index: Index,
        ids: IdStore,
        workers: Workers,
        metrics: RouterMetrics,
        background: Background,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.settings = settings
        self.model = model
        self.fleet = fleet
        self.workers = workers
        self.metrics = metrics
        self.draining = False
        self.admission = Admission(
            in_flight_max=settings.in_flight_max,
            queue_len_max=settings.queue_len_max,
            queue_timeout_s=settings.queue_timeout_ms / 1e3,
            room_retry_s=settings.room_retry_ms / 1e3,
        )
        self.gap = Gap()
        self.ledger = Ledger(suspect_s=settings.suspect_ms / 1e3)
        self._threads = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._encodings = EncodingCache(model.tokenizer, settings.encodings_tokens_max)
        self._recall = Recall(ids, model.tokenizer, model.tokenizer_revision, self._threads)
        self._lookups = Lookups(index, self._threads, metrics)
        self._legs = Legs(workers, self.ledger, metrics, stall_s=settings.stall_timeout_ms / 1e3)
        self._background = background
        self._watched: set[WorkerKey] = set()  # missing workers that calls still run on
        self._clocks: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_fatal = on_fatal
        self._random = random.SystemRandom()

    @property
    def ready(self) -> bool:
        """A whole serving path exists, and new requests are welcome."""
        return not self.draining and bool(core.serving(self.fleet.workers()))

    @property
    def context_len(self) -> int:
        """Tokens that every worker can hold: the model's context, or less where a worker's pools are smaller."""
        return min(self.model.context_len, *(w.context_len for w in self.fleet.workers() if w.context_len), 1 << 40)

    async def serve(self, request: GenerationRequest, call: Call, sink: Sink) -> Result:
        """Serve one request: deltas into `sink`, then the result, or one ServeError. Cancelling frees everything."""
        code, result = CLIENT_GONE, None
        try:
            result = await self.guarded(self._within_deadline(request, call, sink), call.request_id)
            code = "200"
            self.metrics.success[result.finish_reason].inc()
            return result
        except ClientGone:
            raise
        except ServeError as error:
            code = str(http_status(error))
            if isinstance(error, Refused):
                self.metrics.refused[error.reason].inc()
            raise
        finally:
            seconds = time.perf_counter() - call.arrived_s
            self.metrics.e2e.observe(seconds)
            self.metrics.requests.labels(code).inc()
            shown = {} if result is None else log_fields(result)
            log.info(
                "request", extra={"request_id": call.request_id, "code": code, "seconds": round(seconds, 4), **shown}
            )

    async def guarded(self, work: Awaitable[T], request_id: str) -> T:
        """The process's edge: what nobody foresaw becomes one logged internal error; a broken invariant ends us."""
        try:
            return await work
        except ServeError:
            raise
        except Exception as error:
            log.exception("request failed", extra={"request_id": request_id})
            if isinstance(error, AssertionError | InvariantError):
                self._on_fatal(error)
            raise ServeError("internal error") from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what would hold up every stream for milliseconds; a few threads, so that it stays bounded."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def observe(self) -> None:
        """Set the gauges, for a scrape."""
        metrics, workers = self.metrics, self.fleet.workers()
        metrics.in_flight.set(self.admission.in_flight)
        metrics.queue.set(self.admission.waiting)
        metrics.ready.set(self.ready)
        for role in ROLES:
            metrics.workers.labels(role).set(sum(worker.role == role for worker in workers))

    def hurry(self) -> None:
        """The drain deadline has passed: end what is still in flight, each with its terminal reply."""
        now_s = asyncio.get_running_loop().time()
        for clock in self._clocks:
            if not clock.expired():
                clock.reschedule(now_s)

    async def wait_idle(self, timeout_s: float) -> None:
        """Return when nothing is in flight, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def follow_fleet(self) -> None:
        """The fleet has changed: forget workers that are gone, and look after those that are missing under calls."""
        self._note_gap(asyncio.get_running_loop().time())
        live = {worker.key for worker in self.fleet.workers()}
        self.ledger.prune(live)
        self.workers.prune(live)
        for worker in self.workers.in_use().values():
            if worker.key not in self._watched and self._missing(worker):
                self._watched.add(worker.key)
                self._background(self._look_after(worker))

    def _missing(self, worker: Worker) -> bool:
        present = self.fleet.present()
        return present is not None and worker.key not in present

    async def _look_after(self, worker: Worker) -> None:
        """End the calls on a worker that is missing and does not answer: frozen, or cut off.

        Missing alone proves nothing: after a flush of Redis all are, until they have written themselves again.
        """
        try:
            while self._missing(worker) and worker.key in self.workers.in_use():
                if not await self.workers.alive(worker, SIGN_OF_LIFE_S) and self._missing(worker):
                    log.warning("no sign of life", extra={"instance_id": worker.instance_id, "epoch": worker.epoch})
                    self.workers.abandon(worker)
                    return
                await asyncio.sleep(SIGN_OF_LIFE_S)
        finally:
            self._watched.discard(worker.key)

    async def close(self) -> None:
        await self.workers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Assert that everything was given back; run when idle."""
        self.admission.check()
        if not self.admission.in_flight:
            self.ledger.check()

    async def _within_deadline(self, request: GenerationRequest, call: Call, sink: Sink) -> Result:
        if self.draining:
            raise Unavailable("this router is shutting down")
        clock = asyncio.timeout_at(call.deadline_s)
        try:
            async with clock:
                self._clocks.add(clock)
                self._idle.clear()
                return await self._live(request, call, sink)
        except TimeoutError:
            if self.draining:
                raise Unavailable("this router is shutting down") from None
            raise DeadlineExceeded("the request's deadline passed") from None
        finally:
            self._clocks.discard(clock)
            if not self._clocks:
                self._idle.set()
                self.check()

    async def _live(self, request: GenerationRequest, call: Call, sink: Sink) -> Result:
        """The whole life of a request, in order; details live one call down."""
        async with self.admission.place():
            drafted, prompt = await self._prepare(request, call)
            turn = self._begin(call, drafted, prompt, sink)
            while not turn.ended:
                try:
                    lookup = await self._lookups.ask(turn, await self._fingerprint(turn))
                    leg = Leg(lookup=lookup, sampling=turn.sampling(), work_id=turn.new_work_id())
                    await self._place(turn, leg)
                    await self._legs.run(turn, leg)
                except NoRoom as full:
                    turn.end_if_complete()  # the first token may have been the last
                    turn.full.add(full.worker.key)
                except WorkerLost as lost:
                    self._after_loss(turn, lost)
            result = await turn.finish()
            # Before the client is told: its next request may come at once, and to another router.
            await self._recall.keep(turn)
            return result

    async def _prepare(self, request: GenerationRequest, call: Call) -> tuple[Draft, Prompt]:
        """Render, recall and tokenise, in a thread where that would hold up other streams."""
        began, limit, tokenizer = time.perf_counter(), self.context_len, self.model.tokenizer
        self.metrics.stage["queue"].observe(began - call.arrived_s)
        salt = self._recall.salt(call.tenant)
        work = self.in_thread if call.size > OFF_LOOP_BYTES else _at_once
        drafted = await work(lambda: draft(request, salt))
        recalled = await self._recall.find(drafted)
        encode = partial(self._encodings.encode, salt)
        prompt = await work(lambda: tokenise(drafted, tokenizer, limit, recalled, encode))
        self.metrics.recalled.inc(prompt.recalled_tokens)
        self.metrics.stage["prepare"].observe(time.perf_counter() - began)
        return drafted, prompt

    def _begin(self, call: Call, drafted: Draft, prompt: Prompt, sink: Sink) -> Turn:
        request, tokenizer = drafted.request, self.model.tokenizer
        limit = token_limit(request, prompt.ids, self.context_len, self.settings.default_max_tokens)
        chat = request.kind == "chat"
        stop_ids = (tokenizer.end_of_msg,) if chat else (tokenizer.eos, tokenizer.end_of_msg)
        turn = Turn(
            request=request,
            call=call,
            draft=drafted,
            prompt=prompt,
            max_tokens=limit,
            seed=self._random.getrandbits(64) if request.seed is None else request.seed,
            stop_ids=() if request.ignore_eos else stop_ids,
            output=ChatOutput(tokenizer, request.stop, thinking=prompt.thinking, request_id=call.request_id)
            if chat
            else TextOutput(tokenizer, request.stop),
            sink=sink,
            metrics=self.metrics,
        )
        turn.served.queue_seconds = time.perf_counter() - call.arrived_s
        sink.accepted(prompt.ids)
        return turn

    async def _fingerprint(self, turn: Turn) -> Fingerprint:
        """Of the workers that would serve this prompt were nothing cached. Raises: Unavailable."""
        plan = await self._path(turn, Need(prompt_tokens=len(turn.ids)), None, frozenset())
        assert plan is not None, "nobody was called full"
        return plan.decode.fingerprint

    async def _path(
        self, turn: Turn, need: Need, fingerprint: Fingerprint | None, full: Set[WorkerKey]
    ) -> Plan | None:
        """The best plan now; after a loss, or while the view has a gap, wait for one. None: who could serve is full.

        Raises: Unavailable.
        """
        loop = asyncio.get_running_loop()
        until_s: float | None = None
        while True:
            view, loads = self.fleet.workers(), self.ledger.loads
            suspects = frozenset(self.ledger.suspects(loop.time()))
            avoid = [full | suspects | turn.failed, full | suspects]
            if not turn.attempts:
                avoid.append(full)  # someone suspect is better than nobody, once
            plans = (core.choose(view, loads, need, fingerprint=fingerprint, avoid=a) for a in avoid)
            plan = next((p for p in plans if p is not None), None)
            if plan is not None or full:
                return plan
            if until_s is None:
                until_s = self._patience(turn, loop.time())
            if loop.time() >= until_s:
                raise Unavailable("no worker can serve this now: expected a prefill and a decode worker")
            cleared_s = self.ledger.cleared_s()
            await self.fleet.changed(until_s if cleared_s is None else min(until_s, cleared_s))

    def _patience(self, turn: Turn, now_s: float) -> float:
        """Until when a request without a path waits for one, on the loop's clock."""
        if turn.attempts:
            return now_s + self.settings.recovery_wait_ms / 1e3
        self._note_gap(now_s)  # `follow_fleet` may not have seen this view yet
        return min(self.gap.until_s(now_s), now_s + self.admission.queue_timeout_s)

    def _note_gap(self, now_s: float) -> None:
        if self.fleet.present() is not None:  # else nobody can say
            self.gap.note(bool(core.serving(self.fleet.workers())), now_s)

    async def _place(self, turn: Turn, leg: Leg) -> None:
        """Choose workers; wait in line where all are full. Raises: Refused.

        As long as nobody has been refused, decode is asked for room beside prefill's first steps: one that has none
        ends them. Otherwise prefill spends nothing before there is room.
        """
        began = time.perf_counter()
        beside = not turn.full
        no_line = self.admission.line_is_empty or turn.remaining == 1  # that line is for decode's room
        if not (no_line and await self._try_place(turn, leg, beside=beside)):
            if turn.queue_until_s is None:
                turn.queue_until_s = asyncio.get_running_loop().time() + self.admission.queue_timeout_s
            async with self.admission.head_of_line():
                while not await self._try_place(turn, leg, beside=False):
                    turn.full.clear()
                    await self.admission.room(turn.queue_until_s)
        waited = time.perf_counter() - began
        turn.served.queue_seconds += waited
        self.metrics.stage["place"].observe(waited)

    async def _try_place(self, turn: Turn, leg: Leg, *, beside: bool) -> bool:
        fingerprint = leg.lookup.fingerprint
        while (plan := await self._path(turn, leg.need, fingerprint, turn.full)) is not None:
            leg.plan = plan
            if plan.prefill is None or beside or turn.remaining == 1:  # the last token is prefill's own
                return True
            try:
                await self._legs.reserve(turn, leg, plan.decode)
                return True
            except NoRoom as full:
                turn.full.add(full.worker.key)
        return False

    def _after_loss(self, turn: Turn, lost: WorkerLost) -> None:
        """Decide whether to go on. Raises: WorkerLost when the request has lost too many workers."""
        now_s = asyncio.get_running_loop().time()
        phase = turn.lose(lost, now_s)
        for worker in lost.workers:
            if lost.unreachable or (lost.died and not self._missing(worker)):  # the missing are not chosen anyway
                self.ledger.suspect(worker, now_s)
        self.metrics.losses[phase].inc()
        names = [worker.instance_id for worker in lost.workers]
        fields = {"request_id": turn.call.request_id, "instance_ids": names, "phase": phase}
        log.warning("worker lost", extra={**fields, "reason": str(lost), "detail": lost.detail})
        limits = self.settings
        spent = turn.retries > limits.retries_max or turn.recoveries > limits.recoveries_max
        if not turn.ended and (spent or turn.attempts >= limits.attempts_max):
            raise lost


async def _at_once(work: Callable[[], T]) -> T:
    return work()
