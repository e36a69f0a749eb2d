"""A simulated router: `Service._live` and `Legs.run` as one generator over the real choices, plans and accounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.api import SamplingParams
from moonrelay.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServeError, Unavailable
from moonrelay.prefix import prefix_hashes
from router import core
from router.core import Need, Plan, Worker, WorkerKey
from router.edge import NoRoom, WorkerLost
from router.ledger import Ledger
from sim import adapters
from sim.adapters import FINGERPRINT
from sim.decode import Adopt, Adopted, Done, Reserve, Tokens, Writeback
from sim.network import Link, LinkLost
from sim.prefill import FirstToken, Opened, Ready
from sim.prompt import STALL_MS
from sim.redis import Member, Record
from sim.toy import BLOCK_TOKENS
from sim.worker import Hit, Prompt
from sim.world import Future, Steps, Violation, World

SUSPECT_S, ROOM_RETRY_MS, RECOVERY_WAIT_MS = 0.5, 40, 2_000
RETRIES_MAX, RECOVERIES_MAX, ATTEMPTS_MAX = 2, 3, 8
Emit = Callable[[Any], None]


class RequestDeadline(ServeError):
    code = "deadline_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's request: already rendered and tokenised."""

    request_id: str
    tenant: str
    ids: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    hints: tuple[tuple[int, int], ...]
    deadline_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    reason: str
    cached: int  # tokens of the client's prompt that came from the cache
    matched: int


@dataclass(slots=True, kw_only=True)
class Turn:
    ask: Ask
    generated: list[int] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0
    matched: int = 0
    accounted: bool = False
    attempts: int = 0
    retries: int = 0
    recoveries: int = 0
    full: set[WorkerKey] = field(default_factory=set)
    failed: set[WorkerKey] = field(default_factory=set)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.ask.ids + tuple(self.generated)

    @property
    def remaining(self) -> int:
        return self.ask.max_tokens - len(self.generated)

    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.remaining, stop_token_ids=tuple(self.ask.stop))

    def end_if_complete(self) -> None:
        """Nothing is left to generate, although no worker said so."""
        if self.generated and self.generated[-1] in self.ask.stop:
            self.reason = "stop"
        elif self.remaining <= 0:
            self.reason = "length"


@dataclass(slots=True, kw_only=True)
class Leg:
    """What one attempt holds."""

    prompt: Prompt
    match: Any
    plan: Plan | None = None
    reservation_id: str | None = None
    stream: Link | None = None  # prefill's
    failed: Exception | None = None  # what ended the decode side
    opened: Future = field(default_factory=Future)
    adopting: bool = False  # decode was told of the handoff
    adopted: bool = False
    first: Future = field(default_factory=Future)  # the first token was taken

    @property
    def computed(self) -> int:
        cached: int = self.match.tokens
        return len(self.prompt.ids) - cached


class Router(Member):
    role = "router"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.ledger = Ledger(suspect_s=SUSPECT_S)
        self._num_attempts = 0

    def rpc_serve(self, ask: Ask, emit: Emit) -> Steps:
        """The whole life of a request; ends in its one terminal reply, a result or a ServeError."""
        turn = Turn(ask=ask)
        task = self.task
        assert task is not None
        self.after(ask.deadline_ms, task.throw, RequestDeadline("the request's deadline passed"))
        while turn.reason is None:
            try:
                leg = yield from self._look_up(turn)
                yield from self._place(turn, leg)
                yield from self._run(turn, leg, emit)
            except NoRoom as full:
                turn.end_if_complete()
                turn.full.add(full.worker.key)
                if turn.reason is None:
                    yield ROOM_RETRY_MS
            except WorkerLost as lost:
                self._after_loss(turn, lost)
        emit(Result(turn.reason, turn.cached, turn.matched))

    # Where to.

    def _look_up(self, turn: Turn) -> Steps:
        """Hashes, match and plan; an index out of reach is a miss."""
        ids, ask = turn.ids, turn.ask
        root = adapters.prefix_root(FINGERPRINT, ask.tenant)
        hashes = prefix_hashes(root, ids, BLOCK_TOKENS)
        self.world.checkers.hashed(ask.tenant, root, hashes, ids)
        nodes = self.members("cachestore")
        try:
            self.rng.shuffle(nodes)
            match = yield from self.index("match", root, hashes, len(ids), nodes, workers=self.workers())
            self.world.checkers.matched(self, root, hashes, len(ids), match)
        except (LinkLost, DeadlineExceeded):
            match = adapters.cold(len(ids))
        self.world.phase("looked_up", self)
        self._num_attempts += 1
        bundles = [match, *match.alternatives] if match.tokens else []
        hits = tuple(Hit(tokens=b.tokens, runs=b.runs, snapshot=b.snapshot) for b in bundles)
        snapshots = adapters.plan(() if turn.generated else ask.hints, len(ids), match)
        prompt = Prompt(
            request_id=f"{ask.request_id}.{self.name}.{self.epoch}.{self._num_attempts}",
            ids=ids,
            sampling=turn.sampling(),
            root=root,
            hashes=hashes,
            hits=hits,
            snapshot_at=snapshots,
            store=not turn.generated,
            write_back=not turn.generated and adapters.wants_turn(),
            tenant=ask.tenant,
        )
        return Leg(prompt=prompt, match=match)

    def _place(self, turn: Turn, leg: Leg) -> Steps:
        """Choose workers and reserve on the decode side; wait where all are full."""
        kept: dict[Any, int] = {(local.instance_id, local.epoch): local.tokens for local in leg.match.devices}
        need = Need(prompt_tokens=len(leg.prompt.ids), hit_tokens=leg.match.tokens, kept=kept)
        until = self.now_ms() + (RECOVERY_WAIT_MS if turn.attempts else 0)
        while True:
            plan = self._path(turn, need)
            if plan is None:
                if turn.full:
                    turn.full.clear()
                elif self.now_ms() >= until:
                    raise Unavailable("no worker can serve this now")
                yield ROOM_RETRY_MS
                continue
            leg.plan = plan
            if not turn.full:
                return  # room is asked for beside prefill
            try:
                yield from self._reserve(turn, leg, plan.decode)
                return
            except NoRoom:
                turn.full.add(plan.decode.key)

    def _reserve(self, turn: Turn, leg: Leg, worker: Worker) -> Steps:
        """Set rows and a slot aside on the decode side. Raises: NoRoom, WorkerLost."""
        prompt = leg.prompt
        request = Reserve(
            prompt.request_id, len(prompt.ids), turn.remaining, prompt.root, prompt.hashes, prompt.write_back
        )
        try:
            leg.reservation_id = yield from self.call(worker.instance_id, "reserve", request)
        except RequestDeadline:
            raise
        except ServeError as error:
            raise worker_fault(worker, error) from None

    def workers(self) -> list[Record]:
        return [record for role in ("prefill", "decode") for record in self.members(role)]

    def _path(self, turn: Turn, need: Need) -> Plan | None:
        now_s = self.now_ms() / 1000
        suspects = frozenset(self.ledger.suspects(now_s))
        view = [worker_of(record) for record in self.workers()]
        avoid = [turn.full | suspects | turn.failed, turn.full | suspects]
        if not turn.attempts:
            avoid.append(turn.full)
        plans = (core.choose(view, self.ledger.loads, need, avoid=frozenset(a)) for a in avoid)
        return next((plan for plan in plans if plan is not None), None)

    # One attempt.

    def _run(self, turn: Turn, leg: Leg, emit: Emit) -> Steps:
        """Prefill, and beside it decode, which has room set aside and follows the handoff once it is opened."""
        plan = leg.plan
        assert plan is not None and plan.prefill is not None
        decode = self.spawn(self._decode(turn, leg, plan.prefill, plan.decode, emit), "decode")
        decode.outcome.callbacks.append(lambda outcome: self._decode_ended(outcome, leg))
        try:
            with self.ledger.held(plan.decode, 0):
                with self.ledger.held(plan.prefill, leg.computed):
                    yield from self._prefill(turn, leg, plan.prefill, emit)
                if turn.reason is None:
                    yield (decode.outcome, STALL_MS)
                if turn.reason is None:
                    raise WorkerLost("prefill withdrew its handoff", plan.prefill, plan.decode)
        except DeadlineExceeded:
            raise WorkerLost("decode is silent", plan.decode) from None
        finally:
            decode.cancel()
            if self.alive:
                self._give_back(leg, plan.prefill, plan.decode)

    def _give_back(self, leg: Leg, prefill: Worker, decode: Worker) -> None:
        """A handoff of which decode was told is decode's to release: it may be reading."""
        if not leg.adopted and leg.reservation_id is not None:
            self.tell(decode.instance_id, "release_reservation", leg.reservation_id)
        if not leg.adopting and leg.opened.done:
            opened: Opened = leg.opened.value
            self.tell(prefill.instance_id, "release_handoff", (opened.handoff_id, opened.fence))

    def _prefill(self, turn: Turn, leg: Leg, worker: Worker, emit: Emit) -> Steps:
        stream = leg.stream = self.world.network.stream(self, worker.instance_id, "prefill", leg.prompt)
        if leg.failed is not None:
            stream.fail(leg.failed)
        try:
            while True:
                event = yield from self._hear(stream, worker)
                match event:
                    case Opened():
                        leg.opened.set(event)
                    case FirstToken(token=token):
                        self._settle(turn, leg, event)
                        self._take(turn, (token,), emit)
                        leg.first.set()
                    case Ready(finish=finish):
                        if finish is not None:
                            turn.reason = finish
                        return
        finally:
            stream.close()

    def _decode_ended(self, outcome: Future, leg: Leg) -> None:
        """An attempt whose decode side has failed needs no prefill any more."""
        leg.failed = outcome.error
        if outcome.error is not None and leg.stream is not None:
            leg.stream.fail(outcome.error)

    def _decode(self, turn: Turn, leg: Leg, prefill: Worker, worker: Worker, emit: Emit) -> Steps:
        """Let decode follow and adopt the handoff, and stream what it generates, after the first token."""
        if leg.reservation_id is None:
            yield from self._reserve(turn, leg, worker)
        opened = yield leg.opened
        prompt = leg.prompt
        sampling = replace(prompt.sampling, max_tokens=max(1, prompt.sampling.max_tokens - 1))
        tail = tuple(prompt.ids[len(prompt.hashes) * BLOCK_TOKENS :])
        back = Writeback(prompt.root, prompt.hashes, tail, prompt.hits, prompt.tenant) if prompt.write_back else None
        request = Adopt(prompt.request_id, leg.reservation_id or "", opened, sampling, back, tuple(prompt.ids))
        stream = self.world.network.stream(self, worker.instance_id, "adopt", request)
        leg.adopting = True
        try:
            while True:
                event = yield from self._hear(stream, worker)
                match event:
                    case Adopted():
                        leg.adopted = True
                    case Tokens(ids=ids):
                        yield leg.first
                        self._take(turn, ids, emit)
                    case Done(reason=reason):
                        yield leg.first
                        turn.reason = reason
                        return
        except WorkerLost as lost:
            if leg.adopted:
                raise
            raise WorkerLost(str(lost), worker, prefill) from None
        finally:
            stream.close()

    def _hear(self, stream: Link, worker: Worker) -> Steps:
        """The next event. Raises: WorkerLost, NoRoom, InvalidRequest."""
        try:
            event = yield from stream.next(STALL_MS)
        except RequestDeadline:
            raise
        except ServeError as error:
            raise worker_fault(worker, error) from None
        if event is None:
            raise WorkerLost(f"{worker.instance_id} ended its answer too early", worker)
        return event

    def _take(self, turn: Turn, ids: tuple[int, ...], emit: Emit) -> None:
        turn.generated += ids
        if len(turn.generated) > turn.ask.max_tokens:
            raise Violation("tokens", f"{len(turn.generated)} tokens where {turn.ask.max_tokens} were asked for")
        emit(Tokens(ids))

    def _settle(self, turn: Turn, leg: Leg, first: FirstToken) -> None:
        """Account for the client's prompt, once."""
        if turn.accounted:
            return
        turn.accounted = True
        self.world.checkers.accounted(adapters.account(leg.match, len(leg.prompt.ids), first.cached, first.reason))
        turn.cached, turn.matched = first.cached, leg.match.tokens

    def _after_loss(self, turn: Turn, lost: WorkerLost) -> None:
        """Decide whether to go on. Raises: WorkerLost."""
        turn.end_if_complete()
        turn.attempts += 1
        if not lost.unreachable:
            if turn.generated:
                turn.recoveries += 1
            else:
                turn.retries += 1
        for worker in lost.workers:
            turn.failed.add(worker.key)
            if lost.unreachable:
                self.ledger.suspect(worker, self.now_ms() / 1000)
        self.world.counts["worker_lost"] += 1
        spent = turn.retries > RETRIES_MAX or turn.recoveries > RECOVERIES_MAX
        if turn.reason is None and (spent or turn.attempts >= ATTEMPTS_MAX):
            raise lost

    def settled(self) -> None:
        self.world.counts["check:books"] += 1
        self.ledger.check()
        if any(task.name == "serve" for task in self.tasks):
            raise Violation("books", f"{self.name} is idle with a request in flight")


def worker_of(record: Record) -> Worker:
    role: Any = record.role
    return Worker(
        instance_id=record.instance_id,  # type: ignore[arg-type]
        epoch=record.epoch,
        role=role,
        address=record.instance_id,
        host_id="host",
        fingerprint=FINGERPRINT,
        context_len=adapters.CONTEXT_LEN,
        state_bytes=16_384,
        row_bytes=128,
        busy=record.busy,
    )


def worker_fault(worker: Worker, error: ServeError) -> ServeError:
    """What a worker's error means for the request, as `router.edge.fault` says."""
    match error:
        case WorkerLost() | NoRoom():
            return error  # of the attempt's other half
        case Overloaded():
            return NoRoom(worker)
        case InvalidRequest():
            return error
        case LinkLost(unreachable=unreachable):
            return WorkerLost(str(error), worker, unreachable=unreachable)
        case _:
            return WorkerLost(f"{worker.instance_id} failed: {error}", worker)
